package main

import (
	"strings"
	"testing"
)

func TestTofuHabits(t *testing.T) {
	for name, tt := range map[string]struct{ in, want string }{
		"one dash":                           {"plan -target=x", "plan -- -target=x"},
		"two dashes":                         {"plan --target=x", "plan -- --target=x"},
		"two dashes, value as a word":        {"plan --target x --refresh-only", "plan -- --target x --refresh-only"},
		"one dash, value as a word":          {"apply -target x --ask", "apply --ask -- -target x"},
		"beside ours with a value":           {"plan --setup s.json --target x", "plan --setup s.json -- --target x"},
		"beside ours with an equals":         {"plan --setup=s.json --out=p --json", "plan --setup=s.json --json -- --out=p"},
		"behind the dashes":                  {"plan --target=x -- --ask", "plan -- --target=x --ask"},
		"a flag that is not known":           {"plan --quite-new=1", "plan -- --quite-new=1"},
		"state list":                         {"state list --id=x", "state-list -- --id=x"},
		"state rm of all":                    {"all state rm --dry-run prod.app1", "all state-rm -- --dry-run prod.app1"},
		"a group named as a verb":            {"all --group plan apply --target=x", "all --group plan apply -- --target=x"},
		"a group behind the verb":            {"all apply --group g0 --target=x", "all apply --group g0 -- --target=x"},
		"a setup file named as a verb":       {"--setup plan apply --refresh=false", "--setup plan apply -- --refresh=false"},
		"OpenTofu's help":                    {"plan -help", "plan -- -help"},
		"our help":                           {"plan --help", "plan --help"},
		"our help in short":                  {"plan -h", "plan -h"},
		"one of ours misspelt":               {"plan --setpu s.json", "plan --setpu -- s.json"},
		"one of ours, cut short":             {"plan --reclaim", "plan --reclaim"},
		"one of another command's":           {"apply --group=g0", "apply --group=g0"},
		"no verb of OpenTofu's":              {"doctor --format json", "doctor --format json"},
		"a verb's name as another command's": {"backend serve show -x", "backend serve show -x"},
		"OpenTofu's, near to one of ours":    {"plan --out=p --lock=false", "plan -- --out=p --lock=false"},
	} {
		got := strings.Join(tofuHabits(newRootCommand(&program{}), strings.Fields(tt.in)), " ")
		if got != tt.want {
			t.Errorf("%s: tofuHabits(%q) = %q, want %q", name, tt.in, got, tt.want)
		}
	}
}
