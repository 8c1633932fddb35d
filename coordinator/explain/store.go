package explain

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"
	"unsafe"

	"waypost/coordinator/outcome"
	"waypost/coordinator/placement"
)

// ErrOptions is wrapped by every error of New.
var ErrOptions = errors.New("bad explain options")

// Options bounds a Store. Zero values take the defaults.
type Options struct {
	// MaxBytes bounds the memory of all entries, 256 MiB.
	MaxBytes int64
	// MaxAge is how long an entry is kept, one hour.
	MaxAge time.Duration
	// FullPerSec is the rate of entries kept with their inputs, 200; above it
	// only summaries are kept.
	FullPerSec float64
	// RefusedPerSec is the rate of refusals that are kept, 20; what is refused
	// beyond is like it, and must not take the room of placements.
	RefusedPerSec float64
	// KeepCandidates is how many candidates a full entry keeps, 64.
	KeepCandidates int
	// Journal keeps the entries on disk as well; nil: memory only. What it
	// read back is taken over by New.
	Journal *Journal
}

// Entry is one decision and what became of it.
type Entry struct {
	// Placement is its id, Coordinator who took it, MadeAt when.
	Placement   string
	Coordinator string
	MadeAt      time.Time
	// RequestID, Attempt, Tenant and Pool are the request's.
	RequestID    string
	Attempt      uint32
	Tenant, Pool string
	// PromptTokens is the prompt's length, OutputTokens the expected answer.
	PromptTokens int
	OutputTokens float64
	// InputSource says where the prompt's keys came from: tokens, keys, memo,
	// render or unknown.
	InputSource string
	// Worker is the chosen worker, Process its engine's life; empty: refused.
	Worker  string
	Process uint64
	// Refused is the reason of a refusal.
	Refused placement.RefusalReason
	// ExpectedTokens is the predicted reuse, placement.Unknown if unknown;
	// BiasTokens of it is the worker's learnt bias.
	ExpectedTokens, BiasTokens int
	// ReachableTokens is what the best eligible worker could have reused,
	// placement.Unknown if nobody is known to hold anything or nothing is
	// known; LostTo says why it was passed over, empty if it was not.
	ReachableTokens int
	LostTo          LostTo
	// FirstTokenMs and FirstTokenP90Ms are the prediction, PrefillMs and GapMs
	// terms of the chosen, UncachedTokens what it was expected to compute.
	FirstTokenMs, FirstTokenP90Ms float64
	PrefillMs, GapMs              float64
	UncachedTokens                int
	// Redirected says that the worker with most reuse was passed over.
	Redirected bool
	// SpareSource says that a source was named to fill in what is gone of the
	// chosen worker's own, or to move what it may well not hold: reuse does not
	// tell whose tokens they were.
	SpareSource bool
	// DecidingTerm is the term in which the choice led most.
	DecidingTerm string
	// Because is the reason in a sentence.
	Because string
	// Marks says what was not normal.
	Marks placement.Marks
	// PolicyVersion is that of the fleet file in force.
	PolicyVersion uint32
	// View is the chosen worker's cache view, with its age and that of its
	// queue report in ms; NaN: none.
	View                  placement.ViewKind
	ViewAgeMs, QueueAgeMs float64
	// Full says that Record holds the inputs; a summary has none, and nil here.
	Full   bool
	Record *placement.Record
	// Outcome is what happened; nil: not told yet. Class is its class;
	// Provisional says that evidence which could change it is waited for.
	Outcome     *outcome.Outcome
	Class       outcome.Class
	Provisional bool
}

// LostTo says why reuse that an eligible worker held was passed over.
type LostTo string

// The causes.
const (
	LostToLoad   LostTo = "load"
	LostToHealth LostTo = "health"
	LostToPolicy LostTo = "policy"
)

// NewEntry summarises a decision over its inputs. Placement, Coordinator,
// Attempt, InputSource, BiasTokens and the record are left to the caller and
// the store.
func NewEntry(req *placement.Request, candidates []placement.Candidate, sit placement.Situation, d *placement.Decision) Entry {
	e := Entry{
		RequestID: req.ID, Tenant: req.Tenant, Pool: req.Pool,
		PromptTokens: req.PromptTokens, OutputTokens: d.OutputTokens, PolicyVersion: sit.PolicyVersion,
		FirstTokenMs: d.FirstTokenMs, FirstTokenP90Ms: d.FirstTokenP90Ms,
		Redirected: d.Redirected(), DecidingTerm: d.DecidingTerm(), Because: d.Because(candidates),
		Marks: d.Marks, Refused: d.Refusal.Reason, ExpectedTokens: placement.Unknown, ReachableTokens: placement.Unknown,
	}
	if d.Chosen >= 0 {
		w, t := candidates[d.Chosen].Worker, &d.Terms[d.Chosen]
		e.Worker, e.Process = w.Name, w.Process
		e.ExpectedTokens, e.UncachedTokens = t.ExpectedReuseTokens(), t.UncachedTokens
		e.PrefillMs, e.GapMs = t.PrefillMs, t.GapMs
		e.SpareSource = t.SourceFillsIn()
		e.View, e.ViewAgeMs, e.QueueAgeMs = w.View.Kind, sit.NowMs-w.View.AtMs, sit.NowMs-w.LoadAtMs
		e.ReachableTokens = t.ReuseTokens
	}
	if d.MostReuse >= 0 {
		most := &d.Terms[d.MostReuse]
		e.ReachableTokens = max(e.ReachableTokens, most.ReuseTokens)
		switch {
		case !e.Redirected:
		case most.Placeable:
			e.LostTo = LostToLoad
		case most.Reason.Firm():
			e.LostTo = LostToPolicy
		default:
			e.LostTo = LostToHealth
		}
	}
	return e
}

// stored is an entry in the store. Its Entry is replaced as a whole when an
// outcome comes, so that readers keep what they got.
type stored struct {
	*Entry
	bytes        int64
	older, newer *stored // of the same request id
}

// added is a new entry and its place in the store in one piece of memory.
type added struct {
	stored
	entry Entry
}

// Store keeps entries. It is safe for concurrent use.
type Store struct {
	options Options

	mu        sync.RWMutex
	entries   []*stored // oldest first, from head on
	head      int
	byID      map[string]*stored
	byRequest map[string]*stored // newest of a request id
	bytes     int64
	full      allowance // of entries with their inputs
	refused   allowance // of refusals
	counts    Counts
	watchers  map[*Watcher]struct{}
}

// Counts are what a store did.
type Counts struct {
	// Added counts entries, Summaries those kept without inputs, Dropped
	// those that went for room or age, Unkept refusals above their rate.
	Added, Summaries, Dropped, Unkept uint64
	// Joined counts outcomes that met their entry, Repeated second ones of no
	// higher source, Missed those whose entry is not here.
	Joined, Repeated, Missed uint64
}

// New makes an empty store.
func New(options Options) (*Store, error) {
	if options.MaxBytes < 0 || options.MaxAge < 0 || options.KeepCandidates < 0 || !(options.FullPerSec >= 0) || !(options.RefusedPerSec >= 0) {
		return nil, fmt.Errorf("%w: maxBytes, maxAge, fullPerSec, refusedPerSec and keepCandidates must not be negative: %+v", ErrOptions, options)
	}
	if options.MaxBytes == 0 {
		options.MaxBytes = 256 << 20
	}
	if options.MaxAge == 0 {
		options.MaxAge = time.Hour
	}
	if options.FullPerSec == 0 {
		options.FullPerSec = 200
	}
	if options.RefusedPerSec == 0 {
		options.RefusedPerSec = 20
	}
	if options.KeepCandidates == 0 {
		options.KeepCandidates = 64
	}
	s := &Store{
		options: options, byID: map[string]*stored{}, byRequest: map[string]*stored{},
		full: allowance{left: options.FullPerSec}, refused: allowance{left: options.RefusedPerSec}, watchers: map[*Watcher]struct{}{},
	}
	if options.Journal != nil {
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, e := range options.Journal.takeRead() {
			s.insert(&stored{Entry: e})
			s.trim(e.MadeAt)
		}
	}
	return s, nil
}

// KeepCandidates is how many candidates the record of a full entry should
// keep.
func (s *Store) KeepCandidates() int { return s.options.KeepCandidates }

// Add keeps a decision and reports whether it did: refusals are kept up to a rate.
// record makes the inputs and is called only if they are kept; it must hold at most
// KeepCandidates candidates. An entry whose id is known already changes nothing.
func (s *Store) Add(now time.Time, e Entry, record func() placement.Record) bool {
	if e.Worker == "" && !s.take(now, &s.refused, s.options.RefusedPerSec) {
		s.mu.Lock()
		s.counts.Unkept++
		s.mu.Unlock()
		return false
	}
	a := &added{entry: e}
	n := &a.entry
	a.Entry, n.MadeAt, n.Full, n.Record = n, now, record != nil && s.take(now, &s.full, s.options.FullPerSec), nil
	if n.Full {
		r := record()
		n.Record = &r
	}
	n.Outcome, n.Class, n.Provisional = nil, "", false

	s.mu.Lock()
	defer s.mu.Unlock()
	if s.byID[n.Placement] != nil {
		return true
	}
	s.counts.Added++
	if !n.Full {
		s.counts.Summaries++
	}
	s.insert(&a.stored)
	s.trim(now)
	s.options.Journal.put(n, journalEntry)
	kind := EventPlaced
	if n.Worker == "" {
		kind = EventRefused
	}
	s.tell(kind, n)
	return true
}

// insert puts a new entry in.
func (s *Store) insert(n *stored) {
	e := n.Entry
	n.bytes = sizeOf(e)
	s.entries = append(s.entries, n)
	s.byID[e.Placement] = n
	if e.RequestID != "" {
		if older := s.byRequest[e.RequestID]; older != nil {
			n.older, older.newer = older, n
		}
		s.byRequest[e.RequestID] = n
	}
	s.bytes += n.bytes
}

// allowance is how many entries of a kind may be kept now.
type allowance struct {
	left float64
	at   time.Time
}

// take reports whether one more entry is within the rate of its kind.
func (s *Store) take(now time.Time, a *allowance, perSec float64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if elapsed := now.Sub(a.at); elapsed > 0 {
		if !a.at.IsZero() {
			a.left = min(a.left+elapsed.Seconds()*perSec, max(perSec, 1))
		}
		a.at = now
	}
	if a.left < 1 {
		return false
	}
	a.left--
	return true
}

// trim drops the oldest entries until bytes and ages are within the bounds.
func (s *Store) trim(now time.Time) {
	for s.head < len(s.entries) {
		oldest := s.entries[s.head]
		if s.bytes <= s.options.MaxBytes && now.Sub(oldest.MadeAt) <= s.options.MaxAge {
			break
		}
		s.drop(oldest)
	}
	if s.head > 1024 && s.head*2 > len(s.entries) {
		s.entries = append([]*stored(nil), s.entries[s.head:]...)
		s.head = 0
	}
}

// drop forgets the oldest entry.
func (s *Store) drop(oldest *stored) {
	s.entries[s.head] = nil
	s.head++
	s.bytes -= oldest.bytes
	s.counts.Dropped++
	delete(s.byID, oldest.Placement)
	if oldest.newer != nil {
		oldest.newer.older = nil
	} else if s.byRequest[oldest.RequestID] == oldest {
		delete(s.byRequest, oldest.RequestID)
	}
}

// Trim drops what is too old; call it now and then while nothing is added.
func (s *Store) Trim(now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.trim(now)
}

// Get is the entry of a placement id. The entry must not be changed.
func (s *Store) Get(placementID string) (*Entry, bool) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	n := s.byID[placementID]
	if n == nil {
		return nil, false
	}
	return n.Entry, true
}

// Find is Get, and looks on disk for an entry that left memory.
func (s *Store) Find(placementID string) (*Entry, bool) {
	if e, ok := s.Get(placementID); ok {
		return e, true
	}
	found := s.options.Journal.find(func(e *Entry) bool { return e.Placement == placementID }, 1)
	if len(found) == 0 {
		return nil, false
	}
	return found[0], true
}

// ByRequest lists the entries of a request id, newest first, at most limit,
// looking on disk if none is in memory. The entries must not be changed.
func (s *Store) ByRequest(requestID string, limit int) []*Entry {
	s.mu.RLock()
	var found []*Entry
	for n := s.byRequest[requestID]; n != nil && len(found) < limit; n = n.older {
		found = append(found, n.Entry)
	}
	s.mu.RUnlock()
	if len(found) == 0 {
		found = s.options.Journal.find(func(e *Entry) bool { return e.RequestID == requestID }, limit)
		slices.Reverse(found)
	}
	return found
}

// Filter selects entries; zero values match all.
type Filter struct {
	RequestID, Worker, Tenant, Pool string
	Class                           outcome.Class
	// Since matches entries made at or after it.
	Since time.Time
	// Redirected and Mispredicted match only such entries.
	Redirected, Mispredicted bool
	// Limit is the largest number of entries, 1 to MaxList; 0: 20.
	Limit int
}

// MaxList is the largest number of entries in one answer.
const MaxList = 1000

func (f *Filter) matches(e *Entry) bool {
	return (f.RequestID == "" || f.RequestID == e.RequestID) &&
		(f.Worker == "" || f.Worker == e.Worker) &&
		(f.Tenant == "" || f.Tenant == e.Tenant) &&
		(f.Pool == "" || f.Pool == e.Pool) &&
		(f.Class == "" || f.Class == e.Class) &&
		(!f.Redirected || e.Redirected) &&
		(!f.Mispredicted || e.Class.Mispredicted())
}

// List is the matching entries, newest first. They must not be changed.
func (s *Store) List(f Filter) []*Entry {
	limit := f.Limit
	if limit <= 0 {
		limit = 20
	}
	limit = min(limit, MaxList)
	var found []*Entry
	s.each(f, func(e *Entry) bool {
		found = append(found, e)
		return len(found) < limit
	})
	return found
}

// each calls fn for the matching entries, newest first, until it says no.
func (s *Store) each(f Filter, fn func(*Entry) bool) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	for i := len(s.entries) - 1; i >= s.head; i-- {
		e := s.entries[i].Entry
		if e.MadeAt.Before(f.Since) || f.matches(e) && !fn(e) {
			return
		}
	}
}

// Counts returns the counts so far.
func (s *Store) Counts() Counts {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.counts
}

// Size is the number of entries and the bytes they count as.
func (s *Store) Size() (entries int, bytes int64) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return len(s.entries) - s.head, s.bytes
}

// Sizes of what entries hold, for the bound. A worker snapshot may be shared
// by many records and counts in each: the sum is an upper bound.
const (
	// An outcome replaces the entry, whose memory stays with its place.
	entryBytes     = int64(unsafe.Sizeof(stored{}) + 2*unsafe.Sizeof(Entry{}) + unsafe.Sizeof(outcome.Outcome{}))
	recordBytes    = int64(unsafe.Sizeof(placement.Record{}))
	candidateBytes = int64(unsafe.Sizeof(placement.Candidate{}))
	pathBytes      = int64(unsafe.Sizeof(placement.Path{}))
	partnerBytes   = int64(unsafe.Sizeof(placement.Partner{}))
	sourceBytes    = int64(unsafe.Sizeof(placement.Source{}))
	workerBytes    = int64(unsafe.Sizeof(placement.Worker{}) + unsafe.Sizeof(placement.Transfer{}) + unsafe.Sizeof(placement.HostTier{}))
	stringBytes    = int64(unsafe.Sizeof(""))
	// indexBytes is about what two map entries and the slot cost.
	indexBytes = 160
)

// sizeOf is the memory an entry counts as.
func sizeOf(e *Entry) int64 {
	size := entryBytes + indexBytes
	if o := e.Outcome; o != nil {
		size += int64(len(o.Result) + len(o.ErrorClass))
	}
	size += int64(len(e.Placement) + len(e.Coordinator) + len(e.RequestID) + len(e.Tenant) + len(e.Pool) + len(e.InputSource) + len(e.Worker) +
		len(e.DecidingTerm) + len(e.Because) + len(e.Refused) + len(e.LostTo) + len(e.Class))
	if e.Record != nil {
		size += sizeOfRecord(e.Record)
	}
	return size
}

func sizeOfRecord(r *placement.Record) int64 {
	size := recordBytes
	for _, text := range [...]string{
		r.Request.ID, r.Request.Tenant, r.Request.Pool, r.Request.TenantBarred, r.Request.TenantOver, r.Request.TenantFull,
		r.Request.CallerZone, r.Request.Adapter, string(r.Request.IfInfeasible), string(r.Policy.IfInfeasible),
	} {
		size += int64(len(text))
	}
	for i := range r.Situation.Sources {
		size += sourceBytes + sizeOfWorker(r.Situation.Sources[i].Worker)
	}
	for i := range r.Candidates {
		c := &r.Candidates[i]
		size += candidateBytes + sizeOfWorker(c.Worker)
		for k := range c.Paths {
			size += pathBytes + int64(len(c.Paths[k].Link))
		}
		for k := range c.Partners {
			p := &c.Partners[k]
			size += partnerBytes + sizeOfWorker(p.Worker) + int64(len(p.Path.Link))
		}
	}
	return size + sizeOfTexts(r.Request.ExcludeWorkers) + 8*int64(len(r.Request.ExcludeProcesses))
}

func sizeOfWorker(w *placement.Worker) int64 {
	size := workerBytes + sizeOfTexts(w.Served)
	for _, text := range [...]string{w.Name, w.BarredWhy, w.DoubtedWhy, string(w.Steps.Model().Source)} {
		size += int64(len(text))
	}
	if t := w.Transfer; t != nil {
		size += int64(len(t.Connector) + len(t.SideChannel) + len(t.Fingerprint) + len(t.ExportedTier))
	}
	if h := w.Host; h != nil {
		size += int64(len(h.Link) + len(h.Uncounted))
	}
	return size
}

func sizeOfTexts(texts []string) int64 {
	size := stringBytes * int64(len(texts))
	for _, text := range texts {
		size += int64(len(text))
	}
	return size
}
