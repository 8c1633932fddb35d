package placement

// Pulls remembers the transfers that a coordinator asked for: those under way,
// for the shares of links, and pairs whose pulls were not confirmed. The zero
// value is ready. It is not safe for concurrent use. Times are ms on the
// caller's clock.
type Pulls struct {
	open    []openPull
	links   map[string]int
	sending map[string]int
	pairs   map[Pair]*pairTrust
}

// Pair is the two ends of a transfer, by worker name.
type Pair struct{ From, To string }

type openPull struct {
	link, from string
	untilMs    float64
}

// pairTrust is what outcomes say of a pair.
type pairTrust struct {
	misses     int
	offUntilMs float64
	atMs       float64
}

// Bounds and constants of Pulls.
const (
	// PairOffAfter is the number of unconfirmed pulls in a row that switch a
	// pair off; after PairOffMs pulls may try again.
	PairOffAfter = 3
	PairOffMs    = 600_000
	maxOpenPulls = 4096
	maxPairs     = 4096
)

// Begin notes a transfer over a link that will be over at untilMs.
func (p *Pulls) Begin(nowMs, untilMs float64, pair Pair, link string) {
	p.advance(nowMs)
	if len(p.open) >= maxOpenPulls || !(untilMs > nowMs) {
		return
	}
	if p.links == nil {
		p.links, p.sending = map[string]int{}, map[string]int{}
	}
	p.open = append(p.open, openPull{link, pair.From, untilMs})
	p.links[link]++
	p.sending[pair.From]++
}

// UnderWay counts the transfers on a link.
func (p *Pulls) UnderWay(nowMs float64, link string) int {
	p.advance(nowMs)
	return p.links[link]
}

// Sending counts the transfers a worker is sending.
func (p *Pulls) Sending(nowMs float64, worker string) int {
	p.advance(nowMs)
	return p.sending[worker]
}

// advance forgets what is over.
func (p *Pulls) advance(nowMs float64) {
	kept := p.open[:0]
	for _, o := range p.open {
		if o.untilMs > nowMs {
			kept = append(kept, o)
			continue
		}
		countDown(p.links, o.link)
		countDown(p.sending, o.from)
	}
	p.open = kept
}

func countDown(counts map[string]int, key string) {
	if counts[key]--; counts[key] <= 0 {
		delete(counts, key)
	}
}

// Outcome says whether a pull was seen to have worked. It reports true when
// that switches the pair off or on again.
func (p *Pulls) Outcome(nowMs float64, pair Pair, confirmed bool) (switched bool) {
	t := p.pairs[pair]
	if confirmed {
		delete(p.pairs, pair)
		return t != nil && t.misses >= PairOffAfter
	}
	if t == nil {
		p.makeRoom()
		t = &pairTrust{}
		p.pairs[pair] = t
	}
	t.misses, t.atMs = t.misses+1, nowMs
	if t.misses < PairOffAfter {
		return false
	}
	t.offUntilMs = nowMs + PairOffMs
	return t.misses == PairOffAfter
}

// makeRoom forgets the pair that was heard of longest ago.
func (p *Pulls) makeRoom() {
	if p.pairs == nil {
		p.pairs = map[Pair]*pairTrust{}
	}
	if len(p.pairs) < maxPairs {
		return
	}
	var oldest Pair
	atMs, any := 0.0, false
	for pair, t := range p.pairs {
		if !any || t.atMs < atMs || t.atMs == atMs && (pair.From < oldest.From || pair.From == oldest.From && pair.To < oldest.To) {
			oldest, atMs, any = pair, t.atMs, true
		}
	}
	delete(p.pairs, oldest)
}

// Off reports whether a pair is switched off. When its time is over pulls may
// try again; the first that is not confirmed switches it off anew.
func (p *Pulls) Off(nowMs float64, pair Pair) bool {
	t := p.pairs[pair]
	return t != nil && t.misses >= PairOffAfter && nowMs < t.offUntilMs
}

// OffPairs lists the pairs that are off, with how many pulls in a row were not
// confirmed.
func (p *Pulls) OffPairs(nowMs float64) map[Pair]int {
	off := map[Pair]int{}
	for pair, t := range p.pairs {
		if p.Off(nowMs, pair) {
			off[pair] = t.misses
		}
	}
	return off
}
