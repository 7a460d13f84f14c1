package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sync"
	"time"
)

// Entry is one line of the journal: a period that was missed, or, if Done, one
// that has been made up for.
type Entry struct {
	Job string `json:"job"`
	Period
	Done     bool      `json:"done,omitempty"`
	Reason   string    `json:"reason,omitempty"` // the word with which grpcretry gave up, "still_running" or "panic"
	Code     string    `json:"code,omitempty"`
	Attempts int       `json:"attempts,omitempty"`
	At       time.Time `json:"at"`
}

// Journal is a file with one JSON object a line, to which lines are only ever
// appended: a crash loses no entry, and a replay may run beside the schedule.
type Journal struct {
	Path string

	mu sync.Mutex
}

// Append adds the entry, and returns when it is on the disk.
func (j *Journal) Append(e Entry) (err error) {
	line, err := json.Marshal(e)
	if err != nil {
		return err
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	f, err := os.OpenFile(j.Path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if _, err := f.Write(append(line, '\n')); err != nil {
		return err
	}
	return f.Sync()
}

// Pending are the periods missed and not made up for, each once, in the order in
// which they were missed. A journal that does not exist is empty.
func (j *Journal) Pending() ([]Entry, error) {
	data, err := os.ReadFile(j.Path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	var order []string
	open := map[string]*Entry{}
	lines := bufio.NewScanner(bytes.NewReader(data))
	for n := 1; lines.Scan(); n++ {
		var e Entry
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			return nil, fmt.Errorf("%s, line %d: %w", j.Path, n, err)
		}
		key := e.Job + " " + e.Period.String()
		if _, known := open[key]; !known {
			order = append(order, key)
		}
		open[key] = &e
		if e.Done {
			open[key] = nil
		}
	}
	var pending []Entry
	for _, key := range order {
		if e := open[key]; e != nil {
			pending = append(pending, *e)
		}
	}
	return pending, lines.Err()
}
