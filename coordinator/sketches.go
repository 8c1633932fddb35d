package coordinator

import (
	"math"
	"slices"
	"sync/atomic"
	"time"

	"waypost/coordinator/fleet"
	"waypost/coordinator/placement"
	"waypost/gossip/prefix"
	"waypost/gossip/summary"
)

// sketches are what the mesh says of workers whose lane is down. Requests read
// them while the next ones are made.
type sketches struct {
	now atomic.Pointer[map[fleet.WorkerID]sketched]
	// outdated is streamOutdated; tests have less time.
	outdated time.Duration
}

// sketched is what the mesh says of one worker.
type sketched struct {
	process uint64
	at      time.Time
	roots   []summary.Root
}

// streamOutdated is the age at which what a stream told before its lane went down
// is worth less than the few prefixes of a sketch that is younger.
const streamOutdated = 2 * time.Minute

// maxSketchAge is the age at which a sketch says nothing any more: the hottest
// prefixes of a worker outlive several of the longest rhythms.
const maxSketchAge = 10 * time.Minute

// readSketches takes the sketches of hosts without a lane. They credit prefixes
// to workers that are known; they never make a worker known or eligible, and
// the word of a lane that is up outranks them.
func (c *Coordinator) readSketches(now time.Time) {
	next := map[fleet.WorkerID]sketched{}
	for _, m := range c.mesh.Sketches() {
		if _, up := c.laneServer.Session(m.Name); up || m.Name == c.name {
			continue
		}
		sk, err := summary.ParseSketch(m.Payload)
		if err != nil {
			c.metrics.badFrames.WithLabelValues("sketch").Inc()
			continue
		}
		at := m.Received.Add(-sk.Age)
		if sk.KeyID != c.prefixKey.IDUint32() || now.Sub(at) > maxSketchAge {
			continue
		}
		for _, w := range sk.Workers {
			id, process, ok := c.fleet.LookupWorker(m.Name + "/" + w.Name)
			if !ok || len(w.Roots) == 0 || w.State == summary.SketchLost || w.State == summary.SketchUnknown {
				continue
			}
			if c.lanes.inferView(m.Name, id, process, now.Sub(at)) {
				next[id] = sketched{process, at, w.Roots}
			}
		}
	}
	c.sketches.now.Store(&next)
}

// credit replaces the matches of workers of whose cache only a sketch is known
// by the deepest of its roots that the prompt begins with. Where none fits, that
// is unknown: a sketch names the hottest prefixes only.
func (s *sketches) credit(f *fleet.Fleet, p *prefix.Probe, matches []placement.Match) []placement.Match {
	now := s.now.Load()
	if now == nil {
		return matches
	}
	for id, sk := range *now {
		if kind, process, ok := f.ViewOf(id); !ok || process != sk.process || kind != placement.ViewInferred {
			continue
		}
		matches = slices.DeleteFunc(matches, func(m placement.Match) bool { return m.Worker == id })
		deepest := placement.Unknown
		for _, r := range sk.roots {
			if depth := int(r.DepthTokens); depth > deepest {
				if key, ok := p.At(depth); ok && key == r.Key {
					deepest = depth
				}
			}
		}
		matches = append(matches, placement.Match{Worker: id, Tokens: int32(deepest)})
	}
	return matches
}

// oldestSec is the age of the oldest sketch in use; NaN: none is.
func (s *sketches) oldestSec(now time.Time) float64 {
	oldest := math.NaN()
	if m := s.now.Load(); m != nil {
		for _, sk := range *m {
			oldest = math.Max(now.Sub(sk.at).Seconds(), nanToZero(oldest))
		}
	}
	return oldest
}

func nanToZero(v float64) float64 {
	if math.IsNaN(v) {
		return 0
	}
	return v
}

// inferView makes the view of a worker whose lane is down one that is inferred
// from a sketch of some age, unless its stream says more.
func (h *lanes) inferView(host string, id fleet.WorkerID, process uint64, age time.Duration) bool {
	h.mu.Lock()
	hl := h.hosts[host]
	h.mu.Unlock()
	if hl == nil {
		return false
	}
	hl.mu.Lock()
	defer hl.mu.Unlock()
	if hl.open {
		return false
	}
	for _, st := range hl.streams {
		if st.worker == id && st.process == process && !st.viewAt.IsZero() {
			if told := time.Since(st.viewAt); told < h.c.sketches.outdated || told < age || st.viewKind == placement.ViewBlind {
				return false
			}
		}
	}
	h.c.setView(id, process, placement.ViewInferred, age)
	return true
}

// stale makes the views of a host's workers stale, as old as they are: its lane
// is down, and what changes is not told. The caller holds hl.mu.
func (h *lanes) stale(hl *hostLane) {
	for _, st := range hl.streams {
		if !st.viewAt.IsZero() && st.viewKind != placement.ViewBlind {
			h.c.setView(st.worker, st.process, placement.ViewStale, time.Since(st.viewAt))
		}
	}
}
