package generic

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"reflect"
	"strconv"
	"syscall"
	"time"

	"github.com/zeebo/xxh3"

	"waypost/agent/engine"
	"waypost/agent/engine/enginehttp"
	"waypost/agent/engine/promtext"
)

var _ engine.Adapter = (*Adapter)(nil)

// Options configures an adapter. Zero values are the defaults.
type Options struct {
	engine.Options
}

const (
	healthEvery    = 5 * time.Second
	refusalsToGone = 2
	errorsToDown   = 5
	// hint goes with the coverage.
	hint = "an engine of unknown kind: its cache is not seen"
)

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
	p := &poller{a: a, sink: sink}
	tick := time.NewTicker(a.o.LoadEvery)
	defer tick.Stop()
	for {
		p.poll(ctx)
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// poller is one Run. It is used by one goroutine.
type poller struct {
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

	refused, failed int
	gone, up        bool
	reason          string
}

func (p *poller) poll(ctx context.Context) {
	err := p.read(ctx)
	if now := time.Now(); err == nil && (!p.known || now.Sub(p.factsAt) >= p.a.o.FactsEvery || p.noMetrics && now.Sub(p.aliveAt) >= healthEvery) {
		err = p.learn(ctx)
	}
	if ctx.Err() == nil {
		p.judge(err)
	}
}

func (p *poller) read(ctx context.Context) error {
	if p.noMetrics && time.Since(p.missedAt) < p.a.o.FactsEvery {
		return nil
	}
	_, err := p.a.client.Ask(ctx, enginehttp.Question{Path: "/metrics", MaxBytes: enginehttp.MaxPageBytes, Timeout: p.a.o.PageTimeout}, &p.buf)
	at := time.Now()
	if enginehttp.Missing(err) || enginehttp.Status(err) == http.StatusNotImplemented {
		p.noMetrics, p.missedAt = true, at
		return nil
	}
	if err != nil {
		return err
	}
	p.noMetrics = false
	told := scan(p.buf.Bytes())
	// A page without the mark says nothing of the process.
	if mark := told.startMark(); mark != 0 && mark != p.mark {
		restarted := p.mark != 0
		p.mark, p.factsAt = mark, time.Time{}
		if restarted && p.known {
			p.sink.Reset(0, engine.ResetRestart)
		}
	}
	if p.known {
		p.sink.Load(0, told.load(at))
		if told.faults > 0 {
			p.sink.Counted(0, "metricFaults", told.faults)
		}
	}
	return nil
}

// learn reads the list of models, which is also the sign of life of an engine
// that shows no page.
func (p *poller) learn(ctx context.Context) error {
	var list struct {
		Data []struct {
			ID     string `json:"id"`
			MaxLen *int64 `json:"max_model_len"`
		} `json:"data"`
	}
	if err := p.a.client.GetJSON(ctx, "/v1/models", &list); err != nil {
		return err
	}
	f := engine.Facts{Ranks: 1, StartMark: p.mark}
	for i, m := range list.Data {
		if i > 0 {
			f.Aliases = append(f.Aliases, m.ID)
			continue
		}
		f.Model = m.ID
		if m.MaxLen != nil && *m.MaxLen <= engine.MaxTokens {
			f.MaxModelTokens = engine.Within(int(*m.MaxLen), engine.MaxTokens)
		}
	}
	if f.Model == "" {
		return errors.New("/v1/models lists no model")
	}
	p.factsAt = time.Now()
	p.aliveAt = p.factsAt
	if !p.known || !reflect.DeepEqual(f, p.facts) {
		first := !p.known
		p.known, p.facts = true, f
		p.sink.Facts(f)
		if first {
			p.sink.Coverage(0, engine.CoverageNone, hint)
		}
	}
	return nil
}

func (p *poller) judge(err error) {
	if err == nil {
		if p.gone && p.mark == 0 && p.known {
			p.sink.Reset(0, engine.ResetRestart)
		}
		p.refused, p.failed, p.gone = 0, 0, false
		p.health(true, "")
		return
	}
	p.failed++
	if errors.Is(err, syscall.ECONNREFUSED) {
		p.refused++
	} else {
		p.refused = 0
	}
	if p.refused >= refusalsToGone && !p.gone {
		p.gone, p.mark, p.noMetrics, p.factsAt = true, 0, false, time.Time{}
		if p.known {
			p.sink.Reset(0, engine.ResetGone)
		}
	}
	if p.gone || p.failed >= errorsToDown || !p.known {
		p.health(false, err.Error())
	}
}

func (p *poller) health(up bool, reason string) {
	if up == p.up && (up || reason == p.reason) {
		return
	}
	p.up, p.reason = up, reason
	p.sink.Health(up, reason)
}
