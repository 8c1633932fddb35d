package dev

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"waypost/agent"
	"waypost/testbed/cluster"
	"waypost/testbed/emulator"
	"waypost/testbed/emulator/profile"
)

// model is the served name of the emulated engines; their step times are those
// of this model on one H100.
const model = "Llama-3.1-8B"

// apiAddress is where the API is if the port is free.
const apiAddress = "127.0.0.1:7712"

// vllm is the kind of the engines of package emulator; the others are those of
// package profile.
const vllm = "vllm"

// kinds are the engine kinds that can be emulated.
func kinds() []string {
	out := []string{vllm}
	for _, k := range profile.Kinds() {
		out = append(out, string(k))
	}
	return out
}

// emulated is an engine of any kind.
type emulated interface {
	URL() string
	Close()
}

// system is Waypost's set with all its parts, and the other set.
type system struct {
	*cluster.Cluster
	// others are the engines of Waypost's set that are not vLLM, which the
	// cluster does not own.
	others   []emulated
	baseline []emulated
}

// fleet is what to start: engines of these kinds, taken in turn.
type fleet struct {
	kinds                 []string
	engines, coordinators int
	dir, version          string
}

// start runs one engine, of about what an 80 GB GPU has left for an 8B model, and
// tells how an agent reaches it unless it is a vLLM.
func start(kind string) (emulated, agent.EngineConfig, error) {
	if kind == vllm {
		e, err := emulator.Start(vllmOptions)
		if err != nil {
			return nil, agent.EngineConfig{}, err
		}
		return e, agent.EngineConfig{}, nil
	}
	o, err := profile.Of(profile.Kind(kind), "")
	if err != nil {
		return nil, agent.EngineConfig{}, err
	}
	o.Model, o.MaxModelTokens, o.PoolTokens, o.StreamInterval, o.Slots = model, 131_072, 432_000, vllmOptions.StreamInterval, 16
	o.Streams = false // polling needs no endpoint in the agent's configuration
	e, err := profile.Start(o)
	if err != nil {
		return nil, agent.EngineConfig{}, err
	}
	return e, agent.EngineConfig{Name: kind + "-1", Kind: agent.Kind(kind), URL: e.URL(), KVEvents: e.EventsEndpoint(), KVReplay: e.ReplayEndpoint()}, nil
}

var vllmOptions = emulator.Options{Model: model, StreamInterval: 25}

// newSystem starts two equal sets of engines and Waypost for the first; dir
// holds certificates and state.
func newSystem(ctx context.Context, f fleet, log *slog.Logger) (*system, error) {
	s := &system{}
	o := cluster.Options{Dir: f.dir, Coordinators: f.coordinators, APIAddress: apiAddress, Version: f.version, Logger: log}
	for i := range f.engines {
		kind := f.kinds[i%len(f.kinds)]
		e, _, err := start(kind)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("emulated engine: %w", err), s.stop())
		}
		s.baseline = append(s.baseline, e)
		if kind == vllm {
			o.Engines = append(o.Engines, vllmOptions)
			continue
		}
		e, config, err := start(kind)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("emulated engine: %w", err), s.stop())
		}
		s.others, o.External = append(s.others, e), append(o.External, config)
	}
	var err error
	if s.Cluster, err = cluster.Start(ctx, o); err != nil {
		return nil, errors.Join(err, s.stop())
	}
	return s, nil
}

func (s *system) stop() error {
	var err error
	if s.Cluster != nil {
		err = s.Stop()
	}
	for _, e := range append(s.others, s.baseline...) {
		e.Close()
	}
	return err
}
