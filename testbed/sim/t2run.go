package sim

import (
	"math"
	"math/rand/v2"
	"strings"

	"waypost/coordinator/placement"
	"waypost/gossip/ledger"
	"waypost/testbed/sim/cluster"
	"waypost/testbed/sim/prompt"
	"waypost/testbed/sim/rules"
	"waypost/testbed/sim/truth"
	"waypost/testbed/workload"
)

// The rules by the names of --policy.
const (
	policyWaypost     = "waypost"
	policyRoundRobin  = "round-robin"
	policyLeastTokens = "least-tokens"
	policyDynamo      = "dynamo"
	policyDynamo32    = "dynamo-s32"
	policyLMetric     = "lmetric"
	policySticky      = "sticky"
)

var t2Policies = []string{policyWaypost, policyRoundRobin, policyLeastTokens, policyDynamo, policyDynamo32, policyLMetric, policySticky}

// T2Options configures runs of model T2.
type T2Options struct {
	Policy                string
	Workers, Coordinators int
	Speedup               float64
	Spread, Unique        bool
	Copies                int
	Seed                  uint64
	SlowWorkers           int
	SlowFactor            float64
	Crowd                 bool
	CrowdStartSec         float64
	Cut                   cuts
	Evidence              evidence
	NoticeMs, EventMs     float64 // negative: the policy's
	Theta                 float64
	Learn                 bool
	PriorScale            float64
	// Set changes constants of the placement policy: name=value.
	Set []string
}

// cuts says what coordinators do not share.
type cuts struct{ place, atOnce, all bool }

// evidence says what tells agents how far their claims are: callers' notices
// of first tokens and ends, the engine's store events. Counters always do.
type evidence struct{ marks, stores bool }

// Delays with which Waypost is run unless told otherwise: first tokens and
// ends are told 250 ms late, cache events 1 s late. Peers' rules know at
// once, as in their own replay.
const (
	defaultNoticeMs = 250
	defaultEventMs  = 1000
	loadPeriodMs    = 200
	// warmUpMs is how long before the first arrival agents begin to report, as
	// coordinators are not ready before they heard of their workers.
	warmUpMs = 1000
	// copyJitterMs is how far arrivals move in a copy of the trace.
	copyJitterMs = 2
)

// The flash crowd: 120 requests per second for a minute with one prefix.
const (
	crowdPerSec, crowdSeconds          = 120, 60
	crowdPrefix, crowdOwn, crowdOutput = 8192, 256, 100
)

func (o *T2Options) validate() error {
	switch {
	case o.Workers < 1 || o.Workers > 1024:
		return wrong("workers", "%d is not in 1 to 1024", o.Workers)
	case o.Coordinators < 1 || o.Coordinators > 64:
		return wrong("coordinators", "%d is not in 1 to 64", o.Coordinators)
	case o.Coordinators > 1 && o.Policy != policyWaypost:
		return wrong("coordinators", "policy %s has one router; only %s runs with several", o.Policy, policyWaypost)
	case o.Copies < 1 || o.Copies > 1000:
		return wrong("copies", "%d is not in 1 to 1000", o.Copies)
	case o.SlowWorkers < 0 || o.SlowWorkers > o.Workers:
		return wrong("slow-workers", "%d is not in 0 to %d", o.SlowWorkers, o.Workers)
	case !(o.SlowFactor >= .1 && o.SlowFactor <= 100):
		return wrong("slow-factor", "%v is not in 0.1 to 100", o.SlowFactor)
	case !(o.PriorScale >= .01 && o.PriorScale <= 100):
		return wrong("prior-scale", "%v is not in 0.01 to 100", o.PriorScale)
	case !(o.CrowdStartSec <= 1e9):
		return wrong("crowd-at", "%v is not a time in s", o.CrowdStartSec)
	case !(o.NoticeMs <= 60_000):
		return wrong("notice-delay", "%v ms is above 60,000", o.NoticeMs)
	case !(o.EventMs <= 600_000):
		return wrong("event-delay", "%v ms is above 600,000", o.EventMs)
	}
	return nil
}

// The classes of a workload with a flash crowd: the crowd, and the trace's
// requests of the same minute.
const (
	classNameCrowd     = "crowd"
	classNameUnrelated = "unrelated"
)

// RunT2 runs all copies and describes them. progress is told after each
// request, and ends the run by an error; nil: nobody is.
func RunT2(t *workload.Trace, o T2Options, progress func(copyIndex, copies, done, all int) error) (*Summary, error) {
	if err := o.validate(); err != nil {
		return nil, err
	}
	if o.Crowd && o.CrowdStartSec < 0 {
		last := t.Requests[len(t.Requests)-1].TimestampMs
		o.CrowdStartSec = math.Round(float64(last) / o.Speedup / 2000)
	}
	s := &Summary{Policy: o.Policy, Scope: Scope{
		Model: "t2", Workers: o.Workers, SlowWorkers: o.SlowWorkers, Speedup: o.Speedup,
		Coordinators: o.Coordinators, Cut: o.Cut.String(), Evidence: o.Evidence.String(), Copies: o.Copies, Seed: o.Seed,
	}}
	if o.Policy != policyWaypost {
		s.Scope.Evidence = ""
	}
	if o.SlowWorkers > 0 {
		s.Scope.SlowFactor = o.SlowFactor
	}
	var all, crowded, unrelated []Figures
	for i := range o.Copies {
		run, err := runT2(t, o, i, func(done, all int) error {
			if progress == nil {
				return nil
			}
			return progress(i, o.Copies, done, all)
		})
		if err != nil {
			return nil, err
		}
		s.Scope.NoticeMs, s.Scope.EventMs = run.noticeMs, run.eventMs
		all = append(all, run.figuresOf(func(*served) bool { return true }))
		if !o.Crowd {
			continue
		}
		begin := warmUpMs + o.CrowdStartSec*1000
		crowded = append(crowded, run.figuresOf(func(r *served) bool { return r.class == classCrowd }))
		unrelated = append(unrelated, run.figuresOf(func(r *served) bool {
			return r.class == classTrace && r.atMs >= begin && r.atMs < begin+crowdSeconds*1000
		}))
	}
	s.Figures = meanOf(all)
	for _, f := range all {
		s.TTFTMeans = append(s.TTFTMeans, f.TTFTMs.Mean)
	}
	if o.Crowd {
		s.Classes = map[string]Figures{classNameCrowd: meanOf(crowded), classNameUnrelated: meanOf(unrelated)}
	}
	return s, nil
}

// runT2 runs one copy of the trace.
func runT2(t *workload.Trace, o T2Options, copyIndex int, progress func(done, all int) error) (*t2, error) {
	tr := traceOptions{spread: o.Spread, speedup: o.Speedup, unique: o.Unique, seed: o.Seed + uint64(copyIndex)}
	if o.Copies > 1 {
		tr.jitterMs = copyJitterMs
	}
	if o.Crowd {
		tr.crowd = crowd{
			perSec: crowdPerSec, seconds: crowdSeconds, startMs: o.CrowdStartSec * 1000,
			prefixTokens: crowdPrefix, ownTokens: crowdOwn, outputToks: crowdOutput,
		}
	}
	arrivals, err := replay(t, tr)
	if err != nil {
		return nil, err
	}
	slowdowns := make([]float64, o.Workers)
	for w := range slowdowns {
		slowdowns[w] = 1
		if w < o.SlowWorkers {
			slowdowns[w] = o.SlowFactor
		}
	}
	run, err := newT2(arrivals, slowdowns)
	if err != nil {
		return nil, err
	}
	run.progress, run.evidence = progress, o.Evidence
	run.evidence.marks = run.evidence.marks || o.Policy != policyWaypost
	for i := range arrivals {
		arrivals[i].atMs += warmUpMs
	}
	if err := run.route(&o, copyIndex); err != nil {
		return nil, err
	}
	return run, run.run()
}

// route installs the rule.
func (run *t2) route(o *T2Options, copyIndex int) error {
	rng := rand.New(rand.NewPCG(o.Seed+uint64(copyIndex), 2))
	if o.Policy == policyWaypost {
		run.noticeMs, run.eventMs = defaultNoticeMs, defaultEventMs
	}
	if o.NoticeMs >= 0 {
		run.noticeMs = o.NoticeMs
	}
	if o.EventMs >= 0 {
		run.eventMs = o.EventMs
	}
	if o.Policy == policyWaypost {
		return run.routeByWaypost(o, copyIndex)
	}
	var cache rules.CacheView = trueCache(run.engines)
	if run.eventMs > 0 {
		heard := rules.NewHeard(o.Workers)
		cache, run.caches = heard, heard
	}
	switch o.Policy {
	case policyRoundRobin:
		run.router = rules.NewRoundRobin(o.Workers)
	case policyLeastTokens:
		run.router = rules.NewLeastTokens(o.Workers, rng)
	case policyDynamo:
		run.router = rules.NewDynamo(1, o.Workers, cache, rng)
	case policyDynamo32:
		run.router = rules.NewDynamo(32, o.Workers, cache, rng)
	case policyLMetric:
		run.router = rules.NewLMetric(o.Workers, cache, rng)
	case policySticky:
		run.router = rules.NewSticky(o.Workers, cache, rng)
	default:
		return wrong("policy", "%q is not one of %s", o.Policy, strings.Join(t2Policies, ", "))
	}
	return nil
}

func (run *t2) routeByWaypost(o *T2Options, copyIndex int) error {
	policy := placement.DefaultPolicy()
	policy.Theta = o.Theta
	if err := override(&policy, o.Set); err != nil {
		return err
	}
	prior := ledger.PriorFor(ledger.Class{Engine: ledger.EngineMocker})
	options := cluster.Options{
		Workers: o.Workers, Coordinators: o.Coordinators,
		Model: prior.Model.Scaled(o.PriorScale), StepTokens: prior.StepTokens,
		BlockTokens: prompt.BlockTokens, PoolBlocks: truth.DefaultPoolBlocks, MaxRunning: truth.DefaultMaxRunning,
		Policy: policy, FixedSpeeds: !o.Learn,
		EventMs: run.eventMs, LoadMs: loadPeriodMs, AtOnce: !o.Cut.atOnce, SharePlacements: !o.Cut.place,
		Seed: o.Seed + uint64(copyIndex),
	}
	var s system
	var err error
	if o.Cut.all {
		s, err = cluster.NewSplit(options, &run.clock)
	} else {
		s, err = cluster.New(options, &run.clock)
	}
	run.router, run.caches, run.system = s, s, s
	return err
}
