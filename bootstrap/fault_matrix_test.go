package bootstrap

import (
	"fmt"
	"slices"
	"sort"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/backend/client"
	"fediversity.eu/tf-hosts/backend/foreigntest"
)

// faultCell is one fault against one server. Cells of a row share a rig.
type faultCell struct {
	name string
	// not says why a server can not have this fault.
	not map[string]string
	// run does it and says what happened.
	run func(t *testing.T, r *faultRig) string
}

// faultRow is a line of the fault table of the protocol's facts.
type faultRow struct {
	name string
	// fresh: the first cell begins without a state.
	fresh bool
	self  bool
	cells []faultCell
}

func faultRows() []faultRow {
	drop, lost := foreigntest.Fault{DropBefore: true}, foreigntest.Fault{DropAfter: true}
	is := func(code int) foreigntest.Fault { return foreigntest.Fault{Status: code} }
	to := func(code int) foreigntest.Fault { return foreigntest.Fault{Status: code, Location: "/elsewhere"} }
	const salvage = tfhosts.ExitSalvage
	f3 := []faultCell{{name: "POST 409 once", run: during(foreigntest.Post, codes{gitlab: salvage}, is(409))}}
	for _, code := range []int{400, 409, 412, 413, 423, 501, 202} {
		f3 = append(f3, faultCell{name: fmt.Sprintf("POST %d", code), run: during(foreigntest.Post, always(salvage), foreigntest.Times(4, is(code))...)})
	}
	for _, code := range []int{301, 307} {
		f3 = append(f3, faultCell{name: fmt.Sprintf("POST %d", code), run: during(foreigntest.Post, always(salvage), to(code))})
	}
	onlyOurs := func(why string) map[string]string { return map[string]string{gitlab: why, nimbolus: why} }
	walk := map[string]string{ours: "every operation of it: TestFaultWalk"}
	return []faultRow{
		{name: "F1", cells: []faultCell{
			{name: "LOCK answer lost", run: during(foreigntest.Lock, codes{}, lost)},
			{name: "LOCK answer lost twice", run: during(foreigntest.Lock, codes{}, lost, lost)},
			{name: "LOCK 502", run: during(foreigntest.Lock, codes{}, is(502), is(502))},
		}},
		{name: "F2", cells: []faultCell{
			{name: "POST answer lost", run: during(foreigntest.Post, codes{}, lost)},
			{name: "POST dropped", run: during(foreigntest.Post, codes{}, drop)},
			{name: "POST answer lost, 502 x4", run: during(foreigntest.Post, codes{}, append([]foreigntest.Fault{lost}, foreigntest.Times(4, is(502))...)...)},
			{name: "POST answer cut off", run: during(foreigntest.Post, codes{}, foreigntest.Fault{Truncate: true, DropAfter: true})},
		}},
		{name: "F3", cells: f3},
		{name: "F4", cells: []faultCell{
			{name: "UNLOCK 500", run: during(foreigntest.Unlock, codes{}, is(500), is(500))},
			{name: "UNLOCK 409", run: during(foreigntest.Unlock, codes{}, foreigntest.Fault{}, is(409))},
			{name: "UNLOCK dropped", run: during(foreigntest.Unlock, codes{}, drop)},
			{name: "UNLOCK answer lost", run: during(foreigntest.Unlock, codes{}, lost, foreigntest.Fault{}, lost)},
		}},
		{name: "F4 migration", fresh: true, self: true, cells: []faultCell{
			// The probe takes the lock once, and so does the wait.
			{name: "UNLOCK 502", run: migrationFault(foreigntest.Unlock, foreigntest.Fault{}, foreigntest.Fault{}, is(502))},
		}},
		{name: "F4 migration, lost", fresh: true, self: true, cells: []faultCell{
			{name: "all answers lost", run: migrationFault(foreigntest.Unlock, lost, foreigntest.Fault{}, lost, foreigntest.Fault{}, lost)},
		}},
		{name: "F4 migration, LOCK", fresh: true, self: true, cells: []faultCell{
			{name: "all answers lost", run: migrationFault(foreigntest.Lock, lost, foreigntest.Fault{}, lost, foreigntest.Fault{}, lost)},
		}},
		{name: "F4 migration, POST", fresh: true, self: true, cells: []faultCell{
			{name: "answer lost", run: migrationFault(foreigntest.Post, lost)},
		}},
		{name: "F5", cells: []faultCell{
			{name: "GET 404", run: refused(3, "has no state", status(404), 1)},
			{name: "GET 204", run: refused(3, "has no state", status(204), 1)},
			{name: "GET 200, empty", run: refused(3, "has no state", status(200), 1)},
			{name: "GET HTML", run: refused(1, "no state", page, 1)},
			{name: "GET 301", run: refused(1, "redirect", status(301), 1)},
			{name: "GET 401", run: refused(1, "credentials", status(401), 1)},
			{name: "GET 410", run: refused(3, "lost its state", status(410), 1)},
			{name: "GET 502 for good", run: refused(5, "unavailable", status(502), 3)},
			{name: "GET cut off for good", run: refused(5, "cut off", truncated, 3)},
			{name: "GET cut off once", run: during(foreigntest.Get, codes{}, foreigntest.Fault{Truncate: true})},
			{name: "GET old serial", run: refused(3, "went back", changed(map[string]any{"serial": -1}), 1)},
			{name: "GET other lineage", run: refused(3, "lineage", changed(map[string]any{"lineage": "another"}), 1)},
			{name: "GET 0 resources", run: refused(3, "resources", changed(map[string]any{"resources": []any{}}), 1)},
			{name: "GET 404 after the first look", run: lostBehindTheLook(status(404))},
			{name: "GET other lineage after it", run: lostBehindTheLook(changed(map[string]any{"lineage": "another"}))},
			{name: "wrong password", not: map[string]string{ours: "401, above", gitlab: "401, above"}, run: wrongPassword},
		}},
		{name: "F6 tofu", cells: []faultCell{
			{name: "SIGKILL during create", run: killed("create", 1, syscall.SIGKILL)},
			{name: "SIGHUP during create", run: killed("create", 1, syscall.SIGHUP)},
			{name: "2x SIGINT during create", run: killed("create", 1, syscall.SIGINT, syscall.SIGINT)},
			{name: "SIGKILL during LOCK", run: killed("lock", 1, syscall.SIGKILL)},
			{name: "SIGKILL during POST", run: killed("post", 0, syscall.SIGKILL)},
			{name: "SIGKILL during UNLOCK", run: killed("unlock", 0, syscall.SIGKILL)},
		}},
		{name: "F6 tf-hosts", cells: []faultCell{
			{name: "SIGKILL during POST", run: wrapperKilled("relay.post", false)},
			{name: "SIGKILL of both", run: wrapperKilled("relay.post", true)},
		}},
		{name: "F7", cells: []faultCell{
			{name: "before the write", not: onlyOurs("their stores are not ours to stop"), run: storeFails("store.state.write")},
			{name: "between write and rename", not: onlyOurs("their stores are not ours to stop"), run: storeFails("store.state.rename")},
			{name: "between rename and fsync", not: onlyOurs("their stores are not ours to stop"), run: storeFails("store.state.dirsync")},
			{name: "lock write", not: onlyOurs("their stores are not ours to stop"), run: storeFails("store.lock.rename")},
			{name: "lock write and reply", not: onlyOurs("their stores are not ours to stop"), run: storeFails("store.lock.dirsync")},
		}},
		{name: "F8 5 s", cells: []faultCell{
			{name: "restart, locks kept", not: map[string]string{nimbolus: "its locks are in memory"}, run: restarted(5*time.Second, false)},
			{name: "restart, locks lost", not: map[string]string{ours: "short, in F8", gitlab: "short, in F8"}, run: restarted(5*time.Second, true)},
		}},
		{name: "F8", cells: []faultCell{
			{name: "restart, locks lost", not: map[string]string{nimbolus: "5 s, above"}, run: restarted(200*time.Millisecond, true)},
			{name: "restart for 60 s", not: map[string]string{
				ours: "as 5 s: the patience is the relay's, TestPatience", gitlab: "as 5 s", nimbolus: "as 5 s",
			}},
		}},
		{name: "F9", fresh: true, self: true, cells: []faultCell{{name: "killed after LOCK", not: walk, run: migrationKilled("migrate.get")}}},
		{name: "F9 POST", fresh: true, self: true, cells: []faultCell{{name: "killed after POST", not: walk, run: migrationKilled("migrate.verify")}}},
		{name: "F9 end", fresh: true, self: true, cells: []faultCell{{name: "killed before the rename", not: walk, run: migrationKilled("migrate.rename")}}},
		{name: "F10", fresh: true, self: true, cells: []faultCell{{name: "server gone before UNLOCK", run: detachFault("")}}},
		{name: "F10 kill", fresh: true, self: true, cells: []faultCell{{name: "killed after GET", not: walk, run: detachFault("detach.ledger")}}},
		{name: "F11", cells: []faultCell{
			{name: "hung GET, interrupt", run: hung(foreigntest.Get, 1, 0)},
			{name: "hung POST, interrupt", run: hung(foreigntest.Post, 0, 1)},
		}},
		{name: "F12", cells: []faultCell{
			{name: "423, empty", run: notReclaimed(func([]byte) (int, string) { return 423, "" })},
			{name: "423 without ID", run: notReclaimed(func([]byte) (int, string) { return 423, `{"Who":"` + client.Who() + `"}` })},
			{name: "423, own ID echoed", run: notReclaimed(func(body []byte) (int, string) { return 423, string(body) })},
			{name: "409, own ID echoed", run: notReclaimed(func(body []byte) (int, string) { return 409, string(body) })},
			{name: "held by another machine", run: foreignHolder},
		}},
		{name: "F13", cells: []faultCell{
			{name: "encrypted", not: map[string]string{ours: "TestFaultEncryptedState", gitlab: "TestFaultEncryptedState", nimbolus: "TestFaultEncryptedState"}},
		}},
		{name: "reclaim", cells: []faultCell{
			{name: "lock of a dead run", run: deadHolder},
			{name: "lock of a killed run", run: killedHolder},
		}},
		{name: "force-unlock", cells: []faultCell{
			// GitLab and nimbolus do not tell an unlock from a lost lock; ours does.
			{name: "in the middle of an apply", run: unlockedInTheMiddle(codes{ours: salvage})},
		}},
	}
}

// TestFaultMatrix is the fault table of the protocol's facts against our server,
// one with GitLab's rules and one with nimbolus', through the wrapper and a real
// tofu. After each fault: one lock at most and none in the end, each state
// stored once, one lineage, nothing deployed that is not in the state. "make
// faults" prints the table.
func TestFaultMatrix(t *testing.T) {
	if testing.Short() {
		t.Skip("takes minutes")
	}
	servers := []string{ours, gitlab, nimbolus}
	var mu sync.Mutex
	table := map[string]map[string]string{}
	var order []string
	var notes []string
	enter := func(line, server, what string) {
		mu.Lock()
		defer mu.Unlock()
		table[line][server] = what
	}
	rows := faultRows()
	for _, row := range rows {
		for _, c := range row.cells {
			line := fmt.Sprintf("%-20s %s", row.name, c.name)
			table[line] = map[string]string{}
			order = append(order, line)
			for _, s := range servers {
				if why := c.not[s]; why != "" {
					table[line][s] = "-"
					notes = append(notes, fmt.Sprintf("%s, %s: %s", line, s, why))
				}
			}
		}
	}
	t.Run("cells", func(t *testing.T) {
		for _, row := range rows {
			for _, s := range servers {
				if !slices.ContainsFunc(row.cells, func(c faultCell) bool { return c.run != nil && c.not[s] == "" }) {
					continue
				}
				t.Run(row.name+"/"+s, func(t *testing.T) {
					t.Parallel()
					r := newFaultRig(t, s, 1, row.self)
					if !row.fresh {
						r.wantCode(t, 0, "apply")
					}
					for _, c := range row.cells {
						if c.run == nil || c.not[s] != "" {
							continue
						}
						line := fmt.Sprintf("%-20s %s", row.name, c.name)
						enter(line, s, "FAILED")
						ok := t.Run(c.name, func(t *testing.T) {
							what := c.run(t, r)
							if !t.Failed() && row.name != "F10" && row.name != "F10 kill" {
								r.whole(t)
							}
							if !t.Failed() {
								enter(line, s, what)
							}
						})
						if !ok {
							return
						}
					}
				})
			}
		}
	})
	var b strings.Builder
	fmt.Fprintf(&b, "%-52s %-26s %-26s %s\n", "exit codes", servers[0], servers[1], servers[2])
	for _, line := range order {
		fmt.Fprintf(&b, "%-52s %-26s %-26s %s\n", line, table[line][ours], table[line][gitlab], table[line][nimbolus])
	}
	sort.Strings(notes)
	t.Logf("\n%s\nnot there:\n%s", b.String(), strings.Join(notes, "\n"))
}
