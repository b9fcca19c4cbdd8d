package api

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/tidwall/gjson"
)

// LockedError is ErrLocked with the holder, as the server sent it over HTTP.
type LockedError struct {
	// Holder is zero (empty ID) when the server did not say who holds the lock.
	// Nothing may be reclaimed then: tofu's own text shows the requester instead.
	Holder LockInfo
}

func (e *LockedError) Error() string {
	if e.Holder.ID == "" {
		return "state is locked, the server does not say by whom"
	}
	return fmt.Sprintf("state is locked by %q since %s for %q, lock ID %q",
		e.Holder.Who, e.Holder.Created.UTC().Format(time.RFC3339), e.Holder.Operation, e.Holder.ID)
}

// Is makes errors.Is(err, ErrLocked) true.
func (e *LockedError) Is(target error) bool { return target == ErrLocked }

// ParseHolder reads lock information from the body of a conflict. ok is false
// when it holds no ID; the other fields are read one by one, since servers fill
// them as they like.
func ParseHolder(body []byte) (info LockInfo, ok bool) {
	if !gjson.ValidBytes(body) || !gjson.ParseBytes(body).IsObject() {
		return LockInfo{}, false
	}
	if json.Unmarshal(body, &info) == nil && info.ID != "" {
		return info, true
	}
	root := gjson.ParseBytes(body)
	id := root.Get("ID")
	if id.Type != gjson.String || id.Str == "" {
		return LockInfo{}, false
	}
	info = LockInfo{
		ID: id.Str, Operation: root.Get("Operation").String(), Info: root.Get("Info").String(),
		Who: root.Get("Who").String(), Version: root.Get("Version").String(), Path: root.Get("Path").String(),
	}
	if t, err := time.Parse(time.RFC3339Nano, root.Get("Created").String()); err == nil {
		info.Created = t
	}
	return info, true
}
