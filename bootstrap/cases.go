package bootstrap

import (
	"fmt"

	tfhosts "fediversity.eu/tf-hosts"
)

// situation is everything that decides what a verb does with the state: what
// this machine holds, and what the backend answered.
type situation struct {
	bootstrap bool // BOOTSTRAP=1
	writes    bool // the verb may write
	// local is terraform.tfstate, migrated the state in the marker file.
	local    *StateRef
	marker   bool
	migrated *StateRef
	ledger   *Ledger
	// reachable: a state server answered. backend is its state; nil is absent.
	reachable bool
	backend   *StateRef
	// gone: the server says that it lost the state (410).
	gone bool
	// unsure: nothing answered, and yet a state may exist: the node that would
	// serve it can not be asked, or serves one at another address.
	unsure bool
	// strangers: the backend holds nodes, none of which is in the setup.
	strangers bool
}

// course is what a verb does about the state before it begins.
type course int

const (
	steady         course = iota // on the backend
	cycleOne                     // on terraform.tfstate, then migrate
	migrateFirst                 // terraform.tfstate goes to the empty backend
	migrateOver                  // it goes over an older copy of itself
	alreadyMoved                 // the backend has it: terraform.tfstate becomes the marker
	onLocal                      // detached: on terraform.tfstate, the backend is not read
	waitForBackend               // it may hold a migrated state: cycle 1 would fork it
)

// decision is a course, or the refusal to take one.
type decision struct {
	course course
	// notice is told before the verb begins.
	notice string
	// lost is why a writing verb stops with exit 3; a reading one warns.
	lost string
	// away: the backend can not be reached: exit 5.
	away bool
}

// decide is the case table of the design, row by row.
func decide(s situation) decision {
	switch {
	case s.ledger.Mode == ModeDetached:
		return decideDetached(s)
	case s.ledger.Sent != nil && !s.reachable:
		return decision{course: waitForBackend, away: true}
	case s.local != nil && !s.marker:
		return decideLocal(s)
	case !s.reachable:
		return decideAway(s)
	}
	return decideSteady(s)
}

// decideLocal: terraform.tfstate is there, and no marker.
func decideLocal(s situation) decision {
	switch {
	case !s.reachable && s.bootstrap:
		return decision{course: cycleOne, notice: "resuming cycle 1 on the local state"}
	case !s.reachable:
		return decision{away: true}
	case s.gone:
		return decision{lost: "the backend says that it lost its state, while this machine holds a local one"}
	case s.backend == nil && s.bootstrap:
		return decision{course: migrateFirst}
	case s.backend == nil:
		return decision{lost: fmt.Sprintf("the backend has no state, while this machine holds a local one of serial %d that was never moved there", s.local.Serial)}
	case s.backend.Lineage != s.local.Lineage:
		return decision{lost: fmt.Sprintf("the backend holds a state of lineage %s, this machine a local one of lineage %s", s.backend.Lineage, s.local.Lineage)}
	case s.backend.Serial >= s.local.Serial:
		return decision{course: alreadyMoved, notice: "the local state had been moved to the backend"}
	case s.bootstrap:
		return decision{course: migrateOver}
	}
	return decision{lost: fmt.Sprintf("the backend's state has serial %d, the local one that was never moved there %d", s.backend.Serial, s.local.Serial)}
}

// decideAway: no terraform.tfstate to work on, and no backend.
func decideAway(s situation) decision {
	if s.bootstrap && !s.unsure && !s.marker && !s.ledger.known() {
		return decision{course: cycleOne}
	}
	return decision{away: true}
}

// decideSteady: the backend answers and nothing local waits for it.
func decideSteady(s situation) decision {
	expected := s.ledger.State
	if !s.ledger.known() && s.migrated != nil {
		expected = *s.migrated
	}
	known := s.marker || s.ledger.known()
	switch {
	case s.gone:
		return decision{lost: "the backend says that it lost its state (410)"}
	case s.backend == nil && known:
		return decision{lost: fmt.Sprintf("the backend has no state, while this machine last saw serial %d with %d resources there", expected.Serial, expected.Resources)}
	case s.backend == nil:
		return decision{}
	case known && expected.Lineage != "" && s.backend.Lineage != expected.Lineage:
		return decision{lost: fmt.Sprintf("the backend holds a state of lineage %s, this machine last saw lineage %s there", s.backend.Lineage, expected.Lineage)}
	case known && s.backend.Serial < expected.Serial:
		return decision{lost: fmt.Sprintf("the backend's state went back to serial %d, this machine last saw serial %d there", s.backend.Serial, expected.Serial)}
	case !known && s.strangers:
		return decision{lost: "the backend holds the state of other nodes: none of them is in the setup"}
	case !known && s.bootstrap:
		return decision{notice: "another run brought this backend up; going on with its state"}
	case known && s.backend.Resources == 0 && !s.backend.Encrypted && !expected.Encrypted && expected.Resources > 0 && s.backend.Serial == expected.Serial:
		return decision{lost: fmt.Sprintf("the backend's state of serial %d holds no resources, this machine last saw %d in it", s.backend.Serial, expected.Resources)}
	case known && s.backend.Resources == 0 && !s.backend.Encrypted && expected.Resources > 0 && s.backend.Serial > expected.Serial:
		return decision{notice: "the backend's state holds no resources any more: somebody destroyed them"}
	}
	return decision{}
}

// decideDetached: the state was moved away from the backend, which may still
// answer with a superseded copy.
func decideDetached(s situation) decision {
	switch {
	case !s.bootstrap:
		return decision{course: onLocal}
	case s.local == nil:
		return decision{lost: "the state was detached from the backend, and the local copy is not there"}
	case !s.reachable:
		return decision{course: cycleOne, notice: "bringing the backend up again on the detached state"}
	case s.gone, s.backend == nil:
		return decision{course: migrateFirst}
	case s.backend.Lineage != s.local.Lineage:
		return decision{lost: fmt.Sprintf("the backend holds a state of lineage %s, the detached one has lineage %s", s.backend.Lineage, s.local.Lineage)}
	case s.backend.Serial < s.local.Serial:
		return decision{course: migrateOver, notice: "the backend still holds a superseded copy; it is replaced"}
	}
	return decision{lost: fmt.Sprintf("the state was detached at serial %d, and the backend went on to serial %d", s.local.Serial, s.backend.Serial)}
}

// lostError is exit 3 with the way out.
func lostError(why string) error {
	return tfhosts.WithExit(tfhosts.ExitLostState,
		"put the last known state back: tf-hosts state-restore; or give it up: BOOTSTRAP_ALLOW_LOST_STATE=1",
		fmt.Errorf("refusing to write: %s", why))
}
