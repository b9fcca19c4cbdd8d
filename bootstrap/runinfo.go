package bootstrap

import (
	"fmt"
	"os"
	"strconv"
	"strings"

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
