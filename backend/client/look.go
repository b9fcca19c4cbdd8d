package client

import (
	"context"
	"net/http"
	"time"
)

// Answer is what a server said to a GET, unjudged: for a person who looks for
// what is wrong with it.
type Answer struct {
	Status int
	// Date is the server's clock, to the second; zero where it does not say.
	Date time.Time
}

// Look reads the state's address and says what the server answered, whatever
// it is. The error is one of the connection, as that of Get.
func (c *Client) Look(ctx context.Context) (Answer, error) {
	a, err := c.do(ctx, http.MethodGet, c.state, nil)
	if err != nil {
		return Answer{}, c.fail("asking", err)
	}
	look := Answer{Status: a.status}
	if date, err := http.ParseTime(a.header.Get("Date")); err == nil {
		look.Date = date
	}
	return look, nil
}
