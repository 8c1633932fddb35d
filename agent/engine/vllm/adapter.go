package vllm

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"time"

	"waypost/agent/engine"
	"waypost/agent/engine/enginehttp"
	"waypost/agent/engine/kvevents"
	"waypost/agent/engine/poller"
)

var (
	_ engine.Adapter   = (*Adapter)(nil)
	_ engine.Tokenizer = (*Adapter)(nil)
	_ engine.Completer = (*Adapter)(nil)
	_ engine.Resyncer  = (*Adapter)(nil)
)

// dialect is how vLLM publishes.
var dialect = kvevents.Dialect{
	Setting:     "--kv-events-config",
	Check:       `that prefix caching is on, and in --kv-events-config that publisher is "zmq" and endpoint has a "*"`,
	Enable:      `--kv-events-config '{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5657"}'`,
	TellsMedium: true,
}

// Options configures an adapter. Zero values are the defaults.
type Options struct {
	engine.Options
	// Stream configures the event streams; Replay is found out.
	Stream kvevents.StreamOptions
}

// Adapter reads one vLLM server: an event stream of each of its ranks, its
// counters, its facts and its health.
type Adapter struct {
	*poller.Poller
	client client
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
	s := &source{client: client{c}, target: o.Target, timeout: o.PageTimeout}
	return &Adapter{client: s.client, Poller: poller.New(poller.Options{
		Options: o.Options, Dialect: &dialect, Stream: o.Stream, Host: c.Host(), Close: c.Close,
	}, s)}, nil
}

// Tokenize asks the engine for the token ids of a prompt.
func (a *Adapter) Tokenize(ctx context.Context, prompt string, addSpecialTokens bool) ([]uint32, error) {
	return a.client.TokenIDs(ctx, map[string]any{"prompt": prompt, "add_special_tokens": addSpecialTokens})
}

// Render asks the engine for the token ids a chat request becomes.
func (a *Adapter) Render(ctx context.Context, chatJSON []byte) ([]uint32, error) {
	body, err := renderBody(chatJSON)
	if err != nil {
		return nil, err
	}
	return a.client.TokenIDs(ctx, body)
}

// rankHeader is the header by which a request names its data-parallel rank.
const rankHeader = "X-data-parallel-rank"

// Complete implements engine.Completer.
func (a *Adapter) Complete(ctx context.Context, prompt string, rank int) (u engine.Usage, err error) {
	u.PromptTokens, u.CachedTokens, err = a.client.Complete(ctx, "", prompt, engine.RankHeaders(rankHeader, rank))
	return u, err
}

// source asks one vLLM server.
type source struct {
	client  client
	target  engine.Target
	timeout time.Duration

	page metricsPage
	buf  bytes.Buffer
}

// Counters implements poller.Source. An engine that was started without its
// page of counters (404) is read without.
func (s *source) Counters(ctx context.Context) (poller.Counters, error) {
	_, err := s.client.Ask(ctx, enginehttp.Question{Path: "/metrics", MaxBytes: enginehttp.MaxPageBytes, Timeout: s.timeout}, &s.buf)
	if enginehttp.Missing(err) {
		s.page.scan(nil)
		return poller.Counters{}, nil
	}
	if err != nil {
		return poller.Counters{}, err
	}
	at := time.Now()
	s.page.scan(s.buf.Bytes())
	out := poller.Counters{StartMark: s.page.startMark(), Faults: s.page.faults}
	for i := range s.page.ranks {
		out.Loads = append(out.Loads, s.page.load(i, at))
	}
	return out, nil
}

// Health implements poller.Source.
func (s *source) Health(ctx context.Context) error {
	var buf bytes.Buffer
	_, err := s.client.Ask(ctx, enginehttp.Question{Path: "/health"}, &buf)
	if enginehttp.Missing(err) {
		return nil
	}
	return err
}

// Facts implements poller.Source.
func (s *source) Facts(ctx context.Context, latest *poller.Counters) (poller.Known, error) {
	k, err := s.client.learn(ctx)
	if err != nil {
		return poller.Known{}, err
	}
	ranks := max(1, len(s.page.ranks), len(k.sources))
	k.facts.Ranks = ranks
	k.facts.BlockTokens = s.page.blockTokens()
	k.facts.PoolBlocks = s.page.usableBlocks()
	k.facts.Capabilities |= engine.TokenizesText | engine.TokenizesChats
	k.facts.Capabilities = k.facts.Capabilities.With(engine.NamesSessions, namesSessions(k.facts.Version))
	k.facts.Capabilities = k.facts.Capabilities.With(engine.ReadsHostTier, readsHostTier(s.connector(&k.facts)))
	if ranks > 1 {
		k.facts.RankHeader = rankHeader
	}
	out := poller.Known{Facts: k.facts, StartMark: latest.StartMark, Faults: k.faults + s.client.Odd()}
	if out.StartMark == 0 {
		out.StartMark = k.instance
	}
	for n := range min(ranks, engine.MaxRanks) {
		plan := planFor(s.target, &k, n)
		if s.page.cachingOff() {
			plan = kvevents.Plan{Named: plan.Named, Hint: hintNoCache}
		}
		out.Plans = append(out.Plans, plan)
	}
	return out, nil
}

// namesSessions says whether a version's events name sessions: 0.32 was seen to;
// which earlier one did first is not known.
func namesSessions(version string) bool {
	var major, minor int
	if _, err := fmt.Sscanf(version, "%d.%d.", &major, &minor); err != nil {
		return false
	}
	return major > 0 || minor >= 32
}

const hintNoCache = "the engine keeps no prefixes: start it with --enable-prefix-caching"

// simpleOffload is the connector whose older releases tell the removals from
// its CPU cache as removals from GPU memory, and no stores there.
const simpleOffload = "SimpleCPUOffloadConnector"

// connector is the engine's KV connector: only developers' routes tell it, so that
// the configuration may.
func (s *source) connector(f *engine.Facts) string {
	return cmp.Or(s.target.KVConnector, f.Transfer.Connector)
}

// Doubt implements poller.Doubter.
func (s *source) Doubt(k *poller.Known, r *kvevents.Reader) string {
	if s.connector(&k.Facts) != simpleOffload || r.SeesTiers() {
		return ""
	}
	return "the engine's " + simpleOffload + " may tell removals from its CPU cache as removals from GPU memory: use a vLLM whose events name the CPU"
}
