package hostconn

import (
	"io"
	"strings"
	"testing"
)

// lineWriter passes on what is written to it, one write a time.
type lineWriter chan string

func (w lineWriter) Write(b []byte) (int, error) {
	w <- string(b)
	return len(b), nil
}

// TestOutputComesWhileTheScriptRuns: the script waits for an answer to what it
// said, so that output which is held back would hold it for good.
func TestOutputComesWhileTheScriptRuns(t *testing.T) {
	h := startSSHD(t)
	c := dial(t, newTestPool(t, testConfig(t)), h.target())
	dir := t.TempDir()
	out, errs := make(lineWriter, 8), make(lineWriter, 8)
	ended := make(chan Result, 1)
	go func() {
		res, err := c.Run(t.Context(), Command{
			Script: `echo out; echo err >&2; until [ -e "$1/go" ]; do sleep 0.05; done; echo last; exit 3`,
			Args:   []string{dir}, Stdout: out, Stderr: errs,
		})
		if err != nil {
			t.Error(err)
		}
		ended <- res
	}()
	if got := <-out; got != "out\n" {
		t.Errorf("the first of stdout = %q, want %q", got, "out\n")
	}
	if got := <-errs; got != "err\n" {
		t.Errorf("the first of stderr = %q, want %q: no token and no noise before it", got, "err\n")
	}
	writeFile(t, dir+"/go", "")
	if got := <-out; got != "last\n" {
		t.Errorf("the last of stdout = %q, want %q", got, "last\n")
	}
	if res := <-ended; res.Code != 3 || len(res.Stdout)+len(res.Stderr) > 0 {
		t.Errorf("Run = %+v, want the code 3 alone", res)
	}
}

func TestOutputBeyondTheBoundOfAResult(t *testing.T) {
	h := startSSHD(t)
	cfg := testConfig(t)
	cfg.MaxOutput = 1000
	c := dial(t, newTestPool(t, cfg), h.target())
	var out, errs strings.Builder
	script := `head -c 5000 /dev/zero | tr '\0' x; head -c 5000 /dev/zero | tr '\0' y >&2`
	if _, err := c.Run(t.Context(), Command{Script: script, Stdout: &out, Stderr: &errs}); err != nil {
		t.Fatal(err)
	}
	if out.Len() != 5000 || errs.Len() != 5000 {
		t.Errorf("%d bytes of stdout and %d of stderr came, want 5000 of each", out.Len(), errs.Len())
	}
	if _, err := c.Run(t.Context(), Command{Script: script, Stdout: io.Discard}); err == nil {
		t.Error("stderr beyond the bound is no error where it is kept")
	}
}
