package dev

import (
	"context"
	"fmt"
	"math"
	"sort"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	waypostv1 "waypost/proto/waypost/v1"
	"waypost/testbed/cluster"
	"waypost/testbed/workload"
)

// outcome is what became of one request on Waypost's set of engines.
type outcome struct {
	PlacementID         string `json:"placementId"`
	Worker              string `json:"worker"`
	ExpectedReuseTokens *int   `json:"expectedReuseTokens"`
	ActualReuseTokens   *int   `json:"actualReuseTokens"`
	Class               string `json:"class"`
}

// quantiles are two points of a distribution, ms; nil: nothing was measured.
type quantiles struct {
	P50 *float64 `json:"p50"`
	P99 *float64 `json:"p99"`
}

// baselineSummary is what the other set of engines did.
type baselineSummary struct {
	Policy            string    `json:"policy"`
	Requests          int       `json:"requests"`
	PromptTokens      int       `json:"promptTokens"`
	Failed            int       `json:"failed"`
	ActualReuseTokens int       `json:"actualReuseTokens"`
	TTFTMs            quantiles `json:"ttftMs"`
}

// summary is the whole run.
type summary struct {
	Placements          int             `json:"placements"`
	Failed              int             `json:"failed"`
	Refused             int             `json:"refused"`
	PromptTokens        int             `json:"promptTokens"`
	ExpectedReuseTokens int             `json:"expectedReuseTokens"`
	ActualReuseTokens   int             `json:"actualReuseTokens"`
	Equal               int             `json:"equal"`
	PredictionErrors    int             `json:"predictionErrors"`
	TTFTMs              quantiles       `json:"ttftMs"`
	Baseline            baselineSummary `json:"baseline"`
}

// results collects outcomes of both sets.
type results struct {
	mu       sync.Mutex
	s        summary
	ttft     []float64
	baseTTFT []float64
	byWorker map[string]int
	lastErr  string
	// each is called for every outcome of Waypost's set.
	each func(outcome)
}

func newResults(each func(outcome)) *results {
	return &results{byWorker: map[string]int{}, each: each, s: summary{Baseline: baselineSummary{Policy: "round-robin"}}}
}

// summary returns the sums so far.
func (r *results) summary() summary {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := r.s
	out.TTFTMs, out.Baseline.TTFTMs = quantilesOf(r.ttft), quantilesOf(r.baseTTFT)
	return out
}

func quantilesOf(v []float64) quantiles {
	if len(v) == 0 {
		return quantiles{}
	}
	s := append([]float64(nil), v...)
	sort.Float64s(s)
	at := func(q float64) *float64 {
		x := math.Round(s[min(len(s)-1, int(q*float64(len(s))))]*10) / 10
		return &x
	}
	return quantiles{P50: at(0.5), P99: at(0.99)}
}

// load sends a workload to the engines of a cluster, and to another set.
type load struct {
	s        *cluster.Cluster
	baseline []emulated
	client   *engineClient
	res      *results
}

// Driven is what became of a workload.
type Driven struct {
	// Placements, Failed and Refused count requests.
	Placements, Failed, Refused int
	// PromptTokens are those of the answered requests, ReusedTokens what their
	// engines reused of them.
	PromptTokens, ReusedTokens int
	// TTFTMs are the times to the first token, placing included.
	TTFTMs []float64
	// Problem is the last thing that went wrong.
	Problem string
}

// Drive sends each request at its time, placed by the coordinators in turn,
// until all have been answered or ctx ends.
func Drive(ctx context.Context, c *cluster.Cluster, model string, requests []workload.Request) Driven {
	client := newEngineClient(model)
	defer client.close()
	l := &load{s: c, client: client, res: newResults(func(outcome) {})}
	l.run(ctx, requests)
	s := l.res.summary()
	return Driven{s.Placements, s.Failed, s.Refused, s.PromptTokens, s.ActualReuseTokens, l.res.ttft, l.res.lastErr}
}

// maxInFlight bounds the requests under way on each set.
const maxInFlight = 2048

// run sends each request at its time, to all sets at once, until ctx ends. It
// returns when all have been answered.
func (l *load) run(ctx context.Context, requests []workload.Request) {
	start := time.Now()
	slots := make(chan struct{}, maxInFlight)
	var wg sync.WaitGroup
	for i, r := range requests {
		at := start.Add(time.Duration(r.ArrivalMs * float64(time.Millisecond)))
		if !sleepUntil(ctx, at) {
			break
		}
		tokens := r.Prompt.AppendTokens(nil)
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			l.placed(ctx, i, tokens, r.OutputTokens)
		})
		if len(l.baseline) > 0 {
			wg.Go(func() { l.roundRobin(ctx, i, tokens, r.OutputTokens) })
		}
	}
	wg.Wait()
}

func sleepUntil(ctx context.Context, at time.Time) bool {
	t := time.NewTimer(time.Until(at))
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}

// placed asks a coordinator, calls the worker and reports the outcome.
func (l *load) placed(ctx context.Context, i int, tokens []uint32, outputTokens int) {
	arrival := time.Now()
	api := l.s.Placement(i % len(l.s.Coordinators))
	resp, err := api.Place(ctx, &waypostv1.PlaceRequest{
		RequestId: proto.String(fmt.Sprintf("dev-%d", i)), Input: &waypostv1.Input{TokenIds: tokens}, OutputTokensMax: proto.Uint32(uint32(outputTokens)),
	})
	if err != nil || resp.GetPlacement() == nil {
		l.res.refused(ctx, err, resp.GetRefused().GetDetail())
		return
	}
	p := resp.GetPlacement()
	a, err := l.client.complete(ctx, p.GetWorker().GetUrl(), p.GetWorker().GetHeaders(), l.client.body(tokens, outputTokens, p.GetWorker().GetBodyPatch().AsMap()), arrival)
	if ctx.Err() != nil {
		return
	}
	report := &waypostv1.ReportOutcomeRequest{PlacementId: p.PlacementId, Result: proto.String("done")}
	if err != nil {
		report.Result, report.ErrorClass = proto.String("failed"), proto.String("worker")
	} else {
		report.FirstTokenMs, report.DurationMs = msOf(a.firstToken), msOf(a.took)
		report.PromptTokens, report.OutputTokens = proto.Uint32(uint32(a.promptTokens)), proto.Uint32(uint32(a.outputTokens))
		if a.cachedTokens != nil {
			report.CachedTokens = proto.Uint32(uint32(*a.cachedTokens))
		}
	}
	class := ""
	if r, rerr := api.ReportOutcome(ctx, report); rerr == nil {
		class = r.GetReuseClass()
	}
	l.res.done(p, len(tokens), a, class, err)
}

func msOf(d time.Duration) *float64 {
	return proto.Float64(float64(d) / float64(time.Millisecond))
}

// roundRobin sends the same request to the other set.
func (l *load) roundRobin(ctx context.Context, i int, tokens []uint32, outputTokens int) {
	e := l.baseline[i%len(l.baseline)]
	a, err := l.client.complete(ctx, e.URL(), nil, l.client.body(tokens, outputTokens, nil), time.Now())
	if ctx.Err() != nil {
		return
	}
	l.res.mu.Lock()
	defer l.res.mu.Unlock()
	l.res.s.Baseline.Requests++
	if err != nil {
		l.res.s.Baseline.Failed++
		return
	}
	l.res.s.Baseline.PromptTokens += len(tokens)
	if a.cachedTokens != nil {
		l.res.s.Baseline.ActualReuseTokens += *a.cachedTokens
	}
	l.res.baseTTFT = append(l.res.baseTTFT, float64(a.firstToken)/float64(time.Millisecond))
}

func (r *results) refused(ctx context.Context, err error, detail string) {
	if ctx.Err() != nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.s.Refused++
	r.lastErr = detail
	if err != nil {
		r.lastErr = err.Error()
	}
}

func (r *results) done(p *waypostv1.Placement, promptTokens int, a answer, class string, err error) {
	o := outcome{PlacementID: p.GetPlacementId(), Worker: p.GetWorker().GetName(), ActualReuseTokens: a.cachedTokens, Class: class}
	if e := p.GetExpected(); e != nil && e.ReuseTokens != nil {
		n := int(e.GetReuseTokens())
		o.ExpectedReuseTokens = &n
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.s.Placements++
	r.byWorker[o.Worker]++
	if err != nil {
		r.s.Failed++
		r.lastErr = err.Error()
	} else {
		r.ttft = append(r.ttft, float64(a.firstToken)/float64(time.Millisecond))
		r.s.PromptTokens += promptTokens
	}
	if o.ExpectedReuseTokens != nil && o.ActualReuseTokens != nil {
		r.s.ExpectedReuseTokens += *o.ExpectedReuseTokens
		r.s.ActualReuseTokens += *o.ActualReuseTokens
		if *o.ExpectedReuseTokens == *o.ActualReuseTokens {
			r.s.Equal++
		}
	}
	switch class {
	case "", "as_predicted", "cold", "not_reported":
	default:
		r.s.PredictionErrors++
	}
	r.each(o)
}
