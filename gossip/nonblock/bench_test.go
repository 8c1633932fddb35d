//go:build linux && !race

package nonblock

import (
	"fmt"
	"io"
	"syscall"
	"testing"
	"time"
)

// A process that wakes for a message of a peer every other millisecond: how often
// the kernel switches to one of its threads, and what it computes.
func BenchmarkWake(b *testing.B) {
	for _, wrap := range []bool{false, true} {
		b.Run(fmt.Sprintf("wrapped=%v", wrap), func(b *testing.B) {
			wrapped, peer := pair(b)
			c, from := wrapped, Conn(peer)
			if !wrap {
				c, from = wrapped.(*conn).TCPConn, peer
			}
			buf := make([]byte, 64)
			go func() {
				for {
					time.Sleep(2 * time.Millisecond)
					if _, err := from.Write([]byte("message")); err != nil {
						return
					}
				}
			}()
			var before, after syscall.Rusage
			if err := syscall.Getrusage(syscall.RUSAGE_SELF, &before); err != nil {
				b.Fatal(err)
			}
			for b.Loop() {
				if _, err := io.ReadAtLeast(c, buf[:7], 7); err != nil {
					b.Fatal(err)
				}
			}
			if err := syscall.Getrusage(syscall.RUSAGE_SELF, &after); err != nil {
				b.Fatal(err)
			}
			n := float64(b.N)
			b.ReportMetric(float64(after.Nvcsw-before.Nvcsw)/n, "switches/op")
			b.ReportMetric(float64(after.Utime.Nano()+after.Stime.Nano()-before.Utime.Nano()-before.Stime.Nano())/n/1e3, "cpu-µs/op")
			c.Close()
		})
	}
}
