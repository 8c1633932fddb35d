package bench

import (
	"bytes"
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"waypost/agent/blocktable"
	"waypost/agent/engine/kvevents"
	"waypost/testbed/workload"
)

func mixRequests(t testing.TB, perSecond, seconds float64) []workload.Request {
	t.Helper()
	g, err := workload.NewGenerator(workload.Mix, 5)
	if err != nil {
		t.Fatal(err)
	}
	list, err := g.Requests(perSecond, time.Duration(seconds*float64(time.Second)))
	if err != nil {
		t.Fatal(err)
	}
	return list
}

// The production block table, fed with what the simulated engine publishes,
// holds at every tick what the engine's cache holds.
func TestTableMirrorsEngine(t *testing.T) {
	const blocks = 8000
	var pool jobPool
	e := newEngine(blocks, &pool)
	a := newAgent(blocks, 1)
	first := 0
	e.appeared = func(uint64) { first++ }
	e.vanished = func(uint64) { first-- }
	requests := mixRequests(t, 5, 60)
	hits, n := 0, 0
	for tick := 1000.0; tick <= 60_000; tick += 1000 {
		for ; n < len(requests) && requests[n].ArrivalMs < tick; n++ {
			e.advanceTo(requests[n].ArrivalMs)
			j := pool.newJob(&requests[n])
			e.submit(j, j.prompt, requests[n].ArrivalMs)
		}
		e.advanceTo(tick)
		a.apply(&e.tape, tick)
		e.tape.reset()
		if a.table.Len() != first || a.table.Copies() != e.cache.named {
			t.Fatalf("at %.0f ms the table holds %d blocks in %d copies, the engine %d in %d", tick, a.table.Len(), a.table.Copies(), first, e.cache.named)
		}
		if a.table.Attached() != a.table.Len() {
			t.Fatalf("at %.0f ms %d of %d blocks stand on one that was evicted before them", tick, a.table.Len()-a.table.Attached(), a.table.Len())
		}
		for i := max(0, n-5); i < min(len(requests), n+5); i++ {
			j := pool.newJob(&requests[i])
			got, want := a.table.Match(j.tokens[:j.prompt], "", ""), e.match(j)*blockTokens
			if got != want {
				t.Fatalf("at %.0f ms the table matches %d tokens of request %d, the engine %d", tick, got, i, want)
			}
			if want > 0 {
				hits++
			}
		}
	}
	s := a.table.Stats()
	if s.ParkedOrphans+s.UnknownRemovals+s.Malformed+s.Conflicts+s.Refused > 0 {
		t.Errorf("the table met events that make no sense: %+v", s)
	}
	if hits < 50 || e.requests < 50 || s.BlocksRemoved < blocks/2 {
		t.Errorf("%d matches, %d requests, %d removed: too few to tell anything", hits, e.requests, s.BlocksRemoved)
	}
}

// Two requests, by hand: 2,048 tokens take 102.4 ms, a token of answer 25 ms.
func TestEngineTiming(t *testing.T) {
	var pool jobPool
	e := newEngine(1000, &pool)
	text := func(name uint64, n int) workload.Prompt {
		return &workload.SegmentPrompt{FirstToken: 1000, TokenCount: 64000, Segments: []workload.Segment{{Name: name, Tokens: n}}}
	}
	for i, r := range []workload.Request{
		{Prompt: text(1, 4096), Answer: text(2, 40), OutputTokens: 40},
		{Prompt: text(1, 4000), Answer: text(3, 8), OutputTokens: 8, ArrivalMs: 10},
	} {
		j := pool.newJob(&r)
		e.submit(j, j.prompt, float64(i)*10)
	}
	var log bytes.Buffer
	for e.next() < never {
		now := e.next()
		e.advance()
		fmt.Fprintf(&log, "%.1f ms:", now)
		for _, ev := range e.tape.events {
			fmt.Fprintf(&log, " store %d parent %v", len(ev.Hashes), ev.HasParent)
		}
		fmt.Fprintf(&log, " queued %d free %d\n", e.queued, e.cache.free)
		e.tape.reset()
	}
	// The second finds 249 whole blocks of 250, computes 16 tokens in 0.8 ms.
	want := `102.4 ms: store 128 parent false queued 6048 free 872
204.8 ms: store 128 parent true queued 16 free 744
205.6 ms: store 1 parent true queued 0 free 743
380.6 ms: queued 0 free 742
405.6 ms: queued 0 free 744
604.8 ms: store 1 parent true queued 0 free 743
1004.8 ms: store 1 parent true queued 0 free 742
1179.8 ms: queued 0 free 741
1204.8 ms: queued 0 free 1000
`
	if d := cmp.Diff(want, log.String()); d != "" {
		t.Error(d)
	}
	if e.hits != 249*blockTokens || e.prompts != 8096 {
		t.Errorf("%d of %d tokens were found", e.hits, e.prompts)
	}
}

func TestEngineRefusesWhatNeverFits(t *testing.T) {
	var pool jobPool
	e := newEngine(10, &pool)
	for _, n := range []int{200, 100} {
		j := pool.newJob(&workload.Request{Prompt: make(workload.TokenPrompt, n), OutputTokens: 5})
		e.submit(j, n, 0)
	}
	for e.next() < never {
		e.advance()
	}
	if e.refused != 1 || e.requests != 1 || e.cache.free != 10 {
		t.Errorf("%d refused, %d served, %d free", e.refused, e.requests, e.cache.free)
	}
}

// The raw events are what vLLM would publish: the production decoder reads the
// same changes out of them.
func TestRawEventsAreVLLMs(t *testing.T) {
	var pool jobPool
	e := newEngine(600, &pool)
	for _, r := range mixRequests(t, 3, 20) {
		e.advanceTo(r.ArrivalMs)
		j := pool.newJob(&r)
		e.submit(j, j.prompt, r.ArrivalMs)
	}
	e.advanceTo(60_000)
	var raw rawEvents
	d := kvevents.NewDecoder()
	bytesSeen, hashes := 0, 0
	from := 0
	for _, to := range e.tape.batches {
		raw.appendBatch(e.tape.events[from:to])
		b, err := d.Decode(raw.buf)
		if err != nil || b.Damaged+b.Unknown > 0 || len(b.Events) != to-from {
			t.Fatalf("%d events, error %v, %+v", to-from, err, b)
		}
		for i, got := range b.Events {
			want := e.tape.events[from+i]
			hashes += len(want.Hashes)
			if want.HasParent {
				hashes++
			}
			same := got.Op == want.Op && got.Parent == want.Parent && got.HasParent == want.HasParent
			if !same || !cmp.Equal(got.Hashes, want.Hashes) || len(want.Tokens) > 0 && !cmp.Equal(got.Tokens, want.Tokens) {
				t.Fatalf("event %d of %d came back as another one", i, len(b.Events))
			}
			if want.Op == blocktable.OpStore && (got.Spec != want.Spec || got.BlockTokens != want.BlockTokens) {
				t.Fatalf("store %d came back with another block size or spec", i)
			}
		}
		bytesSeen += len(raw.buf)
		from = to
	}
	if from != len(e.tape.events) || from == 0 {
		t.Fatalf("batches cover %d of %d events", from, len(e.tape.events))
	}
	narrow, wide := raw.size(&e.tape)
	if narrow != bytesSeen || wide-narrow != 25*hashes {
		t.Errorf("%d and %d bytes: want %d, and 25 more for each of %d hashes", narrow, wide, bytesSeen, hashes)
	}
}
