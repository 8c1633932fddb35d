package agent

import (
	"testing"
	"time"

	"waypost/gossip/lane"
)

// Each lane hears of the host when it comes up, and again whenever it is due,
// though nothing has changed.
func TestHostReportsAreRepeated(t *testing.T) {
	a := newAgent(t, newKey)
	c, address := startCoordinator(t)
	if err := a.dialer.SetAddresses(lane.FromConfig, []string{address}); err != nil {
		t.Fatal(err)
	}
	a.dialer.Start()
	heard := func(want int) {
		t.Helper()
		for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(2 * time.Millisecond) {
			c.mu.Lock()
			got := c.hosts
			c.mu.Unlock()
			if got == want {
				return
			}
			if got > want || time.Now().After(deadline) {
				t.Fatalf("%d reports, want %d", got, want)
			}
		}
	}
	heard(1)
	due := make(chan time.Time)
	a.tasks.Go(func() { a.reportHost(due) })
	for i := range 3 {
		due <- time.Time{}
		heard(2 + i)
	}
}
