package cluster

import "waypost/coordinator/placement"

// Lanes are known by coordinator and worker. SetLane loses a lane or opens it
// again.
func (c *Cluster) SetLane(coordinator, worker int, up bool) {
	k, a := c.coordinators[coordinator], c.agents[worker]
	switch {
	case up && a.lanes[k] == nil:
		a.openLane(k)
	case !up:
		a.closeLane(k)
	}
}

// RestartAgent ends an agent's life and begins another with what it had learnt
// and kept on disk; its lanes come up again at once.
func (c *Cluster) RestartAgent(worker int) {
	a := c.agents[worker]
	up := map[*coordinator]bool{}
	for _, k := range c.coordinators {
		up[k] = a.lanes[k] != nil
		a.closeLane(k)
	}
	kept := a.estimator.Export()
	c.fail(a.restart())
	c.fail(a.estimator.Import(kept))
	for _, k := range c.coordinators {
		if up[k] {
			a.openLane(k)
		}
	}
}

// RestartCoordinator ends a coordinator's life and begins another; its lanes
// come up again at once.
func (c *Cluster) RestartCoordinator(coordinator int) {
	k := c.coordinators[coordinator]
	var up []*agent
	for _, a := range c.agents {
		if a.lanes[k] != nil {
			up = append(up, a)
			a.closeLane(k)
		}
	}
	c.fail(k.restart())
	for _, a := range up {
		a.openLane(k)
	}
	k.look(c.clock.NowMs())
}

// RestartEngine tells that a worker's engine is a new process with an empty
// cache: its agent sees it, and with the next report the coordinators.
func (c *Cluster) RestartEngine(worker int) {
	a := c.agents[worker]
	a.engine = c.processMark()
	a.estimator.SetProcess(a.engine)
	c.caches[worker].Clear()
	a.report()
}

// Waits are the waiting ms that a coordinator believes of every worker;
// unknown ones as if nothing waited.
func (c *Cluster) Waits(coordinator int, dst []float64) []float64 {
	k := c.coordinators[coordinator]
	now := c.clock.NowMs()
	var err error
	k.candidates, _, err = k.candidatesAt(now)
	c.fail(err)
	dst = dst[:0]
	for range c.agents {
		dst = append(dst, 0)
	}
	for i := range k.candidates {
		w := k.candidates[i].Worker
		dst[k.workerOf(w)] = w.Waiting.QueueMs(now)
	}
	return dst
}

// Residue counts the claims that coordinators and agents still hold.
func (c *Cluster) Residue() int {
	n := 0
	for _, k := range c.coordinators {
		n += k.fleet.OpenClaims()
	}
	for _, a := range c.agents {
		open, _ := a.estimator.OpenClaims()
		n += open
	}
	return n
}

// workerOf is the worker of a snapshot.
func (k *coordinator) workerOf(w *placement.Worker) int { return k.index[w.Name] }
