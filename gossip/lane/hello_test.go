package lane

import (
	"sync"
	"sync/atomic"
	"testing"

	waypostv1 "waypost/proto/waypost/v1"
)

// A change that comes after the hello was built and before the lane is up is
// told on it all the same.
func TestHelloChangedWhileHellosAreExchanged(t *testing.T) {
	c := startCoordinator(t, coordinatorOptions{})
	var d atomic.Pointer[Dialer]
	known := atomic.Bool{}
	var once sync.Once
	a := startAgent(t, agentOptions{edit: func(o *DialerOptions) {
		o.Hello = func() *waypostv1.AgentHello {
			h := &waypostv1.AgentHello{Host: new("gpu-01"), AgentProcess: new(uint64(0xa1)), Version: new("test")}
			if known.Load() {
				h.Workers = []*waypostv1.WorkerFacts{{Index: new(uint32(0))}}
			}
			once.Do(func() { // what follows happens after the facts were read
				known.Store(true)
				d.Load().HelloChanged()
			})
			return h
		}
	}})
	d.Store(a.d)
	if err := a.d.SetAddresses(FromConfig, []string{c.addr}); err != nil {
		t.Fatal(err)
	}
	a.lane()
	eventually(t, "the worker is told", func() bool {
		return len(c.newest("gpu-01 agent_hello").GetHello().GetWorkers()) == 1
	})
	// It is told once and not with every report.
	loads := c.count("gpu-01 load")
	eventually(t, "20 more LOADs", func() bool { return c.count("gpu-01 load") > loads+20 })
	if n := c.count("gpu-01 agent_hello"); n != 1 {
		t.Errorf("%d hellos after the first, want 1", n)
	}
}
