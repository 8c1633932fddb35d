package trtllm

import (
	"fmt"

	"waypost/agent/engine"
	"waypost/agent/engine/enginehttp"
	"waypost/agent/engine/kvevents"
	"waypost/agent/engine/poller"
)

var (
	_ engine.Adapter   = (*Adapter)(nil)
	_ engine.Resyncer  = (*Adapter)(nil)
	_ poller.Deliverer = (*source)(nil)
	_ poller.Changer   = (*source)(nil)
)

// dialect is how TensorRT-LLM publishes.
var dialect = kvevents.Dialect{
	Setting:     "kv_cache_config.kv_events_config",
	Check:       "that kv_cache_config has enable_block_reuse: true, and event_buffer_max_size or kv_events_config",
	Enable:      "kv_cache_config: {enable_block_reuse: true, event_buffer_max_size: 16384}, or kv_cache_config.kv_events_config: {enable_kv_cache_events: true, publisher: zmq, endpoint: tcp://*:5557, replay_endpoint: tcp://*:5657} with kv_events and kv_replay of the engine",
	AlwaysBinds: true,
}

// Options configures an adapter. Zero values are the defaults.
type Options struct {
	engine.Options
	// Stream configures the event streams; Replay is found out.
	Stream kvevents.StreamOptions
}

// Adapter reads one TensorRT-LLM server.
type Adapter struct{ *poller.Poller }

// New makes an adapter; Run starts it.
func New(o Options) (*Adapter, error) {
	var err error
	if o.Options, err = o.WithDefaults(); err != nil {
		return nil, fmt.Errorf("trtllm: %w", err)
	}
	c, err := enginehttp.New(enginehttp.Options{URL: o.Target.URL, APIKey: o.Target.APIKey, DialTimeout: o.PageTimeout})
	if err != nil {
		return nil, fmt.Errorf("trtllm: %w", err)
	}
	s := &source{Client: c, o: o.Options, log: o.Logger, target: o.Target}
	po := poller.Options{Options: o.Options, Dialect: &dialect, Stream: o.Stream, Host: c.Host(), Close: c.Close}
	if !s.streams() {
		po.Decoder = func() kvevents.BatchDecoder { return newDecoder() }
	}
	return &Adapter{poller.New(po, s)}, nil
}
