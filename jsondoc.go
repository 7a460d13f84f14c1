package grpcretry

import (
	"encoding/json"
	"errors"
	"strconv"
	"strings"
	"unicode/utf8"
)

// jsonKind is the type of a JSON value.
type jsonKind uint8

const (
	jsonNull jsonKind = iota
	jsonBool
	jsonNumber
	jsonString
	jsonArray
	jsonObject
)

// jsonNode is one value of a JSON document that still knows where it stands,
// so that whoever reads it can say which line is wrong.
type jsonNode struct {
	at      int // byte offset in the document
	kind    jsonKind
	text    string // a string's value, a number or a bool as it is written
	members []jsonMember
	items   []*jsonNode
}

// jsonMember is one field of an object; the same name can occur twice.
type jsonMember struct {
	name  string
	at    int
	value *jsonNode
}

// parseJSON reads a whole document. The error has the offset where reading
// stopped; it is at most len(doc).
func parseJSON(doc string) (n *jsonNode, at int, err error) {
	if strings.HasPrefix(doc, "\ufeff") {
		return nil, 0, errors.New("the document begins with a byte order mark, want UTF-8 without one")
	}
	// The decoder below reads token by token and would not see what follows
	// the document, nor how deep it is.
	var raw json.RawMessage
	if err := json.Unmarshal([]byte(doc), &raw); err != nil {
		var syntax *json.SyntaxError
		if !errors.As(err, &syntax) || strings.HasPrefix(syntax.Error(), "unexpected end") {
			return nil, len(doc), errors.New("the document ends too early, want a complete JSON object")
		}
		return nil, max(int(syntax.Offset)-1, 0), errors.New("not JSON: " + syntax.Error())
	}
	r := jsonReader{doc: doc, dec: json.NewDecoder(strings.NewReader(doc))}
	r.dec.UseNumber()
	return r.value(), 0, nil
}

// jsonReader builds nodes from a document that is known to be valid.
type jsonReader struct {
	doc string
	dec *json.Decoder
}

// next gives the next token and where it begins.
func (r *jsonReader) next() (json.Token, int) {
	at := int(r.dec.InputOffset())
	for at < len(r.doc) && strings.IndexByte(" \t\r\n,:", r.doc[at]) >= 0 {
		at++
	}
	token, _ := r.dec.Token() // cannot fail in a valid document
	return token, at
}

func (r *jsonReader) value() *jsonNode {
	token, at := r.next()
	n := &jsonNode{at: at}
	switch token := token.(type) {
	case bool:
		n.kind, n.text = jsonBool, strconv.FormatBool(token)
	case json.Number:
		n.kind, n.text = jsonNumber, token.String()
	case string:
		n.kind, n.text = jsonString, token
	case json.Delim:
		if token == '[' {
			n.kind = jsonArray
			for r.dec.More() {
				n.items = append(n.items, r.value())
			}
		} else {
			n.kind = jsonObject
			for r.dec.More() {
				name, at := r.next()
				m := jsonMember{at: at, value: r.value()}
				m.name, _ = name.(string)
				n.members = append(n.members, m)
			}
		}
		r.next() // the closing bracket
	}
	return n
}

// String describes the value for an error: short, and on one line.
func (n *jsonNode) String() string {
	switch n.kind {
	case jsonString:
		return quote(n.text)
	case jsonArray:
		return "an array"
	case jsonObject:
		return "an object"
	case jsonNull:
		return "null"
	}
	return shorten(n.text)
}

// lineAndColumn counts both from 1, columns in characters.
func lineAndColumn(doc string, at int) (line, column int) {
	before := doc[:at]
	line = 1 + strings.Count(before, "\n")
	return line, 1 + utf8.RuneCountInString(before[strings.LastIndexByte(before, '\n')+1:])
}

// quote is s for an error: in quotes, and not longer than a line.
func quote(s string) string { return strconv.Quote(shorten(s)) }

func shorten(s string) string {
	const most = 60
	if utf8.RuneCountInString(s) <= most {
		return s
	}
	return string([]rune(s)[:most]) + "..."
}

// nearest finds what a misspelt word was meant to be: the candidate that is the
// same but for case, '_' and '-', or else differs by at most two letters. It is
// empty if there is none.
func nearest(word string, candidates []string) string {
	if len(word) > 100 {
		return ""
	}
	plain := func(s string) string {
		return strings.NewReplacer("_", "", "-", "", " ", "").Replace(strings.ToLower(s))
	}
	best, distance := "", 3
	for _, c := range candidates {
		d := editDistance(plain(word), plain(c))
		if d < distance && d < len(c)/2 {
			best, distance = c, d
		}
	}
	return best
}

// editDistance is the number of bytes to insert, delete or replace.
func editDistance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost++
			}
			diagonal = row[j+1]
			row[j+1] = min(cost, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}
