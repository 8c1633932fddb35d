package nvml

import (
	"os"
	"syscall"
)

// childAttributes make the kernel end the child with the parent, for the case
// that a driver call keeps it from seeing that its input ended.
func childAttributes() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
}

// takeStdout keeps standard output for frames: what the driver library prints
// goes to standard error and cannot get between them.
func takeStdout() (*os.File, error) {
	fd, err := syscall.Dup(syscall.Stdout)
	if err != nil {
		return nil, err
	}
	syscall.CloseOnExec(fd)
	if err := syscall.Dup3(syscall.Stderr, syscall.Stdout, 0); err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), "frames"), nil
}
