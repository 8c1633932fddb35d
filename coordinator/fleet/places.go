package fleet

import (
	"fmt"
	"math"
	"slices"
	"time"

	"waypost/gossip/ledger"
)

// Bounds of what peers say.
const (
	maxCoordinators = ledger.MaxCoordinators
	maxKeptKeys     = 1024 // claims per worker whose predicted keys are kept
	maxCounted      = 1000 // arrivals taken from one step of an echo
	// Predicted keys of a peer's claim live until its predicted first token,
	// times keyFactor, and keyRestMs: peers do not tell the end. Those of an own
	// one that is done live for keyRestMs at most, and until the view is viewLagMs
	// newer than its end.
	keyFactor = 1.3
	keyRestMs = 2_000
	viewLagMs = 100
	// maxParts is the number of claims of one placement.
	maxParts = 2
)

// keptKeys are predicted keys of a peer's claim, or of an own one that is done:
// what was computed for it is told with the next changes of the cache only.
type keptKeys struct {
	number  uint64
	untilMs float64
	// doneMs is when an own claim ended: once the view is that new, it tells what
	// became of them. NaN: a peer's.
	doneMs float64
}

// counted is how far the claims of one coordinator were counted as arrivals.
type counted struct{ coordinator, seq uint64 }

// peerRequest is a request that another coordinator placed.
type peerRequest struct {
	coordinator uint64
	attempt     uint32
	placement   string
	atMs        float64
	parts       []peerPart
}

// peerPart is one claim of it.
type peerPart struct {
	worker  string
	process uint64
	seq     uint64
}

func (p *peerRequest) processes(dst []uint64) []uint64 {
	for _, part := range p.parts {
		dst = append(dst, part.process)
	}
	return dst
}

// Placed takes a placement that a peer told. Lost, doubled, late and reordered
// ones do no harm: what counts follows from the claim and the report in hand.
func (f *Fleet) Placed(now time.Time, coordinator uint64, placed ledger.Placed) (Changes, error) {
	var changes Changes
	if err := placed.Validate(); err != nil {
		return changes, err
	}
	if coordinator == 0 {
		return changes, fmt.Errorf("%w: coordinator: is 0; the coordinator must send its process mark", ledger.ErrFrame)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	nowMs := f.Ms(now)
	w := f.byName[placed.Worker]
	switch {
	case coordinator == f.options.Process:
		f.counts.OwnPlaces++
		return changes, nil
	case w == nil:
		f.counts.UnknownPlaces++
		return changes, nil
	case w.isPast(placed.EngineProcess):
		f.counts.FencedPlaces++
		return changes, nil
	}
	f.countArrivals(w, coordinator, placed.Seq, nowMs)
	if placed.RequestID != "" {
		if stale := f.notePeerRequest(coordinator, &placed, nowMs); stale {
			f.counts.OlderPlaces++
			return changes, nil
		}
	}
	f.addPeer(w, coordinator, &placed, nowMs, &changes)
	if placed.RequestID != "" {
		f.resolve(RequestKey{Tenant: placed.Tenant, ID: placed.RequestID}, nowMs, &changes)
	}
	return changes, nil
}

// addPeer puts a peer's claim on top of the worker's report, if the report in
// hand neither speaks of it nor must have.
func (f *Fleet) addPeer(w *worker, coordinator uint64, placed *ledger.Placed, nowMs float64, changes *Changes) {
	c := placed.Received(nowMs)
	if slices.ContainsFunc(w.open, func(p *part) bool { return p.coordinator == coordinator && p.Seq == c.Seq }) {
		f.counts.DuplicatePlaces++
		return
	}
	f.claims.number++
	p := &part{w: w, coordinator: coordinator, number: f.claims.number, Claim: c}
	r := &w.report
	if r.any {
		p.covered = r.covers(c.MadeMs, c.Seq <= w.echoOf(coordinator), w.echoing, f.graceMs)
		if p.covered && r.writtenMs-c.MadeMs > f.graceMs {
			return
		}
	}
	p.Keys, p.KeyDepths = nil, nil
	f.insert(w, p)
	f.claims.peerParts++
	if f.claims.peerParts > f.options.MaxClaims {
		f.foldOldestPeer(w)
	}
	if !w.followed && (len(c.Keys) > 0 || c.AfterKey != 0) {
		f.predictPeer(w, p.number, &c, nowMs)
	}
	f.publish(w, nowMs, changes)
}

// foldOldestPeer makes room for claims of peers.
func (f *Fleet) foldOldestPeer(w *worker) {
	at := slices.IndexFunc(w.open, func(p *part) bool { return p.c == nil })
	if p := w.open[at]; p.pending() {
		f.fold(w, p)
	}
	f.claims.peerParts--
	w.open = slices.Delete(w.open, at, at+1)
}

// predictPeer predicts the keys of a peer's claim for a while.
func (f *Fleet) predictPeer(w *worker, number uint64, c *ledger.Claim, nowMs float64) {
	wait := max(w.waiting.QueueMs(nowMs), w.steps.PrefillMs(c.ReusedTokens(), c.UncachedTokens))
	f.keepKeys(w, keptKeys{number, nowMs + keyFactor*wait + keyRestMs, math.NaN()})
	f.options.Predicted.AddPredicted(w.id, number, c.AfterKey, c.Keys, c.KeyDepths)
}

// keepKeys keeps predicted keys that no open claim has; the oldest make room.
func (f *Fleet) keepKeys(w *worker, k keptKeys) {
	if len(w.keptKeys) >= maxKeptKeys {
		f.options.Predicted.RemovePredicted(w.id, w.keptKeys[0].number)
		w.keptKeys = slices.Delete(w.keptKeys, 0, 1)
	}
	w.keptKeys = append(w.keptKeys, k)
}

// dropKeys takes kept keys back for which drop says so.
func (f *Fleet) dropKeys(w *worker, drop func(keptKeys) bool) {
	w.keptKeys = slices.DeleteFunc(w.keptKeys, func(k keptKeys) bool {
		if !drop(k) {
			return false
		}
		f.options.Predicted.RemovePredicted(w.id, k.number)
		return true
	})
}

// echoOf is the newest echo of a coordinator's claims.
func (w *worker) echoOf(coordinator uint64) uint64 {
	for _, e := range w.echoes {
		if e.Coordinator == coordinator {
			return e.Upto
		}
	}
	return 0
}

// countArrivals counts the claims of a peer up to a seq, each once, whether a
// placement or an echo tells of them first: λ is of all arrivals.
func (f *Fleet) countArrivals(w *worker, coordinator, seq uint64, nowMs float64) {
	at := slices.IndexFunc(w.counted, func(c counted) bool { return c.coordinator == coordinator })
	if at < 0 {
		if len(w.counted) >= maxCoordinators {
			w.counted = slices.Delete(w.counted, 0, 1)
		}
		w.counted = append(w.counted, counted{coordinator, seq - 1})
		at = len(w.counted) - 1
	}
	c := &w.counted[at]
	if seq <= c.seq {
		return
	}
	fresh := min(seq-c.seq, maxCounted)
	c.seq = seq
	if pool := f.pools[w.assigned.Pool]; pool != nil {
		for range fresh {
			pool.arrivals.add(nowMs)
		}
	}
}

// countEchoes counts what the echoes of a report say of peers' claims. The
// first echo of a coordinator is where counting begins.
func (f *Fleet) countEchoes(w *worker, echoes []ledger.Echo, nowMs float64) {
	for _, e := range echoes {
		if e.Coordinator == f.options.Process || e.Upto == 0 {
			continue
		}
		if !slices.ContainsFunc(w.counted, func(c counted) bool { return c.coordinator == e.Coordinator }) {
			if len(w.counted) >= maxCoordinators {
				w.counted = slices.Delete(w.counted, 0, 1)
			}
			w.counted = append(w.counted, counted{e.Coordinator, e.Upto})
			continue
		}
		f.countArrivals(w, e.Coordinator, e.Upto, nowMs)
	}
}

// notePeerRequest remembers who placed a request. It reports true for a
// placement of an attempt that a later one superseded.
func (f *Fleet) notePeerRequest(coordinator uint64, placed *ledger.Placed, nowMs float64) (stale bool) {
	key := RequestKey{Tenant: placed.Tenant, ID: placed.RequestID}
	l := &f.claims
	known := l.peerRequests[key]
	if known == nil {
		if out, full := l.peerRing.push(key, f.options.MaxEnded); full {
			delete(l.peerRequests, out)
		}
		known = &peerRequest{coordinator: coordinator, attempt: placed.Attempt, placement: placed.Placement}
		l.peerRequests[key] = known
	}
	switch {
	case placed.Attempt < known.attempt:
		return true
	case placed.Attempt > known.attempt, coordinator < known.coordinator, f.settled(known, nowMs) && coordinator != known.coordinator:
		// A later attempt, or of two coordinators the one that stays.
		f.withdraw(known, nowMs)
		*known = peerRequest{coordinator: coordinator, attempt: placed.Attempt, placement: placed.Placement}
	case coordinator > known.coordinator:
		return true
	}
	known.atMs = nowMs
	part := peerPart{placed.Worker, placed.EngineProcess, placed.Seq}
	if !slices.Contains(known.parts, part) && len(known.parts) < maxParts {
		known.parts = append(known.parts, part)
	}
	return false
}

// settled reports whether a peer's placement is too old to be one of two that
// were made at once: the same request is then placed anew.
func (f *Fleet) settled(r *peerRequest, nowMs float64) bool {
	return nowMs-r.atMs > durationMs(f.options.ReservationTTL)
}

// withdraw takes a peer's claims of a superseded placement off their workers;
// its issuer tells the agents.
func (f *Fleet) withdraw(r *peerRequest, nowMs float64) {
	for _, at := range r.parts {
		w := f.byName[at.worker]
		if w == nil {
			continue
		}
		if f.dropPeers(w, func(p *part) bool { return p.coordinator == r.coordinator && p.Seq == at.seq }) {
			w.refold()
			f.publish(w, nowMs, new(Changes))
		}
	}
}

// resolve settles a request that both this coordinator and a peer placed: of
// different attempts the higher stays, of the same one that of the smaller
// coordinator mark. The other issuer marks its claims superseded.
func (f *Fleet) resolve(key RequestKey, nowMs float64, changes *Changes) {
	own, peer := f.claims.byKey[key], f.claims.peerRequests[key]
	if own == nil || peer == nil || own.Attempt == peer.attempt && f.settled(peer, nowMs) {
		return
	}
	if own.Attempt > peer.attempt || own.Attempt == peer.attempt && f.options.Process < peer.coordinator {
		f.withdraw(peer, nowMs)
		return
	}
	f.counts.SupersededClaims++
	for _, p := range own.parts {
		f.tellMark(p, ledger.MarkSuperseded, 0, nowMs)
	}
	f.end(own, EndSuperseded, nowMs, changes)
}
