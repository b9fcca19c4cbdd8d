package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	tfhosts "fediversity.eu/tf-hosts"
)

// teller is stderr: the story of a run, one whole line at a time, from OpenTofu
// and from events at once.
type teller struct {
	mu      sync.Mutex
	w       io.Writer
	partial []byte // of what OpenTofu wrote: a line without its end
	asJSON  bool
	// groupOf is the group of a node, for events that do not say it; nil: none.
	groupOf  func(node string) string
	progress *progress
}

func newTeller(w io.Writer) *teller {
	t := &teller{w: w}
	var live io.Writer
	if isTerminal(w) {
		live = w
	}
	t.progress = newProgress(live, func(message string) {
		t.event(tfhosts.Event{Kind: tfhosts.EventHeartbeat, Message: message})
	})
	return t
}

// setJSON makes stderr a stream of objects, which has no live lines.
func (t *teller) setJSON(on bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.asJSON = on; on {
		t.progress.w = nil
	}
}

// close ends the live lines and the heartbeat, and writes what is left.
func (t *teller) close() {
	t.mu.Lock()
	t.progress.clear()
	stop := t.progress.stopBeat
	t.mu.Unlock()
	if stop != nil { // it may be waiting for the lock
		stop()
	}
	t.flush()
}

// Write takes OpenTofu's output and passes on whole lines.
func (t *teller) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.partial = append(t.partial, b...)
	end := bytes.LastIndexByte(t.partial, '\n')
	if end < 0 {
		return len(b), nil
	}
	t.output(t.partial[:end+1])
	t.partial = append(t.partial[:0], t.partial[end+1:]...)
	return len(b), nil
}

func (t *teller) flush() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.partial) > 0 {
		t.output(append(t.partial, '\n'))
		t.partial = nil
	}
}

// output passes whole lines on. With --json each of them is an event, unless it
// is an object of OpenTofu's own -json. mu is held.
func (t *teller) output(lines []byte) {
	if !t.asJSON {
		t.put(lines)
		return
	}
	for line := range bytes.Lines(lines) {
		line = bytes.TrimRight(line, "\r\n")
		switch {
		case len(line) == 0:
		case line[0] == '{' && json.Valid(line):
			t.line(string(line))
		default:
			t.object(tfhosts.Event{Time: time.Now(), Kind: tfhosts.EventOutput, Message: string(line)})
		}
	}
}

// object writes an event as JSON; mu is held.
func (t *teller) object(e tfhosts.Event) {
	if b, err := json.Marshal(e); err == nil {
		t.line(string(b))
	}
}

// line writes one line; mu is held.
func (t *teller) line(s string) { t.put([]byte(s + "\n")) }

// put writes whole lines, above the live ones; mu is held. There is nobody to
// tell that stderr is gone, and a run does not end because nobody listens.
func (t *teller) put(lines []byte) {
	if !t.progress.write(lines) {
		t.w.Write(lines) //nolint:errcheck // see above
	}
}

// say tells one thing.
func (t *teller) say(message string) {
	t.event(tfhosts.Event{Kind: tfhosts.EventNotice, Message: message})
}

// event tells an event: a line, or with --json an object.
func (t *teller) event(e tfhosts.Event) {
	if e.Time.IsZero() {
		e.Time = time.Now()
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if e.Group == "" && t.groupOf != nil {
		e.Group = t.groupOf(e.Node)
	}
	t.progress.event(e)
	if t.asJSON {
		t.object(e)
		return
	}
	if t.progress.live() && e.Kind == tfhosts.EventStep && e.Node != "" {
		return // its live line says it
	}
	if e.Kind == tfhosts.EventBytes || e.Kind == tfhosts.EventVerdict && e.Verdict == nil {
		return
	}
	prefix := "tf-hosts: "
	if e.Group != "" {
		prefix = "[" + e.Group + "] " + prefix
	}
	t.line(prefix + eventText(e))
	if e.Diff != nil {
		for _, line := range diffLines(e.Diff) {
			t.line(prefix + e.Node + ": " + line)
		}
	}
}

func eventText(e tfhosts.Event) string {
	var parts []string
	switch e.Kind {
	case tfhosts.EventPhase:
		parts = append(parts, "["+e.Op+"]")
	case tfhosts.EventWarning:
		parts = append(parts, "warning:")
	case tfhosts.EventVerdict:
		return e.Verdict.String()
	}
	if e.Node != "" {
		parts = append(parts, e.Node+":")
	}
	if e.Kind == tfhosts.EventHeartbeat {
		parts = append(parts, "still running:")
	}
	if e.Message != "" {
		parts = append(parts, e.Message)
	} else if e.Kind == tfhosts.EventStep {
		parts = append(parts, e.Op)
	}
	return strings.Join(parts, " ")
}

// fail tells an error and its way out.
func (t *teller) fail(err error) {
	t.flush()
	t.mu.Lock()
	defer t.mu.Unlock()
	tell := func(kind, message string) {
		if t.asJSON {
			t.object(tfhosts.Event{Time: time.Now(), Kind: kind, Message: message})
			return
		}
		t.line("tf-hosts: " + kind + ": " + message)
	}
	for _, line := range strings.Split(err.Error(), "\n") {
		tell(tfhosts.EventError, line)
	}
	for _, hint := range hints(err) {
		tell(tfhosts.EventHint, hint)
	}
}

// hints collects the hint of every ExitError in err's tree.
func hints(err error) []string {
	var all []string
	var walk func(error)
	walk = func(err error) {
		switch e := err.(type) { //nolint:errorlint // the tree itself is walked
		case nil:
			return
		case *tfhosts.ExitError:
			if e.Hint != "" {
				all = append(all, e.Hint)
			}
			walk(e.Err)
		case interface{ Unwrap() []error }:
			for _, inner := range e.Unwrap() {
				walk(inner)
			}
		default:
			walk(errors.Unwrap(err))
		}
	}
	walk(err)
	return all
}

// ask asks a question on the terminal; only "yes" confirms.
func (p *program) ask(question string) (bool, error) {
	p.teller.flush()
	fmt.Fprintf(p.stderr, "tf-hosts: %s Only \"yes\" goes on: ", question) //nolint:errcheck // an unseen question is not confirmed
	answer := make(chan string, 1)
	go func() { // ends with the process: a read of a terminal can not be ended
		var word string
		fmt.Fscanln(p.stdin, &word) //nolint:errcheck // any other end is no "yes"
		answer <- word
	}()
	select {
	case word := <-answer:
		return word == "yes", nil
	case <-p.interrupt:
		return false, tfhosts.WithExit(tfhosts.ExitInterrupted, "", errors.New("interrupted at the question; nothing was changed"))
	}
}
