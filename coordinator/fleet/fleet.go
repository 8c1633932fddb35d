package fleet

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"time"

	"waypost/coordinator/placement"
	"waypost/gossip/ledger"
	"waypost/gossip/prefix"
)

// WorkerID is the dense slot of a worker. A slot is used again only after its
// worker was removed.
type WorkerID = placement.WorkerID

// Errors of the fleet. Those about input name the field.
var (
	// ErrOptions is wrapped by every error of New.
	ErrOptions = errors.New("bad fleet options")
	// ErrHello is wrapped by errors about a host's introduction.
	ErrHello = errors.New("bad hello")
	// ErrReport is wrapped by errors about a load report.
	ErrReport = errors.New("bad report")
	// ErrConflict: another live lane speaks for the host with another agent.
	ErrConflict = errors.New("host conflict")
	// ErrStaleSession: the host has a lane of a newer session.
	ErrStaleSession = errors.New("stale session")
	// ErrStaleLane: the lane is not the host's any more.
	ErrStaleLane = errors.New("stale lane")
	// ErrFull: a bound of the fleet is reached.
	ErrFull = errors.New("fleet is full")
	// ErrClaim is wrapped by errors about a field of a claim or mark.
	ErrClaim = errors.New("bad claim")
	// ErrUnknownPool: no pool has this name.
	ErrUnknownPool = errors.New("unknown pool")
	// ErrUnknownWorker: no worker has this slot or name.
	ErrUnknownWorker = errors.New("unknown worker")
	// ErrFenced: the engine process named is not the worker's.
	ErrFenced = errors.New("engine process is over")
	// ErrBarred: the worker may not be chosen any more.
	ErrBarred = errors.New("worker is barred")
	// ErrOlderAttempt: a higher attempt of the request was placed already.
	ErrOlderAttempt = errors.New("older attempt")
	// ErrUnknownPlacement: no open claim has this placement id.
	ErrUnknownPlacement = errors.New("unknown placement")
)

// PredictedKeys is what the fleet tells the owner of the prefix index. The
// calls are made under the fleet's lock, in order; an implementation must not
// call the fleet. Predicted keys live exactly as long as their claim.
type PredictedKeys interface {
	// AddPredicted says that the worker will hold the keys, which hang on the
	// checkpoint with the index key after (see ledger.Claim).
	AddPredicted(w WorkerID, claim, after uint64, keys []prefix.Key, depths []uint32)
	// RemovePredicted takes a claim's keys back.
	RemovePredicted(w WorkerID, claim uint64)
	// Drop says that nothing the worker held is there any more.
	Drop(w WorkerID)
}

// Options configures a Fleet. Zero bounds take the defaults.
type Options struct {
	// Epoch is the zero of the fleet's clock: any moment before all others.
	Epoch time.Time
	// Process is this coordinator's process mark, not 0.
	Process uint64
	// Predicted is told of predicted prefix keys; nil: nobody is.
	Predicted PredictedKeys
	// ReservationTTL is how long a claim lives without a sign of life, 60 s;
	// MaxClaimLife its longest life, 600 s.
	ReservationTTL, MaxClaimLife time.Duration
	// LaneSilent is the silence after which a lane no longer defends its
	// host against another agent, 2 s.
	LaneSilent time.Duration
	// ForgetAfter is how long a worker stays after its agent stopped listing
	// it, 10 min.
	ForgetAfter time.Duration
	// ForgetHostAfter is how long a host stays after its lane went down, 24 h.
	ForgetHostAfter time.Duration
	// MaxHosts, MaxWorkers, MaxClaims and MaxEnded bound hosts (4,096),
	// workers (16,384), open claims (65,536) and remembered ended ones
	// (32,768).
	MaxHosts, MaxWorkers, MaxClaims, MaxEnded int
}

func (o *Options) setDefaults() error {
	if o.Epoch.IsZero() {
		return fmt.Errorf("%w: epoch: is not set", ErrOptions)
	}
	if o.Process == 0 {
		return fmt.Errorf("%w: process: is 0; give the coordinator's process mark", ErrOptions)
	}
	for _, d := range [...]struct {
		name  string
		value *time.Duration
		usual time.Duration
	}{
		{"reservationTTL", &o.ReservationTTL, 60 * time.Second},
		{"maxClaimLife", &o.MaxClaimLife, 600 * time.Second},
		{"laneSilent", &o.LaneSilent, 2 * time.Second},
		{"forgetAfter", &o.ForgetAfter, 10 * time.Minute},
		{"forgetHostAfter", &o.ForgetHostAfter, 24 * time.Hour},
	} {
		if *d.value < 0 {
			return fmt.Errorf("%w: %s: %v is negative", ErrOptions, d.name, *d.value)
		}
		if *d.value == 0 {
			*d.value = d.usual
		}
	}
	for _, n := range [...]struct {
		name  string
		value *int
		usual int
	}{
		{"maxHosts", &o.MaxHosts, 4096},
		{"maxWorkers", &o.MaxWorkers, 16_384},
		{"maxClaims", &o.MaxClaims, 65_536},
		{"maxEnded", &o.MaxEnded, 32_768},
	} {
		if *n.value < 0 {
			return fmt.Errorf("%w: %s: %d is negative", ErrOptions, n.name, *n.value)
		}
		if *n.value == 0 {
			*n.value = n.usual
		}
	}
	if o.Predicted == nil {
		o.Predicted = noKeys{}
	}
	return nil
}

// noKeys is a PredictedKeys that nobody reads.
type noKeys struct{}

func (noKeys) AddPredicted(WorkerID, uint64, uint64, []prefix.Key, []uint32) {}
func (noKeys) RemovePredicted(WorkerID, uint64)                              {}
func (noKeys) Drop(WorkerID)                                                 {}

// Fleet is the view of all workers and the ledger of claims.
type Fleet struct {
	options Options

	mu     sync.RWMutex
	hosts  map[string]*host
	byName map[string]*worker
	slots  []*worker // by id; nil: free
	free   []WorkerID
	pools  map[string]*pool
	intent Intent
	ways   map[string]zoneWays // by caller zone
	lanes  uint64              // last lane handed out
	counts Counts
	claims claims
	outbox []*worker // with claims or marks to send
	fronts []*worker // of engines that span hosts
	// graceMs is the age of a claim beyond which a report must speak of it.
	graceMs float64
}

// New makes an empty fleet.
func New(options Options) (*Fleet, error) {
	if err := options.setDefaults(); err != nil {
		return nil, err
	}
	f := &Fleet{
		options: options,
		hosts:   map[string]*host{},
		byName:  map[string]*worker{},
		pools:   map[string]*pool{},
		ways:    map[string]zoneWays{},
		graceMs: echoGraceMs,
	}
	f.claims.init()
	return f, nil
}

// Ms is a moment on the fleet's clock: ms since the epoch.
func (f *Fleet) Ms(now time.Time) float64 {
	return float64(now.Sub(f.options.Epoch)) / float64(time.Millisecond)
}

// Counts are what the fleet put aside, for counters.
type Counts struct {
	// Reports counts reports of hosts that were taken.
	Reports uint64
	// FencedReports counts reports of a worker that named a process which is
	// over, OldReports those that were not newer than the last.
	FencedReports, OldReports uint64
	// Conflicts counts introductions refused because another agent speaks
	// for the host.
	Conflicts uint64
	// FencedClaims counts claims refused because the process changed between
	// decision and claim.
	FencedClaims uint64
	// DuplicateMarks counts marks on claims that had ended, UnknownMarks
	// those on claims nobody remembers.
	DuplicateMarks, UnknownMarks uint64
	// FoldedClaims counts claims that were folded into the report for the
	// bound of claims per worker.
	FoldedClaims uint64
	// SupersededClaims counts own claims that gave way to a peer's of the same
	// request.
	SupersededClaims uint64
	// LostMarks and LostPlaces count what was never sent for want of room.
	LostMarks, LostPlaces uint64
	// DuplicatePlaces counts placements of peers that were here already,
	// UnknownPlaces those on unknown workers, FencedPlaces those on an engine
	// life that is over, OlderPlaces those of an attempt that was superseded,
	// OwnPlaces those that this coordinator had told itself.
	DuplicatePlaces, UnknownPlaces, FencedPlaces, OlderPlaces, OwnPlaces uint64
}

// Counts returns the counts so far.
func (f *Fleet) Counts() Counts {
	f.mu.RLock()
	defer f.mu.RUnlock()
	return f.counts
}

// Changes is what a call changed, for events and for the owner of the prefix
// streams.
type Changes struct {
	// Appeared are new workers, Removed those whose slots were freed.
	Appeared, Removed []WorkerID
	// Restarted are workers with a new engine process: their prefix stream
	// starts anew.
	Restarted []Restart
	// States are workers whose state word changed.
	States []StateChange
	// Ended are claims that ended by themselves.
	Ended []EndedClaim
}

// Restart is a change of a worker's engine process.
type Restart struct {
	Worker   WorkerID
	Old, New uint64
}

// StateChange is a change of a worker's state word.
type StateChange struct {
	Worker         WorkerID
	Name, From, To string
	// Why says more about To.
	Why string
}

// pool is the workers of one pool.
type pool struct {
	workers  []WorkerID // ascending
	board    placement.Board
	arrivals rate
	output   ewma
	// promptTokens and uncachedTokens are of a mean claim.
	promptTokens, uncachedTokens ewma
}

// claimed takes the size of a claim.
func (p *pool) claimed(c *ledger.Claim) {
	p.promptTokens.add(float64(c.PromptTokens))
	p.uncachedTokens.add(float64(c.UncachedTokens))
}

// rate is a decaying count of arrivals per ms.
type rate struct {
	perMs float64
	atMs  float64
	since float64 // first arrival
	any   bool
}

// rateTimeMs is the time constant of arrival rates.
const rateTimeMs = 3_000

func (r *rate) add(nowMs float64) {
	if !r.any {
		r.any, r.since, r.atMs = true, nowMs, nowMs
	}
	if nowMs > r.atMs {
		r.perMs *= math.Exp(-(nowMs - r.atMs) / rateTimeMs)
		r.atMs = nowMs
	}
	r.perMs += 1.0 / rateTimeMs
}

// value is the rate at nowMs, corrected for a window that is not full yet;
// NaN before the first arrival.
func (r *rate) value(nowMs float64) float64 {
	if !r.any {
		return math.NaN()
	}
	v := r.perMs * math.Exp(-max(nowMs-r.atMs, 0)/rateTimeMs)
	// Below a second the few arrivals say nothing about a rate.
	seen := max(nowMs-r.since, 1000)
	return v / (1 - math.Exp(-seen/rateTimeMs))
}

// ewma is a moving mean of weight 1/20 per value; unknown before the first.
type ewma struct {
	value float64
	any   bool
}

func (e *ewma) add(v float64) {
	if !e.any {
		e.value, e.any = v, true
		return
	}
	e.value += (v - e.value) / 20
}

func (e *ewma) get() float64 {
	if !e.any {
		return math.NaN()
	}
	return e.value
}

// join puts a worker into the pool of its assignment.
func (f *Fleet) join(w *worker) {
	name := w.assigned.Pool
	if name == "" {
		return
	}
	p := f.pools[name]
	if p == nil {
		p = &pool{}
		f.pools[name] = p
	}
	if at, found := slices.BinarySearch(p.workers, w.id); !found {
		p.workers = slices.Insert(p.workers, at, w.id)
		p.board.Set(w.snapshot)
	}
}

// leave takes a worker out of its pool.
func (f *Fleet) leave(w *worker) {
	p := f.pools[w.assigned.Pool]
	if p == nil {
		return
	}
	if at, found := slices.BinarySearch(p.workers, w.id); found {
		p.workers = slices.Delete(p.workers, at, at+1)
		p.board.Remove(w.id)
	}
	if len(p.workers) == 0 && !slices.Contains(f.intent.Pools, w.assigned.Pool) {
		delete(f.pools, w.assigned.Pool)
	}
}
