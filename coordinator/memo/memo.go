package memo

import (
	"errors"
	"math"

	"waypost/gossip/prefix"
)

// Options of a Memo.
type Options struct {
	// MaxBytes bounds its memory; what was used longest ago makes room. At
	// least 64 KiB.
	MaxBytes int
}

// Memo is what was learnt of the prompts of one pool. It is not safe for
// concurrent use.
type Memo struct {
	opt     Options
	records records
	nodes   []node // 0 is none
	free    []int32
	byKey   map[uint64]int32
	trust   trust
	breaker breaker
	epoch   uint32
	early   int
	// goesOn: a prompt went on from the end of another as was predicted.
	goesOn bool
	// scale raises the bounds of tokens where they proved too low.
	scale  float64
	tape   tape
	lcp    map[int32]int // of the prompt being learnt, by record
	stats  Stats
	shares shares
}

// node says of a unit in a state how much of a record it is sure to begin with.
type node struct {
	key        uint64
	next       follower // on the record's path; none: it ended here
	record     int32
	tokens     int32 // sure to be shared, a multiple of pointTokens
	prev, succ int32 // nodes of the same record
	// answer: the record is a prompt and its answer, same: it is not; branched:
	// paths part behind it; queued: it waits to be told to other coordinators.
	answer           kind
	branched, queued bool
	tools            uint8 // Request.toolsMark of the record's, if paths with other tools meet here
}

// Stats counts since the start.
type Stats struct {
	// Lookups, of these those that were given an answer, and those that were not
	// because the breaker was open or too little was proven yet.
	Lookups, Hits, Withheld uint64
	// Learnt prompts, their tokens, and of these those that a prompt learnt
	// before had in common with them.
	Learnt, PromptTokens, KnownTokens uint64
	// GivenTokens were predicted for prompts learnt afterwards: CoveredTokens
	// rightly, OverTokens wrongly.
	GivenTokens, CoveredTokens, OverTokens uint64
	// Wrong answers, disagreements of two prompts about one boundary, and changes
	// of the epoch.
	Wrong, Disagreements, Epochs uint64
	// Evicted records, and entries taken from other coordinators.
	Evicted, Imported uint64
}

// behindTokens estimates the tokens of a text, rather too high.
func behindTokens(bytes int) int { return bytes * 2 / 3 }

// ErrOptions reports options that cannot be used.
var ErrOptions = errors.New("memo options")

// New returns an empty memo.
func New(opt Options) (*Memo, error) {
	if opt.MaxBytes < 64<<10 {
		return nil, errors.Join(ErrOptions, errors.New("max bytes: use at least 64 KiB"))
	}
	return &Memo{
		opt: opt, records: newRecords(), nodes: make([]node, 1), byKey: map[uint64]int32{}, epoch: 1, scale: 1, lcp: map[int32]int{},
	}, nil
}

// Epoch enters the hash of every request: read requests with the present one.
func (m *Memo) Epoch() uint32 { return m.epoch }

// Bytes is the memory held, counted by the sizes of its parts.
func (m *Memo) Bytes() int { return len(m.byKey)*nodeBytes + m.records.bytes() }

// Records is the number of prompts held.
func (m *Memo) Records() int { return m.records.live }

// Stats returns the counters.
func (m *Memo) Stats() Stats { return m.stats }

// Breaker says whether predictions are withheld because too many were wrong,
// the moving share of wrong ones, and how often it opened.
func (m *Memo) Breaker() (open bool, wrongShare float64, opened uint64) {
	return m.breaker.open, m.breaker.wrong, m.breaker.opens
}

// Prediction is what is known of a request's first tokens. Its memory is used
// again by the next look-up into it.
type Prediction struct {
	// Tokens is how many are known, a multiple of 16; 0: none.
	Tokens int
	// Chains are the chain values at the checkpoints among them and at the end of
	// the chunk in which they end, Points those at the points that are known
	// between. Values deeper than Tokens are of a prompt that begins alike.
	Chains []prefix.Chain
	Points []prefix.Points
	// BehindTokens estimates the tokens of the text behind what was found, on the
	// high side: two for three bytes.
	BehindTokens int
	// Withheld says that it is only compared, not used: the breaker is open, or
	// it is long, of a prompt that goes on from the end of another, and none such of
	// the pool has proved right so far.
	Withheld bool
	goesOn   bool // from the end of another
	epoch    uint32
}

func (p *Prediction) reset() {
	*p = Prediction{Chains: p.Chains[:0], Points: p.Points[:0]}
}

// pointsOf are the known points of a chunk.
func (p *Prediction) pointsOf(chunk int) []prefix.Chain {
	for i := len(p.Points) - 1; i >= 0; i-- {
		if p.Points[i].Chunk == chunk {
			return p.Points[i].Values
		}
	}
	return nil
}

// end is the chain value at the last known token.
func (p *Prediction) end() (prefix.Chain, bool) {
	chunk, o := p.Tokens/prefix.ChunkTokens, p.Tokens%prefix.ChunkTokens/pointTokens
	if o == 0 {
		if chunk == 0 || chunk > len(p.Chains) {
			return 0, false
		}
		return p.Chains[chunk-1], true
	}
	points := p.pointsOf(chunk)
	if o > len(points) {
		return 0, false
	}
	return points[o-1], true
}

func keyOf(u *unit, closed bool) uint64 { return u.hash&^1 | uint64(bit(closed)) }

// Lookup finds the first tokens of a request. It reports false when nothing is
// known, or when what is known is withheld.
func (m *Memo) Lookup(r *Request, p *Prediction) bool {
	p.reset()
	p.BehindTokens = behindTokens(r.textBytes)
	m.stats.Lookups++
	if r.epoch != m.epoch {
		return false
	}
	j, n, tokens := len(r.units)-1, int32(0), int32(0)
	for ; j >= 0 && n == 0; j-- {
		u := &r.units[j]
		if u.nowhere || u.opaque {
			continue
		}
		if n = m.usable(r, u); n != 0 {
			p.BehindTokens = behindTokens(r.textBytes - u.end)
			tokens = m.nodes[n].tokens
			if whole := m.wholeEnd(n); whole > 0 && m.trust.trusts(u.classOf(ending, u.closed, r.tools)) {
				tokens = whole
			}
			p.goesOn = m.ended(n) && j+1 < len(r.units)
		}
	}
	if j < r.plainAt {
		if k := m.plain(r); m.nodes[k].tokens > tokens {
			n, tokens = k, m.nodes[k].tokens
			p.BehindTokens = behindTokens(r.textBytes - r.plain.end + r.toolBytes)
			p.goesOn = false
		}
	}
	if n != 0 {
		m.predict(n, tokens, p)
	}
	if p.Tokens == 0 {
		return false
	}
	p.epoch = m.epoch
	p.Withheld = m.breaker.open || p.goesOn && !m.goesOn && p.Tokens > unprovenTokens
	if p.Withheld {
		p.BehindTokens = behindTokens(r.textBytes)
		m.stats.Withheld++
		return false
	}
	m.stats.Hits++
	return true
}

// usable is the node that stands for a unit, if there is one that is believed.
func (m *Memo) usable(r *Request, u *unit) int32 {
	if id := m.byKey[keyOf(u, u.closed)]; id != 0 {
		n := &m.nodes[id]
		c := u.classOf(n.answer, u.closed, r.tools)
		if n.tokens > 0 && m.trust.trusts(c) {
			return id
		}
	}
	if !u.closed {
		return 0
	}
	if id := m.byKey[keyOf(u, false)]; id != 0 {
		n := &m.nodes[id]
		c := u.classOf(max(cross, n.answer), true, r.tools)
		if n.tokens > 0 && m.trust.trusts(c) {
			return id
		}
	}
	return 0
}

// plain is the node that stands for the leading system messages whatever the
// tools, if templates were seen to write those behind them; 0: none.
func (m *Memo) plain(r *Request) (n int32) {
	if r.plainAt == 0 {
		return 0
	}
	if m.trust.trusts(r.plain.classOf(untooled, r.plain.closed, r.tools)) {
		n = m.byKey[keyOf(&r.plain, r.plain.closed)]
	}
	if r.toolsMark != 0 && m.trust.trusts(r.plain.classOf(retooled, r.plain.closed, true)) {
		if k := m.byKey[keyOf(&r.someTools, r.plain.closed)]; m.nodes[k].tokens > m.nodes[n].tokens {
			n = k
		}
	}
	return n
}

// wholeEnd is how much of a record a node may stand for whose unit ends its prompt,
// if what asks for an answer stays when the answer follows; 0: it ends no prompt,
// or is known to share less.
func (m *Memo) wholeEnd(id int32) int32 {
	n := &m.nodes[id]
	whole := m.records.all[n.record].tokens
	if n.answer != same || n.next.path != 0 || n.tokens != floor(float64(whole)-endTokens) {
		return 0
	}
	return floor(float64(whole))
}

// ended says that a node's unit was the last one of its prompt. Of what another
// coordinator told of, that is not known.
func (m *Memo) ended(id int32) bool {
	n := &m.nodes[id]
	return n.answer == same && n.next.path == 0 && !n.branched
}

// predict tells so much of a node's record.
func (m *Memo) predict(id, tokens int32, p *Prediction) {
	n := &m.nodes[id]
	m.records.use(n.record)
	m.records.tell(n.record, int(tokens), p)
}

// tell puts the first tokens of a record into a prediction, up to a point that
// is known. Of the chunk in which they end it tells all: who holds more of it
// than the prompt is sure to share, holds that too.
func (s *records) tell(id int32, tokens int, p *Prediction) {
	r := &s.all[id]
	whole := tokens / prefix.ChunkTokens
	o := tokens % prefix.ChunkTokens / pointTokens
	at := r.tip
	var last []prefix.Chain // points of the chunk in which the tokens end
	depth := whole
	if whole == int(r.tokens)/prefix.ChunkTokens {
		last = r.tail
	} else {
		at = s.ancestor(at, whole+1)
		if q := s.chunks[at].points; q != nil {
			last = q[:]
		}
		depth++
	}
	for len(p.Chains) < depth {
		p.Chains = append(p.Chains, 0)
	}
	if whole == depth && len(last) > 0 {
		p.Points = append(p.Points, prefix.Points{Chunk: whole, Values: last})
	}
	for ; at != 0; at = s.chunks[at].parent {
		c := &s.chunks[at]
		p.Chains[c.depth-1] = c.value
		if c.points != nil {
			p.Points = append(p.Points, prefix.Points{Chunk: int(c.depth) - 1, Values: c.points[:]})
		}
	}
	p.Tokens = whole*prefix.ChunkTokens + min(o, len(last))*pointTokens
}

// Depth is how deep values are told, in tokens; at least Tokens.
func (p *Prediction) Depth() int {
	depth := len(p.Chains) * prefix.ChunkTokens
	for i := range p.Points {
		depth = max(depth, p.Points[i].Chunk*prefix.ChunkTokens+len(p.Points[i].Values)*pointTokens)
	}
	return depth
}

// newNode makes a node on a record.
func (m *Memo) newNode(n node) int32 {
	id := int32(len(m.nodes))
	if k := len(m.free); k > 0 {
		id, m.free = m.free[k-1], m.free[:k-1]
		m.nodes[id] = n
	} else {
		m.nodes = append(m.nodes, n)
	}
	m.byKey[n.key] = id
	m.hang(id, n.record)
	return id
}

// hang puts a node on a record.
func (m *Memo) hang(id, rec int32) {
	n, r := &m.nodes[id], &m.records.all[rec]
	n.record, n.prev, n.succ = rec, 0, r.nodes
	if r.nodes != 0 {
		m.nodes[r.nodes].prev = id
	}
	r.nodes = id
}

// unhang takes a node off its record, which goes when it was the last.
func (m *Memo) unhang(id int32) {
	n := &m.nodes[id]
	if n.prev != 0 {
		m.nodes[n.prev].succ = n.succ
	} else {
		m.records.all[n.record].nodes = n.succ
	}
	if n.succ != 0 {
		m.nodes[n.succ].prev = n.prev
	}
	if m.records.all[n.record].nodes == 0 {
		m.records.drop(n.record)
	}
}

// move puts a node on another record.
func (m *Memo) move(id, rec int32) {
	if m.nodes[id].record != rec {
		m.unhang(id)
		m.hang(id, rec)
	}
}

func (m *Memo) dropNode(id int32) {
	m.unhang(id)
	delete(m.byKey, m.nodes[id].key)
	m.nodes[id] = node{}
	m.free = append(m.free, id)
}

// dropRecord forgets a record and the nodes on it.
func (m *Memo) dropRecord(rec int32) {
	for id := m.records.all[rec].nodes; id != 0; {
		next := m.nodes[id].succ
		last := next == 0
		m.dropNode(id)
		if last {
			return // the record went with its last node
		}
		id = next
	}
}

// makeRoom drops what was used longest ago.
func (m *Memo) makeRoom() {
	for m.Bytes() > m.opt.MaxBytes && m.records.oldest != m.records.newest {
		m.stats.Evicted++
		m.dropRecord(m.records.oldest)
	}
}

// newEpoch forgets all prompts; what was learnt about classes stays.
func (m *Memo) newEpoch(epoch uint32) {
	m.epoch, m.early = epoch, 0
	m.stats.Epochs++
	m.records, m.nodes, m.free, m.byKey = newRecords(), make([]node, 1), nil, map[uint64]int32{}
	m.shares.clear()
}

func floor(tokens float64) int32 {
	if !(tokens >= pointTokens) {
		return 0
	}
	return int32(min(tokens, math.MaxInt32)) / pointTokens * pointTokens
}
