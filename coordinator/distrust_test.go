package coordinator

import (
	"testing"

	waypostv1 "waypost/proto/waypost/v1"
)

// TestDistrustAsksForAllOfAView distrusts a view while another pull of it is
// under way: once that is answered, all is asked for, once.
func TestDistrustAsksForAllOfAView(t *testing.T) {
	c := startOne(t)
	const worker = "gpu-01/vllm-8000/0"
	cache := newCache(1)
	tokens := cache.grow(10)
	cache.delta()
	asked := false
	a := &fakeAgent{workers: 1, pulled: func(p *waypostv1.PrefixPull) [][]byte {
		if !asked {
			asked = true
			c.views.Distrust(worker)
		}
		return cache.replayOr(p)
	}}
	a.start(t, c)
	eventually(t, "a second pull", func() bool { _, n := a.counts(); return n >= 2 })
	eventually(t, "the view is there", func() bool { return c.held(tokens) == 160 })
	loads, _ := a.counts()
	eventually(t, "some more reports", func() bool { now, _ := a.counts(); return now > loads+20 })
	a.mu.Lock()
	defer a.mu.Unlock()
	if first, second := a.pulls[0], a.pulls[1]; len(a.pulls) != 2 || first.GetReason() != "new" || second.GetReason() != "distrust" || second.HaveSeq != nil {
		t.Errorf("pulls %v", a.pulls)
	}
}
