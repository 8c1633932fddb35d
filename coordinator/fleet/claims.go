package fleet

import (
	"container/heap"
	"fmt"
	"slices"
	"time"

	"waypost/coordinator/placement"
	"waypost/gossip/ledger"
	"waypost/gossip/prefix"
)

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
	// Decode is the second claim of a placement that is prefilled on Worker
	// and decoded elsewhere; nil: it is decoded on Worker.
	Decode *DecodeClaim
	// ExpectedFirstMs is the predicted first-token time; 0: none.
	ExpectedFirstMs float64
	// Answer is what a repeated request gets again.
	Answer any
}

// DecodeClaim is the decode part of a placement over two workers.
type DecodeClaim struct {
	// Worker decodes; it is not the one that prefills.
	Worker WorkerID
	// Claim holds the sizes as the decode worker meets them: UncachedTokens
	// are what it computes itself once the prefix has come over.
	ledger.Claim
}

// validate names the first field that is out of range.
func (n *NewClaim) validate() error {
	if n.Placement == "" {
		return fmt.Errorf("%w: placement: is empty", ErrClaim)
	}
	if field, detail := n.Fault(); field != "" {
		return fmt.Errorf("%w: %s: %s", ErrClaim, field, detail)
	}
	if n.Decode == nil {
		return nil
	}
	if n.Decode.Worker == n.Worker {
		return fmt.Errorf("%w: decode.worker: is the one that prefills; leave decode out", ErrClaim)
	}
	if field, detail := n.Decode.Fault(); field != "" {
		return fmt.Errorf("%w: decode.%s: %s", ErrClaim, field, detail)
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
	// Decode is the second claim of a placement over two workers.
	Decode *DecodeClaim
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

// claim is an open placement of this coordinator.
type claim struct {
	OpenClaim
	// parts are its claims at workers: the prefill, and the decode part of a
	// placement over two.
	parts    []*part
	first    bool
	expected float64
	// cachedTokens is the reuse that was reported; nil: not yet.
	cachedTokens *int
	excluded     []uint64 // engine lives of former attempts
	deadlineMs   float64
	heapIndex    int
}

// claims is the ledger of own claims and what is known of peers' requests.
type claims struct {
	number         uint64
	lastRemovedSeq uint64
	byKey          map[RequestKey]*claim
	byPlacement    map[string]*claim
	tenantTokens   map[string]int64 // prompt tokens of open claims
	deadlines      deadlines

	ended          map[string]EndReason // by placement
	endedKeys      map[RequestKey]endedRequest
	endedPlacement ring[string]
	endedRequests  ring[RequestKey]

	peerParts    int // claims of peers that are kept
	peerRequests map[RequestKey]*peerRequest
	peerRing     ring[RequestKey]
	places       []placedOut // to be told to peers
}

// endedRequest is what is remembered of a request whose claim ended.
type endedRequest struct {
	attempt  uint32
	excluded []uint64
}

func (c *claims) init() {
	c.byKey = map[RequestKey]*claim{}
	c.byPlacement = map[string]*claim{}
	c.tenantTokens = map[string]int64{}
	c.ended = map[string]EndReason{}
	c.endedKeys = map[RequestKey]endedRequest{}
	c.peerRequests = map[RequestKey]*peerRequest{}
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
	// PlacedBy says that another coordinator placed the same attempt; nil: none
	// is known to have. If the request is placed here as well, one of the two
	// claims is superseded.
	PlacedBy *PlacedBy
}

// PlacedBy is a placement of another coordinator.
type PlacedBy struct {
	// Coordinator is its process mark.
	Coordinator uint64
	// Placement is the placement's id there; empty: not told.
	Placement string
	// Worker is the name of the worker that prefills, Process its engine life.
	Worker  string
	Process uint64
	// AtMs is when it was told last, on the fleet's clock.
	AtMs float64
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
	var a Admission
	if p := f.claims.peerRequests[key]; p != nil {
		switch {
		case attempt < p.attempt:
			return a, fmt.Errorf("%w: request %q is at attempt %d at another coordinator, %d came", ErrOlderAttempt, key.ID, p.attempt, attempt)
		case attempt == p.attempt && len(p.parts) > 0:
			a.PlacedBy = &PlacedBy{Coordinator: p.coordinator, Placement: p.placement, Worker: p.parts[0].worker, Process: p.parts[0].process, AtMs: p.atMs}
		default:
			a.ExcludeProcesses = p.processes(nil)
		}
	}
	if c := f.claims.byKey[key]; c != nil {
		switch {
		case attempt == c.Attempt:
			stored := c.OpenClaim
			return Admission{Stored: &stored}, nil
		case attempt < c.Attempt:
			return Admission{}, fmt.Errorf("%w: request %q is at attempt %d, %d came", ErrOlderAttempt, key.ID, c.Attempt, attempt)
		}
		a.ExcludeProcesses = append(a.ExcludeProcesses, c.excludedNow()...)
		return a, nil
	}
	e, ended := f.claims.endedKeys[key]
	switch {
	case !ended || attempt == e.attempt:
		return a, nil
	case attempt < e.attempt:
		return Admission{}, fmt.Errorf("%w: request %q was at attempt %d, %d came", ErrOlderAttempt, key.ID, e.attempt, attempt)
	}
	a.ExcludeProcesses = append(a.ExcludeProcesses, e.excluded...)
	return a, nil
}

// excludedNow are the engine lives a later attempt must not use.
func (c *claim) excludedNow() []uint64 {
	excluded := slices.Clone(c.excluded)
	for _, p := range c.parts {
		excluded = append(excluded, p.EngineProcess)
	}
	return excluded[max(len(excluded)-maxExcluded, 0):]
}

// Claim puts a claim on the chosen worker, and on the one that decodes if that
// is another. If the same attempt was claimed meanwhile, the stored claim is
// returned with stored true and nothing changes; a lower attempt is ended as
// superseded. ErrFenced and ErrBarred mean that a worker changed since the
// decision: decide again.
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
	if f.claims.byPlacement[n.Placement] != nil {
		return c, false, changes, fmt.Errorf("%w: placement: %q is open already", ErrClaim, n.Placement)
	}
	if len(f.claims.byPlacement) >= f.options.MaxClaims {
		return c, false, changes, fmt.Errorf("%w: %d claims are open, the bound", ErrFull, len(f.claims.byPlacement))
	}
	workers := []*worker{nil}
	if workers[0], err = f.claimable(n.Worker, n.EngineProcess); err != nil {
		return c, false, changes, err
	}
	if n.Decode != nil {
		w, err := f.claimable(n.Decode.Worker, n.Decode.EngineProcess)
		if err != nil {
			return c, false, changes, err
		}
		workers = append(workers, w)
	}
	if err := n.validate(); err != nil {
		return c, false, changes, err
	}
	nowMs := f.Ms(now)
	if former := f.claims.byKey[n.Key]; former != nil {
		f.end(former, EndSuperseded, nowMs, &changes)
	}
	made := f.add(workers, &n, admission.ExcludeProcesses, nowMs)
	if n.Key.ID != "" {
		f.resolve(n.Key, nowMs, &changes)
	}
	return made.OpenClaim, false, changes, nil
}

// claimable is the worker of a slot if a claim may be put on it.
func (f *Fleet) claimable(id WorkerID, process uint64) (*worker, error) {
	w := f.worker(id)
	switch {
	case w == nil:
		return nil, fmt.Errorf("%w: slot %d", ErrUnknownWorker, id)
	case process != w.process:
		f.counts.FencedClaims++
		return nil, fmt.Errorf("%w: %s", ErrFenced, w.name)
	case w.snapshot.Barred != placement.ReasonNone:
		return nil, fmt.Errorf("%w: %s is %s", ErrBarred, w.name, w.snapshot.Barred)
	}
	return w, nil
}

// add makes the placement and its claims, and publishes the workers.
func (f *Fleet) add(workers []*worker, n *NewClaim, excluded []uint64, nowMs float64) *claim {
	f.claims.number++
	c := &claim{
		OpenClaim: OpenClaim{
			Number: f.claims.number, Key: n.Key, Attempt: n.Attempt, Placement: n.Placement, Worker: n.Worker, Answer: n.Answer,
		},
		expected: n.ExpectedFirstMs, excluded: excluded[max(len(excluded)-maxExcluded, 0):],
		deadlineMs: nowMs + durationMs(f.options.ReservationTTL),
	}
	f.claims.byKey[c.Key] = c
	f.claims.byPlacement[c.Placement] = c
	f.claims.tenantTokens[c.Key.Tenant] += int64(n.PromptTokens)
	heap.Push(&f.claims.deadlines, c)
	for i, w := range workers {
		made := n.Claim
		if i > 0 {
			made = n.Decode.Claim
		}
		w.seq++
		made.Seq, made.MadeMs, made.Sequences = w.seq, nowMs, max(made.Sequences, 1)
		made.Keys, made.KeyDepths = slices.Clone(made.Keys), slices.Clone(made.KeyDepths)
		p := &part{c: c, w: w, coordinator: f.options.Process, number: c.Number, Claim: made}
		c.parts = append(c.parts, p)
		if i == 0 {
			c.Claim = made
		} else {
			c.Decode = &DecodeClaim{Worker: w.id, Claim: made}
		}
		if !w.followed && (len(made.Keys) > 0 || made.AfterKey != 0) {
			f.options.Predicted.AddPredicted(w.id, c.Number, made.AfterKey, made.Keys, made.KeyDepths)
		}
		f.insert(w, p)
		f.tell(p)
		f.publish(w, nowMs, new(Changes))
	}
	if pool := f.pools[workers[0].assigned.Pool]; pool != nil {
		pool.arrivals.add(nowMs)
		pool.claimed(&c.Claim)
	}
	return c
}

// Extend predicts more of the worker that prefills an open claim: the keys of the
// part of its prompt that was not expected to be cached, not all of which were
// known when it was made. keys and depths are as those of a claim, and replace
// them. Its size stands, and the worker's agent is not told again. It reports
// false if no such claim is open, or if the worker's agent follows its cache
// itself.
func (f *Fleet) Extend(placementID string, afterKey uint64, keys []prefix.Key, depths []uint32) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	c := f.claims.byPlacement[placementID]
	if c == nil || c.parts[0].w.followed || len(keys) > ledger.MaxClaimKeys {
		return false
	}
	p := c.parts[0]
	p.extended = true
	f.options.Predicted.AddPredicted(p.w.id, c.Number, afterKey, slices.Clone(keys), slices.Clone(depths))
	return true
}

// Learn takes in the points of an open claim's prompt, which was not known as a
// whole when it was made, and has the worker's agent told if it follows its cache
// by them. The prompt's length is put right there; what was reckoned with here
// stands. It reports false if no such claim is open, or its agent does not.
func (f *Fleet) Learn(placementID string, promptTokens int, points []prefix.Key) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	c := f.claims.byPlacement[placementID]
	if c == nil || !c.parts[0].w.followed || promptTokens < 1 || promptTokens > ledger.MaxTokens || len(points) > promptTokens/ledger.PointTokens {
		return false
	}
	f.tellLearnt(c.parts[0], promptTokens, points)
	return true
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

// TenantTokens sums the prompt tokens of a tenant's open claims here.
func (f *Fleet) TenantTokens(tenant string) int64 {
	f.mu.RLock()
	defer f.mu.RUnlock()
	return f.claims.tenantTokens[tenant]
}

// OpenClaims counts the open claims.
func (f *Fleet) OpenClaims() int {
	f.mu.RLock()
	defer f.mu.RUnlock()
	return len(f.claims.byPlacement)
}

// Reservations counts the open claims by the pool of the worker that prefills;
// a pool without any is counted as well.
func (f *Fleet) Reservations() map[string]int {
	f.mu.RLock()
	defer f.mu.RUnlock()
	open := make(map[string]int, len(f.pools))
	for name := range f.pools {
		open[name] = 0
	}
	for _, c := range f.claims.byPlacement {
		open[c.parts[0].w.assigned.Pool]++
	}
	return open
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
