package cluster

import (
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"

	"waypost/agent"
	waypostv1 "waypost/proto/waypost/v1"
	"waypost/testbed/emulator"
	"waypost/testbed/emulator/wire"
)

// An agent that comes late hears the children of prompts whose beginnings are not
// told any more. That is shown as a view in part, and nothing is credited that
// hangs on a beginning nobody saw; what comes whole from then on is.
func TestEVT04LateAgentSeesInPart(t *testing.T) {
	t.Parallel()
	r := start(t, 1, 1, emulator.Options{BlockTokens: 16, BufferBatches: 2}, func(o *Options) { o.LateAgents = true })
	old := make([]ask, 20)
	for i := range old {
		old[i] = ask{tokens: tokens(uint32(100+i), 700), output: 1}
		r.direct(0, old[i])
	}
	if err := r.StartAgent(0); err != nil {
		t.Fatal(err)
	}
	w := WorkerName(0, 0)
	r.eventually("the view is not one in part", func() string {
		x := r.worker(0, w)
		if x.GetState() != "ready" || x.GetView() != "partial" || x.GetViewHint() == "" {
			return fmt.Sprintf("%s, view %s (%s)", x.GetState(), x.GetView(), x.GetViewHint())
		}
		return ""
	})
	if n := r.expectsNow(0, w, old[0]); n > 0 {
		t.Errorf("%d tokens are expected of a prompt that was never told", n)
	}
	resp, err := r.Operator(0).GetStatus(t.Context(), &waypostv1.GetStatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if !slices.ContainsFunc(resp.GetProblems(), func(p *waypostv1.Problem) bool {
		return p.GetSubject() == w && strings.HasPrefix(p.GetWhat(), "cache view partial") && strings.Contains(p.GetWhat(), "buffer_steps")
	}) {
		t.Errorf("status does not tell: %v", resp.GetProblems())
	}
	// The engine has it; the answer says on what it rests.
	p, err := r.place(0, old[1])
	if err != nil {
		t.Fatal(err)
	}
	if view := p.GetBasis().GetCacheView(); view != "partial" {
		t.Errorf("the answer rests on a view that is %q", view)
	}
	fresh := ask{tokens: tokens(500, 700), output: 1}
	r.serve(0, fresh)
	r.settled(w, fresh, 700, 16)
	if s := r.serve(0, fresh); s.expected != s.actual || s.actual == 0 {
		t.Errorf("expected %d, reused %d", s.expected, s.actual)
	}
}

// TRU-05: two engines hold a prompt, and one does not say in which memory. With
// equal load the other serves it; with much waiting there, the one that earns no
// credit does, and the prices tell why. Its tier is shown as unknown.
func TestTRU05TierThatIsNotTold(t *testing.T) {
	t.Parallel()
	r := start(t, 2, 1, emulator.Options{BlockTokens: 16}, func(o *Options) {
		o.Engines[1].Tap = func(b *wire.Batch) {
			// Batches are ours and decode.
			_ = b.Events(func(events []any) []any {
				for i, e := range events {
					if m, ok := e.(map[string]any); ok && m["type"] == "BlockStored" {
						m = maps.Clone(m)
						m["medium"] = nil
						events[i] = m
					}
				}
				return events
			})
		}
	})
	told, untold := WorkerName(0, 0), WorkerName(1, 0)
	a := ask{tokens: tokens(900, 3000), output: 1}
	r.direct(0, a)
	r.direct(1, a)
	r.eventually("the tier is not shown as unknown", func() string {
		x := r.worker(0, untold)
		if x.GetView() != "partial" || !strings.HasPrefix(x.GetViewHint(), "tier unknown") {
			return fmt.Sprintf("view %s (%s)", x.GetView(), x.GetViewHint())
		}
		return ""
	})
	r.eventually("the prompt is not listed", func() string {
		if n := r.expectsNow(0, told, a); n < 2900 {
			return fmt.Sprintf("%d tokens", n)
		}
		return ""
	})
	if n := r.expectsNow(0, untold, a); n > 0 {
		t.Errorf("%d tokens are expected of memory that is not told", n)
	}
	price := func(p *waypostv1.Placement, worker string) *waypostv1.Terms {
		for _, x := range p.GetTerms() {
			if x.GetWorker() == worker {
				return x
			}
		}
		t.Fatalf("%s is not priced: %v", worker, p)
		return nil
	}
	// Each placement adds its claim to the queue of whoever is chosen: each of
	// them is another long prompt that only the one that is told may take.
	r.eventually("with equal load it does not go where it is credited", func() string {
		p, err := r.place(0, a)
		if err != nil {
			return err.Error()
		}
		if p.GetWorker().GetName() != told || price(p, untold).GetPrefillMs() <= price(p, told).GetPrefillMs() {
			return p.String()
		}
		return ""
	})
	for i := range 10 {
		other := ask{tokens: tokens(uint32(1000+i), 3000), output: 1, exclude: []string{untold}}
		if _, err := r.place(0, other); err != nil {
			t.Fatal(err)
		}
	}
	// As soon as both tell their queues: an unknown one is taken for the mean.
	r.eventually("with long prompts waiting it does not go where it earns no credit", func() string {
		p, err := r.place(0, a)
		if err != nil {
			return err.Error()
		}
		if p.GetWorker().GetName() != untold || price(p, told).GetStartMs() <= price(p, untold).GetPrefillMs()/2 || price(p, untold).GetReuseTokens() != 0 {
			return p.String()
		}
		return ""
	})
}

// IDN-07: what an engine offloaded to host memory is credited at the price of
// reading it back, which the answer tells as a term of its own, and the worker's
// screen says what that rests on. A worker that has it in GPU memory goes first.
func TestIDN07HostMemoryHasItsPrice(t *testing.T) {
	t.Parallel()
	offload := func(b *wire.Batch) {
		// Batches are ours and decode.
		_ = b.Events(func(events []any) (out []any) {
			for _, e := range events {
				out = append(out, e)
				if m, ok := e.(map[string]any); ok && m["type"] == "BlockStored" {
					m = maps.Clone(m)
					// By hash only, as the connector tells.
					m["medium"], m["token_ids"], m["block_size"], m["parent_block_hash"] = "CPU", []any{}, 0, nil
					delete(m, "extra_keys")
					out = append(out, m)
				}
			}
			return out
		})
	}
	const pool = 400 // blocks, of which the prompt takes 187
	r := start(t, 2, 1, emulator.Options{BlockTokens: 16}, func(o *Options) {
		o.Engines[0].PoolBlocks, o.Engines[0].Tap = pool, offload
		o.ChangeAgent = func(i int, cfg *agent.Config) {
			if i == 0 {
				cfg.Engines[0].KVConnector, cfg.Engines[0].KVBytes = "OffloadingConnector", 131072
			}
		}
	})
	host, other := WorkerName(0, 0), WorkerName(1, 0)
	a := ask{tokens: tokens(900, 3000), output: 1}
	r.direct(0, a)
	for i := range 5 {
		r.direct(0, ask{tokens: tokens(uint32(1000+i), 3000), output: 1}) // drives it out of GPU memory
	}
	var terms *waypostv1.Terms
	r.eventually("what is in host memory has no price", func() string {
		p, err := r.place(0, ask{tokens: a.tokens, output: 1, exclude: []string{other}})
		if err != nil {
			return err.Error()
		}
		terms = p.GetTerms()[0]
		if terms.GetWorker() != host || terms.GetHostTokens() < 2900 || !(terms.GetLoadMs() > 0) {
			return p.String()
		}
		return ""
	})
	if want := float64(terms.GetHostTokens()) * 131072 / 18e6; terms.GetReuseTokens() < terms.GetHostTokens() || terms.GetLoadMs() > want*1.001 {
		t.Errorf("reading %d tokens at 18 GB/s takes %v ms at most: %v", terms.GetHostTokens(), want, terms)
	}
	if h := r.worker(0, host).GetHostTier(); h.GetKvBytesPerToken() != 131072 || h.GetLinkSource() != "assumed" {
		t.Errorf("the worker's host tier is %v", h)
	}
	r.direct(1, a)
	r.eventually("the one that has it in GPU memory does not win", func() string {
		p, err := r.place(0, ask{tokens: a.tokens, output: 1})
		if err != nil {
			return err.Error()
		}
		if p.GetWorker().GetName() != other {
			return p.String()
		}
		return ""
	})
}

// TRU-01: an engine that sleeps gets nothing, whatever it held, and nothing that it
// held is expected once it is awake.
func TestTRU01SleepingEngineGetsNothing(t *testing.T) {
	t.Parallel()
	r := start(t, 2, 1, emulator.Options{BlockTokens: 16})
	asleep, awake := WorkerName(0, 0), WorkerName(1, 0)
	a := ask{tokens: tokens(900, 3000), output: 1}
	r.direct(0, a)
	r.settled(asleep, a, len(a.tokens), 16)
	call := func(path string) {
		resp, err := r.client.Post(r.Engines[0].URL()+path, "application/json", nil)
		if err != nil {
			t.Fatal(err)
		}
		if _ = resp.Body.Close(); resp.StatusCode != http.StatusOK {
			t.Fatalf("%s: status %d", path, resp.StatusCode)
		}
	}
	call("/sleep?level=1")
	r.eventually("the sleep is not seen", func() string {
		if x := r.worker(0, asleep); x.GetState() != "sleeping" {
			return x.GetState()
		}
		return ""
	})
	for i := range 5 {
		p, err := r.place(0, a)
		if err != nil {
			t.Fatal(err)
		}
		if p.GetWorker().GetName() != awake {
			t.Errorf("placement %d goes to %s, which sleeps", i, p.GetWorker().GetName())
		}
	}
	call("/wake_up")
	r.eventually("it does not wake", func() string { return notLive(r.worker(0, asleep)) })
	if n := r.expects(0, asleep, a); n != 0 {
		t.Errorf("%d tokens are expected of what was dropped", n)
	}
	r.direct(0, a)
	r.settled(asleep, a, len(a.tokens), 16)
}

// DSC-04: coordinators that all lost their memory are told of all workers again,
// and of what these hold, with nothing done by hand.
func TestDSC04AllCoordinatorsRestart(t *testing.T) {
	t.Parallel()
	r := start(t, 2, 3, emulator.Options{BlockTokens: 16})
	prompts := []ask{{tokens: tokens(900, 1500), output: 1}, {tokens: tokens(901, 1500), output: 1}}
	for i, a := range prompts {
		r.direct(i, a)
		r.settled(WorkerName(i, 0), a, len(a.tokens), 16)
	}
	for i := range 3 {
		if err := r.StopCoordinator(i); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 3 {
		if err := r.StartCoordinator(i); err != nil {
			t.Fatal(err)
		}
	}
	for c := range 3 {
		for i, a := range prompts {
			r.eventually(fmt.Sprintf("%s does not know %s again", CoordinatorName(c), WorkerName(i, 0)), func() string {
				if state := notLive(r.worker(c, WorkerName(i, 0))); state != "" {
					return state
				}
				if n := r.expectsNow(c, WorkerName(i, 0), a); n < 1400 {
					return fmt.Sprintf("%d tokens are expected", n)
				}
				return ""
			})
		}
	}
}
