package bootstrap

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/backend/durable"
)

const engineHint = "install OpenTofu 1.12 or newer, or name it: TF_HOSTS_TOFU=/path/to/tofu"

// checkEngine asks an engine for its version once, and keeps the answer.
func (s *session) checkEngine(ctx context.Context) error {
	sum := sha256.Sum256([]byte(s.engine.Fingerprint))
	checked := filepath.Join(s.workDir, "init", "engine-"+hex.EncodeToString(sum[:16]))
	if _, err := os.Stat(checked); err == nil {
		return nil
	}
	version, err := s.engine.CheckVersion(ctx, s.runDir, append(s.Environ, "TF_CLI_CONFIG_FILE="+os.DevNull))
	if err != nil {
		return tfhosts.WithExit(tfhosts.ExitFailed, engineHint, err)
	}
	return durable.Replace(checked, []byte(version+"\n"), 0o600, "engine", s.Fault)
}

// initialize gives the run its TF_DATA_DIR: a copy of what init made for the
// same graph shape and engine, or a new init. A changed address needs none
// (reproduced).
func (s *session) initialize(ctx context.Context, graph []byte) error {
	sum := sha256.Sum256([]byte(s.engine.Fingerprint + "\x00" + string(graph)))
	cached := filepath.Join(s.workDir, "init", hex.EncodeToString(sum[:16]))
	data := filepath.Join(s.runDir, dataFolder)
	if s.initialized {
		return nil
	}
	s.initialized = true
	if _, err := os.Stat(cached); err == nil {
		return s.copyInit(cached, data)
	} else if !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("looking for an earlier init: %w", err)
	}
	s.step("init", "initializing OpenTofu")
	code, err := s.runTofu(ctx, "init", []string{"init", "-input=false"}, io.Discard, nil)
	if err != nil {
		return err
	}
	if code != 0 {
		s.showFailure("init")
		return s.tofuError("init", code)
	}
	return s.keepInit(data, cached)
}

func (s *session) copyInit(cached, data string) error {
	if err := os.CopyFS(data, os.DirFS(filepath.Join(cached, dataFolder))); err != nil {
		return fmt.Errorf("copying an earlier init: %w", err)
	}
	lock, err := os.ReadFile(filepath.Join(cached, lockFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil {
		err = os.WriteFile(filepath.Join(s.runDir, lockFile), lock, 0o600)
	}
	if err != nil {
		return fmt.Errorf("copying an earlier init: %w", err)
	}
	return nil
}

// initTemp begins the name of a folder that is not published yet: the run's ID
// follows.
const initTemp = ".tmp-"

// keepInit publishes a finished init under its hash. Another run may have been
// first: then its copy is as good.
func (s *session) keepInit(data, cached string) error {
	if err := s.fault("init.keep"); err != nil {
		return err
	}
	temp, err := os.MkdirTemp(filepath.Dir(cached), initTemp+s.id+"-")
	if err != nil {
		return fmt.Errorf("keeping what init made: %w", err)
	}
	defer os.RemoveAll(temp)
	if err := os.CopyFS(filepath.Join(temp, dataFolder), os.DirFS(data)); err != nil {
		return fmt.Errorf("keeping what init made: %w", err)
	}
	if lock, err := os.ReadFile(filepath.Join(s.runDir, lockFile)); err == nil {
		if err := os.WriteFile(filepath.Join(temp, lockFile), lock, 0o600); err != nil {
			return fmt.Errorf("keeping what init made: %w", err)
		}
	}
	if err := s.fault("init.sync"); err != nil {
		return err
	}
	if err := durable.SyncTree(temp); err != nil { // an empty file would break every later run
		return fmt.Errorf("keeping what init made: %w", err)
	}
	if err := s.fault("init.rename"); err != nil {
		return err
	}
	if err := os.Rename(temp, cached); err != nil && !errors.Is(err, fs.ErrExist) && !isNotEmpty(err) {
		return fmt.Errorf("keeping what init made: %w", err)
	}
	return durable.SyncDir(filepath.Dir(cached))
}

// showFailure tells what a quiet command printed.
func (s *session) showFailure(name string) {
	b, err := os.ReadFile(filepath.Join(s.runDir, name+stdoutSuffix))
	if err == nil {
		s.Story.Write(b) //nolint:errcheck // the error of the command follows
	}
}
