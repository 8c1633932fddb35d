package generic

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"reflect"
	"strconv"
	"time"

	"github.com/zeebo/xxh3"

	"waypost/agent/engine"
	"waypost/agent/engine/enginehttp"
	"waypost/agent/engine/poller"
	"waypost/agent/engine/promtext"
)

var _ engine.Adapter = (*Adapter)(nil)

// Options configures an adapter. Zero values are the defaults.
type Options struct {
	engine.Options
}

// hint goes with the coverage.
const hint = "an engine of unknown kind: its cache is not seen"

// Adapter reads one engine.
type Adapter struct {
	o      Options
	client *enginehttp.Client
}

// New makes an adapter; Run starts it.
func New(o Options) (*Adapter, error) {
	var err error
	if o.Options, err = o.WithDefaults(); err != nil {
		return nil, fmt.Errorf("generic: %w", err)
	}
	c, err := enginehttp.New(enginehttp.Options{URL: o.Target.URL, APIKey: o.Target.APIKey, DialTimeout: o.PageTimeout})
	if err != nil {
		return nil, fmt.Errorf("generic: %w", err)
	}
	return &Adapter{o: o, client: c}, nil
}

// page is what a Prometheus page tells. Families are known by their last part:
// vllm:num_requests_running and num_requests_running mean the same.
type page struct {
	running, waiting, used, prompt, generated promtext.Reading
	start                                     promtext.Reading
	faults                                    int
}

// scan reads a page. Several series of a family are several ranks or models
// behind the endpoint and add up, but for the share of KV in use, which is not
// known then.
func scan(text []byte) (p page) {
	used := 0
	for s := promtext.NewScanner(text); s.Next(); {
		name := s.Name()
		name = name[bytes.LastIndexByte(name, ':')+1:]
		var r *promtext.Reading
		switch string(name) {
		case "num_requests_running", "num_running_reqs", "requests_running", "requests_processing":
			r = &p.running
		case "num_requests_waiting", "num_queue_reqs", "requests_waiting", "requests_deferred":
			r = &p.waiting
		case "kv_cache_usage_perc", "gpu_cache_usage_perc", "token_usage":
			r = &p.used
			used++
		case "prompt_tokens_total":
			r = &p.prompt
		case "generation_tokens_total":
			r = &p.generated
		case "process_start_time_seconds":
			r = &p.start
		default:
			s.Skip()
			continue
		}
		v, ok := s.Value()
		if !ok {
			p.faults++
		}
		r.Add(v, ok)
	}
	if used > 1 {
		p.used = promtext.Reading{}
	}
	return p
}

func (p *page) load(at time.Time) engine.Load {
	return engine.Load{
		At: at, Running: p.running.Count(), Waiting: p.waiting.Count(), KVUsedRatio: p.used.Share(),
		PromptTokens: p.prompt.Float(), GenerationTokens: p.generated.Float(),
	}
}

// startMark tells process lives apart; 0: the page does not say when it began.
func (p *page) startMark() uint64 {
	if !p.start.Known || p.start.V == 0 {
		return 0
	}
	return xxh3.HashString(strconv.FormatFloat(p.start.V, 'g', -1, 64)) | 1
}

// Run reads the engine until ctx ends.
func (a *Adapter) Run(ctx context.Context, sink engine.Sink) error {
	defer a.client.Close()
	r := &reading{a: a, sink: sink}
	engine.InStep(ctx, a.o.LoadEvery, func() { r.poll(ctx) })
	return nil
}

// reading is one Run. It is used by one goroutine.
type reading struct {
	a    *Adapter
	sink engine.Sink

	buf     bytes.Buffer
	known   bool
	facts   engine.Facts
	factsAt time.Time
	aliveAt time.Time
	mark    uint64
	// noMetrics says that the engine shows no page; missedAt is when it was asked
	// for one last. It is asked again as seldom as for its facts: a page may be
	// added by a proxy or come up late.
	noMetrics bool
	missedAt  time.Time

	vitals poller.Vitals
}

func (r *reading) poll(ctx context.Context) {
	err := r.read(ctx)
	if now := time.Now(); err == nil && (!r.known || now.Sub(r.factsAt) >= r.a.o.FactsEvery || r.noMetrics && now.Sub(r.aliveAt) >= poller.HealthEvery) {
		err = r.learn(ctx)
	}
	if ctx.Err() == nil {
		r.judge(err)
	}
}

func (r *reading) read(ctx context.Context) error {
	if r.noMetrics && time.Since(r.missedAt) < r.a.o.FactsEvery {
		return nil
	}
	_, err := r.a.client.Ask(ctx, enginehttp.Question{Path: "/metrics", MaxBytes: enginehttp.MaxPageBytes, Timeout: r.a.o.PageTimeout}, &r.buf)
	at := time.Now()
	if enginehttp.Missing(err) || enginehttp.Status(err) == http.StatusNotImplemented {
		r.noMetrics, r.missedAt = true, at
		return nil
	}
	if err != nil {
		return err
	}
	r.noMetrics = false
	told := scan(r.buf.Bytes())
	// A page without the mark says nothing of the process.
	if mark := told.startMark(); mark != 0 && mark != r.mark {
		restarted := r.mark != 0
		r.mark, r.factsAt = mark, time.Time{}
		if restarted && r.known {
			r.sink.Reset(0, engine.ResetRestart)
		}
	}
	if r.known {
		r.sink.Load(0, told.load(at))
		if told.faults > 0 {
			r.sink.Counted(0, engine.CountMetricFaults, told.faults)
		}
	}
	return nil
}

// learn reads the list of models, which is also the sign of life of an engine
// that shows no page.
func (r *reading) learn(ctx context.Context) error {
	f := engine.Facts{Ranks: 1, StartMark: r.mark}
	if err := poller.LearnModels(ctx, r.a.client, &f); err != nil {
		return err
	}
	if n := r.a.client.Odd(); n > 0 {
		r.sink.Counted(0, engine.CountFactFaults, n)
	}
	r.factsAt = time.Now()
	r.aliveAt = r.factsAt
	if !r.known || !reflect.DeepEqual(f, r.facts) {
		first := !r.known
		r.known, r.facts = true, f
		r.sink.Facts(f)
		if first {
			r.sink.Coverage(0, engine.CoverageNone, hint)
		}
	}
	return nil
}

func (r *reading) judge(err error) {
	switch r.vitals.Take(err, poller.Refused(err), false) {
	case poller.Gone:
		r.mark, r.noMetrics, r.factsAt = 0, false, time.Time{}
		if r.known {
			r.sink.Reset(0, engine.ResetGone)
		}
	case poller.Back:
		if r.mark == 0 && r.known {
			r.sink.Reset(0, engine.ResetRestart)
		}
	}
	r.vitals.Tell(r.sink, err, r.known)
}
