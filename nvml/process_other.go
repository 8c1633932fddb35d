//go:build !linux

package nvml

import (
	"os"
	"syscall"
)

func childAttributes() *syscall.SysProcAttr { return nil }

func takeStdout() (*os.File, error) { return os.Stdout, nil }
