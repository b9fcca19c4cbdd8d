package api

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestSentinelsAndStatuses(t *testing.T) {
	seen := make(map[int]bool)
	for _, r := range table() {
		wrapped := fmt.Errorf("reading %q: %w", "x", r.err)
		if got := ExitCode(wrapped); got != r.exit {
			t.Errorf("ExitCode(%q) = %d, want %d", wrapped, got, r.exit)
		}
		if r.status == 0 {
			if got := Status(wrapped); got != http.StatusInternalServerError {
				t.Errorf("Status(%q) = %d, want 500: it never goes over the wire", wrapped, got)
			}
			continue
		}
		if seen[r.status] {
			t.Errorf("two sentinels have the status %d", r.status)
		}
		seen[r.status] = true
		if got := Status(wrapped); got != r.status {
			t.Errorf("Status(%q) = %d, want %d", wrapped, got, r.status)
		}
		if got := FromStatus(r.status); !errors.Is(got, r.err) {
			t.Errorf("FromStatus(%d) = %v, want %v", r.status, got, r.err)
		}
	}
}

func TestFromStatus(t *testing.T) {
	for _, tt := range []struct {
		status int
		want   error
	}{
		{200, nil},
		{201, nil},
		{204, nil},
		{202, ErrBadRequest},
		{301, ErrRedirect},
		{307, ErrRedirect},
		{304, ErrRedirect},
		{418, ErrBadRequest},
		{422, ErrBadRequest},
		{429, ErrUnavailable},
		{500, ErrUnavailable},
		{501, ErrBadRequest},
		{502, ErrUnavailable},
		{504, ErrUnavailable},
	} {
		if got := FromStatus(tt.status); got != tt.want { //nolint:errorlint // the sentinel itself is the contract
			t.Errorf("FromStatus(%d) = %v, want %v", tt.status, got, tt.want)
		}
	}
}

func TestLockedErrorIsLocked(t *testing.T) {
	err := fmt.Errorf("locking: %w", &LockedError{Holder: LockInfo{ID: "1", Who: "ann@box"}})
	if !errors.Is(err, ErrLocked) || Status(err) != 423 || ExitCode(err) != 4 {
		t.Errorf("LockedError: Is = %v, Status = %d, ExitCode = %d, want true, 423, 4", errors.Is(err, ErrLocked), Status(err), ExitCode(err))
	}
	if !strings.Contains(err.Error(), "ann@box") {
		t.Errorf("LockedError says %q, want the holder in it", err)
	}
}

func TestStateKey(t *testing.T) {
	long := "https://example.org/" + strings.Repeat("a", 300)
	for address, want := range map[string]string{
		"http://localhost:8080/state/project1/example": "http___localhost_8080_state_project1_example",
		"https://h/s?a=1&b=2#c@d e":                    "https___h_s_a_1_b_2_c_d_e",
		"":                                             "",
		long[:200]:                                     "https___example.org_" + strings.Repeat("a", 180),
	} {
		if got := StateKey(address); got != want {
			t.Errorf("StateKey(%q) = %q, want %q", address, got, want)
		}
	}
	if a, b := StateKey(long), StateKey(long+"b"); a == b || len(a) != 200 || len(b) != 200 {
		t.Errorf("StateKey of two long addresses = %q, %q, want two keys of 200 bytes", a, b)
	}
}

func TestParseMeta(t *testing.T) {
	for _, tt := range []struct {
		name, body string
		want       Meta
		fails      bool
	}{
		{name: "plain", body: `{"version":4,"serial":7,"lineage":"l","resources":[{},{}]}`, want: Meta{Serial: 7, Lineage: "l", Resources: 2}},
		{name: "empty", body: `{"serial":0,"lineage":"l","resources":[]}`, want: Meta{Lineage: "l"}},
		{name: "encrypted", body: `{"serial":3,"lineage":"l","meta":{},"encrypted_data":"x"}`, want: Meta{Serial: 3, Lineage: "l", Encrypted: true}},
		{name: "serial over 2^53", body: `{"serial":9007199254740993,"lineage":"l"}`, want: Meta{Serial: 9007199254740993, Lineage: "l"}},
		{name: "no body", body: ``, fails: true},
		{name: "page", body: `<html></html>`, fails: true},
		{name: "list", body: `[{"serial":1,"lineage":"l"}]`, fails: true},
		{name: "two values", body: `{"serial":1,"lineage":"l"}{}`, fails: true},
		{name: "no lineage", body: `{"serial":1}`, fails: true},
		{name: "empty lineage", body: `{"serial":1,"lineage":""}`, fails: true},
		{name: "no serial", body: `{"lineage":"l"}`, fails: true},
		{name: "serial is text", body: `{"serial":"1","lineage":"l"}`, fails: true},
		{name: "serial is negative", body: `{"serial":-1,"lineage":"l"}`, fails: true},
		{name: "serial is a fraction", body: `{"serial":1.5,"lineage":"l"}`, fails: true},
		{name: "cut off", body: `{"serial":1,"lineage":"l"`, fails: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := ParseMeta([]byte(tt.body))
			if (err != nil) != tt.fails {
				t.Fatalf("ParseMeta(%q) fails with %v, want failure %v", tt.body, err, tt.fails)
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("ParseMeta(%q) (-want +got):\n%s", tt.body, diff)
			}
		})
	}
}

func TestParseHolder(t *testing.T) {
	created := time.Date(2026, 11, 29, 10, 0, 0, 1, time.UTC)
	for _, tt := range []struct {
		name, body string
		want       LockInfo
		ok         bool
	}{
		{
			name: "tofu", body: `{"ID":"1","Operation":"o","Info":"i","Who":"w","Version":"v","Created":"2026-11-29T10:00:00.000000001Z","Path":""}`,
			want: LockInfo{ID: "1", Operation: "o", Info: "i", Who: "w", Version: "v", Created: created}, ok: true,
		},
		{name: "odd time", body: `{"ID":"1","Who":"w","Created":"yesterday"}`, want: LockInfo{ID: "1", Who: "w"}, ok: true},
		{name: "no ID", body: `{"Who":"w"}`},
		{name: "text", body: `locked`},
		{name: "empty", body: ``},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, ok := ParseHolder([]byte(tt.body))
			if ok != tt.ok || ok && got != tt.want {
				t.Errorf("ParseHolder(%q) = %+v, %v, want %+v, %v", tt.body, got, ok, tt.want, tt.ok)
			}
		})
	}
}
