package main

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/vbauerster/mpb/v8"
	"github.com/vbauerster/mpb/v8/decor"

	tfhosts "fediversity.eu/tf-hosts"
)

// heartbeatEvery is how often stderr hears of running nodes where it is no
// terminal: a CI system takes a silent job for a dead one.
const heartbeatEvery = 15 * time.Second

// progress knows the nodes that are being deployed. On a terminal each has a
// live line below everything else; elsewhere there is a heartbeat. It shows
// nothing while no node is under way, so a question has the terminal for itself.
type progress struct {
	// w gets the live lines; nil where they do not belong.
	w io.Writer
	// beat tells a heartbeat; only called without w.
	beat func(message string)
	now  func() time.Time
	// ticks makes the heartbeat's clock; a test's own, else time.NewTicker.
	ticks func() (ticks <-chan time.Time, stop func())

	// bars is the area of the live lines, nil while no node runs. It belongs to
	// the teller's lock, as everything that writes does.
	bars *mpb.Progress
	// stopBeat ends the heartbeat and waits for it; nil before there is one.
	stopBeat func()

	mu    sync.Mutex // guards what follows; never held while bars is called
	nodes map[string]*nodeProgress
}

// nodeProgress is one node under way.
type nodeProgress struct {
	step         string
	since, step0 time.Time // begin of the deploy, of the step
	// done and total are bytes of a copy; rate is in bytes a second.
	done, total int64
	rate        float64
	bar         *mpb.Bar
}

func newProgress(w io.Writer, beat func(string)) *progress {
	return &progress{
		w: w, beat: beat, now: time.Now, nodes: make(map[string]*nodeProgress),
		ticks: func() (<-chan time.Time, func()) {
			t := time.NewTicker(heartbeatEvery)
			return t.C, t.Stop
		},
	}
}

// event takes an event of a node in; the teller's lock is held.
func (p *progress) event(e tfhosts.Event) {
	if e.Node == "" {
		return
	}
	switch e.Kind {
	case tfhosts.EventStep:
		p.begin(e)
	case tfhosts.EventBytes:
		p.bytes(e)
	case tfhosts.EventVerdict:
		p.end(e.Node)
	}
}

func (p *progress) begin(e tfhosts.Event) {
	now := p.now()
	p.mu.Lock()
	n, ok := p.nodes[e.Node]
	if !ok {
		n = &nodeProgress{since: now}
		p.nodes[e.Node] = n
	}
	if n.step != e.Op {
		n.step, n.step0 = e.Op, now
	}
	p.mu.Unlock()
	if ok {
		return
	}
	if p.w == nil {
		p.startBeat()
		return
	}
	if p.bars == nil {
		p.bars = mpb.New(mpb.WithOutput(p.w), mpb.WithRefreshRate(200*time.Millisecond))
	}
	name := e.Node
	bar, err := p.bars.Add(0, mpb.BarFillerFunc(func(w io.Writer, s decor.Statistics) error {
		_, err := io.WriteString(w, cut(p.line(name), s.AvailableWidth))
		return err
	}), mpb.BarRemoveOnComplete())
	if err == nil { // the only error is that the area was closed: then there is no line
		n.bar = bar
	}
}

func (p *progress) bytes(e tfhosts.Event) {
	p.mu.Lock()
	defer p.mu.Unlock()
	n, ok := p.nodes[e.Node]
	if !ok {
		return
	}
	n.done, n.total = e.Done, e.Total
	if spent := p.now().Sub(n.step0).Seconds(); spent > 0 {
		n.rate = float64(n.done) / spent
	}
}

func (p *progress) end(node string) {
	p.mu.Lock()
	n, ok := p.nodes[node]
	delete(p.nodes, node)
	left := len(p.nodes)
	p.mu.Unlock()
	if !ok {
		return
	}
	if n.bar != nil {
		n.bar.Abort(true)
	}
	if left == 0 {
		p.clear()
	}
}

// clear ends the live lines until a node begins again. The teller's lock is held.
func (p *progress) clear() {
	p.mu.Lock()
	var bars []*mpb.Bar
	for name, n := range p.nodes {
		if n.bar != nil {
			bars = append(bars, n.bar)
		}
		delete(p.nodes, name)
	}
	p.mu.Unlock()
	for _, bar := range bars {
		bar.Abort(true)
	}
	if p.bars != nil {
		p.bars.Wait()
		p.bars = nil
	}
}

// live says whether stderr has live lines.
func (p *progress) live() bool { return p.w != nil }

// write puts whole lines above the live ones; false where there are none. The
// teller's lock is held.
func (p *progress) write(lines []byte) bool {
	if p.bars == nil {
		return false
	}
	_, err := p.bars.Write(lines)
	return err == nil
}

func (p *progress) startBeat() {
	if p.stopBeat != nil {
		return
	}
	ticks, stopTicks := p.ticks()
	ended, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case <-ticks:
				if text := p.heartbeat(); text != "" {
					p.beat(text)
				}
			case <-ended:
				return
			}
		}
	}()
	p.stopBeat = func() {
		stopTicks()
		close(ended)
		<-done
	}
}

// heartbeat names all nodes under way, sorted.
func (p *progress) heartbeat() string {
	p.mu.Lock()
	names := make([]string, 0, len(p.nodes))
	for name := range p.nodes {
		names = append(names, name)
	}
	p.mu.Unlock()
	slices.Sort(names)
	for i, name := range names {
		names[i] = p.line(name)
	}
	return strings.Join(names, "; ")
}

// line is one node under way, in ASCII: "prod.app1 copy 12 MiB of 300 MiB 4.0 MiB/s, 12s".
func (p *progress) line(node string) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	n, ok := p.nodes[node]
	if !ok {
		return ""
	}
	text := node + " " + n.step
	if n.total > 0 && n.step == "copy" {
		text += fmt.Sprintf(" %s of %s %s/s", humanize.IBytes(uint64(n.done)), humanize.IBytes(uint64(n.total)), humanize.IBytes(uint64(n.rate)))
	}
	return text + fmt.Sprintf(", %s", p.now().Sub(n.since).Truncate(time.Second))
}

// cut keeps a live line on one row of the terminal: a row more, and the lines
// above would be overwritten.
func cut(line string, width int) string {
	if len(line) > width {
		return line[:max(0, width)]
	}
	return line
}
