// Package lifecycle holds the five operations that every resource on a host
// goes through: Observe, Diff, Plan, Apply, Verify (spec 003). Observe and Apply
// belong to the resource's Provider, the other three to the planner, which is
// this package.
//
// It never touches a host, and it never retries: a resource that does not match
// after Apply is unverified, and the next pass is what corrects it.
//
//	res := lifecycle.Run(ctx, resource, provider)
//	if res.Err == nil && len(res.Unverified) == 0 { … }
package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sort"
	"strings"
)

// Action is what a plan does to a resource: exactly one.
type Action string

// The actions. A type may allow fewer (Type.Actions).
const (
	None   Action = "none"
	Create Action = "create"
	Update Action = "update"
	Remove Action = "remove"
	Skip   Action = "skip"
)

// State says what a Value is.
type State string

// The states of a Value.
const (
	// Present: Text is the value.
	Present State = "present"
	// Absent is an answer, not an error: the field has no value there.
	Absent State = "absent"
	// Unobservable: the provider cannot read the field here, so it is neither
	// compared nor verified, and the plan names it.
	Unobservable State = "unobservable"
	// Unsettable: Text was read, but the provider cannot change it here. A
	// difference in it fails the action before anything is done.
	Unsettable State = "unsettable"
)

// Value is one field of a resource, as declared or as observed.
type Value struct {
	State State
	Text  string
}

// Text is a present value.
func Text(s string) Value { return Value{State: Present, Text: s} }

// AbsentValue is a field without a value.
func AbsentValue() Value { return Value{State: Absent} }

// UnobservableValue is a field that cannot be read here.
func UnobservableValue() Value { return Value{State: Unobservable} }

// UnsettableValue is a field that reads s and cannot be changed here.
func UnsettableValue(s string) Value { return Value{State: Unsettable, Text: s} }

func (v Value) String() string {
	if v.State == Present || v.State == Unsettable {
		return v.Text
	}
	return string(v.State)
}

// Fields are the values of a resource by field name.
type Fields map[string]Value

// Resource is what is wanted of one target.
type Resource struct {
	// Name identifies the resource in errors: "prod.app1".
	Name string
	Type Type
	// Exists: the target is to be there. Without it Fields are not looked at.
	Exists bool
	// Fields are the declared fields; the others are left as they are.
	Fields Fields
	// SkipReason, when set, skips the resource: a dependency failed, or there
	// is no provider.
	SkipReason string
}

// Type is a kind of resource.
type Type struct {
	Name string
	// Actions lists those that the type knows beside None and Skip.
	Actions []Action
}

// Observation is what is there, never what was asked for.
type Observation struct {
	Exists bool
	Fields Fields
}

// Difference is a declared field that is not as wanted.
type Difference struct {
	Field     string
	Want, Got Value
}

func (d Difference) String() string {
	return fmt.Sprintf("%s: want %s, got %s", d.Field, d.Want, d.Got)
}

// Plan is the one action chosen for a resource, and why.
type Plan struct {
	Action Action
	// Differences are sorted by field.
	Differences []Difference
	// Unobservable are declared fields that could not be read, sorted.
	Unobservable []string
	// Reason is set for Skip.
	Reason string
}

// Provider reads and changes one target.
type Provider interface {
	// Observe reports the current state. Absence is an answer; an error means
	// that the target could not be asked.
	Observe(ctx context.Context) (Observation, error)
	// Apply carries out exactly the plan's action. It does not check whether
	// the action is needed. It is never called for None or Skip.
	Apply(ctx context.Context, plan Plan) error
}

// The errors of a pass. Errors of a provider come through wrapped.
var (
	// ErrUnsettable: a field differs that cannot be set.
	ErrUnsettable = errors.New("field cannot be set here")
	// ErrAction: the state asks for an action that the type does not know.
	ErrAction = errors.New("type does not allow the action")
)

// Diff compares the declared fields alone. Unobservable fields are no
// differences; they are returned by name.
func Diff(declared, observed Fields) (diffs []Difference, unobservable []string) {
	for name, want := range declared {
		got, ok := observed[name]
		if !ok {
			// A provider that says nothing about a declared field cannot read it.
			got = UnobservableValue()
		}
		switch {
		case got.State == Unobservable:
			unobservable = append(unobservable, name)
		case !equal(want, got):
			diffs = append(diffs, Difference{Field: name, Want: want, Got: got})
		}
	}
	sort.Slice(diffs, func(i, j int) bool { return diffs[i].Field < diffs[j].Field })
	sort.Strings(unobservable)
	return diffs, unobservable
}

func equal(want, got Value) bool {
	if (want.State == Absent) != (got.State == Absent) {
		return false
	}
	return want.Text == got.Text
}

// NewPlan chooses the action for r after obs was seen. The error is ErrAction or
// ErrUnsettable with the field's name; the plan is then complete, and must not be
// applied.
func NewPlan(r Resource, obs Observation) (Plan, error) {
	if r.SkipReason != "" {
		return Plan{Action: Skip, Reason: r.SkipReason}, nil
	}
	plan := Plan{Action: None}
	switch {
	case !r.Exists && obs.Exists:
		plan.Action = Remove
	case !r.Exists:
	case !obs.Exists:
		plan.Action = Create
		plan.Differences, _ = Diff(r.Fields, absentFields(r.Fields))
	default:
		plan.Differences, plan.Unobservable = Diff(r.Fields, obs.Fields)
		if len(plan.Differences) > 0 {
			plan.Action = Update
		}
	}
	if plan.Action != None && !slices.Contains(r.Type.Actions, plan.Action) {
		return plan, fmt.Errorf("planning %s %q: %w: %s", r.Type.Name, r.Name, ErrAction, plan.Action)
	}
	var fixed []string
	for _, d := range plan.Differences {
		if d.Got.State == Unsettable {
			fixed = append(fixed, d.String())
		}
	}
	if len(fixed) > 0 {
		return plan, fmt.Errorf("planning %s %q: %w: %s", r.Type.Name, r.Name, ErrUnsettable, strings.Join(fixed, "; "))
	}
	return plan, nil
}

func absentFields(declared Fields) Fields {
	f := make(Fields, len(declared))
	for name := range declared {
		f[name] = AbsentValue()
	}
	return f
}

// Verify compares what was seen after Apply with what is wanted. What it returns
// is unverified: reported, not retried.
func Verify(r Resource, after Observation) []Difference {
	if r.Exists != after.Exists {
		return []Difference{{Field: "exists", Want: existence(r.Exists), Got: existence(after.Exists)}}
	}
	if !r.Exists {
		return nil
	}
	diffs, _ := Diff(r.Fields, after.Fields)
	return diffs
}

func existence(exists bool) Value {
	if exists {
		return Text("true")
	}
	return AbsentValue()
}

// Result is what one pass over a resource did and saw.
type Result struct {
	Before Observation
	Plan   Plan
	// Applied: Apply was called and returned no error.
	Applied bool
	// After is the observation that Verify used; Before when nothing was applied.
	After      Observation
	Unverified []Difference
	// Err is the first error: of Observe, of planning, of Apply, or of the
	// observation after it.
	Err error
}

// Run takes one resource through the five operations. With the action None or
// Skip the provider's Apply is not called.
func Run(ctx context.Context, r Resource, p Provider) Result {
	var res Result
	if r.SkipReason != "" {
		res.Plan, res.Err = NewPlan(r, Observation{})
		return res
	}
	if res.Before, res.Err = p.Observe(ctx); res.Err != nil {
		return res
	}
	res.After = res.Before
	if res.Plan, res.Err = NewPlan(r, res.Before); res.Err != nil || res.Plan.Action == None {
		return res
	}
	if res.Err = p.Apply(ctx, res.Plan); res.Err != nil {
		return res
	}
	res.Applied = true
	if res.After, res.Err = p.Observe(ctx); res.Err != nil {
		return res
	}
	res.Unverified = Verify(r, res.After)
	return res
}
