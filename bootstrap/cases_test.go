package bootstrap

import "testing"

// TestCases walks the case table of the design, row by row.
func TestCases(t *testing.T) {
	state := func(lineage string, serial uint64, resources int) *StateRef {
		return &StateRef{Lineage: lineage, Serial: serial, Resources: resources, SHA256: lineage + string(rune('0'+serial))}
	}
	none := &Ledger{}
	seen := &Ledger{Mode: ModeRemote, State: *state("a", 5, 3)}
	sent := &Ledger{Mode: ModeBootstrapping, State: *state("a", 5, 3), Sent: state("a", 5, 3)}
	detached := &Ledger{Mode: ModeDetached, State: *state("a", 5, 3)}
	for _, row := range []struct {
		name string
		sit  situation
		want course
		lost bool
		away bool
	}{
		{"sent, backend away", situation{bootstrap: true, ledger: sent, local: state("a", 5, 3)}, waitForBackend, false, true},
		{"sent, backend away, no BOOTSTRAP", situation{ledger: sent, local: state("a", 5, 3)}, waitForBackend, false, true},
		{"nothing anywhere", situation{bootstrap: true, ledger: none}, cycleOne, false, false},
		{"nothing answers, the node may have a state", situation{bootstrap: true, unsure: true, ledger: none}, steady, false, true},
		{"cycle 1 was interrupted", situation{bootstrap: true, ledger: none, local: state("a", 1, 1)}, cycleOne, false, false},
		{"cycle 1 ended, backend empty", situation{bootstrap: true, ledger: none, local: state("a", 1, 1), reachable: true}, migrateFirst, false, false},
		{"migration had happened", situation{bootstrap: true, ledger: sent, local: state("a", 5, 3), reachable: true, backend: state("a", 5, 3)}, alreadyMoved, false, false},
		{"migration had happened and went on", situation{bootstrap: true, ledger: none, local: state("a", 5, 3), reachable: true, backend: state("a", 7, 3)}, alreadyMoved, false, false},
		{"backend has an older copy", situation{bootstrap: true, ledger: none, local: state("a", 5, 3), reachable: true, backend: state("a", 4, 3)}, migrateOver, false, false},
		{"backend has a stranger's", situation{bootstrap: true, ledger: none, local: state("a", 5, 3), reachable: true, backend: state("b", 9, 3)}, steady, true, false},
		{"BOOTSTRAP again after the marker", situation{bootstrap: true, ledger: seen, marker: true, migrated: state("a", 5, 3), reachable: true, backend: state("a", 6, 3)}, steady, false, false},
		{"BOOTSTRAP after the marker, backend away", situation{bootstrap: true, ledger: seen, marker: true, migrated: state("a", 5, 3)}, steady, false, true},
		{"BOOTSTRAP on a machine that knows the state, backend away", situation{bootstrap: true, ledger: seen}, steady, false, true},
		{"another run bootstrapped it", situation{bootstrap: true, ledger: none, reachable: true, backend: state("a", 5, 3)}, steady, false, false},
		{"first apply", situation{ledger: none, reachable: true}, steady, false, false},
		{"not renamed yet", situation{ledger: none, local: state("a", 5, 3), reachable: true, backend: state("a", 5, 3)}, alreadyMoved, false, false},
		{"local state never moved", situation{ledger: none, local: state("a", 5, 3), reachable: true}, steady, true, false},
		{"local state newer, no BOOTSTRAP", situation{ledger: none, local: state("a", 5, 3), reachable: true, backend: state("a", 4, 3)}, steady, true, false},
		{"marker, backend empty", situation{ledger: none, marker: true, migrated: state("a", 5, 3), reachable: true}, steady, true, false},
		{"marker, other lineage, no ledger", situation{ledger: none, marker: true, migrated: state("a", 5, 3), reachable: true, backend: state("b", 9, 3)}, steady, true, false},
		{"ledger, backend empty", situation{ledger: seen, reachable: true}, steady, true, false},
		{"ledger, other lineage", situation{ledger: seen, reachable: true, backend: state("b", 9, 3)}, steady, true, false},
		{"ledger, lower serial", situation{ledger: seen, reachable: true, backend: state("a", 4, 3)}, steady, true, false},
		{"ledger, 410", situation{ledger: seen, reachable: true, gone: true}, steady, true, false},
		{"no ledger, 410", situation{ledger: none, reachable: true, gone: true}, steady, true, false},
		{"BOOTSTRAP, 410", situation{bootstrap: true, ledger: none, reachable: true, gone: true}, steady, true, false},
		{"no ledger, a stranger's nodes", situation{ledger: none, reachable: true, backend: state("b", 9, 3), strangers: true}, steady, true, false},
		{"destroyed by somebody", situation{ledger: seen, reachable: true, backend: state("a", 6, 0)}, steady, false, false},
		{"unreachable", situation{ledger: none}, steady, false, true},
		{"detached, apply", situation{writes: true, ledger: detached, local: state("a", 5, 3)}, onLocal, false, false},
		{"detached, BOOTSTRAP, backend away", situation{bootstrap: true, ledger: detached, local: state("a", 6, 0)}, cycleOne, false, false},
		{"detached, BOOTSTRAP, superseded copy", situation{bootstrap: true, ledger: detached, local: state("a", 6, 0), reachable: true, backend: state("a", 5, 3)}, migrateOver, false, false},
		{"detached, BOOTSTRAP, backend went on", situation{bootstrap: true, ledger: detached, local: state("a", 6, 0), reachable: true, backend: state("a", 8, 3)}, steady, true, false},
		{"detached, BOOTSTRAP, foreign", situation{bootstrap: true, ledger: detached, local: state("a", 6, 0), reachable: true, backend: state("b", 1, 3)}, steady, true, false},
		{"detached, BOOTSTRAP, empty", situation{bootstrap: true, ledger: detached, local: state("a", 6, 0), reachable: true}, migrateFirst, false, false},
		{"detached, the copy is gone", situation{bootstrap: true, ledger: detached}, steady, true, false},
	} {
		t.Run(row.name, func(t *testing.T) {
			got := decide(row.sit)
			if got.course != row.want || (got.lost != "") != row.lost || got.away != row.away {
				t.Errorf("decide = course %d, lost %q, away %v; want course %d, lost %v, away %v",
					got.course, got.lost, got.away, row.want, row.lost, row.away)
			}
		})
	}
}
