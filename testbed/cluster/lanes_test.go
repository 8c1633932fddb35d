package cluster

import (
	"fmt"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	waypostv1 "waypost/proto/waypost/v1"
	"waypost/testbed/emulator"
)

// cutLanes closes the lane of a host whenever it comes up, until stop. It returns
// when it has been closed once.
func (r *rig) cutLanes(coordinator int, host string) (stop func()) {
	r.t.Helper()
	ended, stopped, first := make(chan struct{}), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		cut := false
		for {
			select {
			case <-ended:
				return
			case <-time.After(time.Millisecond):
				if r.Coordinators[coordinator].CloseLane(host) && !cut {
					cut = true
					close(first)
				}
			}
		}
	}()
	select {
	case <-first:
	case <-time.After(patience):
		r.t.Error("the lane was never cut: the test proves little")
	}
	return func() { close(ended); <-stopped }
}

// direct sends a prompt to an engine without a placement.
func (r *rig) direct(engine int, a ask) int {
	r.t.Helper()
	url := r.Engines[engine].URL()
	cached, _, err := r.send(&waypostv1.Placement{Worker: &waypostv1.WorkerRef{Url: proto.String(url)}}, a)
	if err != nil {
		r.t.Fatal(err)
	}
	return cached
}

// TestDroppedLane evicts what a coordinator credits while no lane stands long
// enough to tell it: the first view after that is right.
func TestDroppedLane(t *testing.T) {
	t.Parallel()
	r, w, a := warm(t, emulator.Options{PoolBlocks: 200, MaxModelTokens: 3000})
	for round := range 3 {
		stop := r.cutLanes(0, HostName(0))
		for i := range 4 {
			r.direct(0, ask{tokens: tokens(uint32(500+10*round+i), 1000)})
		}
		last := ask{tokens: tokens(uint32(500+10*round+3), 1000)}
		stop()
		// What was evicted happened before what was stored last, so that a view
		// that shows the one must not show the other.
		r.settled(w, last, 1000, faultBlock)
		if got := r.expects(0, w, a); got != 0 {
			t.Errorf("round %d: %d tokens of an evicted prompt expected", round, got)
		}
		r.exact(w, a)
	}
}

// TestLanesAreOfOneCoordinatorEach: what one coordinator cannot be told, the
// others are.
func TestLanesAreOfOneCoordinatorEach(t *testing.T) {
	t.Parallel()
	r := start(t, 1, 3, emulator.Options{BlockTokens: faultBlock})
	a, w := ask{tokens: tokens(77, 1200)}, WorkerName(0, 0)
	stop := r.cutLanes(0, HostName(0))
	r.direct(0, a)
	for _, i := range []int{1, 2} {
		r.eventually(CoordinatorName(i)+" is not told", func() string {
			if got := r.expects(i, w, a); got != 1184 {
				return fmt.Sprint(got)
			}
			return ""
		})
	}
	stop()
	r.settled(w, a, 1200, faultBlock)
}
