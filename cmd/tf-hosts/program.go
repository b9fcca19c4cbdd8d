package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/hostconn"
	"fediversity.eu/tf-hosts/setup"
)

// version is set by the linker.
var version = "dev"

// program is one invocation: its streams, environment and interrupt.
type program struct {
	stdin     io.Reader
	stdout    io.Writer
	stderr    io.Writer
	environ   []string
	getenv    func(string) string
	dir       string
	interrupt chan struct{}
	teller    *teller
	root      *cobra.Command
	jsonLog   bool
	code      int
}

func newProgram() *program {
	return &program{
		stdin: os.Stdin, stdout: os.Stdout, stderr: os.Stderr,
		environ: os.Environ(), getenv: os.Getenv, interrupt: make(chan struct{}),
	}
}

// main runs the program and gives its exit code.
func (p *program) main(args []string) int {
	p.teller = newTeller(p.stderr)
	defer p.teller.close()
	dir, err := os.Getwd()
	if err != nil {
		p.teller.fail(fmt.Errorf("finding the current folder: %w", err))
		return tfhosts.ExitFailed
	}
	p.dir = dir
	stop := p.watchSignals()
	defer stop()
	p.root = newRootCommand(p)
	p.root.SetArgs(tofuHabits(p.root, args))
	p.root.SetIn(p.stdin)
	p.root.SetOut(p.stdout)
	p.root.SetErr(p.stderr)
	if err := p.root.ExecuteContext(context.Background()); err != nil {
		p.teller.fail(err)
		if p.code == tfhosts.ExitOK {
			p.code = tfhosts.ExitCodeOf(err)
		}
	}
	return p.code
}

// watchSignals closes p.interrupt at the first INT, TERM or HUP. A second one
// only says what is waited for: state must not be lost to impatience.
func (p *program) watchSignals() (stop func()) {
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	// A reader of stdout or stderr that goes away ("| head") must not kill the
	// program in the middle of a deploy: with a channel of its own the signal is
	// but an error of the write.
	pipes := make(chan os.Signal, 1)
	signal.Notify(pipes, syscall.SIGPIPE)
	done := make(chan struct{})
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		interrupted := false
		for {
			select {
			case s := <-signals:
				if interrupted {
					p.teller.say("already interrupted; waiting for running activations to end and the state to be stored")
					continue
				}
				interrupted = true
				p.teller.say(fmt.Sprintf("%s: ending; running activations are finished, nothing new begins", s))
				close(p.interrupt)
			case <-done:
				return
			}
		}
	}()
	return func() {
		signal.Stop(signals)
		signal.Stop(pipes)
		close(done)
		<-ended
	}
}

// environment is the variables with the flags over them.
func (p *program) environment() setup.Environment {
	return setup.Environment{Getenv: p.getenv, Flag: p.flag}
}

func (p *program) flag(name string) (string, bool) {
	f := p.root.PersistentFlags().Lookup(name)
	if f == nil || !f.Changed {
		return "", false
	}
	if f.Value.Type() == "bool" {
		if f.Value.String() == "true" {
			return "1", true
		}
		return "", false
	}
	return f.Value.String(), true
}

func (p *program) loadSetup(withoutSecrets bool) (*tfhosts.Setup, error) {
	return setup.Load(setup.Options{
		Getenv: p.getenv, Flag: p.flag, WithoutSecrets: withoutSecrets,
		CheckOptions: checkOptions,
	})
}

func checkOptions(options []string) error {
	_, err := hostconn.ParseOptions(options)
	return err
}

// stateDir is BOOTSTRAP_STATE_DIR, absolute.
func (p *program) stateDir() (string, error) {
	return p.folder("BOOTSTRAP_STATE_DIR", "XDG_STATE_HOME", ".local/state")
}

// cacheDir is TF_HOSTS_CACHE, absolute.
func (p *program) cacheDir() (string, error) {
	return p.folder("TF_HOSTS_CACHE", "XDG_CACHE_HOME", ".cache")
}

// folder is a variable's folder, else tf-hosts below an XDG base.
func (p *program) folder(variable, xdg, fallback string) (string, error) {
	if dir := p.environment().Value(variable); dir != "" {
		return filepath.Abs(dir)
	}
	if base := p.getenv(xdg); filepath.IsAbs(base) {
		return filepath.Join(base, "tf-hosts"), nil
	}
	home := p.getenv("HOME")
	if home == "" {
		return "", tfhosts.WithExit(tfhosts.ExitUsage, "set "+variable, errors.New("neither HOME nor "+xdg+" is set"))
	}
	return filepath.Join(home, fallback, "tf-hosts"), nil
}

// colored says whether colours belong on w.
func (p *program) colored(w io.Writer) bool {
	off, err := p.environment().Bool("NO_COLOR")
	return err == nil && !off && p.getenv("TERM") != "dumb" && isTerminal(w)
}

func isTerminal(stream any) bool {
	f, ok := stream.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}
