// Package configdocs reads the file of service config documents on which our
// parser is compared with that of gRPC: testdata/serviceconfig.txt of the root.
// The root's tests read it with the oldest gRPC that we support, those of the
// nested module with the newest.
package configdocs

import (
	"fmt"
	"os"
	"strings"
)

// Doc is one document and what is made of it.
type Doc struct {
	Name string
	// User tells that it is such as users write, not made for one rule.
	User bool
	JSON string
	// Ours is the text of our error, one fault on each line; empty if we accept it.
	Ours string
	// GRPC tells whether gRPC accepts it.
	GRPC bool
	// Why justifies what we do otherwise than gRPC; empty if nothing.
	Why string
}

const (
	start    = "=== "
	user     = " (user)"
	ours     = "--- grpcretry"
	grpc     = "--- gRPC"
	why      = "--- why"
	accepted = "accepted"
	refused  = "refused"
)

// Load reads the file.
func Load(path string) ([]Doc, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var docs []Doc
	seen := map[string]bool{}
	for i, block := range strings.Split("\n"+string(b), "\n"+start) {
		if i == 0 {
			continue // what the file says about itself
		}
		name, rest, _ := strings.Cut(block, "\n")
		d := Doc{}
		d.Name, d.User = strings.CutSuffix(name, user)
		rest, d.Why, _ = strings.Cut(rest+"\n", why+"\n")
		rest, g, _ := strings.Cut(rest, grpc+"\n")
		d.JSON, d.Ours, _ = strings.Cut(rest, ours+"\n")
		// \uFEFF stands for a byte order mark, which an editor would hide or drop.
		d.JSON = strings.ReplaceAll(strings.TrimSuffix(d.JSON, "\n"), "\\uFEFF", "\ufeff")
		d.Why = strings.TrimSpace(d.Why)
		d.Ours = strings.TrimSpace(d.Ours)
		if d.Ours == accepted {
			d.Ours = ""
		}
		d.GRPC = strings.TrimSpace(g) == accepted
		if seen[d.Name] {
			return nil, fmt.Errorf("configdocs: %s: two documents are named %q", path, d.Name)
		}
		seen[d.Name] = true
		docs = append(docs, d)
	}
	return docs, nil
}

// Store writes the file, with what stands before its first document.
func Store(path string, docs []Doc) error {
	old, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	head, _, _ := strings.Cut(string(old), "\n"+start)
	var b strings.Builder
	b.WriteString(head)
	for _, d := range docs {
		suffix, our, their := "", accepted, accepted
		if d.User {
			suffix = user
		}
		if d.Ours != "" {
			our = d.Ours
		}
		if !d.GRPC {
			their = refused
		}
		json := strings.ReplaceAll(d.JSON, "\ufeff", "\\uFEFF")
		fmt.Fprintf(&b, "\n%s%s%s\n%s\n%s\n%s\n%s\n%s\n", start, d.Name, suffix, json, ours, our, grpc, their)
		if d.Why != "" {
			fmt.Fprintf(&b, "%s\n%s\n", why, d.Why)
		}
	}
	return os.WriteFile(path, []byte(b.String()), 0o644)
}
