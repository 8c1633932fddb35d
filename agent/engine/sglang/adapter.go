package sglang

import (
	"context"
	"fmt"

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

// dialect is how SGLang publishes.
var dialect = kvevents.Dialect{
	Setting:         "--kv-events-config",
	Check:           `that the radix cache is on, and in --kv-events-config that publisher is "zmq" and endpoint has a "*"`,
	Enable:          `--kv-events-config '{"publisher":"zmq","endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5657"}'`,
	BindsAllZero:    true,
	NamesNoAdapters: true,
}

// Options configures an adapter. Zero values are the defaults.
type Options struct {
	engine.Options
	// Stream configures the event streams; Replay is found out.
	Stream kvevents.StreamOptions
}

// Adapter reads one SGLang server: an event stream of each of its ranks, its
// load, its facts and its health.
type Adapter struct {
	*poller.Poller
	source *source
}

// New makes an adapter; Run starts it.
func New(o Options) (*Adapter, error) {
	var err error
	if o.Options, err = o.WithDefaults(); err != nil {
		return nil, fmt.Errorf("sglang: %w", err)
	}
	c, err := enginehttp.New(enginehttp.Options{URL: o.Target.URL, APIKey: o.Target.APIKey, DialTimeout: o.PageTimeout})
	if err != nil {
		return nil, fmt.Errorf("sglang: %w", err)
	}
	s := &source{Client: c, target: o.Target, timeout: o.PageTimeout}
	return &Adapter{source: s, Poller: poller.New(poller.Options{
		Options: o.Options, Dialect: &dialect, Stream: o.Stream, Host: c.Host(), Close: c.Close,
	}, s)}, nil
}

// Tokenize asks the engine for the token ids of a prompt.
func (a *Adapter) Tokenize(ctx context.Context, prompt string, addSpecialTokens bool) ([]uint32, error) {
	return a.tokenize(ctx, map[string]any{"prompt": prompt, "add_special_tokens": addSpecialTokens})
}

// rankHeader is the header by which a request names its data-parallel rank.
const rankHeader = "X-Data-Parallel-Rank"

// Complete implements engine.Completer.
func (a *Adapter) Complete(ctx context.Context, prompt string, rank int) (u engine.Usage, err error) {
	model := ""
	if m := a.source.model.Load(); m != nil {
		model = *m
	}
	u.PromptTokens, u.CachedTokens, err = a.source.Complete(ctx, model, prompt, engine.RankHeaders(rankHeader, rank))
	return u, err
}

// templateFields are the fields of a chat request that decide its rendering and
// that the tokenizer's route knows.
var templateFields = []string{"model", "messages", "tools", "tool_choice", "reasoning_effort", "continue_final_message", "chat_template_kwargs"}

// Render asks the engine for the token ids a chat request becomes.
func (a *Adapter) Render(ctx context.Context, chatJSON []byte) ([]uint32, error) {
	fields, err := enginehttp.ChatFields(chatJSON, templateFields)
	if err != nil {
		return nil, err
	}
	body := map[string]any{}
	for name, v := range fields {
		body[name] = v
	}
	return a.tokenize(ctx, body)
}

func (a *Adapter) tokenize(ctx context.Context, body map[string]any) ([]uint32, error) {
	if _, ok := body["model"]; !ok {
		if model := a.source.model.Load(); model != nil {
			body["model"] = *model
		}
	}
	return a.source.TokenIDs(ctx, body)
}
