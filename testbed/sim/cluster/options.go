package cluster

import (
	"errors"
	"fmt"

	"waypost/coordinator/placement"
	"waypost/gossip/ledger"
)

// ErrOptions is wrapped by every error of New.
var ErrOptions = errors.New("bad cluster options")

// Options says how agents and coordinators work and how late they hear.
// Delays are ms.
type Options struct {
	// Workers is the number of workers, Coordinators that of coordinators.
	Workers, Coordinators int
	// Model is the prior of the workers' step model, StepTokens the step
	// budget, BlockTokens and PoolBlocks the KV pool, MaxRunning the largest
	// batch.
	Model                                           ledger.StepModel
	StepTokens, BlockTokens, PoolBlocks, MaxRunning int
	// PriorFactors multiply the prior of each worker; empty: it is as it is.
	PriorFactors []float64
	// Policy is the coordinators' policy.
	Policy placement.Policy
	// FixedSpeeds keeps coordinators from hearing what agents learnt of their
	// worker's speed.
	FixedSpeeds bool
	// EventMs is how old the coordinators' view of caches is.
	EventMs float64
	// LoadMs is the period of load reports. AtOnce sends them at once, too,
	// when agents find them due.
	LoadMs float64
	AtOnce bool
	// SharePlacements tells peers of placements; they travel up to PlaceMs
	// longer than other messages.
	SharePlacements bool
	PlaceMs         float64
	// SlowShare of all messages take SlowMinMs to SlowMaxMs more.
	SlowShare, SlowMinMs, SlowMaxMs float64
	// Seed seeds delays and the split of arrivals.
	Seed uint64
}

func (o *Options) validate() error {
	switch {
	case o.Workers < 1 || o.Workers > 4096:
		return fmt.Errorf("%w: workers: %d is not in 1 to 4096", ErrOptions, o.Workers)
	case o.Coordinators < 1 || o.Coordinators > ledger.MaxCoordinators:
		return fmt.Errorf("%w: coordinators: %d is not in 1 to %d", ErrOptions, o.Coordinators, ledger.MaxCoordinators)
	case !(o.LoadMs > 0):
		return fmt.Errorf("%w: loadMs: %v is not above 0", ErrOptions, o.LoadMs)
	}
	if err := o.Policy.Validate(); err != nil {
		return err
	}
	return o.Model.Validate()
}

// Between processes everything travels 1 to 6 ms. Reports at once are at
// least 20 ms apart.
const (
	travelMinMs = 1
	travelMaxMs = 6
	atOnceMs    = 20
	tickMs      = 1000
)
