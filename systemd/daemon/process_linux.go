package daemon

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"
)

// ProcessMark returns the mark of this process.
func ProcessMark() (uint64, error) { return ProcessMarkOf(os.Getpid()) }

// ProcessMarkOf returns the mark of a process on this host: a hash of the boot
// id, the pid namespace in which pid is meant (the caller's), pid and start
// time, and of extra, which tells apart lives within one process (a publisher's
// id for example). Marks are compared for equality only. The mark of a process
// is the same for every observer in a namespace, whatever its permissions, so it
// survives a restart of the observer; it differs for every other process, also
// after a reboot. It is never 0.
func ProcessMarkOf(pid int, extra ...string) (uint64, error) {
	return markUnder("/proc", pid, extra)
}

func markUnder(proc string, pid int, extra []string) (uint64, error) {
	boot, err := os.ReadFile(proc + "/sys/kernel/random/boot_id")
	if err != nil {
		return 0, fmt.Errorf("process mark: %w", err)
	}
	dir := proc + "/" + strconv.Itoa(pid)
	start, err := startTime(dir)
	if err != nil {
		return 0, fmt.Errorf("process mark of %d: %w", pid, err)
	}
	namespace, err := os.Readlink(proc + "/self/ns/pid")
	if err != nil {
		return 0, fmt.Errorf("process mark: %w", err)
	}
	return hashMark(append([]string{strings.TrimSpace(string(boot)), namespace, strconv.Itoa(pid), start}, extra...)), nil
}

// startTime returns field 22 of /proc/PID/stat: ticks between boot and start.
func startTime(dir string) (string, error) {
	stat, err := os.ReadFile(dir + "/stat")
	if err != nil {
		return "", err
	}
	// The second field is the command in parentheses and may hold anything.
	i := bytes.LastIndexByte(stat, ')')
	fields := strings.Fields(string(stat[i+1:]))
	const afterCommand = 22 - 3 // the first field after the command is the third
	if i < 0 || len(fields) <= afterCommand {
		return "", fmt.Errorf("%s/stat: too few fields", dir)
	}
	if _, err := strconv.ParseUint(fields[afterCommand], 10, 64); err != nil {
		return "", fmt.Errorf("%s/stat: start time %q is not a number", dir, fields[afterCommand])
	}
	return fields[afterCommand], nil
}
