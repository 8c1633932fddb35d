package sim

import (
	"math/rand/v2"
	"slices"
	"strings"

	"waypost/coordinator/placement"
	"waypost/gossip/ledger"
	"waypost/testbed/sim/cluster"
	"waypost/testbed/sim/prompt"
	"waypost/testbed/sim/truth"
)

// The rules of model ledger.
const (
	policyOracle = "oracle"
	policyRaw    = "raw"
)

var ledgerPolicies = []string{policyWaypost, policyOracle, policyRaw}

// scenario is one row of the ledger's table: what differs from the base.
type scenario struct {
	name, what string
	// coordinators is the number if the command does not say.
	coordinators int
	// rate multiplies arrivals.
	rate float64
	// meanTokens, turnTokens and sigma replace those of the base.
	meanTokens, turnTokens, sigma float64
	foreign                       float64
	gaugeLagMs                    float64
	// speedSpread draws each worker's believed speed from 1 − it to 1 + it.
	speedSpread float64
	// cut says that coordinators do not reach each other.
	cut bool
	// lanesDown is the share of lanes that are down, drawn anew every 20 s.
	lanesDown float64
	// restartParties and restartEngines let agents and coordinators, or
	// engines, begin another life now and then.
	restartParties, restartEngines bool
}

var scenarios = []scenario{
	{name: "base", what: "as described"},
	{name: "cut", what: "coordinators do not reach each other", coordinators: 8, cut: true},
	{name: "foreign", what: "20 % of the requests are placed by nobody", foreign: .2},
	{name: "stale-gauges", what: "engine counters are 5 s old", gaugeLagMs: 5000},
	{name: "speeds", what: "every worker's believed speed is wrong by up to 50 %", speedSpread: .5},
	{name: "speeds-stale", what: "both of these", speedSpread: .5, gaugeLagMs: 5000},
	{name: "lanes", what: "a quarter of the lanes is down, another one every 20 s", lanesDown: .25},
	{name: "both-cuts", what: "that, and coordinators do not reach each other", lanesDown: .25, cut: true},
	{name: "restarts", what: "agents and coordinators restart", restartParties: true},
	{name: "engine-restarts", what: "engines restart", restartEngines: true},
	{name: "busier", what: "5 % more requests", rate: 1.05},
	{name: "short", what: "short prompts", coordinators: 8, meanTokens: 1500, turnTokens: 1100, sigma: .55, rate: 2},
}

func scenarioNames() []string {
	var names []string
	for _, s := range scenarios {
		names = append(names, s.name)
	}
	return names
}

// LedgerOptions configures runs of model ledger.
type LedgerOptions struct {
	Policy, Scenario string
	// Coordinators is the number of them; 0: the scenario's, 4 if it says
	// nothing.
	Coordinators int
	// Seconds is how long requests come, Copies the number of seeds.
	Seconds  float64
	Copies   int
	Seed     uint64
	Cut      cuts
	Evidence evidence
	Theta    float64
	Set      []string
	// Learn lets coordinators hear what agents learnt of speeds.
	Learn bool
}

// The ledger's setting.
const (
	ledgerWorkers    = 16
	ledgerGaugeLagMs = 50
	ledgerLoadMs     = 150
	ledgerPlaceMs    = 15
	ledgerForeign    = .05
	lanesEveryMs     = 20_000
	partyRestartMs   = 10_000
	engineRestartMs  = 10_000
	// residueMs is how long after the last arrival the ledger must be empty.
	residueMs = 80_000
)

func (o *LedgerOptions) validate() (scenario, error) {
	at := slices.IndexFunc(scenarios, func(s scenario) bool { return s.name == o.Scenario })
	switch {
	case at < 0:
		return scenario{}, wrong("scenario", "%q is not one of %s", o.Scenario, strings.Join(scenarioNames(), ", "))
	case !slices.Contains(ledgerPolicies, o.Policy):
		return scenario{}, wrong("policy", "%q is not one of %s, the rules of model ledger", o.Policy, strings.Join(ledgerPolicies, ", "))
	case o.Coordinators < 0 || o.Coordinators > ledger.MaxCoordinators:
		return scenario{}, wrong("coordinators", "%d is not in 1 to %d", o.Coordinators, ledger.MaxCoordinators)
	case o.Copies < 1 || o.Copies > 1000:
		return scenario{}, wrong("copies", "%d is not in 1 to 1000", o.Copies)
	case !(o.Seconds >= 1 && o.Seconds <= 86_400):
		return scenario{}, wrong("seconds", "%v is not in 1 to 86,400", o.Seconds)
	}
	s := scenarios[at]
	if o.Coordinators == 0 {
		o.Coordinators = max(s.coordinators, 1)
		if s.coordinators == 0 {
			o.Coordinators = 4
		}
	}
	return s, nil
}

// load is the workload of a scenario.
func (s *scenario) load(seconds float64) ledgerLoad {
	l := ledgerLoad{
		perSec: 37, seconds: seconds, meanTokens: 6000, turnTokens: 1600, sigma: 1, meanOutput: 180,
		foreign: ledgerForeign, never: .01, cancelled: .02, sizeSigma: .15, workers: ledgerWorkers,
	}
	if s.rate > 0 {
		l.perSec *= s.rate
	}
	if s.meanTokens > 0 {
		l.meanTokens, l.turnTokens, l.sigma = s.meanTokens, s.turnTokens, s.sigma
	}
	if s.foreign > 0 {
		l.foreign = s.foreign
	}
	return l
}

// RunLedger runs all seeds of a scenario and describes them. An error of progress
// ends the run.
func RunLedger(o LedgerOptions, progress func(copyIndex, copies, done, all int) error) (*LedgerSummary, error) {
	s, err := o.validate()
	if err != nil {
		return nil, err
	}
	summary := &LedgerSummary{Policy: o.Policy, Scope: LedgerScope{
		Model: "ledger", Scenario: s.name, Workers: ledgerWorkers, Coordinators: o.Coordinators, Seconds: o.Seconds,
		Cut: o.Cut.String(), Copies: o.Copies, Seed: o.Seed,
	}}
	if o.Policy == policyWaypost {
		summary.Scope.Evidence = o.Evidence.String()
	}
	var off []float64
	for i := range o.Copies {
		run, err := runLedger(&o, &s, o.Seed+uint64(i), func(done, all int) error {
			if progress == nil {
				return nil
			}
			return progress(i, o.Copies, done, all)
		})
		if err != nil {
			return nil, err
		}
		summary.add(run, 1/float64(o.Copies))
		off = append(off, run.off...)
	}
	summary.WaitingMs = describeErrors(off)
	return summary, nil
}

// runLedger runs one seed.
func runLedger(o *LedgerOptions, s *scenario, seed uint64, progress func(done, all int) error) (*ledgerRun, error) {
	load := s.load(o.Seconds)
	believed := make([]float64, ledgerWorkers)
	rng := rand.New(rand.NewPCG(seed, 7))
	for w := range believed {
		believed[w] = 1 + s.speedSpread*(2*rng.Float64()-1)
	}
	lag := float64(ledgerGaugeLagMs)
	if s.gaugeLagMs > 0 {
		lag = s.gaugeLagMs
	}
	run, err := newLedgerRun(load.arrivals(seed), believed, lag, seed)
	if err != nil {
		return nil, err
	}
	run.progress, run.evidence = progress, o.Evidence
	switch o.Policy {
	case policyOracle:
		run.oracle()
	case policyRaw:
		run.raw(ledgerLoadMs)
	default:
		if err := run.waypost(o, s, seed); err != nil {
			return nil, err
		}
	}
	if s.restartEngines {
		run.clock.After(engineRestartMs, run.restartEngine)
	}
	return run, run.run()
}

// waypost lets production's parts place.
func (run *ledgerRun) waypost(o *LedgerOptions, s *scenario, seed uint64) error {
	policy := placement.DefaultPolicy()
	policy.Theta = o.Theta
	if err := override(&policy, o.Set); err != nil {
		return err
	}
	c, err := cluster.New(cluster.Options{
		Workers: ledgerWorkers, Coordinators: o.Coordinators,
		Model:        ledger.StepModel{P1MsPerToken: .05, D0Ms: 14, D1MsPerRequest: .05, D2MsPerToken: 4e-5, Source: ledger.SourcePrior},
		PriorFactors: run.believed, StepTokens: linearStepTokens,
		BlockTokens: prompt.BlockTokens, PoolBlocks: linearPoolBlocks, MaxRunning: truth.DefaultMaxRunning,
		Policy: policy, FixedSpeeds: !o.Learn, LoadMs: ledgerLoadMs, AtOnce: !o.Cut.atOnce,
		SharePlacements: !o.Cut.place && !s.cut, PlaceMs: ledgerPlaceMs,
		SlowShare: .01, SlowMinMs: 50, SlowMaxMs: 250, Seed: seed,
	}, &run.clock)
	if err != nil {
		return err
	}
	run.cluster = c
	c.Start()
	for w := range run.engines {
		run.clock.After(run.rng.Float64()*pollMs, func() { run.poll(w) })
	}
	if s.lanesDown > 0 {
		run.clock.After(0, func() { run.redrawLanes(s.lanesDown, o.Coordinators) })
	}
	if s.restartParties {
		run.clock.After(partyRestartMs, func() { run.restartParty(o.Coordinators) })
	}
	run.belief = func(w int) float64 { return run.waits[w] }
	run.place = run.placeByCluster
	return nil
}
