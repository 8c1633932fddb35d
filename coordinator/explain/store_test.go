package explain

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"strings"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"

	"waypost/coordinator/outcome"
	"waypost/coordinator/placement"
	"waypost/gossip/ledger"
)

var epoch = time.Unix(3_000_000, 0)

func at(seconds float64) time.Time {
	return epoch.Add(time.Duration(seconds * float64(time.Second)))
}

func newStore(t testing.TB, options Options) *Store {
	t.Helper()
	s, err := New(options)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// decide takes a decision over n workers of which the second holds matched
// tokens of the prompt but waits long.
func decide(t testing.TB, n, matched int) (placement.Request, []placement.Candidate, placement.Policy, placement.Situation, *placement.Decision) {
	t.Helper()
	const now = 1e6
	var candidates []placement.Candidate
	for i := range n {
		w := placement.NewWorker(placement.WorkerID(i), fmt.Sprintf("gpu-%02d/vllm-8000/0", i))
		w.Process, w.BlockTokens, w.LoadAtMs, w.QueueKnown = uint64(i+1), 16, now-100, true
		w.Steps = ledger.NewSteps(ledger.StepModel{P1MsPerToken: .05, D0Ms: 10}, 0, 10)
		w.View.Kind, w.View.AtMs = placement.ViewLive, now-400
		candidates = append(candidates, placement.Candidate{Worker: &w})
	}
	if n > 1 {
		candidates[1].MatchedTokens = matched
		candidates[1].Worker.Waiting.F = now + 5000
	}
	req := placement.Request{ID: "req", Tenant: "team-a", Pool: "p", PromptTokens: 1000}
	policy := placement.DefaultPolicy()
	sit := placement.Situation{NowMs: now, ArrivalsPerMs: math.NaN(), MeanOutputTokens: 50}
	var d placement.Decision
	if err := placement.Decide(&req, candidates, &policy, sit, &d); err != nil {
		t.Fatal(err)
	}
	return req, candidates, policy, sit, &d
}

func entry(i int, change ...func(*Entry)) Entry {
	e := Entry{
		Placement: fmt.Sprint("pl_", i), RequestID: fmt.Sprint("req-", i), Tenant: "team-a", Pool: "p", Worker: "gpu-00/vllm-8000/0",
		PromptTokens: 1000, ExpectedTokens: 512, View: placement.ViewLive, ViewAgeMs: 300, QueueAgeMs: 100,
	}
	for _, c := range change {
		c(&e)
	}
	return e
}

func ids(entries []*Entry) string {
	var list []string
	for _, e := range entries {
		list = append(list, e.Placement)
	}
	return strings.Join(list, " ")
}

// A full entry decides again to the same answer and terms.
func TestFullEntryDecidesAgain(t *testing.T) {
	s := newStore(t, Options{})
	req, candidates, policy, sit, d := decide(t, 5, 900)
	e := NewEntry(&req, candidates, sit, d)
	e.Placement = "pl_1"
	s.Add(at(0), e, func() placement.Record {
		return placement.NewRecord(&req, candidates, &policy, sit, d, s.KeepCandidates())
	})
	got, ok := s.Get("pl_1")
	if !ok || !got.Full {
		t.Fatalf("found %v, full %v", ok, ok && got.Full)
	}
	var again placement.Decision
	if err := got.Record.Redecide(&again); err != nil {
		t.Fatal(err)
	}
	chosen := got.Record.Candidates[again.Chosen]
	if chosen.Name != got.Worker || again.Terms[again.Chosen].TotalMs != d.Terms[d.Chosen].TotalMs {
		t.Errorf("decided again for %s, the entry says %s", chosen.Name, got.Worker)
	}
	if !got.Redirected || !strings.Contains(got.Because, "gpu-01/vllm-8000/0") || got.ExpectedTokens != 0 ||
		got.View != placement.ViewLive || got.ViewAgeMs != 400 || got.QueueAgeMs != 100 || got.DecidingTerm == "" {
		t.Errorf("entry %+v", got)
	}
}

func TestRefusalIsAnEntry(t *testing.T) {
	req, _, _, sit, d := decide(t, 0, 0)
	e := NewEntry(&req, nil, sit, d)
	if e.Worker != "" || e.Refused != placement.RefusedNoneEligible || e.ExpectedTokens != placement.Unknown || e.Because == "" {
		t.Errorf("entry %+v", e)
	}
}

func TestListFilters(t *testing.T) {
	s := newStore(t, Options{})
	for i := range 10 {
		s.Add(at(float64(i)), entry(i, func(e *Entry) {
			if i%2 == 1 {
				e.Tenant, e.Worker, e.Pool = "team-b", "gpu-01/vllm-8000/0", "q"
			}
			e.Redirected = i == 4
			if i >= 8 {
				e.RequestID = "again"
			}
		}), nil)
	}
	o := outcome.NewOutcome(outcome.ResultDone)
	o.CachedTokens = 0
	if j, err := s.Join("pl_3", o, outcome.Evidence{}); err != nil || !j.News {
		t.Fatal(j, err)
	}
	o.CachedTokens = 512
	if j, err := s.Join("pl_5", o, outcome.Evidence{}); err != nil || !j.News {
		t.Fatal(j, err)
	}
	for _, test := range []struct {
		filter Filter
		want   string
	}{
		{Filter{Limit: 3}, "pl_9 pl_8 pl_7"},
		{Filter{}, "pl_9 pl_8 pl_7 pl_6 pl_5 pl_4 pl_3 pl_2 pl_1 pl_0"},
		{Filter{Tenant: "team-a", Limit: 2}, "pl_8 pl_6"},
		{Filter{Pool: "q", Limit: 1}, "pl_9"},
		{Filter{Worker: "gpu-01/vllm-8000/0", Since: at(6)}, "pl_9 pl_7"},
		{Filter{RequestID: "again"}, "pl_9 pl_8"},
		{Filter{Redirected: true}, "pl_4"},
		{Filter{Mispredicted: true}, "pl_3"},
		{Filter{Class: outcome.ClassAsPredicted}, "pl_5"},
		{Filter{Since: at(20)}, ""},
	} {
		if got := ids(s.List(test.filter)); got != test.want {
			t.Errorf("%+v: %q, want %q", test.filter, got, test.want)
		}
	}
	if got := ids(s.ByRequest("again", 5)); got != "pl_9 pl_8" {
		t.Errorf("by request: %q", got)
	}
	if got := ids(s.ByRequest("again", 1)); got != "pl_9" {
		t.Errorf("by request, one: %q", got)
	}
	reuse := s.Reuse(Filter{Since: at(3)})
	if q := reuse["q"]; q.Placements != 4 || q.Reported != 2 || q.PromptTokens != 2000 || q.ExpectedTokens != 1024 ||
		q.ActualTokens != 512 || q.ByClass[outcome.ClassAsPredicted] != 1 || q.ByClass[outcome.ClassEvicted] != 1 {
		t.Errorf("reuse of q: %+v", q)
	}
	if p := reuse["p"]; p.Placements != 3 || p.Reported != 0 {
		t.Errorf("reuse of p: %+v", p)
	}
}

func TestJoinOnce(t *testing.T) {
	s := newStore(t, Options{})
	s.Add(at(0), entry(1), nil)
	before, _ := s.Get("pl_1")
	o := outcome.NewOutcome(outcome.ResultDone)
	o.CachedTokens = 512
	j, err := s.Join("pl_1", o, outcome.Evidence{BlockTokens: 16, ExpectedTokens: 99999})
	if err != nil || !j.News || j.Entry.Class != outcome.ClassAsPredicted || j.Entry.Provisional {
		t.Errorf("%+v, %v", j, err)
	}
	o.CachedTokens = 0
	if j, _ := s.Join("pl_1", o, outcome.Evidence{}); j.News || j.Entry.Class != outcome.ClassAsPredicted {
		t.Errorf("a second outcome: %+v", j)
	}
	if j, err := s.Join("pl_2", o, outcome.Evidence{}); j.Entry != nil || err != nil {
		t.Errorf("an outcome without entry: %+v, %v", j, err)
	}
	if _, err := s.Join("pl_1", outcome.Outcome{}, outcome.Evidence{}); !errors.Is(err, outcome.ErrOutcome) {
		t.Errorf("a bad outcome: %v", err)
	}
	if got, _ := s.Get("pl_1"); got.Outcome.CachedTokens != 512 {
		t.Errorf("outcome %+v", got.Outcome)
	}
	if before.Outcome != nil {
		t.Error("an entry that was handed out changed")
	}
	if c := s.Counts(); c.Joined != 1 || c.Repeated != 1 || c.Missed != 1 {
		t.Errorf("counts %+v", c)
	}
	// The same id again changes nothing.
	s.Add(at(1), entry(1, func(e *Entry) { e.Worker = "other" }), nil)
	if got, _ := s.Get("pl_1"); got.Worker == "other" {
		t.Error("an entry was replaced")
	}
}

// Memory is flat however many entries come.
func TestBytesAreBounded(t *testing.T) {
	const limit = 1 << 20
	s := newStore(t, Options{MaxBytes: limit, FullPerSec: 1e9})
	req, candidates, policy, sit, d := decide(t, 8, 100)
	for i := range 100_000 {
		s.Add(at(float64(i)/1000), entry(i), func() placement.Record {
			return placement.NewRecord(&req, candidates, &policy, sit, d, 4)
		})
		if i%1000 == 0 {
			if _, bytes := s.Size(); bytes > limit {
				t.Fatalf("%d bytes after %d entries", bytes, i)
			}
		}
	}
	n, bytes := s.Size()
	if n < 100 || bytes < limit/2 || len(s.byID) != n || len(s.byRequest) != n || cap(s.entries) > 4*n+2048 {
		t.Errorf("%d entries of %d bytes, %d ids, %d requests, capacity %d", n, bytes, len(s.byID), len(s.byRequest), cap(s.entries))
	}
	if got, ok := s.Get("pl_99999"); !ok || len(got.Record.Candidates) == 0 {
		t.Error("the newest entry is gone")
	}
	if _, ok := s.Get("pl_0"); ok {
		t.Error("the oldest entry is still there")
	}
}

func TestAge(t *testing.T) {
	s := newStore(t, Options{MaxAge: time.Minute})
	s.Add(at(0), entry(0), nil)
	s.Add(at(59), entry(1), nil)
	s.Trim(at(61))
	if got := ids(s.List(Filter{})); got != "pl_1" {
		t.Errorf("%q after a minute", got)
	}
	s.Trim(at(200))
	if n, bytes := s.Size(); n != 0 || bytes != 0 {
		t.Errorf("%d entries, %d bytes", n, bytes)
	}
}

// Above the rate only summaries are kept; outcomes still find them.
func TestSampling(t *testing.T) {
	s := newStore(t, Options{FullPerSec: 10})
	made := 0
	record := func() placement.Record { made++; return placement.Record{} }
	full := func(from, n int, seconds float64) (count int) {
		for i := range n {
			id := from + i
			s.Add(at(seconds+float64(i)/1e6), entry(id), record)
			if e, ok := s.Get(fmt.Sprint("pl_", id)); !ok {
				t.Fatalf("entry %d is not kept at all", id)
			} else if e.Full {
				count++
			}
		}
		return count
	}
	if got := full(0, 100, 0); got != 10 || made != 10 {
		t.Errorf("%d of 100 full at once, %d records made; want 10", got, made)
	}
	if got := full(1000, 100, .5); got != 5 {
		t.Errorf("%d full half a second later, want 5", got)
	}
	if got := full(2000, 100, 60); got != 10 {
		t.Errorf("%d full after a long pause, want 10", got)
	}
	o := outcome.NewOutcome(outcome.ResultDone)
	o.CachedTokens = 512
	if j, err := s.Join("pl_99", o, outcome.Evidence{}); err != nil || j.Entry.Class != outcome.ClassAsPredicted {
		t.Errorf("outcome of a summary: %+v, %v", j, err)
	}
	if c := s.Counts(); c.Added != 300 || c.Summaries != 275 {
		t.Errorf("counts %+v", c)
	}
}

// Refusals are kept up to a rate of their own; placements are not affected.
func TestRefusalsAreKeptToARate(t *testing.T) {
	s := newStore(t, Options{RefusedPerSec: 4})
	refused := func(e *Entry) { e.Worker, e.Refused = "", placement.RefusedOverLimit }
	kept := 0
	for i := range 100 {
		if s.Add(at(0), entry(i, refused), nil) {
			kept++
		}
		if !s.Add(at(0), entry(1000+i), nil) {
			t.Fatal("a placement is not kept")
		}
	}
	if c := s.Counts(); kept != 4 || c.Unkept != 96 || c.Added != 104 {
		t.Errorf("%d refusals kept, counts %+v", kept, c)
	}
	if !s.Add(at(.5), entry(200, refused), nil) || !s.Add(at(.5), entry(201, refused), nil) || s.Add(at(.5), entry(202, refused), nil) {
		t.Error("half a second brings no half of the rate")
	}
}

func TestOptionsAreChecked(t *testing.T) {
	for _, options := range []Options{{MaxBytes: -1}, {MaxAge: -1}, {FullPerSec: math.NaN()}, {RefusedPerSec: -1}, {KeepCandidates: -1}} {
		if _, err := New(options); !errors.Is(err, ErrOptions) {
			t.Errorf("%+v: %v", options, err)
		}
	}
}

// Against the obvious list: what is kept is a suffix, and chains of one
// request id stay whole.
func TestStoreAgainstList(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s, err := New(Options{MaxBytes: 20_000, MaxAge: 30 * time.Second})
		if err != nil {
			t.Fatal(err)
		}
		var all []Entry
		now := 0.0
		for i := range rapid.IntRange(1, 120).Draw(t, "entries") {
			now += rapid.SampledFrom([]float64{0, .1, 5}).Draw(t, "gap")
			e := entry(i, func(e *Entry) {
				e.RequestID = rapid.SampledFrom([]string{"", "a", "b", "c"}).Draw(t, "request")
				e.Because = strings.Repeat("x", rapid.IntRange(0, 3000).Draw(t, "text"))
			})
			s.Add(at(now), e, nil)
			all = append(all, e)
			n, bytes := s.Size()
			if bytes > 20_000 || n > len(all) {
				t.Fatalf("%d entries, %d bytes", n, bytes)
			}
			kept := all[len(all)-n:]
			for _, request := range []string{"a", "b", "c"} {
				var want []string
				for j := len(kept) - 1; j >= 0; j-- {
					if kept[j].RequestID == request {
						want = append(want, kept[j].Placement)
					}
				}
				if got := ids(s.ByRequest(request, MaxList)); got != strings.Join(want, " ") {
					t.Fatalf("request %s: %q, want %q", request, got, want)
				}
			}
			for j, e := range all {
				if _, ok := s.Get(e.Placement); ok != (j >= len(all)-n) {
					t.Fatalf("entry %d of %d kept: %v, with %d kept", j, len(all), ok, n)
				}
			}
		}
	})
}

func TestConcurrentUse(t *testing.T) {
	s := newStore(t, Options{MaxBytes: 100_000})
	var group sync.WaitGroup
	for g := range 3 {
		group.Go(func() {
			for i := range 300 {
				id := g*1000 + i
				s.Add(at(float64(i)), entry(id), func() placement.Record { return placement.Record{} })
				o := outcome.NewOutcome(outcome.ResultDone)
				o.CachedTokens = i
				if _, err := s.Join(fmt.Sprint("pl_", id), o, outcome.Evidence{}); err != nil {
					t.Error(err)
				}
				for _, e := range s.List(Filter{Limit: 5}) {
					if e.Outcome != nil && e.Class == "" {
						t.Error("an outcome without class")
					}
				}
				s.Reuse(Filter{})
			}
		})
	}
	group.Wait()
}

// Of a decision without its inputs one piece of memory is kept, once the
// tables have their size; the sentence is cut out of memory for many.
func TestAllocationsOfASummary(t *testing.T) {
	s := newStore(t, Options{MaxBytes: 1 << 20})
	req, candidates, policy, sit, d := decide(t, 100, 900)
	ids := make([]string, 20_000)
	for i := range ids {
		ids[i] = fmt.Sprint("pl_", i)
	}
	next := 0
	add := func() {
		e := NewEntry(&req, candidates, sit, d)
		e.Placement = ids[next]
		next++
		s.Add(at(float64(next)/1e6), e, nil)
	}
	for range 10_000 {
		add()
	}
	if n := testing.AllocsPerRun(5000, add); n > 1 {
		t.Errorf("%v allocations a summary, want 1", n)
	}
	kept := 0
	if n := testing.AllocsPerRun(100, func() { kept = len(placement.NewRecord(&req, candidates, &policy, sit, d, 64).Candidates) }); n > 1 || kept != 64 {
		t.Errorf("%v allocations for the inputs with %d candidates, want 1 for 64", n, kept)
	}
}

// A record knows whether reuse can be a source's work, on disk too: one that an
// older version wrote says no. A source that is asked for what is gone may have
// filled in, also behind a worker's own that is not there for sure; what is moved to
// a worker that holds nothing is nothing but the source's.
func TestSpareSourceIsKept(t *testing.T) {
	req, candidates, _, sit, d := decide(t, 2, 900)
	for _, own := range []struct {
		tokens int
		there  float64
		doubt  bool
	}{
		{512, 1, false},
		{512, placement.SurelyThere, false},
		{512, placement.SurelyThere - .01, true},
		{512, .1, true},
		{0, math.NaN(), true},
		{placement.Unknown, math.NaN(), true},
	} {
		for note := placement.PullNone; note <= placement.PullSpare; note++ {
			term := &d.Terms[d.Chosen]
			term.Pull.Note, term.ReuseTokens, term.StillThere = note, own.tokens, own.there
			want := note == placement.PullSpare || note == placement.PullTaken && own.doubt
			if e := NewEntry(&req, candidates, sit, d); e.SpareSource != want {
				t.Errorf("%q behind %d of its own, there by %v: %v, want %v", note, own.tokens, own.there, e.SpareSource, want)
			}
		}
	}
	old := struct {
		Placement      string
		ExpectedTokens int
	}{"pl_1", 512}
	b, err := newGobStream().encode(&old)
	if err != nil {
		t.Fatal(err)
	}
	e, ok := readEntry(append(binary.LittleEndian.AppendUint32(nil, uint32(len(b))), b...), newGobReader(), newGobReader())
	if !ok || e.SpareSource || e.ExpectedTokens != 512 {
		t.Errorf("of an older version: %+v", e)
	}
}

func BenchmarkAddFull100(b *testing.B) {
	s := newStore(b, Options{FullPerSec: 1e12})
	req, candidates, policy, sit, d := decide(b, 100, 900)
	e := NewEntry(&req, candidates, sit, d)
	i := 0
	b.ReportAllocs()
	for b.Loop() {
		i++
		e.Placement = fmt.Sprint("pl_", i)
		s.Add(at(float64(i)/1e6), e, func() placement.Record {
			return placement.NewRecord(&req, candidates, &policy, sit, d, 64)
		})
	}
}

func BenchmarkAddSummary(b *testing.B) {
	s := newStore(b, Options{})
	e := entry(0)
	i := 0
	b.ReportAllocs()
	for b.Loop() {
		i++
		e.Placement = fmt.Sprint("pl_", i)
		s.Add(at(float64(i)/1e6), e, nil)
	}
}
