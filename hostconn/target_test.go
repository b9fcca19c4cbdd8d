package hostconn

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	tfhosts "fediversity.eu/tf-hosts"
)

func TestTargetOf(t *testing.T) {
	n := tfhosts.Node{Host: "h", Username: "deploy", KeyFile: "/k", HostKey: "ssh-ed25519 AAAA", SSHOpts: `["Port=2222"]`}
	got, err := TargetOf("prod.app1", n, tfhosts.NodeSettings{Become: []string{"doas"}, BecomePasswordFile: "/p"})
	want := Target{
		Name: "prod.app1", Host: "h", User: "deploy", KeyFile: "/k", HostKey: "ssh-ed25519 AAAA", Options: []string{"Port=2222"},
		Become: Become{Argv: []string{"doas"}, PasswordFile: "/p"},
	}
	if err != nil || cmp.Diff(want, got) != "" {
		t.Errorf("TargetOf = %v, %v; want %v", got, err, want)
	}
	n.SSHOpts = "Port=2222"
	if _, err := TargetOf("prod.app1", n, tfhosts.NodeSettings{}); err == nil {
		t.Error("ssh_opts that are no JSON list are taken")
	}
}
