package tfhosts

import "errors"

// Exit codes of the program (DESIGN §4). They are interface.
const (
	ExitOK          = 0
	ExitFailed      = 1
	ExitChanges     = 2 // -detailed-exitcode with changes; BOOTSTRAP=1 or TF_VERB against the verb
	ExitLostState   = 3
	ExitLocked      = 4
	ExitUnreachable = 5 // the backend, not a node
	ExitNodesFailed = 6
	ExitSalvage     = 7
	ExitUsage       = 64
	ExitInterrupted = 130
)

// exitOrder: where several codes apply, the first of these wins, also across groups.
func exitOrder() []int {
	return []int{
		ExitUsage, ExitSalvage, ExitLostState, ExitLocked, ExitUnreachable,
		ExitInterrupted, ExitFailed, ExitNodesFailed, ExitChanges, ExitOK,
	}
}

// WorstExit picks the exit code that wins among codes; without any it is 0. A
// code outside the table wins over 0 and 2 and loses to the others.
func WorstExit(codes ...int) int {
	has := make(map[int]bool, len(codes))
	other := 0
	known := make(map[int]bool)
	for _, c := range exitOrder() {
		known[c] = true
	}
	for _, c := range codes {
		has[c] = true
		if !known[c] {
			other = c
		}
	}
	for _, c := range exitOrder() {
		if (c == ExitChanges || c == ExitOK) && other != 0 {
			return other
		}
		if has[c] {
			return c
		}
	}
	return ExitOK
}

// ExitError is an error that knows the program's exit code and, where there is
// one, a way out for the user.
type ExitError struct {
	Code int
	// Hint is a sentence with a command that can be pasted; may be empty.
	Hint string
	Err  error
}

func (e *ExitError) Error() string { return e.Err.Error() }

func (e *ExitError) Unwrap() error { return e.Err }

// WithExit wraps err with an exit code and a hint; nil stays nil.
func WithExit(code int, hint string, err error) error {
	if err == nil {
		return nil
	}
	return &ExitError{Code: code, Hint: hint, Err: err}
}

// ExitCodeOf is the exit code for err: that of the first ExitError in its
// chain, 1 for any other error, 0 for nil.
func ExitCodeOf(err error) int {
	if err == nil {
		return ExitOK
	}
	var e *ExitError
	if errors.As(err, &e) {
		return e.Code
	}
	return ExitFailed
}
