package llamacpp

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"reflect"
	"time"

	"waypost/agent/engine"
	"waypost/agent/engine/enginehttp"
	"waypost/agent/engine/llamacpp/slots"
	"waypost/agent/engine/poller"
	"waypost/agent/engine/process"
)

var (
	_ engine.Adapter   = (*Adapter)(nil)
	_ engine.Tokenizer = (*Adapter)(nil)
	_ engine.Completer = (*Adapter)(nil)

	_ engine.RenderCoster = (*Adapter)(nil)
	_ engine.Mirror       = (*slots.Replay)(nil)
)

// Options configures an adapter. Zero values are the defaults.
type Options struct {
	engine.Options
}

// The hints that go with the coverage.
const (
	hintFollowed = "llama.cpp publishes no KV events: what is cached follows from the requests that were placed here"
	hintNoSlots  = "llama.cpp publishes no KV events, and its slots are not shown: start it with --slots"
)

// Adapter reads one llama.cpp server.
type Adapter struct {
	o      Options
	log    *slog.Logger
	client *enginehttp.Client
	// find finds the process that listens at an address of this host.
	find func(at netip.AddrPort) (process.Process, bool)
}

// New makes an adapter; Run starts it.
func New(o Options) (*Adapter, error) {
	var err error
	if o.Options, err = o.WithDefaults(); err != nil {
		return nil, fmt.Errorf("llamacpp: %w", err)
	}
	c, err := enginehttp.New(enginehttp.Options{URL: o.Target.URL, APIKey: o.Target.APIKey, DialTimeout: o.PageTimeout})
	if err != nil {
		return nil, fmt.Errorf("llamacpp: %w", err)
	}
	return &Adapter{o: o, log: o.Logger, client: c, find: func(at netip.AddrPort) (process.Process, bool) { return process.Listening("", at) }}, nil
}

// Tokenize asks the server for the token ids of a prompt, special tokens in the
// text included, as its completion endpoints read them.
func (a *Adapter) Tokenize(ctx context.Context, prompt string, addSpecialTokens bool) ([]uint32, error) {
	return a.client.TokenIDs(ctx, map[string]any{"content": prompt, "add_special": addSpecialTokens, "parse_special": true})
}

// Render asks the server for the token ids a chat request becomes: it applies
// the template, and its chat endpoint then reads the text so.
func (a *Adapter) Render(ctx context.Context, chatJSON []byte) ([]uint32, error) {
	var chat map[string]json.RawMessage
	if err := json.Unmarshal(chatJSON, &chat); err != nil {
		return nil, errors.New("chat request: not a JSON object")
	}
	if len(chat["messages"]) == 0 {
		return nil, errors.New("chat request: messages is missing")
	}
	var answer struct {
		Prompt *string `json:"prompt"`
	}
	if err := a.client.PostJSON(ctx, "/apply-template", chat, &answer); err != nil {
		return nil, err
	}
	if answer.Prompt == nil {
		return nil, errors.New("/apply-template: answer has no prompt")
	}
	return a.Tokenize(ctx, *answer.Prompt, true)
}

// Complete implements engine.Completer.
func (a *Adapter) Complete(ctx context.Context, prompt string, _ int) (u engine.Usage, err error) {
	u.PromptTokens, u.CachedTokens, err = a.client.Complete(ctx, "", prompt, nil)
	return u, err
}

// RenderRequests implements engine.RenderCoster: the template and the tokens are
// asked for one after the other.
func (a *Adapter) RenderRequests() int { return 2 }

// Run reads the server until ctx ends.
func (a *Adapter) Run(ctx context.Context, sink engine.Sink) error {
	defer a.client.Close()
	p := &reading{a: a, sink: sink}
	p.mirrors, _ = sink.(engine.MirrorSink)
	engine.InStep(ctx, a.o.LoadEvery, func() { p.poll(ctx) })
	return nil
}

// reading is one Run. It is used by one goroutine. Slots and counters are read in
// turns, so each half as often as the options say.
type reading struct {
	a       *Adapter
	sink    engine.Sink
	mirrors engine.MirrorSink // nil: the sink follows no cache

	buf     bytes.Buffer
	turn    int
	facts   engine.Facts
	known   bool
	factsAt time.Time
	aliveAt time.Time
	mark    uint64
	// replay is the mirror that the sink drives; nil: none.
	replay *slots.Replay
	// host is what is known of this life's host cache, replaying what the
	// replay was made with.
	host      hostCache
	replaying slots.Options
	// noMetrics and noSlots say that the server was started without.
	noMetrics, noSlots bool
	sleeping           bool
	hint               string

	vitals poller.Vitals
}

// absent says that the server does not have a route, or was started without.
func absent(err error) bool {
	return enginehttp.Missing(err) || enginehttp.Status(err) == http.StatusNotImplemented
}

// poll does what is due.
func (p *reading) poll(ctx context.Context) {
	now := time.Now()
	err := p.read(ctx)
	if err == nil && now.Sub(p.aliveAt) >= poller.HealthEvery {
		if err = p.checkHealth(ctx); err == nil {
			p.aliveAt = now
		}
	}
	if err == nil && (!p.known || p.sleeping || now.Sub(p.factsAt) >= p.a.o.FactsEvery) {
		err = p.learn(ctx)
	}
	if ctx.Err() == nil {
		p.judge(err)
	}
}

// read reads slots or counters, in turns. Either would wake a server that
// sleeps.
func (p *reading) read(ctx context.Context) error {
	if p.sleeping {
		return nil
	}
	p.turn++
	if !p.noMetrics && (p.turn%2 == 1 || p.noSlots) {
		return p.readMetrics(ctx)
	}
	if !p.noSlots {
		return p.readSlots(ctx)
	}
	return nil
}

func (p *reading) readMetrics(ctx context.Context) error {
	header, err := p.a.client.Ask(ctx, enginehttp.Question{Path: "/metrics", MaxBytes: enginehttp.MaxPageBytes, Timeout: p.a.o.PageTimeout}, &p.buf)
	at := time.Now()
	if absent(err) {
		p.noMetrics = true
		return nil
	}
	if err != nil {
		return err
	}
	if mark := startMark(header.Get("Process-Start-Time-Unix")); mark != p.mark {
		restarted := p.mark != 0
		p.mark, p.factsAt = mark, time.Time{}
		if restarted {
			p.restarted(engine.ResetRestart)
		}
	}
	c := parseMetrics(p.buf.Bytes())
	if p.known {
		p.sink.Load(0, c.load(at))
		if c.faults > 0 {
			p.sink.Counted(0, engine.CountMetricFaults, c.faults)
		}
	}
	return nil
}

func (p *reading) readSlots(ctx context.Context) error {
	_, err := p.a.client.Ask(ctx, enginehttp.Question{Path: "/slots", MaxBytes: enginehttp.MaxPageBytes, Timeout: p.a.o.PageTimeout}, &p.buf)
	at := time.Now()
	if absent(err) {
		p.noSlots = true
		return nil
	}
	if err != nil {
		return err
	}
	page, err := parseSlots(p.buf.Bytes())
	if err != nil {
		p.sink.Counted(0, engine.CountSlotFaults, 1)
		return err
	}
	if p.known && p.noMetrics {
		p.sink.Load(0, engine.Load{At: at, Running: &page.busy})
	}
	if p.replay != nil {
		p.mirrors.Update(0, func() { p.replay.Observe(page.seen) })
	}
	return nil
}

// restarted tells that the server's cache is empty, and asks for its facts
// anew.
func (p *reading) restarted(cause engine.ResetCause) {
	p.factsAt = time.Time{}
	if p.known {
		p.sink.Reset(0, cause)
	}
}

func (p *reading) checkHealth(ctx context.Context) error {
	var buf bytes.Buffer
	_, err := p.a.client.Ask(ctx, enginehttp.Question{Path: "/health"}, &buf)
	if absent(err) {
		return nil
	}
	return err
}

// learn reads the facts and begins to follow the cache once they are known.
func (p *reading) learn(ctx context.Context) error {
	var told props
	if err := p.a.client.GetJSON(ctx, "/props", &told); err != nil {
		return err
	}
	var list models
	if err := p.a.client.GetJSON(ctx, "/v1/models", &list); err != nil {
		return err
	}
	f, err := facts(&told, &list)
	if err != nil {
		return err
	}
	f.StartMark = p.mark
	p.factsAt = time.Now()
	if n := p.a.client.Odd(); n > 0 {
		p.sink.Counted(0, engine.CountFactFaults, n)
	}
	if f.MaxRunning > 0 && p.mirrors != nil && !p.noSlots {
		f.Capabilities |= engine.WantsClaimPoints
		p.learnHost(&f, told.Model)
	}
	if told.Sleeping != p.sleeping {
		p.sleeping = told.Sleeping
		if p.sleeping && p.known {
			p.sink.Reset(0, engine.ResetSleep)
		}
	}
	former := p.facts
	if !p.known || !reflect.DeepEqual(f, former) {
		p.known, p.facts = true, f
		p.sink.Facts(f)
	}
	if p.sleeping {
		p.sink.Load(0, engine.Load{At: p.factsAt, Sleeping: &p.sleeping})
	}
	p.follow(&f, &former)
	return nil
}

// learnHost finds out what the host cache holds and what its KV is: how the server
// was started is another matter in each life.
func (p *reading) learnHost(f *engine.Facts, modelPath string) {
	if former := &p.facts; p.replay == nil || f.StartMark != former.StartMark || f.MaxRunning != former.MaxRunning || f.Model != former.Model {
		p.host = readHostCache(p.a.o.Target, modelPath, p.a.find)
	}
	f.Capabilities = f.Capabilities.With(engine.ReadsHostTier, !p.host.known || p.host.mib != 0)
	f.Transfer.BytesPerToken = p.host.bytesPerToken
}

// follow gives the sink a mirror when there is none yet that fits.
func (p *reading) follow(f, former *engine.Facts) {
	hint := hintNoSlots
	if f.Capabilities.Has(engine.WantsClaimPoints) {
		hint = hintFollowed
		if o := p.host.options(f); p.replay == nil || o != p.replaying || f.Model != former.Model {
			p.a.log.Info("cache is followed", "slots", o.Slots, "host_cache_mib", p.host.mib, "known", o.HostKnown, "kv_bytes_per_token", p.host.bytesPerToken, "host_tokens", o.HostTokens)
			p.replaying = o
			p.replay = slots.New(o)
			p.mirrors.Mirror(0, p.replay)
		}
	}
	if hint != p.hint {
		p.hint = hint
		p.sink.Coverage(0, engine.CoverageNone, hint)
	}
}

// judge turns the outcome of a poll into health. While it loads its model a
// server answers everything with 503: its process is another one then.
func (p *reading) judge(err error) {
	switch p.vitals.Take(err, poller.Refused(err) || enginehttp.Status(err) == http.StatusServiceUnavailable, false) {
	case poller.Gone:
		p.mark, p.turn = 0, 0 // what tells the next life comes first
		p.noMetrics, p.noSlots, p.sleeping = false, false, false
		p.restarted(engine.ResetGone)
	case poller.Back:
		if p.mark == 0 {
			// Without counters nothing else tells this life from the former.
			p.restarted(engine.ResetRestart)
		}
	}
	p.vitals.Tell(p.sink, err, p.known)
}
