package views

import (
	"math"
	"time"

	"waypost/coordinator/fleet"
	"waypost/coordinator/placement"
	"waypost/gossip/mesh"
	"waypost/gossip/prefix"
	"waypost/gossip/summary"
)

// sketched is what the mesh says of one worker whose lane is down.
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

// TakeSketches takes the sketches of hosts without a lane, in place of the former
// ones. They credit prefixes to workers that are known; they never make a worker
// known or eligible, and the word of a lane that is up outranks them.
func (vs *Views) TakeSketches(now time.Time, of []mesh.Sketch) {
	next := map[fleet.WorkerID]sketched{}
	for _, m := range of {
		sk, err := summary.ParseSketch(m.Payload)
		if err != nil {
			vs.opt.Refused("sketch")
			continue
		}
		at := m.Received.Add(-sk.Age)
		if sk.KeyID != vs.prefixKey.IDUint32() || now.Sub(at) > maxSketchAge {
			continue
		}
		for _, w := range sk.Workers {
			id, process, ok := vs.fleet.LookupWorker(m.Name + "/" + w.Name)
			if !ok || len(w.Roots) == 0 || w.State == summary.SketchLost || w.State == summary.SketchUnknown {
				continue
			}
			if vs.inferView(m.Name, id, process, now.Sub(at)) {
				next[id] = sketched{process, at, w.Roots}
			}
		}
	}
	vs.sketches.Store(&next)
}

// Credit replaces the matches of workers of whose cache only a sketch is known
// by the deepest of its roots that the prompt begins with. Where none fits, that
// is unknown: a sketch names the hottest prefixes only.
func (vs *Views) Credit(p *prefix.Probe, matches *placement.Matches) {
	now := vs.sketches.Load()
	if now == nil {
		return
	}
	for id, sk := range *now {
		if kind, process, ok := vs.fleet.ViewOf(id); !ok || process != sk.process || kind != placement.ViewInferred {
			continue
		}
		matches.Remove(id)
		deepest := placement.Unknown
		for _, r := range sk.roots {
			if depth := int(r.DepthTokens); depth > deepest {
				if key, ok := p.At(depth); ok && key == r.Key {
					deepest = depth
				}
			}
		}
		matches.Add(id, placement.Held{Tokens: int32(deepest)})
	}
}

// oldestSketchSec is the age of the oldest sketch in use; NaN: none is.
func (vs *Views) oldestSketchSec(now time.Time) float64 {
	oldest := math.NaN()
	if m := vs.sketches.Load(); m != nil {
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
func (vs *Views) inferView(host string, id fleet.WorkerID, process uint64, age time.Duration) bool {
	hs := vs.known(host)
	if hs == nil {
		return false
	}
	hs.mu.Lock()
	defer hs.mu.Unlock()
	if hs.session != nil {
		return false
	}
	for _, st := range hs.streams {
		if st.worker == id && st.process == process && !st.viewAt.IsZero() {
			if told := time.Since(st.viewAt); told < streamOutdated || told < age || st.viewKind == placement.ViewBlind {
				return false
			}
		}
	}
	vs.setView(id, process, placement.ViewInferred, age)
	return true
}

// stale makes the views of a host's workers stale, as old as they are: its lane
// is down, and what changes is not told. The caller holds hs.mu.
func (vs *Views) stale(hs *hostStreams) {
	for _, st := range hs.streams {
		if !st.viewAt.IsZero() && st.viewKind != placement.ViewBlind {
			vs.setView(st.worker, st.process, placement.ViewStale, time.Since(st.viewAt))
		}
	}
}
