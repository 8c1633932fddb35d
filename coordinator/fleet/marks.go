package fleet

import (
	"container/heap"
	"fmt"
	"slices"
	"strings"
	"time"

	"waypost/coordinator/placement"
	"waypost/gossip/ledger"
)

// Mark says what happened to a placement. A second end changes nothing and is
// counted; ErrUnknownPlacement means that nobody remembers it. outputTokens
// is the length of the answer for MarkDone; 0: unknown. The agents of its
// workers are told.
func (f *Fleet) Mark(now time.Time, placementID string, mark ledger.Mark, outputTokens int) (Changes, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var changes Changes
	if !mark.Valid() {
		return changes, fmt.Errorf("%w: mark: %q is not first, done, failed, gone or superseded", ErrClaim, mark)
	}
	c := f.claims.byPlacement[placementID]
	if c == nil {
		if _, ended := f.claims.ended[placementID]; ended {
			f.counts.DuplicateMarks++
			return changes, nil
		}
		f.counts.UnknownMarks++
		return changes, fmt.Errorf("%w: %q", ErrUnknownPlacement, placementID)
	}
	nowMs := f.Ms(now)
	if mark == ledger.MarkFirst {
		f.first(c, nowMs)
		for _, p := range c.parts {
			f.publish(p.w, nowMs, &changes)
		}
		return changes, nil
	}
	if mark == ledger.MarkDone && outputTokens > 0 {
		if pool := f.pools[c.parts[0].w.assigned.Pool]; pool != nil {
			pool.output.add(float64(min(outputTokens, ledger.MaxTokens)))
		}
	}
	for _, p := range c.parts {
		f.tellMark(p, mark, outputTokens, nowMs)
	}
	f.end(c, EndReason(mark), nowMs, &changes)
	return changes, nil
}

// NoteReuse notes how much of a placement's prompt its engine reused, for the
// agent, which is told with the end. An unknown placement changes nothing.
func (f *Fleet) NoteReuse(placementID string, cachedTokens int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if c := f.claims.byPlacement[placementID]; c != nil && cachedTokens >= 0 {
		c.cachedTokens = &cachedTokens
	}
}

// maxErrorMs bounds one prediction error.
const maxErrorMs = 60_000

// first takes the first token of a placement: its prefill is over. The worker
// that only prefilled is done with it.
func (f *Fleet) first(c *claim, nowMs float64) {
	f.renew(c, nowMs)
	if c.first {
		return
	}
	c.first = true
	if c.expected > 0 {
		off := nowMs - c.MadeMs - c.expected
		c.parts[0].w.errorMs.add(min(max(off, -off), maxErrorMs))
	}
	for i, p := range c.parts {
		if i < len(c.parts)-1 {
			f.tellMark(p, ledger.MarkDone, 0, nowMs)
		} else {
			f.tellMark(p, ledger.MarkFirst, 0, nowMs)
		}
		if p.waits() {
			p.first = true
			p.w.refold()
		}
		p.first = true
	}
}

// Renew extends the reservation of a placement.
func (f *Fleet) Renew(now time.Time, placementID string) (ttl time.Duration, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	c := f.claims.byPlacement[placementID]
	if c == nil {
		return 0, fmt.Errorf("%w: %q", ErrUnknownPlacement, placementID)
	}
	nowMs := f.Ms(now)
	f.renew(c, nowMs)
	return time.Duration((c.deadlineMs - nowMs) * float64(time.Millisecond)), nil
}

// renew moves the deadline of a claim, within its longest life.
func (f *Fleet) renew(c *claim, nowMs float64) {
	c.deadlineMs = min(nowMs+durationMs(f.options.ReservationTTL), c.MadeMs+durationMs(f.options.MaxClaimLife))
	heap.Fix(&f.claims.deadlines, c.heapIndex)
}

// end ends a placement with all its claims and publishes their workers.
func (f *Fleet) end(c *claim, how EndReason, nowMs float64, changes *Changes) {
	delete(f.claims.byPlacement, c.Placement)
	if f.claims.tenantTokens[c.Key.Tenant] -= int64(c.PromptTokens); f.claims.tenantTokens[c.Key.Tenant] <= 0 {
		delete(f.claims.tenantTokens, c.Key.Tenant)
	}
	if f.claims.byKey[c.Key] == c {
		delete(f.claims.byKey, c.Key)
	}
	heap.Remove(&f.claims.deadlines, c.heapIndex)
	f.remember(c, how)
	changes.Ended = append(changes.Ended, EndedClaim{OpenClaim: c.OpenClaim, How: how, First: c.first, AgeMs: nowMs - c.MadeMs})
	for _, p := range c.parts {
		w := p.w
		w.open = slices.DeleteFunc(w.open, func(other *part) bool { return other == p })
		switch {
		case len(p.Keys) == 0 && !p.extended:
		case how == EndDone && w.view.Kind == placement.ViewLive:
			f.keepKeys(w, keptKeys{c.Number, nowMs + keyRestMs, nowMs})
		default:
			f.options.Predicted.RemovePredicted(w.id, c.Number)
		}
		if p.waits() {
			w.refold()
		}
		f.publish(w, nowMs, changes)
	}
}

// remember keeps the end of a claim for a while.
func (f *Fleet) remember(c *claim, how EndReason) {
	l := &f.claims
	if _, known := l.ended[c.Placement]; !known {
		if out, full := l.endedPlacement.push(c.Placement, f.options.MaxEnded); full {
			delete(l.ended, out)
		}
	}
	l.ended[c.Placement] = how
	if _, known := l.endedKeys[c.Key]; !known {
		if out, full := l.endedRequests.push(c.Key, f.options.MaxEnded); full {
			delete(l.endedKeys, out)
		}
	}
	l.endedKeys[c.Key] = endedRequest{attempt: c.Attempt, excluded: c.excludedNow()}
}

// endAll ends the placements of a worker whose engine is gone.
func (f *Fleet) endAll(w *worker, nowMs float64, changes *Changes) {
	for {
		at := slices.IndexFunc(w.open, func(p *part) bool { return p.c != nil })
		if at < 0 {
			return
		}
		f.end(w.open[at].c, EndWorkerLost, nowMs, changes)
	}
}

// Tick ends claims whose reservation is over, forgets those of peers that no
// report speaks of, and removes workers that their agents stopped listing and
// hosts that went away, both long ago. Call it about once per second.
func (f *Fleet) Tick(now time.Time) Changes {
	f.mu.Lock()
	defer f.mu.Unlock()
	var changes Changes
	nowMs := f.Ms(now)
	for len(f.claims.deadlines) > 0 && f.claims.deadlines[0].deadlineMs <= nowMs {
		f.end(f.claims.deadlines[0], EndExpired, nowMs, &changes)
	}
	forget := durationMs(f.options.ForgetAfter)
	for _, w := range f.slots {
		if w == nil {
			continue
		}
		if !w.listed && nowMs-w.unlistedMs >= forget {
			f.removeWorker(w, nowMs, &changes)
			continue
		}
		f.expirePeers(w, nowMs, &changes)
	}
	var lost []*host
	for _, h := range f.hosts {
		if h.lane == 0 && nowMs-h.downSinceMs >= durationMs(f.options.ForgetHostAfter) {
			lost = append(lost, h)
		}
	}
	// Slots are used again in the order in which they were freed.
	slices.SortFunc(lost, func(a, b *host) int { return strings.Compare(a.name, b.name) })
	for _, h := range lost {
		f.removeHost(h, nowMs, &changes)
	}
	f.settleGroups(nowMs, &changes)
	return changes
}
