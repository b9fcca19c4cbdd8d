package relay_test

import (
	"fmt"
	"strings"
	"testing"

	"fediversity.eu/tf-hosts/backend/relay"
)

// BenchmarkApply is a first apply of 100 resources, once with tofu on the state
// server and once through the relay, which may cost 3 % at most.
func BenchmarkApply(b *testing.B) {
	for _, through := range []string{"server", "relay"} {
		b.Run(through, func(b *testing.B) {
			for n := range b.N {
				b.StopTimer()
				srv, _ := newServer(b)
				address := fmt.Sprintf("%s/state/project1/n%d", srv.URL, n)
				ep := relay.Endpoint{Address: address, Username: "ops", Password: "pw-of-backend"}
				if through == "relay" {
					_, ep = startRelay(b, relay.Config{Upstream: newClient(b, address)})
				}
				tf := newTofu(b, ep.Env(), strings.Replace(graph, `"one" {`, `"one" {`+"\n  count = 100", 1))
				tf.run(0, "init", "-input=false")
				b.StartTimer()
				tf.run(0, "apply", "-input=false", "-auto-approve")
			}
		})
	}
}
