//go:build !linux

package daemon

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"os"
	"sync"
)

// ErrNoProc: marks of other processes need /proc.
var ErrNoProc = errors.New("process marks of other processes need Linux")

var ownLife = sync.OnceValue(func() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails, ends the program instead
	return hex.EncodeToString(b[:])
})

// ProcessMark returns the mark of this process: random, the same for its life.
func ProcessMark() (uint64, error) { return ProcessMarkOf(os.Getpid()) }

// ProcessMarkOf returns the mark of this process with extra; of others there is none.
func ProcessMarkOf(pid int, extra ...string) (uint64, error) {
	if pid != os.Getpid() {
		return 0, ErrNoProc
	}
	return hashMark(append([]string{ownLife()}, extra...)), nil
}
