// Package store keeps states, their versions and their locks for the state
// server. Files is a store in one folder; other stores pass the same suite,
// package storetest.
//
// A store keeps what it is given: whether a state may follow the stored one and
// who may unlock is decided by package server, inside Update. It never forgets
// that a state existed: what is missing or damaged later is api.ErrGone.
package store

import (
	"context"
	"fmt"
	"regexp"
	"time"

	"fediversity.eu/tf-hosts/backend/api"
)

// Store keeps named states. Names are PROJECT/NAME, see CheckName.
type Store interface {
	// Get reads the current state: api.ErrNotFound if none was ever written,
	// api.ErrGone if one was and is missing, damaged or deleted.
	Get(ctx context.Context, name string) (State, error)
	// Lock reads the lock of name; the zero Lock if there never was one.
	Lock(ctx context.Context, name string) (Lock, error)
	// Update runs fn while no other Update of name runs. What the Tx wrote
	// before fn failed may stay written.
	Update(ctx context.Context, name string, fn func(Tx) error) error
	// Versions lists the kept versions, newest first.
	Versions(ctx context.Context, name string) ([]Version, error)
	// Version reads the newest kept version with that serial: api.ErrNotFound
	// if there is none.
	Version(ctx context.Context, name string, serial uint64) ([]byte, error)
	// Ready says why states can not be written now; nil when they can.
	Ready(ctx context.Context) error
	Close() error
}

// Tx is what Update may do. Each write is durable when it returns.
type Tx interface {
	State() (State, error)
	PutState(meta api.Meta, body []byte) error
	// Delete leaves a tombstone (api.ErrGone) and keeps the versions.
	Delete() error
	Lock() (Lock, error)
	PutLock(Lock) error
}

// State is a stored state.
type State struct {
	Body    []byte
	Serial  uint64
	Lineage string
	Written time.Time
}

// Lock is the lock of one state.
type Lock struct {
	// Holder is nil when the state is not locked.
	Holder *api.LockInfo `json:"holder"`
	// Released is the ID of the last lock that was released, so that an unlock
	// whose answer was lost can be repeated.
	Released string `json:"released,omitempty"`
}

// Version is one kept version of a state.
type Version struct {
	Serial  uint64    `json:"serial"`
	Size    int64     `json:"size"`
	Written time.Time `json:"written"`
}

// namePattern allows no leading dot, so a name can not leave its folder or
// name a file of the store itself.
const namePattern = `^[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}/[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}$`

// CheckName says whether name is PROJECT/NAME, each 1 to 128 of A-Z a-z 0-9 _
// . - and no dot first. The error wraps api.ErrBadRequest.
func CheckName(name string) error {
	ok, err := regexp.MatchString(namePattern, name)
	if err != nil {
		return err
	}
	if !ok {
		return fmt.Errorf("%w: state name %q: PROJECT/NAME is expected, each of A-Z a-z 0-9 _ . -", api.ErrBadRequest, name)
	}
	return nil
}
