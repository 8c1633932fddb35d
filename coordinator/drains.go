package coordinator

import (
	"context"
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
	// wishes are the ids of hosts' wishes of which this coordinator knows that
	// they are drains now, by host.
	wishes map[string]string
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
		case w.InFlight == 0 && (c.drains.settled(k.Selector, now) || w.Wish.ID != "" && w.WishMs >= ms(drainSettles)):
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
			if w := &workers[i]; selects(selector, w) {
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

// wishDrain is a host's own wish as a drain that no leader knows yet.
func wishDrain(host string, wish fleet.DrainWish) registry.Cordon {
	return registry.Cordon{Selector: host, Reason: wish.Reason, By: wishedBy(host), Drain: true}
}

func wishedBy(host string) string { return "agent of " + host + " (drain --local)" }

// unrecorded are the wishes of hosts that a state of the registry has no drain
// for.
func unrecorded(wishes map[string]fleet.DrainWish, state *registry.State) map[string]fleet.DrainWish {
	for _, k := range state.Cordons() {
		if k.Drain {
			delete(wishes, k.Selector)
		}
	}
	return wishes
}

// recorded is the id of a host's wish that is a drain now; empty: none.
func (d *drains) recorded(host string) string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.wishes[host]
}

// recordWithin bounds the time that making a drain of a wish may take.
const recordWithin = 10 * time.Second

// recordWishes makes drains of what hosts wish for themselves, while this
// coordinator leads. A host is told, and then wishes it no more: from then on
// operators decide. A wish is recorded by its id, so that one which is still
// said after somebody took its drain back does not bring it back.
func (c *Coordinator) recordWishes() {
	t := time.NewTicker(time.Second)
	defer t.Stop()
	for {
		select {
		case <-c.ctx.Done():
			return
		case <-t.C:
		}
		wishes := c.fleet.DrainWishes()
		c.drains.mu.Lock()
		maps.DeleteFunc(c.drains.wishes, func(host, id string) bool { return wishes[host].ID != id })
		c.drains.mu.Unlock()
		if len(wishes) == 0 || !c.replica.IsLeader() {
			continue
		}
		for _, host := range slices.Sorted(maps.Keys(wishes)) {
			if err := c.recordWish(host, wishes[host]); err != nil {
				c.log.Warn("wish of a host is not recorded; it is obeyed all the same", "host", host, "error", err)
			}
		}
	}
}

func (c *Coordinator) recordWish(host string, wish fleet.DrainWish) error {
	ctx, cancel := context.WithTimeout(c.ctx, recordWithin)
	defer cancel()
	if c.drains.recorded(host) != wish.ID {
		cmd, err := registry.Encode(registry.Stamp{RequestID: "drain-wish-" + host + "-" + wish.ID, At: time.Now(), By: wishedBy(host), Via: c.name},
			registry.SetCordon{Selector: host, Reason: wish.Reason, Drain: true})
		if err != nil {
			return err
		}
		applied, err := c.replica.Propose(ctx, cmd)
		if err == nil {
			err = applied.Result.Err()
		}
		if err != nil {
			return err
		}
		if err := c.replica.WaitApplied(ctx, applied.Index); err != nil {
			return err
		}
		c.drains.mu.Lock()
		if c.drains.wishes == nil {
			c.drains.wishes = map[string]string{}
		}
		c.drains.wishes[host] = wish.ID
		c.drains.mu.Unlock()
	}
	// As long as the host says it, it has not heard.
	for _, s := range c.laneServer.Sessions() {
		if s.Host() == host {
			c.lanes.sendPolicy(s, c.replica.State())
		}
	}
	return nil
}
