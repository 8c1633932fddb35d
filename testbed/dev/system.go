package dev

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"waypost/testbed/cluster"
	"waypost/testbed/emulator"
)

// model is the served name of the emulated engines; their step times are those
// of this model on one H100.
const model = "Llama-3.1-8B"

// apiAddress is where the API is if the port is free.
const apiAddress = "127.0.0.1:7712"

// system is Waypost's set with all its parts, and the other set.
type system struct {
	*cluster.Cluster
	baseline []*emulator.Engine
}

// newSystem starts two equal sets of engines and Waypost for the first; dir
// holds certificates and state.
func newSystem(ctx context.Context, dir, version string, engines, coordinators int, log *slog.Logger) (*system, error) {
	s := &system{}
	one := emulator.Options{Model: model, StreamInterval: 25}
	set := make([]emulator.Options, engines)
	for i := range set {
		set[i] = one
		e, err := emulator.Start(one)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("emulated engine: %w", err), s.stop())
		}
		s.baseline = append(s.baseline, e)
	}
	var err error
	s.Cluster, err = cluster.Start(ctx, cluster.Options{
		Dir: dir, Engines: set, Coordinators: coordinators, APIAddress: apiAddress, Version: version, Logger: log,
	})
	if err != nil {
		return nil, errors.Join(err, s.stop())
	}
	return s, nil
}

func (s *system) stop() error {
	var err error
	if s.Cluster != nil {
		err = s.Stop()
	}
	for _, e := range s.baseline {
		e.Close()
	}
	return err
}
