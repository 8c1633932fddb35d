package queue

import (
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"waypost/gossip/ledger"
)

var start = time.Unix(1_000_000, 0)

func at(seconds float64) time.Time {
	return start.Add(time.Duration(seconds * float64(time.Second)))
}

func ptr[T any](v T) *T { return &v }

// A worker whose prefill costs 10 + 0.1·n ms and whose decode step takes 20.
func newEstimator(t interface {
	Helper()
	Fatal(...any)
},
) *Estimator {
	t.Helper()
	e, err := New(Options{Facts: Facts{
		Model:      ledger.StepModel{P0Ms: 10, P1MsPerToken: .1, D0Ms: 20},
		StepTokens: 1000, BlockTokens: 16, PoolBlocks: 1000,
	}})
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// grow returns a reading n steps into a steady life: per second 2 requests of
// 500 prompt tokens, 300 of them computed, and 50 answer tokens each.
func grow(n int) Sample {
	f := float64(n)
	return Sample{
		At: at(f), Running: ptr(4), Waiting: ptr(3), KVUsedRatio: ptr(.25),
		PromptTokens: ptr(1000 * f), ComputedPromptTokens: ptr(600 * f),
		GenerationTokens: ptr(100 * f), FirstTokens: ptr(2 * f), Finished: ptr(2 * f),
	}
}

func TestLoadByHand(t *testing.T) {
	e := newEstimator(t)
	e.Sample(grow(0))
	e.Sample(grow(1))
	got := e.Load(at(1.1))
	want := ledger.Load{
		State: ledger.StateReady, AgeMs: ptr(100.0), CountersAgeMs: ptr(100.0),
		// 3.5 requests of 300 tokens: 10 + 30 ms of prefill and 20 of decode,
		// less the 100 ms since the sample.
		QueueMs:  ptr(3.5*60 - 100),
		Decoding: ptr(uint32(3)), ContextTokens: ptr(4000.0), GapMs: ptr(40.0),
		Live: ptr(uint32(7)), HeldBlocks: ptr(250.0), MeanOutputTokens: ptr(50.0), Foreign: ptr(uint32(3)), QueueBasis: ledger.BasisCounters,
		Running: ptr(uint32(4)), Waiting: ptr(uint32(3)), KVUsedRatio: ptr(.25), FinishPerSec: ptr(2.0),
	}
	round := func(f *float64) *float64 {
		if f == nil {
			return nil
		}
		return ptr(math.Round(*f*1e6) / 1e6)
	}
	got.QueueMs, got.AgeMs = round(got.QueueMs), round(got.AgeMs)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Fatalf("load (-want +got):\n%s", diff)
	}
	e.Sample(Sample{At: at(1.5), Running: ptr(4), Waiting: ptr(0)})
	if load := e.Load(at(1.5)); *load.Decoding != 4 || *load.QueueMs != 0 {
		t.Fatalf("%d of 4 decode with nobody waiting, queue %v", *load.Decoding, *load.QueueMs)
	}
	e = newEstimator(t)
	e.Sample(grow(0))
	e.Sample(grow(1))
	if queue := e.Load(at(1.9)).QueueMs; queue == nil || *queue != 0 {
		t.Fatalf("queue ms = %v after the waiting work is over, want 0", queue)
	}
}

// Each missing counter leaves exactly what rests on it unknown.
func TestMissingCountersStayUnknown(t *testing.T) {
	fields := func(l ledger.Load) string {
		var missing []string
		for _, f := range []struct {
			name    string
			unknown bool
		}{
			{"queue", l.QueueMs == nil},
			{"decoding", l.Decoding == nil},
			{"context", l.ContextTokens == nil},
			{"gap", l.GapMs == nil},
			{"live", l.Live == nil},
			{"held", l.HeldBlocks == nil},
			{"meanOutput", l.MeanOutputTokens == nil},
			{"finish", l.FinishPerSec == nil},
			{"open", l.OpenTokens == nil},
			{"foreign", l.Foreign == nil},
		} {
			if f.unknown {
				missing = append(missing, f.name)
			}
		}
		return strings.Join(missing, " ")
	}
	for _, test := range []struct {
		name string
		drop func(*Sample)
		want string
	}{
		{"nothing", func(*Sample) {}, "open"},
		{"waiting", func(s *Sample) { s.Waiting = nil }, "queue decoding gap live open foreign"},
		{"running", func(s *Sample) { s.Running = nil }, "decoding gap live open"},
		{"kv use", func(s *Sample) { s.KVUsedRatio = nil }, "held open"},
		{"prompt tokens", func(s *Sample) { s.PromptTokens, s.ComputedPromptTokens = nil, nil }, "queue open"},
		{"prompt tokens and kv use", func(s *Sample) {
			s.PromptTokens, s.ComputedPromptTokens, s.KVUsedRatio = nil, nil, nil
		}, "queue context held open"},
		{"generation", func(s *Sample) { s.GenerationTokens = nil }, "gap meanOutput open"},
		{"finished", func(s *Sample) { s.Finished = nil }, "finish open"},
		{"first tokens and finished", func(s *Sample) { s.FirstTokens, s.Finished = nil, nil }, "queue meanOutput finish open"},
		{"everything", func(s *Sample) { *s = Sample{At: s.At} }, "queue decoding context gap live held meanOutput finish open foreign"},
	} {
		t.Run(test.name, func(t *testing.T) {
			e := newEstimator(t)
			for i := range 3 {
				s := grow(i)
				test.drop(&s)
				e.Sample(s)
			}
			if got := fields(e.Load(at(2))); got != test.want {
				t.Errorf("unknown are %q, want %q", got, test.want)
			}
		})
	}
}

func TestOldCountersAreNotUsed(t *testing.T) {
	e := newEstimator(t)
	e.Sample(grow(0))
	e.Sample(grow(1))
	if load := e.Load(at(10.9)); load.QueueMs == nil || load.CountersAgeMs == nil {
		t.Error("counters 9.9 s old are not used")
	}
	load := e.Load(at(11.1))
	if load.QueueMs != nil || load.Live != nil || load.CountersAgeMs != nil || load.AgeMs != nil || load.FinishPerSec != nil {
		t.Errorf("counters 10.1 s old are used: %+v", load)
	}
	if load.MeanOutputTokens == nil {
		t.Error("the learnt mean answer was lost with the counters")
	}
}

func TestMeansMoveByRequests(t *testing.T) {
	e := newEstimator(t)
	e.Sample(Sample{At: at(0), FirstTokens: ptr(0.0), ComputedPromptTokens: ptr(0.0)})
	e.Sample(Sample{At: at(1), FirstTokens: ptr(1.0), ComputedPromptTokens: ptr(1000.0)})
	e.Sample(Sample{At: at(2), FirstTokens: ptr(2.0), ComputedPromptTokens: ptr(1100.0)})
	if want := 1000 + (100-1000)/20.; math.Abs(e.meanUncachedTokens-want) > 1e-9 {
		t.Errorf("mean %v, want %v: one request in twenty", e.meanUncachedTokens, want)
	}
	e.Sample(Sample{At: at(3), FirstTokens: ptr(502.0), ComputedPromptTokens: ptr(51_100.0)})
	if math.Abs(e.meanUncachedTokens-100) > 1 {
		t.Errorf("mean %v after 500 requests of 100 tokens", e.meanUncachedTokens)
	}
	e.Sample(Sample{At: at(4), FirstTokens: ptr(503.0), ComputedPromptTokens: ptr(1e300)})
	if e.meanUncachedTokens > ledger.MaxTokens {
		t.Errorf("mean %v is not bounded", e.meanUncachedTokens)
	}
}

func TestRestartForgetsCountersNotMeans(t *testing.T) {
	e := newEstimator(t)
	e.Sample(grow(0))
	e.Sample(grow(1))
	e.Restarted()
	load := e.Load(at(1.1))
	if load.QueueMs != nil || load.Live != nil || load.GapMs != nil {
		t.Errorf("counters of the old process are used: %+v", load)
	}
	e.Sample(Sample{At: at(2), Running: ptr(0), Waiting: ptr(1), PromptTokens: ptr(0.0), FirstTokens: ptr(0.0)})
	if load = e.Load(at(2)); load.QueueMs == nil || math.Abs(*load.QueueMs-1.5*60) > 1e-6 {
		t.Errorf("queue ms = %v, want 90 by the means learnt before", load.QueueMs)
	}
	if e.Counts().CounterResets != 0 {
		t.Errorf("a told restart counts as %d resets", e.Counts().CounterResets)
	}
}

// The same engine reports as late as before, of which its former life's counters
// tell no more.
func TestRestartKeepsTheLag(t *testing.T) {
	e := newEstimator(t)
	e.lag.set(350)
	e.lag.claim(1, 1)
	e.lag.judged, e.lag.errors[3] = lagPolls, 9
	e.Restarted()
	if e.LagMs() != 350 || len(e.lag.claims)+len(e.lag.polls)+e.lag.judged != 0 || e.lag.errors[3] != 0 {
		t.Errorf("the lag in force is %v; of the old window are left %d claims, %d polls, %d judged", e.LagMs(), len(e.lag.claims), len(e.lag.polls), e.lag.judged)
	}
}

func TestCounterThatGoesBackTeachesNothing(t *testing.T) {
	e := newEstimator(t)
	e.Sample(grow(5))
	back := grow(6)
	back.PromptTokens, back.ComputedPromptTokens, back.FirstTokens = ptr(10.0), ptr(10.0), ptr(1.0)
	e.Sample(back)
	if !math.IsNaN(e.meanUncachedTokens) {
		t.Errorf("learnt %v tokens per request from counters that went back", e.meanUncachedTokens)
	}
	if e.Counts().CounterResets != 3 {
		t.Errorf("%d resets counted, want 3", e.Counts().CounterResets)
	}
}

func TestBadReadingsAreUnknown(t *testing.T) {
	e := newEstimator(t)
	e.Sample(Sample{At: at(0), Running: ptr(-1), Waiting: ptr(1 << 30), KVUsedRatio: ptr(1.5), Finished: ptr(math.NaN())})
	load := e.Load(at(0))
	if load.Running != nil || load.Waiting != nil || load.KVUsedRatio != nil || load.Live != nil {
		t.Errorf("nonsense was believed: %+v", load)
	}
	if got := e.Counts().BadReadings; got != 4 {
		t.Errorf("%d bad readings counted, want 4", got)
	}
}

func TestStalled(t *testing.T) {
	frozen := func(seconds float64, running, waiting int) Sample {
		return Sample{At: at(seconds), Running: &running, Waiting: &waiting, GenerationTokens: ptr(700.0), KVUsedRatio: ptr(.5)}
	}
	for _, test := range []struct {
		name string
		play func(e *Estimator)
		now  float64
		want string
	}{
		{"core dead behind a healthy port", func(e *Estimator) {
			for i := range 21 {
				e.Sample(frozen(float64(i), 4, 0))
			}
		}, 20, "no progress for 20 s with 4 running and 0 waiting"},
		{"admits nothing any more", func(e *Estimator) {
			for i := range 16 {
				e.Sample(frozen(float64(i), 0, 5+3*i))
			}
		}, 15, "no progress for 15 s with 0 running and 50 waiting"},
		{"not long enough", func(e *Estimator) {
			for i := range 10 {
				e.Sample(frozen(float64(i), 4, 0))
			}
		}, 9.9, ""},
		{"stores are signs of life", func(e *Estimator) {
			for i := range 21 {
				e.Sample(frozen(float64(i), 4, 0))
				e.Stored(at(float64(i)), 512)
			}
		}, 20, ""},
		{"a long prefill fills the pool", func(e *Estimator) {
			for i := range 21 {
				s := frozen(float64(i), 1, 0)
				s.KVUsedRatio = ptr(float64(i) / 100)
				e.Sample(s)
			}
		}, 20, ""},
		{"admissions and ends are signs of life", func(e *Estimator) {
			for i := range 21 {
				e.Sample(frozen(float64(i), 4+i%2, 3))
			}
		}, 20, ""},
		{"idle is not stalled", func(e *Estimator) {
			for i := range 60 {
				e.Sample(frozen(float64(i), 0, 0))
			}
		}, 59, ""},
		{"work after a long idle time has its own time", func(e *Estimator) {
			for i := range 60 {
				e.Sample(frozen(float64(i), 0, 0))
			}
			e.Sample(frozen(60, 4, 0))
			e.Sample(frozen(69, 4, 0))
		}, 69, ""},
		{"comes back by itself", func(e *Estimator) {
			for i := range 21 {
				e.Sample(frozen(float64(i), 4, 0))
			}
			s := frozen(21, 4, 0)
			s.GenerationTokens = ptr(701.0)
			e.Sample(s)
		}, 21, ""},
		{"not as long as the fleet bears", func(e *Estimator) {
			e.SetNoProgressAfter(30 * time.Second)
			for i := range 21 {
				e.Sample(frozen(float64(i), 4, 0))
			}
		}, 20, ""},
		{"longer than the fleet bears", func(e *Estimator) {
			e.SetNoProgressAfter(5 * time.Second)
			for i := range 7 {
				e.Sample(frozen(float64(i), 4, 0))
			}
		}, 6, "no progress for 6 s with 4 running and 0 waiting"},
		{"the fleet says nothing any more", func(e *Estimator) {
			e.SetNoProgressAfter(30 * time.Second)
			e.SetNoProgressAfter(0)
			for i := range 12 {
				e.Sample(frozen(float64(i), 4, 0))
			}
		}, 11, "no progress for 11 s with 4 running and 0 waiting"},
		{"nothing that could show life", func(e *Estimator) {
			for i := range 21 {
				e.Sample(Sample{At: at(float64(i)), Running: ptr(4), Waiting: ptr(0)})
			}
		}, 20, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			e := newEstimator(t)
			test.play(e)
			stalled, reason := e.Stalled(at(test.now))
			if reason != test.want || stalled != (test.want != "") {
				t.Errorf("stalled %v, reason %q, want %q", stalled, reason, test.want)
			}
			if load := e.Load(at(test.now)); (load.State == ledger.StateStalled) != stalled || load.StateReason != reason {
				t.Errorf("report says %s %q", load.State, load.StateReason)
			}
		})
	}
}

func TestSleeping(t *testing.T) {
	e := newEstimator(t)
	s := grow(0)
	s.Sleeping = ptr(true)
	e.Sample(s)
	if load := e.Load(at(0)); load.State != ledger.StateSleeping {
		t.Errorf("state %s, want sleeping", load.State)
	}
}

func TestOptionsNameTheFact(t *testing.T) {
	for name, options := range map[string]Options{
		"noProgressAfter": {NoProgressAfter: -1},
		"stepTokens":      {Facts: Facts{StepTokens: -1}},
		"blockTokens":     {Facts: Facts{BlockTokens: 1 << 30}},
		"poolBlocks":      {Facts: Facts{PoolBlocks: -1}},
		"p0Ms":            {Facts: Facts{Model: ledger.StepModel{P0Ms: math.NaN()}}},
	} {
		if _, err := New(options); !errors.Is(err, ErrOptions) || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: error %v", name, err)
		}
	}
}

// Whatever an engine publishes, the report is one that a coordinator takes.
func TestReportIsAlwaysValid(t *testing.T) {
	values := []float64{math.NaN(), math.Inf(1), -1, 0, .5, 1, 7, 1e6, 1e308}
	counts := []int{-1, 0, 1, 3, 200, 1 << 19, 1 << 40}
	maybe := func(t *rapid.T, name string) *float64 {
		if v := rapid.SampledFrom(values).Draw(t, name); rapid.Bool().Draw(t, name+" known") {
			return &v
		}
		return nil
	}
	number := func(t *rapid.T, name string) *int {
		if v := rapid.SampledFrom(counts).Draw(t, name); rapid.Bool().Draw(t, name+" known") {
			return &v
		}
		return nil
	}
	rapid.Check(t, func(t *rapid.T) {
		e := newEstimator(t)
		clock := 0.0
		for range rapid.IntRange(1, 12).Draw(t, "samples") {
			clock += rapid.SampledFrom([]float64{-1, 0, 1e-9, .25, 1, 30}).Draw(t, "step")
			e.Sample(Sample{
				At: at(clock), Running: number(t, "running"), Waiting: number(t, "waiting"),
				KVUsedRatio: maybe(t, "kv"), PromptTokens: maybe(t, "prompt"), ComputedPromptTokens: maybe(t, "computed"),
				GenerationTokens: maybe(t, "generation"), FirstTokens: maybe(t, "first"), Finished: maybe(t, "finished"),
			})
			load := e.Load(at(clock + rapid.SampledFrom([]float64{-1, 0, .1, 9, 11}).Draw(t, "later")))
			if err := load.Validate(); err != nil {
				t.Fatal(err)
			}
		}
	})
}

func BenchmarkLoad(b *testing.B) {
	e := newEstimator(b)
	e.Sample(grow(0))
	e.Sample(grow(1))
	now := at(1.1)
	b.ReportAllocs()
	for range b.N {
		e.Load(now)
	}
}
