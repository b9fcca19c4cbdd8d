package server

import (
	"bytes"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
)

// User is one who may log in with HTTP basic auth.
type User struct {
	Name string `json:"name"`
	// Password in clear, or PasswordSHA256 as hex: exactly one of them. The hash
	// is for long random passwords; it is no protection for a short one.
	Password       string `json:"password,omitempty"`
	PasswordSHA256 string `json:"password_sha256,omitempty"`
	// Projects that the user may use; empty means all.
	Projects []string `json:"projects,omitempty"`
	// Admin may override the serial and lineage guard, and release any lock.
	Admin bool `json:"admin,omitempty"`
}

// ReadUsers reads a credentials file: a JSON list of users. A file that others
// than its owner and group can read is refused.
//
//	[{"name": "ops", "password": "…", "admin": true},
//	 {"name": "ci", "password_sha256": "9f86…", "projects": ["project1"]}]
func ReadUsers(path string) ([]User, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("reading users: %w", err)
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("reading users: %w", err)
	}
	if fi.Mode().Perm()&0o007 != 0 {
		return nil, fmt.Errorf("reading users %q: everybody on this machine can read it; chmod 600 it", path)
	}
	raw, err := io.ReadAll(f)
	if err != nil {
		return nil, fmt.Errorf("reading users: %w", err)
	}
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.DisallowUnknownFields()
	var users []User
	if err := dec.Decode(&users); err != nil {
		// The decoder's own text may quote the file.
		return nil, fmt.Errorf("reading users %q: a JSON list of {name, password or password_sha256, projects, admin} is expected", path)
	}
	if len(users) == 0 {
		return nil, fmt.Errorf("reading users %q: %w", path, ErrNoCredentials)
	}
	if _, err := digest(users); err != nil {
		return nil, fmt.Errorf("reading users %q: %w", path, err)
	}
	return users, nil
}

// credential is a User in the form that is compared: hashes have one length, so
// the comparison takes the same time whatever was sent.
type credential struct {
	name       string
	nameSum    [sha256.Size]byte
	passSum    [sha256.Size]byte
	projects   []string
	admin      bool
	everything bool
}

func (c credential) may(project string) bool {
	return c.everything || slices.Contains(c.projects, project)
}

func digest(users []User) ([]credential, error) {
	var creds []credential
	seen := make(map[string]bool)
	for _, u := range users {
		if u.Name == "" || seen[u.Name] {
			return nil, fmt.Errorf("user %q: names must be unique and not empty", u.Name)
		}
		seen[u.Name] = true
		c := credential{
			name: u.Name, nameSum: sha256.Sum256([]byte(u.Name)),
			projects: u.Projects, admin: u.Admin, everything: len(u.Projects) == 0,
		}
		switch {
		case u.Password != "" && u.PasswordSHA256 == "":
			c.passSum = sha256.Sum256([]byte(u.Password))
		case u.Password == "" && u.PasswordSHA256 != "":
			b, err := hex.DecodeString(u.PasswordSHA256)
			if err != nil || len(b) != sha256.Size {
				return nil, fmt.Errorf("user %q: password_sha256 is not 64 hex digits", u.Name)
			}
			copy(c.passSum[:], b)
		default:
			return nil, errors.New("user " + u.Name + ": exactly one of password and password_sha256 is needed")
		}
		creds = append(creds, c)
	}
	return creds, nil
}

// authenticate looks at every credential, so that the time does not tell which
// user exists.
func (s *Server) authenticate(r *http.Request) (credential, bool) {
	if len(s.creds) == 0 {
		return credential{everything: true, admin: true}, s.cfg.Insecure
	}
	name, pass, _ := r.BasicAuth()
	nameSum, passSum := sha256.Sum256([]byte(name)), sha256.Sum256([]byte(pass))
	found := -1
	for i, c := range s.creds {
		if subtle.ConstantTimeCompare(nameSum[:], c.nameSum[:])&subtle.ConstantTimeCompare(passSum[:], c.passSum[:]) == 1 {
			found = i
		}
	}
	if found < 0 {
		return credential{}, false
	}
	return s.creds[found], true
}
