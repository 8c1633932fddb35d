package memo

import "waypost/gossip/prefix"

const (
	// pointTokens is the distance of the points kept within a chunk.
	pointTokens = prefix.PointTokens
	// chunkPoints is how many a whole chunk has: its end is a checkpoint.
	chunkPoints = prefix.ChunkTokens/pointTokens - 1
)

// Bytes that each part is counted with: its own size and its share of the tables
// that find it.
const (
	nodeBytes   = 32 + 22
	chunkBytes  = 32 + 22
	pointsBytes = chunkPoints * 8
	recordBytes = 48
)

// chunk is 512 tokens of one or more learnt prompts, at one place, behind the
// same tokens.
type chunk struct {
	value  prefix.Chain // at its end
	parent int32        // 0: none
	refs   int32        // chunks behind it, and records that end in it or in the next one
	depth  int32        // how many chunks there are up to its end
	points *[chunkPoints]prefix.Chain
}

// record is a learnt prompt.
type record struct {
	tokens int32
	tip    int32 // last whole chunk; 0: none
	tail   []prefix.Chain
	// nodes heads the list of those that stand on it. older and newer are its
	// neighbours by the last use.
	nodes        int32
	older, newer int32
}

// tape has the chain values of a prompt: computed of its token ids as they are
// asked for, or told.
type tape struct {
	tokens int
	ids    []uint32
	chains []prefix.Chain
	points [][]prefix.Chain // of chunk i; nil: not computed
}

func (t *tape) reset(ids []uint32) {
	t.tokens, t.ids, t.chains = len(ids), ids, t.chains[:0]
	var c prefix.Chain
	for i := prefix.ChunkTokens; i <= len(ids); i += prefix.ChunkTokens {
		c = prefix.Next(c, ids[i-prefix.ChunkTokens:i])
		t.chains = append(t.chains, c)
	}
	t.clear()
}

// told is a prompt of which the values at each pointTokens tokens are known.
func (t *tape) told(values []prefix.Chain) {
	const perChunk = chunkPoints + 1
	t.tokens, t.ids, t.chains = len(values)*pointTokens, nil, t.chains[:0]
	for i := perChunk; i <= len(values); i += perChunk {
		t.chains = append(t.chains, values[i-1])
	}
	t.clear()
	for i := 0; i*perChunk < len(values); i++ {
		t.points[i] = append(t.points[i], values[i*perChunk:min(i*perChunk+chunkPoints, len(values))]...)
	}
}

// clear forgets the points of a former prompt.
func (t *tape) clear() {
	n := len(t.chains) + 1
	for len(t.points) < n {
		t.points = append(t.points, nil)
	}
	for i := range t.points {
		t.points[i] = t.points[i][:0]
	}
}

// chain is the value in front of chunk i.
func (t *tape) chain(i int) prefix.Chain {
	if i == 0 {
		return 0
	}
	return t.chains[i-1]
}

// pointsOf are the values at the points of chunk i, the last one of the tape may
// be partial.
func (t *tape) pointsOf(i int) []prefix.Chain {
	from := i * prefix.ChunkTokens
	n := min(chunkPoints, (t.tokens-from)/pointTokens)
	if len(t.points[i]) >= n {
		return t.points[i][:n]
	}
	p, before := t.points[i], t.chain(i)
	for o := len(p) + 1; o <= n; o++ {
		p = append(p, prefix.Point(before, t.ids[from:from+o*pointTokens]))
	}
	t.points[i] = p
	return p
}

// at is the value at a depth that is a multiple of pointTokens.
func (t *tape) at(depth int) (prefix.Chain, bool) {
	if depth > t.tokens {
		return 0, false
	}
	i, o := depth/prefix.ChunkTokens, depth%prefix.ChunkTokens
	if o == 0 {
		return t.chain(i), true
	}
	if t.ids == nil {
		return t.points[i][o/pointTokens-1], true
	}
	return prefix.Point(t.chain(i), t.ids[i*prefix.ChunkTokens:depth]), true
}

// common counts the tokens, in whole points, that a tape has in common with
// chain values.
func (t *tape) common(chains []prefix.Chain, points func(chunk int) []prefix.Chain) int {
	k, n := 0, min(len(chains), len(t.chains))
	for k < n && chains[k] == t.chains[k] {
		k++
	}
	mine := t.pointsOf(k)
	o := 0
	for _, v := range points(k) {
		if o == len(mine) || mine[o] != v {
			break
		}
		o++
	}
	return k*prefix.ChunkTokens + o*pointTokens
}

// records keeps learnt prompts; what several have in common is kept once.
type records struct {
	chunks    []chunk // 0 is none
	free      []int32
	byValue   map[prefix.Chain]int32
	all       []record // 0 is none
	freeRec   []int32
	oldest    int32
	newest    int32
	points    int // chunks with points
	tailBytes int
	live      int
}

func newRecords() records {
	return records{chunks: make([]chunk, 1), all: make([]record, 1), byValue: map[prefix.Chain]int32{}}
}

func (s *records) bytes() int {
	return len(s.byValue)*chunkBytes + s.points*pointsBytes + s.live*recordBytes + s.tailBytes
}

// add keeps the prompt of a tape up to a length.
func (s *records) add(t *tape, tokens int) int32 {
	whole := tokens / prefix.ChunkTokens
	at, from := int32(0), 0
	for i := whole; i > 0; i-- {
		if c, ok := s.byValue[t.chains[i-1]]; ok && int(s.chunks[c].depth) == i {
			at, from = c, i
			break
		}
	}
	for i := from; i < whole; i++ {
		at = s.newChunk(t.chains[i], at, int32(i+1))
	}
	if at != 0 {
		s.chunks[at].refs++
	}
	r := record{tokens: int32(tokens), tip: at}
	if n := tokens % prefix.ChunkTokens / pointTokens; n > 0 {
		r.tail = append(make([]prefix.Chain, 0, n), t.pointsOf(whole)[:n]...)
	}
	return s.keep(r)
}

// keep gives a record a place, as the one last used.
func (s *records) keep(r record) int32 {
	id := int32(len(s.all))
	if n := len(s.freeRec); n > 0 {
		id, s.freeRec = s.freeRec[n-1], s.freeRec[:n-1]
		s.all[id] = r
	} else {
		s.all = append(s.all, r)
	}
	s.live++
	s.tailBytes += 8 * len(r.tail)
	s.link(id)
	return id
}

func (s *records) newChunk(value prefix.Chain, parent, depth int32) int32 {
	c := chunk{value: value, parent: parent, depth: depth}
	if parent != 0 {
		s.chunks[parent].refs++
	}
	id := int32(len(s.chunks))
	if n := len(s.free); n > 0 {
		id, s.free = s.free[n-1], s.free[:n-1]
		s.chunks[id] = c
	} else {
		s.chunks = append(s.chunks, c)
	}
	s.byValue[value] = id
	return id
}

// drop forgets a record and what only it needed.
func (s *records) drop(id int32) {
	r := &s.all[id]
	s.unlink(id)
	s.tailBytes -= 8 * len(r.tail)
	for at := r.tip; at != 0; {
		c := &s.chunks[at]
		if c.refs--; c.refs > 0 {
			break
		}
		if s.byValue[c.value] == at {
			delete(s.byValue, c.value)
		}
		if c.points != nil {
			s.points--
		}
		next := c.parent
		*c = chunk{}
		s.free = append(s.free, at)
		at = next
	}
	*r = record{}
	s.freeRec = append(s.freeRec, id)
	s.live--
}

// keepPoints keeps the points of the chunk in which a depth of a record lies, or
// asks with more unset only whether they are kept.
func (s *records) keepPoints(id int32, t *tape, depth int, more bool) (kept bool) {
	i := depth / prefix.ChunkTokens
	if i >= int(s.all[id].tokens)/prefix.ChunkTokens {
		return true // the tail has them
	}
	c := &s.chunks[s.ancestor(s.all[id].tip, i+1)]
	if c.points == nil && more {
		c.points = new([chunkPoints]prefix.Chain)
		copy(c.points[:], t.pointsOf(i))
		s.points++
	}
	return c.points != nil
}

// ancestor is the chunk at a depth on the way to another.
func (s *records) ancestor(at int32, depth int) int32 {
	for int(s.chunks[at].depth) > depth {
		at = s.chunks[at].parent
	}
	return at
}

// common counts the tokens that a record has in common with a tape: exact to 16
// tokens where it has points, else to 512.
func (s *records) common(id int32, t *tape) int {
	r := &s.all[id]
	behind, at := int32(0), r.tip
	for at != 0 {
		c := &s.chunks[at]
		if int(c.depth) <= len(t.chains) && c.value == t.chains[c.depth-1] {
			break
		}
		behind, at = at, c.parent
	}
	whole := 0
	if at != 0 {
		whole = int(s.chunks[at].depth)
	}
	var theirs []prefix.Chain
	switch {
	case behind == 0:
		theirs = r.tail
	case s.chunks[behind].points != nil:
		theirs = s.chunks[behind].points[:]
	}
	if len(theirs) == 0 {
		return whole * prefix.ChunkTokens
	}
	mine, n := t.pointsOf(whole), 0
	for n < len(mine) && n < len(theirs) && mine[n] == theirs[n] {
		n++
	}
	return whole*prefix.ChunkTokens + n*pointTokens
}

// known counts the tokens of a tape that any record has in common with it, where
// that can be told.
func (s *records) known(t *tape) int {
	for i := len(t.chains); i > 0; i-- {
		if c, ok := s.byValue[t.chains[i-1]]; ok && int(s.chunks[c].depth) == i {
			return i * prefix.ChunkTokens
		}
	}
	return 0
}

// use makes a record the one last used.
func (s *records) use(id int32) {
	if s.newest != id {
		s.unlink(id)
		s.link(id)
	}
}

func (s *records) link(id int32) {
	s.all[id].older, s.all[id].newer = s.newest, 0
	if s.newest != 0 {
		s.all[s.newest].newer = id
	} else {
		s.oldest = id
	}
	s.newest = id
}

func (s *records) unlink(id int32) {
	r := &s.all[id]
	if r.older != 0 {
		s.all[r.older].newer = r.newer
	} else {
		s.oldest = r.newer
	}
	if r.newer != 0 {
		s.all[r.newer].older = r.older
	} else {
		s.newest = r.older
	}
	r.older, r.newer = 0, 0
}
