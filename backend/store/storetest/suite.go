// Package storetest is the suite that every store of package store passes.
//
//	storetest.Run(t, func(t *testing.T) storetest.Open { … })
package storetest

import (
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"fediversity.eu/tf-hosts/backend/api"
	"fediversity.eu/tf-hosts/backend/store"
)

// Open opens the store under test; a second call, after Close, opens the same
// data again, as a restarted server does.
type Open func() (store.Store, error)

// State makes a small state.
func State(serial uint64, lineage, text string) []byte {
	return fmt.Appendf(nil, `{"version":4,"serial":%d,"lineage":%q,"resources":[],"text":%q}`, serial, lineage, text)
}

// Put writes a state and fails the test if that fails.
func Put(t *testing.T, s store.Store, name string, body []byte) {
	t.Helper()
	if err := put(t, s, name, body); err != nil {
		t.Fatalf("PutState(%q) = %v", name, err)
	}
}

func put(t *testing.T, s store.Store, name string, body []byte) error {
	t.Helper()
	meta, err := api.ParseMeta(body)
	if err != nil {
		t.Fatal(err)
	}
	return s.Update(t.Context(), name, func(tx store.Tx) error { return tx.PutState(meta, body) })
}

// Run runs the suite; fresh gives the opener of an empty store for each test.
func Run(t *testing.T, fresh func(t *testing.T) Open) {
	start := func(t *testing.T) (store.Store, func() store.Store) {
		t.Helper()
		open := fresh(t)
		s, err := open()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { s.Close() })
		return s, func() store.Store {
			t.Helper()
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			if s, err = open(); err != nil {
				t.Fatal(err)
			}
			return s
		}
	}
	const name = "project1/example"

	t.Run("a name that was never written has no state", func(t *testing.T) {
		s, _ := start(t)
		if _, err := s.Get(t.Context(), name); !errors.Is(err, api.ErrNotFound) {
			t.Errorf("Get() = %v, want ErrNotFound", err)
		}
		holder := api.LockInfo{ID: "1"}
		if err := s.Update(t.Context(), name, func(tx store.Tx) error { return tx.PutLock(store.Lock{Holder: &holder}) }); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Get(t.Context(), name); !errors.Is(err, api.ErrNotFound) {
			t.Errorf("Get() after a lock alone = %v, want ErrNotFound", err)
		}
	})
	t.Run("a state is read back as its bytes, also after a restart", func(t *testing.T) {
		s, restart := start(t)
		body := State(3, "l", "x")
		Put(t, s, name, body)
		for range 2 {
			got, err := s.Get(t.Context(), name)
			if err != nil || string(got.Body) != string(body) || got.Serial != 3 || got.Lineage != "l" {
				t.Fatalf("Get() = serial %d, lineage %q, %v, want the bytes that were put", got.Serial, got.Lineage, err)
			}
			s = restart()
		}
	})
	t.Run("a lock survives a restart", func(t *testing.T) {
		s, restart := start(t)
		want := store.Lock{Holder: &api.LockInfo{ID: "1", Who: "ann@box", Info: "{}"}, Released: "0"}
		if err := s.Update(t.Context(), name, func(tx store.Tx) error { return tx.PutLock(want) }); err != nil {
			t.Fatal(err)
		}
		s = restart()
		got, err := s.Lock(t.Context(), name)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("Lock() after a restart (-want +got):\n%s", diff)
		}
	})
	t.Run("a deleted state is gone and its versions stay", func(t *testing.T) {
		s, restart := start(t)
		Put(t, s, name, State(1, "l", "x"))
		if err := s.Update(t.Context(), name, func(tx store.Tx) error { return tx.Delete() }); err != nil {
			t.Fatal(err)
		}
		s = restart()
		if _, err := s.Get(t.Context(), name); !errors.Is(err, api.ErrGone) {
			t.Errorf("Get() = %v, want ErrGone", err)
		}
		if v, err := s.Version(t.Context(), name, 1); err != nil || string(v) != string(State(1, "l", "x")) {
			t.Errorf("Version(1) = %q, %v, want the bytes", v, err)
		}
	})
	t.Run("versions are listed newest first", func(t *testing.T) {
		s, _ := start(t)
		for n := range uint64(4) {
			Put(t, s, name, State(n, "l", "x"))
		}
		list, err := s.Versions(t.Context(), name)
		if err != nil {
			t.Fatal(err)
		}
		var serials []uint64
		for _, v := range list {
			serials = append(serials, v.Serial)
		}
		if diff := cmp.Diff([]uint64{3, 2, 1, 0}, serials); diff != "" {
			t.Errorf("Versions() (-want +got):\n%s", diff)
		}
		if _, err := s.Version(t.Context(), name, 9); !errors.Is(err, api.ErrNotFound) {
			t.Errorf("Version(9) = %v, want ErrNotFound", err)
		}
	})
	t.Run("updates of one name exclude each other", func(t *testing.T) {
		s, _ := start(t)
		var wg sync.WaitGroup
		for range 20 {
			wg.Go(func() {
				err := s.Update(t.Context(), name, func(tx store.Tx) error {
					st, err := tx.State()
					if err != nil && !errors.Is(err, api.ErrNotFound) {
						return err
					}
					return tx.PutState(api.Meta{Serial: st.Serial + 1, Lineage: "l"}, State(st.Serial+1, "l", "x"))
				})
				if err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		if st, err := s.Get(t.Context(), name); err != nil || st.Serial != 20 {
			t.Errorf("serial after 20 parallel updates = %d, %v, want 20", st.Serial, err)
		}
	})
	t.Run("names can not leave their place", func(t *testing.T) {
		s, _ := start(t)
		for _, name := range []string{"", "a", "a/", "/a", "a/b/c", "../a", "a/..", "a/.lock", ".x/a", "a/b\n", "a/b c", `a\b/c`, "a//b", "a/b\x00"} {
			if _, err := s.Get(t.Context(), name); !errors.Is(err, api.ErrBadRequest) {
				t.Errorf("Get(%q) = %v, want ErrBadRequest", name, err)
			}
			if err := s.Update(t.Context(), name, func(store.Tx) error { return nil }); !errors.Is(err, api.ErrBadRequest) {
				t.Errorf("Update(%q) = %v, want ErrBadRequest", name, err)
			}
		}
	})
}
