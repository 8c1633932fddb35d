//go:build linux && race

package nonblock

import "syscall"

// The race detector knows by the calls of the standard library only that what is
// sent through a socket comes before what is done by whoever received it.

func receive(fd uintptr, p []byte) (int, syscall.Errno) { return told(syscall.Read(int(fd), p)) }

func send(fd uintptr, p []byte) (int, syscall.Errno) { return told(syscall.Write(int(fd), p)) }

func told(n int, err error) (int, syscall.Errno) {
	errno, _ := err.(syscall.Errno)
	return max(n, 0), errno
}
