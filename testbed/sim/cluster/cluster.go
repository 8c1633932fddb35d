package cluster

import (
	"fmt"
	"math/rand/v2"
	"time"

	"waypost/testbed/sim/prompt"
	"waypost/testbed/sim/rules"
	"waypost/testbed/sim/vtime"
)

// epoch is the zero of virtual time.
var epoch = time.Unix(2_000_000_000, 0)

// at is a moment of virtual time.
func at(ms float64) time.Time { return epoch.Add(time.Duration(ms * float64(time.Millisecond))) }

// Cluster places requests as a fleet of agents and coordinators does.
type Cluster struct {
	options      Options
	clock        *vtime.Clock
	rng          *rand.Rand
	agents       []*agent
	coordinators []*coordinator
	// caches are what the workers' events told of their caches so far.
	caches []prompt.Set
	owner  map[int]*coordinator // of requests that have not ended
	marks  uint64               // process marks handed out

	// expected are the predicted first-token times by request, ms.
	expected map[int]float64

	stopped bool
	err     error
}

var _ rules.Router = (*Cluster)(nil)

// New makes a cluster on a clock.
func New(o Options, clock *vtime.Clock) (*Cluster, error) {
	if err := o.validate(); err != nil {
		return nil, err
	}
	c := &Cluster{
		options: o, clock: clock, rng: rand.New(rand.NewPCG(o.Seed, 3)),
		caches: make([]prompt.Set, o.Workers), owner: map[int]*coordinator{}, expected: map[int]float64{},
	}
	for w := range o.Workers {
		a, err := newAgent(c, w)
		if err != nil {
			return nil, err
		}
		c.agents = append(c.agents, a)
	}
	for range o.Coordinators {
		k := &coordinator{cluster: c}
		if err := k.restart(); err != nil {
			return nil, err
		}
		c.coordinators = append(c.coordinators, k)
	}
	return c, nil
}

// processMark is a mark that no process had.
func (c *Cluster) processMark() uint64 {
	c.marks++
	return c.marks
}

// fail keeps the first error; a run ends with it.
func (c *Cluster) fail(err error) {
	if err != nil && c.err == nil {
		c.err = err
	}
}

// Err is what went wrong between the parts; a sound cluster gives nil.
func (c *Cluster) Err() error { return c.err }

// Start opens the lanes and lets agents report.
func (c *Cluster) Start() {
	for _, a := range c.agents {
		for _, k := range c.coordinators {
			a.openLane(k)
		}
		// Hosts report out of step.
		c.clock.After(c.rng.Float64()*c.options.LoadMs, a.tick)
	}
	for _, k := range c.coordinators {
		c.clock.After(c.rng.Float64()*tickMs, k.tick)
	}
}

// Stop ends what happens by period, so that a run can end.
func (c *Cluster) Stop() { c.stopped = true }

// Place implements rules.Router: the request comes to a random coordinator.
func (c *Cluster) Place(nowMs float64, q rules.Query) int {
	k := c.coordinators[0]
	if n := len(c.coordinators); n > 1 {
		k = c.coordinators[c.rng.IntN(n)]
	}
	c.owner[q.ID] = k
	return k.place(nowMs, q)
}

// First implements rules.Router.
func (c *Cluster) First(_ float64, id int, atMs float64) {
	if k := c.owner[id]; k != nil {
		k.first(id, atMs)
	}
}

// Done implements rules.Router.
func (c *Cluster) Done(_ float64, id int, atMs float64, outputTokens int) {
	if k := c.owner[id]; k != nil {
		delete(c.owner, id)
		k.done(id, atMs, outputTokens)
	}
}

// Expected is the first-token time that was predicted for a request, ms.
func (c *Cluster) Expected(id int) float64 { return c.expected[id] }

// Stored tells that the coordinators hear that a block entered a worker's
// cache.
func (c *Cluster) Stored(worker int, name uint32) { c.caches[worker].Add(name) }

// Removed is the opposite of Stored.
func (c *Cluster) Removed(worker int, name uint32) { c.caches[worker].Remove(name) }

// travelMs is how long a message is on its way.
func (c *Cluster) travelMs() float64 {
	ms := travelMinMs + c.rng.Float64()*(travelMaxMs-travelMinMs)
	if o := &c.options; o.SlowShare > 0 && c.rng.Float64() < o.SlowShare {
		ms += o.SlowMinMs + c.rng.Float64()*(o.SlowMaxMs-o.SlowMinMs)
	}
	return ms
}

// hostName names the host of a worker.
func hostName(w int) string { return fmt.Sprintf("host-%02d", w) }
