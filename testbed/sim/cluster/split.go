package cluster

import (
	"errors"
	"math/rand/v2"

	"waypost/agent/queue"
	"waypost/testbed/sim/rules"
	"waypost/testbed/sim/vtime"
)

// Split is coordinators that share nothing: each hears of its own claims and
// what became of them, and of no one else's, neither from peers nor from
// agents.
type Split struct {
	parts []*Cluster
	rng   *rand.Rand
	owner map[int]*Cluster // of every request
}

// NewSplit makes options.Coordinators clusters of one coordinator over the
// same workers.
func NewSplit(o Options, clock *vtime.Clock) (*Split, error) {
	s := &Split{rng: rand.New(rand.NewPCG(o.Seed, 4)), owner: map[int]*Cluster{}}
	n := o.Coordinators
	o.Coordinators = 1
	for i := range n {
		part := o
		part.Seed += uint64(i) << 32
		c, err := New(part, clock)
		if err != nil {
			return nil, err
		}
		s.parts = append(s.parts, c)
	}
	return s, nil
}

// Start lets agents report.
func (s *Split) Start() {
	for _, c := range s.parts {
		c.Start()
	}
}

// Stop ends the periodic reports.
func (s *Split) Stop() {
	for _, c := range s.parts {
		c.Stop()
	}
}

// Err is what went wrong.
func (s *Split) Err() error {
	var errs []error
	for _, c := range s.parts {
		errs = append(errs, c.Err())
	}
	return errors.Join(errs...)
}

// Place implements rules.Router.
func (s *Split) Place(nowMs float64, q rules.Query) int {
	c := s.parts[s.rng.IntN(len(s.parts))]
	s.owner[q.ID] = c
	return c.Place(nowMs, q)
}

// First implements rules.Router.
func (s *Split) First(nowMs float64, id int, atMs float64) { s.owner[id].First(nowMs, id, atMs) }

// Done implements rules.Router.
func (s *Split) Done(nowMs float64, id int, atMs float64, outputTokens int) {
	s.owner[id].Done(nowMs, id, atMs, outputTokens)
}

// Expected is the first-token time that was predicted for a request, ms.
func (s *Split) Expected(id int) float64 { return s.owner[id].Expected(id) }

// Stored tells all of a cache event.
func (s *Split) Stored(worker int, name uint32) {
	for _, c := range s.parts {
		c.Stored(worker, name)
	}
}

// Removed is the opposite of Stored.
func (s *Split) Removed(worker int, name uint32) {
	for _, c := range s.parts {
		c.Removed(worker, name)
	}
}

// Sample tells all how many blocks are held. How many requests run and wait
// would tell each of the others' claims.
func (s *Split) Sample(worker int, counters *Counters) {
	own := *counters
	own.Running = -1
	for _, c := range s.parts {
		c.Sample(worker, &own)
	}
}

// Stores tells all of blocks that an engine stored.
func (s *Split) Stores(worker int, atMs float64, stores []queue.Store) {
	for _, c := range s.parts {
		c.Stores(worker, atMs, stores)
	}
}
