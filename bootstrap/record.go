package bootstrap

import (
	"fmt"
	"os"
	"slices"
	"time"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/internal/tofu"
)

// releaseRoots lets go of what was built and is applied or superseded. What a
// failed node is to run stays rooted until its next deploy.
func (s *session) releaseRoots(before *Record) error {
	if s.Worker.Release == nil {
		return nil
	}
	wanted := map[string]bool{}
	var done []string
	for name, v := range s.results.all() {
		identity := s.nodes[name].ConfigIdentity
		out := s.built[identity].Out
		if v.Failed() {
			wanted[identity], wanted[out] = true, true
			continue
		}
		done = append(done, identity, out)
		if old := before.Nodes[name]; old.Failed() {
			done = append(done, old.Identity, old.Built)
		}
	}
	done = slices.DeleteFunc(done, func(p string) bool { return p == "" || wanted[p] })
	if len(done) == 0 {
		return nil
	}
	return s.Worker.Release(done)
}

// record merges this run's verdicts into verdict.json.
func (s *session) record(code int, changes []tofu.NodeChange) error {
	r, err := ReadRecord(s.workDir)
	if err != nil { // it is a report and no state: a broken one is put aside
		s.event(tfhosts.Event{Kind: tfhosts.EventWarning, Op: "verdict", Message: "putting the old verdicts aside: " + err.Error()})
		if err := os.Rename(verdictPath(s.workDir), verdictPath(s.workDir)+".broken"); err != nil {
			return fmt.Errorf("putting the old verdicts aside: %w", err)
		}
		r = &Record{Nodes: map[string]NodeRecord{}}
	}
	if err := s.releaseRoots(r); err != nil { // a root too many loses nothing
		s.event(tfhosts.Event{Kind: tfhosts.EventWarning, Op: "roots", Message: err.Error()})
	}
	r.Version, r.Run, r.Verb, r.ExitCode, r.Started, r.Ended = 1, s.id, s.Verb.Name, code, s.started, time.Now()
	r.NotBegun = s.unbegun
	for _, c := range changes {
		if c.Leaves {
			delete(r.Nodes, c.Name)
		}
	}
	for name, v := range s.results.all() {
		identity := s.nodes[name].ConfigIdentity
		next := NodeRecord{
			Run: s.id, Identity: identity, Built: s.built[identity].Out, System: seen(v, r.Nodes[name]), Verdict: v,
		}
		r.Nodes[name] = next.follows(r.Nodes[name])
	}
	if err := r.write(s.workDir, s.Fault); err != nil {
		return err
	}
	s.warn("packages", s.sweepLists(r)) // a list too many loses nothing
	return nil
}
