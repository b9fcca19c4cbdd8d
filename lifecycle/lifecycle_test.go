package lifecycle

import (
	"context"
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func everything() Type {
	return Type{Name: "file", Actions: []Action{Create, Update, Remove}}
}

func TestNewPlan(t *testing.T) {
	declared := Fields{"mode": Text("0640"), "owner": AbsentValue()}
	tests := []struct {
		name    string
		res     Resource
		obs     Observation
		want    Plan
		wantErr error
	}{
		{
			name: "absent and wanted is created",
			res:  Resource{Type: everything(), Exists: true, Fields: Fields{"mode": Text("0640")}},
			want: Plan{Action: Create, Differences: []Difference{{"mode", Text("0640"), AbsentValue()}}},
		},
		{
			name: "absent and unwanted is none",
			res:  Resource{Type: everything()},
			want: Plan{Action: None},
		},
		{
			name: "there and unwanted is removed",
			res:  Resource{Type: everything(), Fields: declared},
			obs:  Observation{Exists: true},
			want: Plan{Action: Remove},
		},
		{
			name: "an undeclared field is no difference",
			res:  Resource{Type: everything(), Exists: true, Fields: declared},
			obs:  Observation{Exists: true, Fields: Fields{"mode": Text("0640"), "owner": AbsentValue(), "group": Text("adm")}},
			want: Plan{Action: None},
		},
		{
			name: "an empty value is not an absent one",
			res:  Resource{Type: everything(), Exists: true, Fields: Fields{"owner": AbsentValue()}},
			obs:  Observation{Exists: true, Fields: Fields{"owner": Text("")}},
			want: Plan{Action: Update, Differences: []Difference{{"owner", AbsentValue(), Text("")}}},
		},
		{
			name: "an unobservable field is named and not assumed",
			res:  Resource{Type: everything(), Exists: true, Fields: declared},
			obs:  Observation{Exists: true, Fields: Fields{"mode": UnobservableValue()}},
			want: Plan{Action: None, Unobservable: []string{"mode", "owner"}},
		},
		{
			name:    "an unsettable field that differs fails the action",
			res:     Resource{Type: everything(), Exists: true, Fields: Fields{"mode": Text("0640")}},
			obs:     Observation{Exists: true, Fields: Fields{"mode": UnsettableValue("0600")}},
			want:    Plan{Action: Update, Differences: []Difference{{"mode", Text("0640"), UnsettableValue("0600")}}},
			wantErr: ErrUnsettable,
		},
		{
			name: "an unsettable field that matches is none",
			res:  Resource{Type: everything(), Exists: true, Fields: Fields{"mode": Text("0600")}},
			obs:  Observation{Exists: true, Fields: Fields{"mode": UnsettableValue("0600")}},
			want: Plan{Action: None},
		},
		{
			name:    "a type that is never created says so",
			res:     Resource{Type: Type{Name: "service", Actions: []Action{Update}}, Exists: true},
			want:    Plan{Action: Create},
			wantErr: ErrAction,
		},
		{
			name: "a failed dependency skips",
			res:  Resource{Type: everything(), Exists: true, SkipReason: "prod.db failed"},
			want: Plan{Action: Skip, Reason: "prod.db failed"},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := NewPlan(tt.res, tt.obs)
			if !errors.Is(err, tt.wantErr) {
				t.Fatalf("NewPlan() error = %v, want %v", err, tt.wantErr)
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("NewPlan() (-want +got):\n%s", diff)
			}
		})
	}
}

// memory is a target whose writes can go wrong.
type memory struct {
	state   Observation
	applied []Action
	lies    bool
	err     error
}

func (m *memory) Observe(context.Context) (Observation, error) { return m.state, nil }

func (m *memory) Apply(_ context.Context, plan Plan) error {
	m.applied = append(m.applied, plan.Action)
	if m.err != nil || m.lies {
		return m.err
	}
	f := Fields{}
	for k, v := range m.state.Fields {
		f[k] = v
	}
	for _, d := range plan.Differences {
		f[d.Field] = d.Want
	}
	m.state = Observation{Exists: plan.Action != Remove, Fields: f}
	return nil
}

func TestRunSecondPassIsEmpty(t *testing.T) {
	m := &memory{}
	r := Resource{Type: everything(), Exists: true, Fields: Fields{"mode": Text("0640")}}
	first := Run(context.Background(), r, m)
	if first.Err != nil || !first.Applied || len(first.Unverified) != 0 {
		t.Fatalf("Run() = %+v, want a verified create", first)
	}
	second := Run(context.Background(), r, m)
	if second.Plan.Action != None || second.Applied {
		t.Errorf("second Run() = %+v, want none", second)
	}
	if diff := cmp.Diff([]Action{Create}, m.applied); diff != "" {
		t.Errorf("provider calls (-want +got):\n%s", diff)
	}
}

func TestRunReportsWhatDidNotHappen(t *testing.T) {
	r := Resource{Name: "x", Type: everything(), Exists: true, Fields: Fields{"mode": Text("0640")}}

	liar := &memory{state: Observation{Exists: true, Fields: Fields{"mode": Text("0600")}}, lies: true}
	res := Run(context.Background(), r, liar)
	want := []Difference{{"mode", Text("0640"), Text("0600")}}
	if diff := cmp.Diff(want, res.Unverified); diff != "" {
		t.Errorf("Unverified (-want +got):\n%s", diff)
	}
	if len(liar.applied) != 1 {
		t.Errorf("provider was called %d times, want 1: verification is no second attempt", len(liar.applied))
	}

	gone := &memory{lies: true}
	if res := Run(context.Background(), r, gone); len(res.Unverified) != 1 || res.Unverified[0].Field != "exists" {
		t.Errorf("Unverified = %v, want exists", res.Unverified)
	}

	broken := &memory{err: errors.New("disk full")}
	if res := Run(context.Background(), r, broken); !errors.Is(res.Err, broken.err) || res.Applied {
		t.Errorf("Run() = %+v, want the provider's error", res)
	}

	fixed := &memory{state: Observation{Exists: true, Fields: Fields{"mode": UnsettableValue("0600")}}}
	if res := Run(context.Background(), r, fixed); !errors.Is(res.Err, ErrUnsettable) || len(fixed.applied) != 0 {
		t.Errorf("Run() = %v after %v, want ErrUnsettable before any call", res.Err, fixed.applied)
	}

	skipped := &memory{}
	r.SkipReason = "no provider"
	if res := Run(context.Background(), r, skipped); res.Plan.Action != Skip || len(skipped.applied) != 0 {
		t.Errorf("Run() = %+v, want skip without a call", res)
	}
}
