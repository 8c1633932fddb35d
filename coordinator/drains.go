package coordinator

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	"waypost/coordinator/fleet"
	"waypost/coordinator/registry"
)

// drainSettles is how long after a drain is in force a count of 0 is believed:
// placements that were answered before it reach the counts by then.
const drainSettles = time.Second

// drains are the drains in force here, by selector.
type drains struct {
	mu   sync.Mutex
	list map[string]*drain
}

type drain struct {
	since time.Time
	// busy says that it was seen waiting for requests; done that its end was
	// told.
	busy, done bool
}

// follow takes the drains of a state of the registry. One that is there before
// this coordinator began was begun long ago.
func (d *drains) follow(state *registry.State, now time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	next := map[string]*drain{}
	for _, k := range state.Cordons() {
		if k.Drain {
			if next[k.Selector] = d.list[k.Selector]; next[k.Selector] == nil {
				next[k.Selector] = &drain{since: now}
			}
		}
	}
	d.list = next
}

// settled reports whether the counts of what a selector names can be believed.
func (d *drains) settled(selector string, now time.Time) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	one := d.list[selector]
	return one != nil && now.Sub(one.since) >= drainSettles
}

// shownState is the state of a worker as people see it: one that is drained
// says how many requests it still has.
func (c *Coordinator) shownState(w *fleet.WorkerInfo, cordons []registry.Cordon, now time.Time) string {
	if w.State != "cordoned" {
		return w.State
	}
	for _, k := range cordons {
		switch {
		case !k.Drain:
		case math.IsNaN(w.InFlight):
			return "draining(?)"
		case w.InFlight == 0 && c.drains.settled(k.Selector, now):
			return "drained"
		default:
			return fmt.Sprintf("draining(%.0f)", math.Ceil(w.InFlight))
		}
	}
	return w.State
}

// checkDrains tells of drains that are done.
func (c *Coordinator) checkDrains(now time.Time) {
	c.drains.mu.Lock()
	open := maps.Clone(c.drains.list)
	c.drains.mu.Unlock()
	if len(open) == 0 {
		return
	}
	workers := c.fleet.Workers(now)
	for _, selector := range slices.Sorted(maps.Keys(open)) {
		var of []string
		inFlight := 0.0
		for i := range workers {
			if w := &workers[i]; names(selector, w.Name, w.Facts.GPUUUIDs) {
				of, inFlight = append(of, w.Name), inFlight+w.InFlight // NaN stays NaN
			}
		}
		c.drains.mu.Lock()
		d := open[selector]
		d.busy = d.busy || inFlight != 0 || now.Sub(d.since) < drainSettles
		done := len(of) > 0 && inFlight == 0 && now.Sub(d.since) >= drainSettles && d.busy && !d.done
		d.done = d.done || done
		took := now.Sub(d.since)
		c.drains.mu.Unlock()
		if done {
			c.log.Info("drained", "event", "drain_done", "target", selector, "workers", strings.Join(of, " "), "seconds", math.Round(took.Seconds()))
		}
	}
}
