package coordinator

import (
	"errors"
	"strings"
	"testing"

	"waypost/gossip/prefix"
	"waypost/gossip/summary"
	waypostv1 "waypost/proto/waypost/v1"
)

// A mismatch of hash domains is refused with a message that names both sides.
func TestHelloNamesBothSides(t *testing.T) {
	h := &lanes{c: &Coordinator{name: "c-1", prefixKey: testKey}}
	other := prefix.ClusterKey{9}.ID()
	for name, c := range map[string]struct {
		keys   []string
		format uint32
		is     error
		says   []string
	}{
		"equal":              {[]string{testKey.ID()}, summary.Version, nil, nil},
		"while rotated, old": {[]string{other, testKey.ID()}, summary.Version, nil, nil},
		"while rotated, new": {[]string{testKey.ID(), other}, summary.Version, nil, nil},
		"another key":        {[]string{other}, summary.Version, summary.ErrKeyID, []string{"host gpu-01 has key id " + other, "coordinator c-1 has key id " + testKey.ID(), "same prefix key file"}},
		"no key":             {nil, summary.Version, summary.ErrKeyID, []string{"host gpu-01 has no key", "coordinator c-1"}},
		"newer format":       {[]string{testKey.ID()}, summary.Version + 1, summary.ErrVersion, []string{"host gpu-01 writes version 2", "coordinator c-1 reads version 1", "upgrade coordinator c-1"}},
		"no format":          {[]string{testKey.ID()}, 0, summary.ErrVersion, []string{"host gpu-01 writes version 0", "upgrade host gpu-01"}},
	} {
		host := "gpu-01"
		err := h.agree(&waypostv1.AgentHello{Host: &host, PrefixKeyIds: c.keys, PrefixFormat: &c.format})
		if !errors.Is(err, c.is) || c.is == nil && err != nil {
			t.Errorf("%s: error %v, want %v", name, err, c.is)
			continue
		}
		for _, s := range c.says {
			if !strings.Contains(err.Error(), s) {
				t.Errorf("%s: %q does not say %q", name, err, s)
			}
		}
	}
}

func TestBoundaryFaults(t *testing.T) {
	faults := boundaryFaults([]bounded{
		{"a", "p", "1f"},
		{"b", "p", "1f"},
		{"c", "p", "2e"},
		{"d", "p", ""},
		{"e", "q", "2e"},
		{"f", "", "3d"},
		{"g", "r", "22"},
		{"h", "r", "11"}, // as many: the lower one, whoever asks
	})
	for worker, says := range map[string][]string{
		"c": {"worker c has 2e", "pool p has 1f", "chat template"}, "g": {"worker g has 22", "pool r has 11"},
	} {
		err := faults[worker]
		if !errors.Is(err, summary.ErrBoundary) {
			t.Errorf("%s: %v", worker, err)
			continue
		}
		for _, s := range says {
			if !strings.Contains(err.Error(), s) {
				t.Errorf("%s: %q does not say %q", worker, err, s)
			}
		}
	}
	if len(faults) != 2 {
		t.Errorf("%v", faults)
	}
}

// A worker that turns text into other blocks than its pool is marked, shown and
// earns no credit, until it agrees again.
func TestAnotherBoundaryEarnsNoCredit(t *testing.T) {
	o := startOne(t)
	c := newCache(1)
	tokens := c.grow(100)
	c.delta()
	boundary := make(chan string, 1)
	boundary <- "2e"
	a := &fakeAgent{workers: 3, pulled: c.replayOr, facts: func(w *waypostv1.WorkerFacts) {
		w.Boundary = new("1f")
		if w.GetIndex() == 0 {
			b := <-boundary
			boundary <- b
			w.Boundary = &b
		}
	}}
	a.connect(t, o)
	name := "gpu-01/vllm-8000/0"
	credit := func() int {
		resp, err := waypostv1.NewPlacementServiceClient(o.conn).Place(o.ctx, &waypostv1.PlaceRequest{Input: &waypostv1.Input{TokenIds: append(tokens, 1)}, Explain: new("terms"), Reserve: new(false)})
		if err != nil {
			return -1
		}
		for _, term := range resp.GetPlacement().GetTerms() {
			if term.GetWorker() == name {
				return int(term.GetReuseTokens())
			}
		}
		return -1
	}
	shown := func() string {
		resp, err := waypostv1.NewOperatorServiceClient(o.conn).GetStatus(o.ctx, &waypostv1.GetStatusRequest{})
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range resp.GetProblems() {
			if p.GetSubject() == name && strings.Contains(p.GetWhat(), "boundary") {
				return p.GetWhat()
			}
		}
		return ""
	}
	eventually(t, "the difference is shown", func() bool { return strings.Contains(shown(), "worker "+name+" has 2e") })
	eventually(t, "the stream is known", func() bool { return o.metric(t, "waypost_index_keys") > 0 })
	if got := credit(); got != 0 {
		t.Errorf("%d tokens credited across boundaries", got)
	}
	if n := o.metric(t, "waypost_workers_boundary_differs"); n != 1 {
		t.Errorf("%v workers counted", n)
	}
	<-boundary
	boundary <- "1f"
	a.dialer.HelloChanged()
	eventually(t, "it earns credit again", func() bool { return credit() == 1600 })
	if s := shown(); s != "" {
		t.Errorf("still shown: %s", s)
	}
}
