package relay_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"fediversity.eu/tf-hosts/backend/relay"
)

// BenchmarkApply is a first apply of 100 resources by a real tofu, in pairs: on
// the state server, and through the relay, in turns that change their order;
// five pairs an iteration. Its metric "ratio" is the median of the pairs' ratios, relay to server: 1.03 at
// most on a machine with nothing else to do. "server-ms" and "relay-ms" are the
// medians of the two.
//
//	go test ./backend/relay -run '^$' -bench Apply -benchtime 3x
func BenchmarkApply(b *testing.B) {
	var ratios, direct, through []float64
	for n := range 5 * b.N {
		b.StopTimer()
		srv, _ := newServer(b)
		address := fmt.Sprintf("%s/state/project1/n%d", srv.URL, n)
		server := newTofu(b, relay.Endpoint{Address: address + "-server", Username: "ops", Password: "pw-of-backend"}.Env(), hundred())
		_, ep := startRelay(b, relay.Config{Upstream: newClient(b, address+"-relay")})
		relayed := newTofu(b, ep.Env(), hundred())
		server.run(0, "init", "-input=false")
		relayed.run(0, "init", "-input=false")
		apply := func(tf *tofu) float64 {
			begin := time.Now()
			tf.run(0, "apply", "-input=false", "-auto-approve")
			return float64(time.Since(begin).Milliseconds())
		}
		var s, r float64
		b.StartTimer()
		if n%2 == 0 {
			s, r = apply(server), apply(relayed)
		} else {
			r, s = apply(relayed), apply(server)
		}
		direct, through, ratios = append(direct, s), append(through, r), append(ratios, r/s)
	}
	b.ReportMetric(median(ratios), "ratio")
	b.ReportMetric(median(direct), "server-ms")
	b.ReportMetric(median(through), "relay-ms")
}

func hundred() string {
	return strings.Replace(graph, `"one" {`, `"one" {`+"\n  count = 100", 1)
}

func median(all []float64) float64 {
	sorted := slices.Sorted(slices.Values(all))
	if n := len(sorted); n%2 == 0 {
		return (sorted[n/2-1] + sorted[n/2]) / 2
	}
	return sorted[len(sorted)/2]
}
