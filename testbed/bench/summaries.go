package bench

import (
	"context"
	"fmt"
	"time"

	"waypost/testbed/workload"
)

// Summaries says how the prefix summaries are measured.
type Summaries struct {
	// Quick takes less than a minute on two cores: shorter workloads, smaller
	// caches of 1,000 workers, half a minute of churn.
	Quick bool
	// Trace is the path of Mooncake's conversation trace; empty: the sample that
	// ships stands in for it.
	Trace string
	// Progress is told what is being measured; nil: nobody is.
	Progress func(what string)
}

// Report is what was measured.
type Report struct {
	Quick   bool
	Streams []Stream
	Indexes []Index
	Cold    []ColdStart
	Took    time.Duration
}

// plan is one size of the benchmark.
type plan struct {
	streamSeconds map[string]float64
	warmUp        float64
	fleets        []indexOptions
	coldRounds    int
	manyHosts     bool
}

func (s Summaries) plan() plan {
	fleet := func(workers, blocks int, perWorker, churnSeconds float64, references bool) fleetOptions {
		return fleetOptions{workload: "mix", workers: workers, blocks: blocks, requestsPerSecond: perWorker, fillMs: 100_000, churnMs: churnSeconds * 1000, seed: benchSeed, references: references}
	}
	if s.Quick {
		return plan{
			streamSeconds: map[string]float64{"mix": 250, "chat": 150, "conv": 150}, warmUp: .4,
			fleets: []indexOptions{
				{fleet(100, poolBlocks, mixPerWorker, 30, true), 100 * time.Millisecond},
				{fleet(1000, poolBlocks/4, mixPerWorker/4, 30, true), 100 * time.Millisecond},
				{chains(1000, 8000), 100 * time.Millisecond},
			},
			coldRounds: 1,
		}
	}
	return plan{
		streamSeconds: map[string]float64{"mix": 400, "chat": 300, "conv": 400}, warmUp: .3,
		fleets: []indexOptions{
			{fleet(100, poolBlocks, mixPerWorker, 60, true), 500 * time.Millisecond},
			{fleet(1000, poolBlocks, mixPerWorker, 900, true), 500 * time.Millisecond},
			{fleet(4000, poolBlocks/4, mixPerWorker/4, 60, false), 500 * time.Millisecond},
			{chains(1000, 32_000), 500 * time.Millisecond},
		},
		coldRounds: 5, manyHosts: true,
	}
}

// chains is the peer's workload.
func chains(workers, blocks int) fleetOptions {
	return fleetOptions{workload: chainsWorkload, workers: workers, blocks: blocks, references: true}
}

// coldWorkers is the fleet that a coordinator meets.
const (
	coldWorkers  = 1000
	coldHosts    = 125
	coldWorkload = "mix"
)

// Run measures everything, one part after the other.
func (s Summaries) Run(ctx context.Context) (*Report, error) {
	began := time.Now()
	r := &Report{Quick: s.Quick}
	p := s.plan()
	if err := s.runStreams(ctx, p, r); err != nil {
		return nil, err
	}
	for _, o := range p.fleets {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		s.say("index of %s, %d workers × %d blocks, %g s of churn", o.workload, o.workers, o.blocks, o.churnMs/1000)
		index, lives, err := benchIndex(o)
		if err != nil {
			return nil, fmt.Errorf("index of %d workers: %w", o.workers, err)
		}
		r.Indexes = append(r.Indexes, index)
		if o.workload == coldWorkload && o.workers == coldWorkers {
			if err := s.runCold(ctx, p, lives, r); err != nil {
				return nil, err
			}
		}
	}
	r.Took = time.Since(began)
	return r, nil
}

func (s Summaries) say(format string, args ...any) {
	if s.Progress != nil {
		s.Progress(fmt.Sprintf(format, args...))
	}
}

func (s Summaries) runStreams(ctx context.Context, p plan, r *Report) error {
	for _, name := range []string{"conv", "mix", "chat"} {
		if err := ctx.Err(); err != nil {
			return err
		}
		s.say("streams of %s, %d workers", name, streamWorkers)
		var o streamOptions
		var err error
		switch seconds := p.streamSeconds[name]; name {
		case "conv":
			o, err = conv(s.Trace, seconds, p.warmUp)
		case "mix":
			o, err = synthetic(workload.Mix, mixPerWorker, seconds, p.warmUp)
		case "chat":
			o, err = synthetic(workload.Chat, chatPerWorker, seconds, p.warmUp)
		}
		if err != nil {
			return err
		}
		one, err := benchStreams(o)
		if err != nil {
			return err
		}
		r.Streams = append(r.Streams, one)
	}
	return nil
}

func (s Summaries) runCold(ctx context.Context, p plan, lives []life, r *Report) error {
	list := []coldOptions{{hosts: coldHosts, workersPerHost: coldWorkers / coldHosts, lives: lives, rounds: p.coldRounds}}
	if p.manyHosts {
		list = append(list, coldOptions{hosts: coldWorkers, workersPerHost: 1, lives: lives, rounds: 1})
	}
	for _, o := range list {
		s.say("cold start with %d hosts × %d workers", o.hosts, o.workersPerHost)
		c, err := benchColdStart(ctx, o)
		if err != nil {
			return err
		}
		r.Cold = append(r.Cold, c)
	}
	return nil
}
