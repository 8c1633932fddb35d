package cluster

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"waypost/gossip/prefix"
	waypostv1 "waypost/proto/waypost/v1"
	"waypost/testbed/emulator"
)

// settled waits until the expectation for a prompt of which an engine holds the
// first tokens equals what that engine would reuse: whole blocks that leave one
// token.
func (r *rig) settled(worker string, a ask, held, blockTokens int) {
	r.t.Helper()
	want := min(held, len(a.tokens)-1) / blockTokens * blockTokens
	r.fresh(worker)
	r.eventually("the view of "+worker+" did not catch up", func() string {
		if got := r.expects(0, worker, a); got != want {
			return fmt.Sprintf("expects %d of %d tokens", got, want)
		}
		return ""
	})
}

// TestExpectedReuseEqualsWhatTheEngineReports is the chain's promise: growing
// conversations, sent one at a time, are never reused less than the placement
// said, and at rest to the token as it said by the worker that holds most. On
// others less than a chunk more may be found: of them a search tries only the
// known ends listed most.
func TestExpectedReuseEqualsWhatTheEngineReports(t *testing.T) {
	t.Parallel()
	const conversations, rounds, block = 10, 7, 16
	r := start(t, 2, 1, emulator.Options{BlockTokens: block, PoolBlocks: 1400, MaxModelTokens: 8192})
	prompts := make([][]uint32, conversations)
	system := tokens(7, 600)
	for i := range prompts {
		prompts[i] = append(append([]uint32(nil), system...), tokens(uint32(100+i), 150+37*i)...)
	}
	requests, hits := 0, 0
	for range rounds {
		for i := range prompts {
			s := r.serve(0, ask{tokens: prompts[i], output: 20})
			requests++
			if s.actual > 0 {
				hits++
			}
			if s.expected > s.actual {
				t.Errorf("request %d: expected %d tokens, the engine reused %d", requests, s.expected, s.actual)
			}
			// The next turn holds the answer and something new.
			prompts[i] = append(append(prompts[i], s.output...), tokens(uint32(1000+requests), 40)...)
		}
	}
	r.rest(prompts)
	for i := range prompts {
		a := ask{tokens: prompts[i], output: 1}
		most := 0
		for e := range r.Engines {
			most = max(most, r.expects(0, WorkerName(e, 0), a))
		}
		s := r.serve(0, a)
		short := s.actual - s.expected
		if short < 0 || short >= prefix.ChunkTokens || short > 0 && s.expected == most {
			t.Errorf("conversation %d at rest: expected %d tokens, the engine reused %d, most is %d", i, s.expected, s.actual, most)
		}
		r.settled(s.placement.GetWorker().GetName(), a, len(a.tokens), block)
	}
	if hits < requests/2 {
		t.Errorf("only %d of %d requests hit the cache: the test proves little", hits, requests)
	}
}

// TestEvictionsAreSeen cycles prompts through a pool that cannot hold them
// all: what was evicted is not expected a moment later.
func TestEvictionsAreSeen(t *testing.T) {
	t.Parallel()
	const block = 16
	r := start(t, 1, 1, emulator.Options{BlockTokens: block, PoolBlocks: 180, MaxModelTokens: 2800})
	hits, misses := 0, 0
	for i := range 36 {
		// Most prompts come back after their blocks are gone, some before.
		n := uint32(i % 9)
		if i%4 == 3 {
			n = uint32((i - 2) % 9)
		}
		a := ask{tokens: tokens(200+n, 560+int(n)*16), output: 1}
		s := r.serve(0, a)
		if s.expected != s.actual {
			t.Errorf("request %d: expected %d tokens, the engine reused %d (%s)", i, s.expected, s.actual, s.class)
		}
		if s.actual > 0 {
			hits++
		} else {
			misses++
		}
		// What it evicted was told before what it stored.
		r.settled(WorkerName(0, 0), a, len(a.tokens), block)
	}
	if hits < 6 || misses < 15 {
		t.Errorf("%d hits and %d misses: the test proves little", hits, misses)
	}
}

// keptAfterEnd is how much younger than a request's end a view must be to replace
// what was predicted of it.
const keptAfterEnd = 100 * time.Millisecond

// fresh waits until the coordinator's view of a worker's cache is younger than this
// call, and nothing is predicted any more of requests that ended before it.
func (r *rig) fresh(worker string) {
	r.t.Helper()
	began := time.Now()
	ask := &waypostv1.PlaceRequest{Input: &waypostv1.Input{TokenIds: []uint32{1, 2}}, Explain: proto.String("terms"), Reserve: proto.Bool(false)}
	r.eventually("the view of "+worker+" does not get younger", func() string {
		resp, err := r.Placement(0).Place(r.t.Context(), ask)
		if err != nil {
			return err.Error()
		}
		if chosen := resp.GetPlacement().GetWorker().GetName(); chosen != worker {
			if chosen == "" || len(ask.Exclude) > 16 {
				return fmt.Sprintf("not chosen: %v", resp.GetRefused())
			}
			ask.Exclude = append(ask.Exclude, chosen)
			return "another is chosen"
		}
		age := time.Duration(resp.GetPlacement().GetBasis().GetCacheViewAgeMs() * float64(time.Millisecond))
		if age+keptAfterEnd < time.Since(began) {
			return ""
		}
		return age.String()
	})
}

// rest waits until the expectations for the prompts no longer change: growth
// that an agent holds back is told after two quiet seconds.
func (r *rig) rest(prompts [][]uint32) {
	r.t.Helper()
	var last string
	quiet := time.Now()
	r.eventually("views do not come to rest", func() string {
		now := ""
		for e := range r.Engines {
			for _, p := range prompts {
				now += fmt.Sprint(r.expects(0, WorkerName(e, 0), ask{tokens: p}), " ")
			}
		}
		if now != last {
			last, quiet = now, time.Now()
		}
		if time.Since(quiet) < 3*time.Second {
			return now
		}
		return ""
	})
}

func TestSaltsAndAdaptersAreDomainsOfTheirOwn(t *testing.T) {
	t.Parallel()
	const block = 16
	r := start(t, 1, 1, emulator.Options{BlockTokens: block, Adapters: []emulator.Adapter{{Name: "tuned"}}})
	prompt := tokens(3, 700)
	w := WorkerName(0, 0)
	for _, a := range []ask{{salt: "a"}, {salt: "b"}, {}, {adapter: "tuned"}, {adapter: "tuned", salt: "a"}} {
		a.tokens = prompt
		if got := r.expects(0, w, a); got != 0 {
			t.Errorf("salt %q adapter %q: %d tokens expected before the first request", a.salt, a.adapter, got)
		}
		first := r.serve(0, a)
		if first.actual != 0 {
			t.Fatalf("salt %q adapter %q: the engine reused %d of another domain", a.salt, a.adapter, first.actual)
		}
		// The explanation does not tell either that another domain holds it.
		rec, err := r.record(0, first.placement.GetPlacementId())
		if err != nil {
			t.Fatal(err)
		}
		if terms := rec.GetPlacement().GetTerms(); len(terms) != 1 || terms[0].GetReuseTokens() != 0 || rec.GetReachableTokens() != 0 || !strings.Contains(rec.GetPlacement().GetBecause(), "no worker is known to hold a prefix") {
			t.Errorf("salt %q adapter %q: explained by %q, terms %v, reachable %d", a.salt, a.adapter, rec.GetPlacement().GetBecause(), terms, rec.GetReachableTokens())
		}
		r.settled(w, a, len(prompt), block)
		if s := r.serve(0, a); s.expected != s.actual || s.actual == 0 {
			t.Errorf("salt %q adapter %q: expected %d, reused %d", a.salt, a.adapter, s.expected, s.actual)
		}
	}
}

func TestTwoRanksBehindOnePortAreTwoWorkers(t *testing.T) {
	t.Parallel()
	const block = 16
	r := start(t, 1, 1, emulator.Options{BlockTokens: block, Ranks: 2})
	prompt := tokens(5, 400)
	first := r.serve(0, ask{tokens: prompt})
	used := first.placement.GetWorker().GetName()
	other := WorkerName(0, 1)
	if used == other {
		other = WorkerName(0, 0)
	}
	if h := first.placement.GetWorker().GetHeaders()["X-data-parallel-rank"]; h == "" {
		t.Fatal("the placement does not say which rank")
	}
	r.settled(used, ask{tokens: prompt}, len(prompt), block)
	if got := r.expects(0, other, ask{tokens: prompt}); got != 0 {
		t.Errorf("the other rank is credited with %d tokens", got)
	}
	second := r.serve(0, ask{tokens: prompt, exclude: []string{used}})
	if second.placement.GetWorker().GetName() != other || second.actual != 0 {
		t.Errorf("excluded rank: placed on %s, which reused %d", second.placement.GetWorker().GetName(), second.actual)
	}
}
