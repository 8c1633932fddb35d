package fleet

import (
	"container/heap"
	"fmt"
	"slices"
	"time"

	"waypost/coordinator/placement"
	"waypost/gossip/ledger"
)

// maxPending bounds the claims of one worker that are not in its report; the
// oldest beyond it are folded into the report.
const maxPending = 1024

// maxExcluded bounds the engine lives that the attempts of one request
// exclude; the oldest go first.
const maxExcluded = 16

// RequestKey names a request. Attempts of it share the key.
type RequestKey struct{ Tenant, ID string }

// EndReason says how a claim ended.
type EndReason string

// The ends of a claim.
const (
	EndDone       EndReason = "done"
	EndFailed     EndReason = "failed"
	EndGone       EndReason = "gone"
	EndSuperseded EndReason = "superseded"
	// EndExpired: no sign of life in the reservation's time.
	EndExpired EndReason = "expired"
	// EndWorkerLost: its engine process is over, or its worker was removed.
	EndWorkerLost EndReason = "worker_lost"
)

// NewClaim asks for a claim on a chosen worker.
type NewClaim struct {
	// Key and Attempt name the request; attempts count from 1.
	Key     RequestKey
	Attempt uint32
	// Placement is the placement's id, unique.
	Placement string
	// Worker is the choice.
	Worker WorkerID
	// Claim holds its sizes, and the engine process as it was decided; Seq
	// and MadeMs are set by the fleet.
	ledger.Claim
	// ExpectedFirstMs is the predicted first-token time; 0: none.
	ExpectedFirstMs float64
	// Answer is what a repeated request gets again.
	Answer any
}

// maxClaimKeys bounds the predicted keys of one claim.
const maxClaimKeys = 1 << 16

// validate names the first field that is out of range.
func (n *NewClaim) validate() error {
	bad := func(field, format string, args ...any) error {
		return fmt.Errorf("%w: %s: %s", ErrClaim, field, fmt.Sprintf(format, args...))
	}
	switch {
	case n.Placement == "":
		return bad("placement", "is empty")
	case n.PromptTokens < 1 || n.PromptTokens > ledger.MaxTokens:
		return bad("promptTokens", "%d is not in 1 to %d", n.PromptTokens, ledger.MaxTokens)
	case n.UncachedTokens < 1 || n.UncachedTokens > n.PromptTokens:
		return bad("uncachedTokens", "%d is not in 1 to %d", n.UncachedTokens, n.PromptTokens)
	case n.Sequences < 0 || n.Sequences > maxWorkersPerHost:
		return bad("n", "%d is not in 1 to %d", n.Sequences, maxWorkersPerHost)
	case len(n.Keys) != len(n.KeyDepths):
		return bad("keyDepths", "%d depths for %d keys", len(n.KeyDepths), len(n.Keys))
	case len(n.Keys) > maxClaimKeys:
		return bad("keys", "%d are more than %d", len(n.Keys), maxClaimKeys)
	}
	return nil
}

// OpenClaim is a claim as the fleet holds it.
type OpenClaim struct {
	// Number is unique in this coordinator's life; it names predicted keys.
	Number uint64
	// Key, Attempt and Placement are as asked.
	Key       RequestKey
	Attempt   uint32
	Placement string
	// Worker is where it is.
	Worker WorkerID
	ledger.Claim
	// Answer is what a repeated request gets again.
	Answer any
}

// EndedClaim is a claim that ended.
type EndedClaim struct {
	OpenClaim
	How EndReason
	// First says that its first token had been seen.
	First bool
	// AgeMs is how long it lived.
	AgeMs float64
}

// claim is an open claim.
type claim struct {
	OpenClaim
	w          *worker
	covered    bool // the report speaks of it
	first      bool
	expected   float64
	excluded   []uint64 // engine lives of former attempts
	deadlineMs float64
	heapIndex  int
}

// waits reports whether its prefill is ahead and not in the report.
func (c *claim) waits() bool { return !c.covered && !c.first }

// claims is the ledger of own claims.
type claims struct {
	number         uint64
	lastRemovedSeq uint64
	byKey          map[RequestKey]*claim
	byPlacement    map[string]*claim
	deadlines      deadlines

	ended          map[string]EndReason // by placement
	endedKeys      map[RequestKey]endedRequest
	endedPlacement ring[string]
	endedRequests  ring[RequestKey]
}

// endedRequest is what is remembered of a request whose claim ended.
type endedRequest struct {
	attempt  uint32
	excluded []uint64
}

func (c *claims) init() {
	c.byKey = map[RequestKey]*claim{}
	c.byPlacement = map[string]*claim{}
	c.ended = map[string]EndReason{}
	c.endedKeys = map[RequestKey]endedRequest{}
}

// ring remembers the last n keys in order.
type ring[K any] struct {
	keys []K
	next int
}

// push remembers a key and returns the one it pushes out, if any.
func (r *ring[K]) push(key K, n int) (out K, full bool) {
	if len(r.keys) < n {
		r.keys = append(r.keys, key)
		return out, false
	}
	out = r.keys[r.next]
	r.keys[r.next] = key
	r.next = (r.next + 1) % n
	return out, true
}

// Admission is what the ledger says before a request is placed.
type Admission struct {
	// Stored is the open claim of the same attempt; nil: place the request.
	Stored *OpenClaim
	// ExcludeProcesses are the engine lives that former attempts used up.
	ExcludeProcesses []uint64
}

// Admit asks what to do with an attempt of a request: answer what is stored,
// place it without the processes of former attempts, or refuse it with
// ErrOlderAttempt.
func (f *Fleet) Admit(key RequestKey, attempt uint32) (Admission, error) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	return f.admit(key, attempt)
}

func (f *Fleet) admit(key RequestKey, attempt uint32) (Admission, error) {
	if c := f.claims.byKey[key]; c != nil {
		switch {
		case attempt == c.Attempt:
			stored := c.OpenClaim
			return Admission{Stored: &stored}, nil
		case attempt < c.Attempt:
			return Admission{}, fmt.Errorf("%w: request %q is at attempt %d, %d came", ErrOlderAttempt, key.ID, c.Attempt, attempt)
		}
		return Admission{ExcludeProcesses: c.excludedNow()}, nil
	}
	e, ended := f.claims.endedKeys[key]
	switch {
	case !ended || attempt == e.attempt:
		return Admission{}, nil
	case attempt < e.attempt:
		return Admission{}, fmt.Errorf("%w: request %q was at attempt %d, %d came", ErrOlderAttempt, key.ID, e.attempt, attempt)
	}
	return Admission{ExcludeProcesses: slices.Clone(e.excluded)}, nil
}

// excludedNow are the engine lives a later attempt must not use.
func (c *claim) excludedNow() []uint64 {
	excluded := append(slices.Clone(c.excluded), c.EngineProcess)
	return excluded[max(len(excluded)-maxExcluded, 0):]
}

// Claim puts a claim on the chosen worker. If the same attempt was claimed
// meanwhile, the stored claim is returned with stored true and nothing
// changes; a lower attempt is ended as superseded. ErrFenced and ErrBarred
// mean that the worker changed since the decision: decide again.
func (f *Fleet) Claim(now time.Time, n NewClaim) (c OpenClaim, stored bool, changes Changes, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	admission, err := f.admit(n.Key, n.Attempt)
	if err != nil {
		return c, false, changes, err
	}
	if admission.Stored != nil {
		return *admission.Stored, true, changes, nil
	}
	w := f.worker(n.Worker)
	switch {
	case w == nil:
		return c, false, changes, fmt.Errorf("%w: slot %d", ErrUnknownWorker, n.Worker)
	case n.EngineProcess != w.process:
		f.counts.FencedClaims++
		return c, false, changes, fmt.Errorf("%w: %s", ErrFenced, w.name)
	case w.snapshot.Barred != placement.ReasonNone:
		return c, false, changes, fmt.Errorf("%w: %s is %s", ErrBarred, w.name, w.snapshot.Barred)
	case f.claims.byPlacement[n.Placement] != nil:
		return c, false, changes, fmt.Errorf("%w: placement: %q is open already", ErrClaim, n.Placement)
	case len(f.claims.byPlacement) >= f.options.MaxClaims:
		return c, false, changes, fmt.Errorf("%w: %d claims are open, the bound", ErrFull, len(f.claims.byPlacement))
	}
	if err := n.validate(); err != nil {
		return c, false, changes, err
	}
	nowMs := f.Ms(now)
	if former := f.claims.byKey[n.Key]; former != nil {
		f.end(former, EndSuperseded, nowMs, &changes)
		f.publish(former.w, nowMs, &changes)
	}
	made := f.add(w, &n, admission.ExcludeProcesses, nowMs)
	f.publish(w, nowMs, &changes)
	return made.OpenClaim, false, changes, nil
}

// add makes the claim.
func (f *Fleet) add(w *worker, n *NewClaim, excluded []uint64, nowMs float64) *claim {
	f.claims.number++
	w.seq++
	c := &claim{
		OpenClaim: OpenClaim{
			Number: f.claims.number, Key: n.Key, Attempt: n.Attempt, Placement: n.Placement,
			Worker: w.id, Claim: n.Claim, Answer: n.Answer,
		},
		w: w, expected: n.ExpectedFirstMs, excluded: excluded,
		deadlineMs: nowMs + durationMs(f.options.ReservationTTL),
	}
	c.Seq, c.MadeMs = w.seq, nowMs
	c.Sequences = max(c.Sequences, 1)
	c.Keys, c.KeyDepths = slices.Clone(c.Keys), slices.Clone(c.KeyDepths)
	w.open = append(w.open, c)
	f.claims.byKey[c.Key] = c
	f.claims.byPlacement[c.Placement] = c
	heap.Push(&f.claims.deadlines, c)
	if len(c.Keys) > 0 {
		f.options.Predicted.AddPredicted(w.id, c.Number, c.Keys, c.KeyDepths)
	}
	w.waiting.Fold(&w.steps, c.MadeMs, c.ReusedTokens(), c.UncachedTokens)
	f.bound(w)
	if p := f.pools[w.assigned.Pool]; p != nil {
		p.arrivals.add(nowMs)
	}
	return c
}

// bound folds the oldest claims into the report when too many are on top. The
// order of folding stays the same, so the waiting work does as well.
func (f *Fleet) bound(w *worker) {
	over := -maxPending
	for _, c := range w.open {
		if !c.covered {
			over++
		}
	}
	for _, c := range w.open {
		if over <= 0 {
			break
		}
		if c.covered {
			continue
		}
		if c.waits() {
			w.base.Fold(&w.steps, c.MadeMs, c.ReusedTokens(), c.UncachedTokens)
		}
		c.covered = true
		w.report.foldedLive += float64(c.Sequences)
		f.counts.FoldedClaims++
		over--
	}
}

// Mark says what happened to a placement. A second end changes nothing and is
// counted; ErrUnknownPlacement means that nobody remembers it. outputTokens
// is the length of the answer for MarkDone; 0: unknown.
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
	w := c.w
	if mark == ledger.MarkFirst {
		f.first(c, nowMs)
	} else {
		if p := f.pools[w.assigned.Pool]; p != nil && mark == ledger.MarkDone && outputTokens > 0 {
			p.output.add(float64(min(outputTokens, ledger.MaxTokens)))
		}
		f.end(c, EndReason(mark), nowMs, &changes)
	}
	f.publish(w, nowMs, &changes)
	return changes, nil
}

// maxErrorMs bounds one prediction error.
const maxErrorMs = 60_000

// first takes the first token of a claim: its prefill is over.
func (f *Fleet) first(c *claim, nowMs float64) {
	f.renew(c, nowMs)
	if c.first {
		return
	}
	c.first = true
	if c.expected > 0 {
		off := nowMs - c.MadeMs - c.expected
		c.w.errorMs.add(min(max(off, -off), maxErrorMs))
	}
	if !c.covered {
		c.w.refold()
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

// end ends a claim; the caller publishes the worker, or has removed it.
func (f *Fleet) end(c *claim, how EndReason, nowMs float64, changes *Changes) {
	w := c.w
	waited := c.waits()
	w.open = slices.DeleteFunc(w.open, func(other *claim) bool { return other == c })
	delete(f.claims.byPlacement, c.Placement)
	if f.claims.byKey[c.Key] == c {
		delete(f.claims.byKey, c.Key)
	}
	heap.Remove(&f.claims.deadlines, c.heapIndex)
	if len(c.Keys) > 0 {
		f.options.Predicted.RemovePredicted(w.id, c.Number)
	}
	if waited {
		w.refold()
	}
	f.remember(c, how)
	changes.Ended = append(changes.Ended, EndedClaim{OpenClaim: c.OpenClaim, How: how, First: c.first, AgeMs: nowMs - c.MadeMs})
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

// Ended tells how a placement's claim ended; ok is false if it is open or
// not remembered.
func (f *Fleet) Ended(placementID string) (how EndReason, ok bool) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	how, ok = f.claims.ended[placementID]
	return how, ok
}

// Open is the open claim of a placement.
func (f *Fleet) Open(placementID string) (OpenClaim, bool) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	c := f.claims.byPlacement[placementID]
	if c == nil {
		return OpenClaim{}, false
	}
	return c.OpenClaim, true
}

// OpenClaims counts the open claims.
func (f *Fleet) OpenClaims() int {
	f.mu.RLock()
	defer f.mu.RUnlock()
	return len(f.claims.byPlacement)
}

// Tick ends claims whose reservation is over and removes workers that their
// agents stopped listing long ago. Call it about once per second.
func (f *Fleet) Tick(now time.Time) Changes {
	f.mu.Lock()
	defer f.mu.Unlock()
	var changes Changes
	nowMs := f.Ms(now)
	for len(f.claims.deadlines) > 0 && f.claims.deadlines[0].deadlineMs <= nowMs {
		c := f.claims.deadlines[0]
		f.end(c, EndExpired, nowMs, &changes)
		f.publish(c.w, nowMs, &changes)
	}
	forget := durationMs(f.options.ForgetAfter)
	for _, w := range f.slots {
		if w != nil && !w.listed && nowMs-w.unlistedMs >= forget {
			f.removeWorker(w, nowMs, &changes)
		}
	}
	return changes
}

// deadlines is a heap of claims by deadline.
type deadlines []*claim

func (d deadlines) Len() int           { return len(d) }
func (d deadlines) Less(i, j int) bool { return d[i].deadlineMs < d[j].deadlineMs }
func (d deadlines) Swap(i, j int) {
	d[i], d[j] = d[j], d[i]
	d[i].heapIndex, d[j].heapIndex = i, j
}

// Push is for container/heap.
func (d *deadlines) Push(x any) {
	c := x.(*claim)
	c.heapIndex = len(*d)
	*d = append(*d, c)
}

// Pop is for container/heap.
func (d *deadlines) Pop() any {
	old := *d
	c := old[len(old)-1]
	old[len(old)-1] = nil
	*d = old[:len(old)-1]
	return c
}
