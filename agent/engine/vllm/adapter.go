package vllm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"sync"
	"syscall"
	"time"

	"waypost/agent/engine"
	"waypost/agent/engine/enginehttp"
)

var (
	_ engine.Adapter   = (*Adapter)(nil)
	_ engine.Tokenizer = (*Adapter)(nil)
	_ engine.Resyncer  = (*Adapter)(nil)
)

// Options configures an adapter. Zero values are the defaults.
type Options struct {
	engine.Options
	// Stream configures the event streams; Replay is found out.
	Stream StreamOptions
}

const (
	healthEvery    = 5 * time.Second
	refusalsToGone = 2
	errorsToDown   = 5
)

// Adapter reads one vLLM server: an event stream of each of its ranks, its
// counters, its facts and its health.
type Adapter struct {
	o      Options
	log    *slog.Logger
	client client

	mu    sync.Mutex
	ranks []*rankReader
	lives int
}

// New makes an adapter; Run starts it.
func New(o Options) (*Adapter, error) {
	var err error
	if o.Options, err = o.WithDefaults(); err != nil {
		return nil, fmt.Errorf("vllm: %w", err)
	}
	c, err := enginehttp.New(enginehttp.Options{URL: o.Target.URL, APIKey: o.Target.APIKey, DialTimeout: o.PageTimeout})
	if err != nil {
		return nil, fmt.Errorf("vllm: %w", err)
	}
	return &Adapter{o: o, log: o.Logger, client: client{c}}, nil
}

// Tokenize asks the engine for the token ids of a prompt.
func (a *Adapter) Tokenize(ctx context.Context, prompt string, addSpecialTokens bool) ([]uint32, error) {
	return a.client.tokenize(ctx, map[string]any{"prompt": prompt, "add_special_tokens": addSpecialTokens})
}

// Render asks the engine for the token ids a chat request becomes.
func (a *Adapter) Render(ctx context.Context, chatJSON []byte) ([]uint32, error) {
	body, err := renderBody(chatJSON)
	if err != nil {
		return nil, err
	}
	return a.client.tokenize(ctx, body)
}

// Resync implements engine.Resyncer.
func (a *Adapter) Resync(rank int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if rank >= 0 && rank < len(a.ranks) {
		a.ranks[rank].resync.Store(true)
	}
}

// Run reads the engine until ctx ends.
func (a *Adapter) Run(ctx context.Context, sink engine.Sink) error {
	ctx, cancel := context.WithCancel(ctx)
	p := &poller{a: a, sink: sink, group: &sync.WaitGroup{}}
	defer func() {
		cancel()
		p.group.Wait()
		a.client.Close()
		a.mu.Lock()
		a.ranks = nil
		a.mu.Unlock()
	}()
	a.mu.Lock()
	p.again = a.lives > 0
	a.lives++
	a.mu.Unlock()

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

// poller is the part of one Run that asks over HTTP and lets time pass.
type poller struct {
	a     *Adapter
	sink  engine.Sink
	group *sync.WaitGroup
	again bool // Run was called before

	page    metricsPage
	buf     bytes.Buffer
	facts   engine.Facts
	known   *knowledge
	factsAt time.Time
	aliveAt time.Time // of the last health check
	mark    uint64
	markAt  time.Time // when mark was last seen

	refused, failed int
	gone, up        bool
	reason          string
}

// poll does what is due. Streams begin once the engine's facts are known.
func (p *poller) poll(ctx context.Context) {
	now := time.Now()
	err := p.readPage(ctx)
	if err == nil && now.Sub(p.aliveAt) >= healthEvery {
		if err = p.checkHealth(ctx); err == nil {
			p.aliveAt = now
		}
	}
	if err == nil && (p.known == nil || now.Sub(p.factsAt) >= p.a.o.FactsEvery) {
		err = p.learn(ctx)
	}
	if ctx.Err() != nil {
		return
	}
	p.judge(time.Now(), err)
	for _, r := range p.a.readers() {
		r.tick(time.Now())
	}
}

func (a *Adapter) readers() []*rankReader {
	a.mu.Lock()
	defer a.mu.Unlock()
	return append([]*rankReader(nil), a.ranks...)
}

// judge turns the outcome of a poll into health. A refused connection means
// that the server's process has ended, whatever its event sockets still
// answer; other errors may pass.
func (p *poller) judge(now time.Time, err error) {
	if err == nil {
		p.refused, p.failed = 0, 0
		if p.gone {
			p.gone = false
			for _, r := range p.a.readers() {
				r.back(now)
			}
		}
		p.health(true, "")
		return
	}
	p.failed++
	if errors.Is(err, syscall.ECONNREFUSED) || enginehttp.Status(err) == 503 {
		p.refused++
	} else {
		p.refused = 0
	}
	if p.refused >= refusalsToGone && !p.gone {
		p.gone, p.mark, p.factsAt = true, 0, time.Time{}
		for _, r := range p.a.readers() {
			r.goneAt(now)
		}
	}
	if p.gone || p.failed >= errorsToDown || p.known == nil {
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

func (p *poller) checkHealth(ctx context.Context) error {
	var buf bytes.Buffer
	_, err := p.a.client.Ask(ctx, enginehttp.Question{Path: "/health"}, &buf)
	if enginehttp.Missing(err) {
		return nil
	}
	return err
}

// readPage reads the counters and passes them on by rank. An engine that was
// started without them (404) is read without.
func (p *poller) readPage(ctx context.Context) error {
	_, err := p.a.client.Ask(ctx, enginehttp.Question{Path: "/metrics", MaxBytes: enginehttp.MaxPageBytes, Timeout: p.a.o.PageTimeout}, &p.buf)
	at := time.Now()
	if enginehttp.Missing(err) {
		p.page.scan(nil)
		return nil
	}
	if err != nil {
		return err
	}
	p.page.scan(p.buf.Bytes())
	readers := p.a.readers()
	p.watchMark(readers, at)
	for i, r := range readers {
		r.load(p.page.load(i, at), at)
	}
	if p.page.faults > 0 && len(readers) > 0 {
		readers[0].counted("metricFaults", p.page.faults)
	}
	return nil
}

// watchMark looks whether the engine's process is still the same. A stream
// that has seen its restart by itself is left alone.
func (p *poller) watchMark(readers []*rankReader, at time.Time) {
	mark := p.page.startMark()
	if mark == 0 {
		return
	}
	if p.mark != 0 && mark != p.mark {
		p.factsAt = time.Time{}
		for _, r := range readers {
			r.restarted(at, p.markAt)
		}
	}
	p.mark, p.markAt = mark, at
}

// learn reads the facts and starts the streams of ranks that are new.
func (p *poller) learn(ctx context.Context) error {
	k, err := p.a.client.learn(ctx)
	if err != nil {
		return err
	}
	p.known, p.factsAt = &k, time.Now()
	ranks := max(1, len(p.page.ranks), len(k.sources))
	k.facts.Ranks = ranks
	k.facts.BlockTokens = p.page.blockTokens()
	k.facts.PoolBlocks = p.page.usableBlocks()
	k.facts.StartMark = p.page.startMark()
	if k.facts.StartMark == 0 {
		k.facts.StartMark = k.instance
	}
	readers := p.a.readers()
	k.facts.RankHeader = rankHeader(ranks)
	k.facts.Capabilities |= engine.TokenizesText | engine.TokenizesChats
	for _, r := range readers {
		k.facts.Capabilities |= r.capabilities()
	}
	if !reflect.DeepEqual(k.facts, p.facts) {
		p.facts = k.facts
		p.sink.Facts(k.facts)
	}
	for _, r := range readers {
		r.setPool(k.facts.PoolBlocks)
	}
	for n := len(readers); n < ranks; n++ {
		p.startRank(ctx, n)
	}
	return nil
}

// rankHeader is the header that names the rank to a server of several.
func rankHeader(ranks int) string {
	if ranks > 1 {
		return "X-data-parallel-rank"
	}
	return ""
}

// startRank starts the stream of a rank. Its context is Run's: the one given
// here may carry a deadline.
func (p *poller) startRank(ctx context.Context, n int) {
	plan := planFor(p.a.o.Target, p.known, n)
	r := newRankReader(n, plan, p)
	r.setPool(p.facts.PoolBlocks)
	p.a.mu.Lock()
	p.a.ranks = append(p.a.ranks, r)
	p.a.mu.Unlock()
	if p.again {
		p.sink.Reset(n, engine.ResetGap)
	}
	if plan.events == "" {
		p.sink.Coverage(n, engine.CoverageNone, plan.hint)
		return
	}
	p.group.Add(1)
	go func() {
		defer p.group.Done()
		r.run(ctx)
	}()
	if plan.replay != "" {
		p.group.Add(1)
		go func() {
			defer p.group.Done()
			r.replays(ctx)
		}()
	}
}
