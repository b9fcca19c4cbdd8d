package bootstrap

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"

	"fediversity.eu/tf-hosts/backend/relay"
)

// thisRun names this process so that a later run can tell whether it is dead.
func thisRun(id string) (relay.RunInfo, error) {
	info := relay.RunInfo{RunID: id, PID: os.Getpid()}
	for path, to := range map[string]*string{
		"/etc/machine-id":                 &info.MachineID,
		"/proc/sys/kernel/random/boot_id": &info.BootID,
	} {
		b, err := os.ReadFile(path)
		if err != nil && !os.IsNotExist(err) {
			return info, fmt.Errorf("naming this run: %w", err)
		}
		*to = strings.TrimSpace(string(b))
	}
	stat, err := os.ReadFile("/proc/self/stat")
	if err != nil {
		return info, fmt.Errorf("naming this run: %w", err)
	}
	if info.StartTime, err = startTime(string(stat)); err != nil {
		return info, fmt.Errorf("naming this run: %w", err)
	}
	return info, nil
}

// startTime is field 22 of /proc/PID/stat. The program's name, field 2, may
// hold blanks and parentheses, so fields count from its last ")".
func startTime(stat string) (uint64, error) {
	end := strings.LastIndexByte(stat, ')')
	if end < 0 {
		return 0, fmt.Errorf("reading a process's start time: no name in %q", stat)
	}
	fields := strings.Fields(stat[end+1:])
	const at = 22 - 3
	if len(fields) <= at {
		return 0, fmt.Errorf("reading a process's start time: only %d fields", len(fields))
	}
	start, err := strconv.ParseUint(fields[at], 10, 64)
	if err != nil {
		return 0, fmt.Errorf("reading a process's start time: %w", err)
	}
	return start, nil
}

// isZombie: field 3 of /proc/PID/stat. A process that only waits to be reaped
// writes nothing any more.
func isZombie(stat string) bool {
	end := strings.LastIndexByte(stat, ')')
	fields := strings.Fields(stat[end+1:])
	return len(fields) > 0 && (fields[0] == "Z" || fields[0] == "X")
}

// interruptProcess sends one SIGINT to a process that is no child of ours.
func interruptProcess(pid int) error {
	if err := syscall.Kill(pid, syscall.SIGINT); err != nil && !errors.Is(err, syscall.ESRCH) {
		return fmt.Errorf("interrupting tofu (pid %d): %w", pid, err)
	}
	return nil
}
