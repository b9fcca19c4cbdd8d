package runner

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	tfhosts "fediversity.eu/tf-hosts"
)

func TestReadTimes(t *testing.T) {
	at := time.Unix(1700000000, 0).UTC()
	for _, c := range []struct {
		name, answer string
		want         tfhosts.Observed
	}{
		{"all of it", "since 1700000000\nbooted_at 1700000000\nreboot kernel\nreboot initrd\nend yes\n", tfhosts.Observed{Since: at, BootedAt: at, NeedsReboot: true}},
		{"a host without stat and /proc", "since \nbooted_at 0\nend yes\n", tfhosts.Observed{}},
		{"an answer that is no number", "since yesterday\n", tfhosts.Observed{}},
	} {
		var got tfhosts.Observed
		readTimes(c.answer, &got)
		if diff := cmp.Diff(c.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", c.name, diff)
		}
	}
}
