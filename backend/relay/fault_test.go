package relay_test

import (
	"io"
	"net/http"
	"net/http/httptest"
	"sync"
)

// dropAfter lets a request through and closes the connection instead of the
// answer. Other faults are statuses.
const dropAfter = -1

// faultPlan fails the next requests of each method.
type faultPlan struct {
	mu   sync.Mutex
	plan map[string][]int
}

func (f *faultPlan) set(method string, faults ...int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.plan == nil {
		f.plan = make(map[string][]int)
	}
	f.plan[method] = faults
}

func (f *faultPlan) next(method string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.plan[method]) == 0 {
		return 0
	}
	n := f.plan[method][0]
	f.plan[method] = f.plan[method][1:]
	return n
}

func (f *faultPlan) left() (n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, p := range f.plan {
		n += len(p)
	}
	return n
}

func (f *faultPlan) wrap(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch n := f.next(r.Method); n {
		case 0:
			h.ServeHTTP(w, r)
		case dropAfter:
			h.ServeHTTP(httptest.NewRecorder(), r)
			panic(http.ErrAbortHandler)
		default:
			_, _ = io.Copy(io.Discard, r.Body)
			if n >= 300 && n < 400 {
				w.Header().Set("Location", "/elsewhere")
			}
			w.WriteHeader(n)
		}
	})
}

type syncWriter struct {
	mu sync.Mutex
	w  io.Writer
}

func (s *syncWriter) Write(b []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.w.Write(b)
}
