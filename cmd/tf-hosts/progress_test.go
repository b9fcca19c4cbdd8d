package main

import (
	"bytes"
	"io"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/creack/pty"
	"github.com/google/go-cmp/cmp"

	tfhosts "fediversity.eu/tf-hosts"
)

func step(node, op string) tfhosts.Event {
	return tfhosts.Event{Kind: tfhosts.EventStep, Node: node, Op: op}
}

func verdict(node string) tfhosts.Event {
	return tfhosts.Event{Kind: tfhosts.EventVerdict, Node: node, Verdict: &tfhosts.Verdict{Node: node, Status: tfhosts.Deployed}}
}

// lockedBuffer is a stderr that a test reads while it is written.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(b)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// A silent CI job is taken for a dead one: every beat names what is under way.
func TestHeartbeatWhereStderrIsNoTerminal(t *testing.T) {
	var stderr lockedBuffer
	tell := newTeller(&stderr)
	ticks := make(chan time.Time) // unbuffered: a beat that was taken follows the one before
	tell.progress.ticks = func() (<-chan time.Time, func()) { return ticks, func() {} }
	begin := time.Now()
	var seconds time.Duration
	tell.progress.now = func() time.Time { return begin.Add(seconds * time.Second) }

	tell.event(step("prod.b", "connect"))
	tell.event(step("prod.a", "copy"))
	seconds = 3
	tell.event(tfhosts.Event{Kind: tfhosts.EventBytes, Node: "prod.a", Op: "copy", Done: 3 << 20, Total: 6 << 20})
	ticks <- begin
	tell.event(verdict("prod.a"))
	tell.event(verdict("prod.b"))
	ticks <- begin // nothing is under way: silent
	tell.close()

	want := strings.Join([]string{
		"tf-hosts: prod.b: connect", "tf-hosts: prod.a: copy",
		"tf-hosts: still running: prod.a copy 3.0 MiB of 6.0 MiB 1.0 MiB/s, 3s; prod.b connect, 3s",
		"tf-hosts: prod.a: deployed", "tf-hosts: prod.b: deployed", "",
	}, "\n")
	if diff := cmp.Diff(want, stderr.String()); diff != "" {
		t.Errorf("stderr (-want +got):\n%s", diff)
	}
}

// What comes from OpenTofu and from events stands in whole lines above the live
// ones, and nothing of these is left at the end.
func TestLiveLinesOnATerminal(t *testing.T) {
	terminal, tty, err := pty.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer terminal.Close()
	if err := pty.Setsize(tty, &pty.Winsize{Rows: 30, Cols: 60}); err != nil {
		t.Fatal(err)
	}
	var shown lockedBuffer
	read := make(chan struct{})
	go func() {
		defer close(read)
		io.Copy(&shown, terminal) //nolint:errcheck // ends with EIO when the tty is closed
	}()
	tell := newTeller(tty)
	tell.event(step("prod.a", "copy"))
	tell.event(tfhosts.Event{Kind: tfhosts.EventBytes, Node: "prod.a", Op: "copy", Done: 1 << 20, Total: 4 << 20})
	tell.event(step("prod."+strings.Repeat("long", 30), "activate.wait"))
	eventually(t, 10*time.Second, "the live line", func() bool {
		return strings.Contains(shown.String(), "prod.a copy 1.0 MiB of 4.0 MiB")
	})
	for range 20 {
		io.WriteString(tell, "terraform_data.nixos: Creat") //nolint:errcheck // never fails
		tell.event(tfhosts.Event{Kind: tfhosts.EventNotice, Message: "a notice"})
		io.WriteString(tell, "ing...\n") //nolint:errcheck // never fails
	}
	tell.event(verdict("prod.a"))
	tell.event(verdict("prod." + strings.Repeat("long", 30)))
	tell.event(tfhosts.Event{Kind: tfhosts.EventNotice, Message: "after all"})
	tell.close()
	if err := tty.Close(); err != nil {
		t.Fatal(err)
	}
	<-read

	if strings.Contains(shown.String(), "activate.wait") {
		t.Error("a live line is longer than the terminal is wide")
	}
	got := screen(shown.String())
	for line, want := range map[string]int{
		"terraform_data.nixos: Creating...": 20, "tf-hosts: a notice": 20,
		"tf-hosts: prod.a: deployed": 1, "tf-hosts: after all": 1,
	} {
		n := 0
		for _, l := range got {
			if l == line {
				n++
			}
		}
		if n != want {
			t.Errorf("the screen shows %q %d times, want %d:\n%s", line, n, want, strings.Join(got, "\n"))
		}
	}
	for _, l := range got {
		if strings.Contains(l, " copy 1.0 MiB") {
			t.Errorf("a live line is left: %q", l)
		}
	}
}

// screen is what a terminal holds after text: cursor up, erase below and erase
// in line are all that the live lines use.
func screen(text string) []string {
	lines, row := []string{""}, 0
	for len(text) > 0 {
		switch {
		case strings.HasPrefix(text, "\r\n"):
			if row++; row == len(lines) {
				lines = append(lines, "")
			}
			text = text[2:]
		case text[0] == '\r':
			text = text[1:]
		case strings.HasPrefix(text, "\x1b["):
			end := strings.IndexFunc(text[2:], func(r rune) bool { return r >= '@' && r <= '~' }) + 2
			n := 0
			for _, c := range text[2:end] {
				n = n*10 + int(c-'0')
			}
			switch text[end] {
			case 'A':
				row = max(0, row-max(1, n))
			case 'J':
				lines = append(lines[:row], "")
			case 'K':
				lines[row] = ""
			}
			text = text[end+1:]
		default:
			lines[row] += text[:1]
			text = text[1:]
		}
	}
	return lines
}
