package transfers

import (
	"math"
	"strings"
	"sync"
	"time"

	"waypost/coordinator/placement"
	"waypost/coordinator/registry"
)

// OffloadingConnector is the connector that reads what any named peer holds; the
// others read only what a prefill worker left for its partner.
const OffloadingConnector = "OffloadingConnector"

// Bounds of what is remembered of pulls.
const (
	maxKeptPaths    = 65_536
	maxAwaitedPulls = 16_384
)

// Book is what this coordinator knows of pulls of saved KV: the ways of the fleet
// file, the transfers it asked for and what became of them. It is safe for
// concurrent use.
type Book struct {
	mu      sync.Mutex
	started time.Time
	book    placement.Pulls
	rates   placement.LinkRates
	file    *registry.Fleet
	paths   map[hostPair]keptPath
	fastest float64
	awaited map[string]awaitedPull // by placement
	order   []string               // of awaited, oldest first
}

type hostPair struct{ from, to string }

// keptPath is a path with what its ends have in common.
type keptPath struct {
	placement.Path
	sameZone, sameRack bool
}

// awaitedPull is a pull of which no outcome came yet.
type awaitedPull struct {
	pair placement.Pair
	// least is the reuse from which on the pull must have worked.
	least int
	// link carries it, beside others; of its predicted time fixedMs do not
	// depend on the bandwidth, and otherMs stand beside it before the first
	// token; NaN: nobody can tell how much was moved, its time teaches no rate.
	link                     string
	others                   int
	bytes                    float64
	wireMs, fixedMs, otherMs float64
}

// New knows nothing; its times count from now.
func New(now time.Time) *Book {
	return &Book{started: now, paths: map[hostPair]keptPath{}, awaited: map[string]awaitedPull{}}
}

// Ms is a moment in the book's time, ms.
func (t *Book) Ms(now time.Time) float64 { return ms(now.Sub(t.started)) }

// Use takes another fleet file.
func (t *Book) Use(file *registry.Fleet) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if file == t.file {
		return
	}
	t.file = file
	clear(t.paths)
	t.fastest = bytesPerMs(file.PathBetween(registry.Place{Zone: "z"}, registry.Place{Zone: "z"}))
	for i := range file.Links {
		t.fastest = max(t.fastest, float64(file.Links[i].BandwidthBytesPerSec.Value)/1000)
	}
}

func bytesPerMs(p registry.Path) float64 { return float64(p.BandwidthBytesPerSec.Value) / 1000 }

// Path is the way between two workers now, for a pool that stays in a part of
// the fleet.
func (t *Book) Path(nowMs float64, from, to *placement.Worker, stay registry.StayIn) placement.Path {
	t.mu.Lock()
	defer t.mu.Unlock()
	key := hostPair{hostOf(from.Name), hostOf(to.Name)}
	kept, ok := t.paths[key]
	if !ok && t.file != nil {
		if len(t.paths) >= maxKeptPaths {
			clear(t.paths)
		}
		kept = wayOf(t.file, key.from, key.to)
		t.paths[key] = kept
	}
	path := kept.path(from, to, stay)
	path.UnderWay = t.book.UnderWay(nowMs, path.Link)
	pair := placement.Pair{From: from.Name, To: to.Name}
	path.Off = t.book.Off(nowMs, pair)
	return t.rates.Measured(nowMs, pair, path)
}

// wayOf is the path between two hosts of a fleet file.
func wayOf(file *registry.Fleet, from, to string) keptPath {
	a, b := file.HostPlace(from), file.HostPlace(to)
	return keptPath{pathOf(file.PathBetween(a, b)), a.Zone != "" && a.Zone == b.Zone, a.Rack != "" && a.Rack == b.Rack}
}

// path is the way between two workers of the hosts, for a pool that stays in a
// part of the fleet.
func (k *keptPath) path(from, to *placement.Worker, stay registry.StayIn) placement.Path {
	path := k.Path
	path.Never = path.Never || stay != registry.StayInNone && !k.sameZone || stay == registry.StayInRack && !k.sameRack
	// A prefill worker hands its prompt over; else the engine must be able to
	// read what it is told to.
	path.Never = path.Never || to.Role != placement.RoleDecode && !readsAtWill(from)
	return path
}

// pathOf puts a path of the fleet file into the rule's words.
func pathOf(p registry.Path) placement.Path {
	out := placement.Path{
		Link: p.Name, BytesPerMs: bytesPerMs(p), LatencyMs: ms(p.Latency.Value), SurchargeMs: ms(p.PlaceSurcharge.Value),
		Never: p.Transfer.Value == registry.TransferNever,
	}
	if p.BandwidthBytesPerSec.Source == registry.Declared {
		out.Figure = placement.FigureDeclared
	}
	return out
}

func hostOf(worker string) string {
	host, _, _ := strings.Cut(worker, "/")
	return host
}

// Sending is how many transfers a worker sends now.
func (t *Book) Sending(nowMs float64, w *placement.Worker) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.book.Sending(nowMs, w.Name)
}

// Begin notes the transfer that an answer asks for: a pull, or the hand-over of
// a pair.
func (t *Book) Begin(now time.Time, id string, d *placement.Decision, candidates []placement.Candidate, policy *placement.Policy, promptTokens int, sit placement.Situation) {
	terms, to := &d.Terms[d.Chosen], &candidates[d.Chosen]
	a := awaitedPull{otherMs: math.NaN()}
	var path *placement.Path
	var startMs, transferMs float64
	switch {
	case terms.Partner >= 0:
		q := &to.Partners[terms.Partner]
		a.pair, path = placement.Pair{From: to.Name, To: q.Name}, &q.Path
		a.least = (promptTokens + 1) / 2
		startMs, transferMs = terms.StartMs+terms.PrefillMs, terms.HandMs
	case terms.Pull.Note == placement.PullTaken, terms.Pull.Note == placement.PullSpare && terms.LikelyGone():
		// A spare source is asked if the worker's own are gone: as long as they are
		// likelier there no transfer is expected, and reuse says nothing of the pair.
		from := sit.Sources[terms.Pull.Source].Worker
		a.pair, path = placement.Pair{From: from.Name, To: to.Name}, &to.Paths[terms.Pull.Source]
		a.least = terms.Pull.Behind + (terms.Pull.Tokens+1)/2
		startMs, transferMs = terms.StartMs, terms.Pull.TransferMs
		a.bytes = float64(terms.Pull.Tokens) * from.Transfer.BytesPerToken
		a.wireMs = a.bytes / terms.Pull.BytesPerMs
		a.fixedMs = policy.TransferSetupMs + max(path.LatencyMs, 0)
		a.others = max(path.UnderWay, sit.Sources[terms.Pull.Source].Sending)
		// Unless what the worker holds itself is there for sure, the engine may well
		// have moved that too: more bytes in more time, which would pass for a slow link.
		if terms.ReuseTokens <= 0 || terms.SurelyHeld() {
			a.otherMs = d.FirstTokenMs - (terms.PullMs - terms.ComputeMs)
		}
	default:
		return
	}
	a.link = path.Link
	t.mu.Lock()
	defer t.mu.Unlock()
	nowMs := t.Ms(now)
	t.book.Begin(nowMs, nowMs+startMs+transferMs, a.pair, a.link)
	if len(t.order) >= maxAwaitedPulls {
		delete(t.awaited, t.order[0])
		t.order = t.order[1:]
	}
	t.order = append(t.order, id)
	t.awaited[id] = a
}

// seen is the time a confirmed pull took on the way, by its first token less
// what else was predicted to stand before it; false: that tells nothing, since
// the rest outweighs it.
func (a *awaitedPull) seen(firstTokenMs float64) (wireMs float64, ok bool) {
	wireMs = firstTokenMs - max(a.otherMs, 0) - a.fixedMs
	if !(max(wireMs, a.wireMs) >= a.otherMs) {
		return 0, false
	}
	// A prediction that was too long cannot make a link infinitely fast.
	return max(wireMs, a.wireMs/10), true
}

// Seen is what became of a transfer that was asked for. Bytes are 0 if its time
// tells nothing of the link; WireMs is the time they took.
type Seen struct {
	Pair          placement.Pair
	Confirmed     bool
	Bytes, WireMs float64
	// Others shared the link meanwhile.
	Others int
}

// Outcome takes what a placement really reused, and whether it was served. It
// returns what that tells of a transfer; nil: nothing. firstTokenMs is NaN if the
// report does not tell it.
func (t *Book) Outcome(id string, done bool, cachedTokens int, firstTokenMs float64) *Seen {
	t.mu.Lock()
	defer t.mu.Unlock()
	a, ok := t.awaited[id]
	if !ok || !done || cachedTokens < 0 {
		return nil
	}
	delete(t.awaited, id)
	seen := &Seen{Pair: a.pair, Confirmed: cachedTokens >= a.least, Others: a.others}
	if wireMs, ok := a.seen(firstTokenMs); ok && seen.Confirmed {
		seen.Bytes, seen.WireMs = a.bytes, wireMs
	}
	return seen
}

// Learn takes what became of a transfer at a moment, here or at another
// coordinator; it reports whether that switched the pair on or off.
func (t *Book) Learn(nowMs, atMs float64, seen *Seen) (switched, off bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if seen.Bytes > 0 {
		link := ""
		if t.file != nil {
			way := wayOf(t.file, hostOf(seen.Pair.From), hostOf(seen.Pair.To))
			link = way.Link
		}
		t.rates.Note(atMs, link, seen.Pair, seen.Bytes, seen.WireMs, seen.Others)
		if s, ok := t.rates.OfPair(nowMs, seen.Pair); ok {
			t.fastest = max(t.fastest, s.BytesPerMs)
		}
		if s, ok := t.rates.OfLink(nowMs, link); ok {
			t.fastest = max(t.fastest, s.BytesPerMs)
		}
	}
	switched = t.book.Outcome(atMs, seen.Pair, seen.Confirmed)
	return switched, t.book.Off(nowMs, seen.Pair)
}

// readsAtWill says whether an engine can be told to read a worker's blocks.
func readsAtWill(from *placement.Worker) bool {
	t := from.Transfer
	return t == nil || t.Connector == OffloadingConnector
}

// Fastest bounds the bandwidth of all ways, bytes per ms.
func (t *Book) Fastest() float64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.fastest
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// UnderFile is the way between two workers as a fleet file has it, for a pool that
// stays in a part of the fleet: nothing measured, nothing under way.
func UnderFile(file *registry.Fleet, from, to *placement.Worker, stay registry.StayIn) placement.Path {
	kept := wayOf(file, hostOf(from.Name), hostOf(to.Name))
	return kept.path(from, to, stay)
}

// Link is a link of the fleet file as prices reckon with it.
type Link struct {
	placement.Path
	// Seen is what was measured on it; no transfers: nothing.
	Seen placement.SeenRate
}

// LinkOf puts what is known of a link beside what the fleet file says.
func (t *Book) LinkOf(nowMs float64, p *registry.Path) Link {
	t.mu.Lock()
	defer t.mu.Unlock()
	out := Link{Path: t.rates.Measured(nowMs, placement.Pair{}, pathOf(*p))}
	out.UnderWay = t.book.UnderWay(nowMs, p.Name)
	if s, ok := t.rates.OfLink(nowMs, p.Name); ok {
		out.Seen = s
	}
	return out
}

// Measured are the pairs whose transfers were measured.
func (t *Book) Measured(nowMs float64) map[placement.Pair]placement.SeenRate {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.rates.Pairs(nowMs)
}

// Doubted are the pairs whose newest transfers were not confirmed.
func (t *Book) Doubted(nowMs float64) map[placement.Pair]placement.PairDoubt {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.book.Doubted(nowMs)
}
