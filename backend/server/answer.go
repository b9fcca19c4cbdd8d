package server

import (
	"encoding/json"
	"errors"
	"net/http"
	"strconv"

	"fediversity.eu/tf-hosts/backend/api"
)

// fail answers with a status and a JSON body {"error": …}.
func (c *call) fail(status int, message string) {
	c.json(status, map[string]string{"error": message})
}

// error answers with the status of err's sentinel; a lock conflict carries the
// holder (SRV1). What has no sentinel is an internal error whose text stays in
// the log.
func (c *call) error(err error) {
	var locked *api.LockedError
	if errors.As(err, &locked) {
		c.json(http.StatusLocked, locked.Holder)
		return
	}
	c.fail(api.Status(err), err.Error())
}

func (c *call) json(status int, v any) {
	b, err := json.Marshal(v)
	if err != nil { // only plain structs and maps come here
		panic(err)
	}
	c.body(status, append(b, '\n'))
}

func (c *call) body(status int, b []byte) {
	c.Header().Set("Content-Type", "application/json")
	c.Header().Set("Content-Length", strconv.Itoa(len(b)))
	c.WriteHeader(status)
	_, _ = c.Write(b)
}
