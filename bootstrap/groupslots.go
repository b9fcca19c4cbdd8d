package bootstrap

import (
	"context"

	tfhosts "fediversity.eu/tf-hosts"
)

// maxEvaluations bounds the evaluations of all groups together: each may take
// more than a gigabyte.
const maxEvaluations = 2

// slots are the limits that groups share.
type slots struct {
	deploys, evaluations chan struct{}
	interrupt            <-chan struct{}
}

func newSlots(deploys int, interrupt <-chan struct{}) *slots {
	return &slots{
		deploys: make(chan struct{}, deploys), evaluations: make(chan struct{}, maxEvaluations), interrupt: interrupt,
	}
}

// limit makes a worker wait for a slot.
func (s *slots) limit(w Worker) Worker {
	identity, deploy := w.Identity, w.Deploy
	w.Identity = func(ctx context.Context, node, conf, given string) (string, error) {
		select {
		case s.evaluations <- struct{}{}:
			defer func() { <-s.evaluations }()
			return identity(ctx, node, conf, given)
		case <-ctx.Done():
			return "", context.Cause(ctx)
		}
	}
	w.Deploy = func(ctx context.Context, req DeployRequest) tfhosts.Verdict {
		select {
		case s.deploys <- struct{}{}:
			defer func() { <-s.deploys }()
		case <-req.Drop:
			return droppedVerdict(req.Name)
		case <-ctx.Done():
			return droppedVerdict(req.Name)
		}
		select {
		case <-s.interrupt: // the slot came from a deploy that was interrupted, too
			return droppedVerdict(req.Name)
		default:
			return deploy(ctx, req)
		}
	}
	return w
}
