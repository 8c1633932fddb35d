package blocktable

// index is an open-addressed set of node ids by a 32-bit key of the node, in
// Robin Hood order: along a probe the entries farthest from home come first.
// A slot holds an id in its low 24 bits, above it 4 bits of the key, so that a
// probe seldom touches a node that is not the one sought, and above those the
// entry's distance from home, so that insertion and removal shift entries
// without touching their nodes. In a large table each touch is a cache miss.
type index struct {
	slots     []uint32
	count     int
	byContent bool // by node.print, else by node.hash
}

const (
	idMask        = 1<<24 - 1
	indexMinSlots = 64
)

func newIndex(expect int, byContent bool) index {
	return index{slots: make([]uint32, max(indexMinSlots, expect+expect/3+1)), byContent: byContent}
}

// hashKey spreads an engine hash; engines of tests and old versions use small
// or signed numbers.
func hashKey(h uint64) uint32 {
	h ^= h >> 32
	h *= 0x9e3779b97f4a7c15
	return uint32(h >> 32)
}

func (x *index) home(key uint32) int {
	return int(uint64(key) * uint64(len(x.slots)) >> 32)
}

func (x *index) keyOf(s *nodes, id uint32) uint32 {
	if x.byContent {
		return s.at(id).print
	}
	return hashKey(s.at(id).hash)
}

// insert adds an id that is not in the set.
func (x *index) insert(s *nodes, id uint32) {
	if (x.count+1)*4 > len(x.slots)*3 {
		x.grow(s)
	}
	x.count++
	x.place(s, x.keyOf(s, id), id)
}

// farDistance stands for itself and every greater distance.
const farDistance = 15

func slotOf(distance int, tag, id uint32) uint32 {
	return uint32(min(distance, farDistance))<<28 | tag<<24 | id
}

func tagOf(key uint32) uint32 { return key & 15 }

// distance is how far the entry v at slot i is from its home.
func (x *index) distance(s *nodes, i int, v uint32) int {
	if d := int(v >> 28); d < farDistance {
		return d
	}
	d := i - x.home(x.keyOf(s, v&idMask))
	if d < 0 {
		d += len(x.slots)
	}
	return d
}

func (x *index) place(s *nodes, key, id uint32) {
	i, d, tag := x.home(key), 0, tagOf(key)
	for {
		v := x.slots[i]
		if v == 0 {
			x.slots[i] = slotOf(d, tag, id)
			return
		}
		if vd := x.distance(s, i, v); vd < d {
			x.slots[i] = slotOf(d, tag, id)
			d, tag, id = vd, v>>24&15, v&idMask
		}
		d++
		if i++; i == len(x.slots) {
			i = 0
		}
	}
}

func (x *index) grow(s *nodes) {
	old := x.slots
	x.slots = make([]uint32, len(old)+len(old)/2)
	for _, v := range old {
		if v != 0 {
			id := v & idMask
			x.place(s, x.keyOf(s, id), id)
		}
	}
}

// remove takes out an id that is in the set.
func (x *index) remove(s *nodes, id uint32) {
	i := x.home(x.keyOf(s, id))
	for x.slots[i]&idMask != id {
		if x.slots[i] == 0 {
			return
		}
		if i++; i == len(x.slots) {
			i = 0
		}
	}
	x.count--
	for {
		j := i + 1
		if j == len(x.slots) {
			j = 0
		}
		v := x.slots[j]
		if v>>28 == 0 { // empty or at home
			x.slots[i] = 0
			return
		}
		x.slots[i] = slotOf(x.distance(s, j, v)-1, v>>24&15, v&idMask)
		i = j
	}
}

func (x *index) reset() {
	clear(x.slots)
	x.count = 0
}

// findHash gives the node with an engine hash, or 0.
func (t *Table) findHash(h uint64) uint32 {
	key := hashKey(h)
	x := &t.byHash
	i, sought := x.home(key), tagOf(key)
	for d := uint32(0); ; d++ {
		v := x.slots[i]
		// An entry nearer its home than this probe: the sought one would
		// have taken the slot.
		if v == 0 || v>>28 < min(d, farDistance) {
			return 0
		}
		if v>>24&15 == sought {
			if id := v & idMask; t.nodes.at(id).hash == h {
				return id
			}
		}
		if i++; i == len(x.slots) {
			i = 0
		}
	}
}

// appendAttached appends the attached children of parent that hold exactly the
// tokens: none, one, or twins. Tokens are compared, so a tenant who can make
// fingerprints collide gains nothing.
func (t *Table) appendAttached(dst []uint32, parent uint32, class uint8, tokens []uint32) []uint32 {
	key := t.contentKey(parent, tokens)
	x := &t.byContent
	i, sought := x.home(key), tagOf(key)
	for d := uint32(0); ; d++ {
		v := x.slots[i]
		if v == 0 || v>>28 < min(d, farDistance) {
			return dst
		}
		if v>>24&15 == sought {
			id := v & idMask
			n := t.nodes.at(id)
			if n.print == key && n.parent == parent && n.class == class && n.flags&flagAttached != 0 &&
				equalTokens(t.slabs[class].at(n.slot), tokens) {
				dst = append(dst, id)
			}
		}
		if i++; i == len(x.slots) {
			i = 0
		}
	}
}

// maxTwins bounds the blocks of equal content below one parent that are found
// by content. An engine has a few when it reloads an adapter; one that gives
// every copy a new hash would otherwise make one endless probe of the index.
const maxTwins = 32

// crowded says whether the index by content holds maxTwins entries of a key.
func (t *Table) crowded(key uint32) bool {
	x := &t.byContent
	i, sought, twins := x.home(key), tagOf(key), 0
	for d := uint32(0); ; d++ {
		v := x.slots[i]
		if v == 0 || v>>28 < min(d, farDistance) {
			return false
		}
		if v>>24&15 == sought && t.nodes.at(v&idMask).print == key {
			if twins++; twins == maxTwins {
				return true
			}
		}
		if i++; i == len(x.slots) {
			i = 0
		}
	}
}

func equalTokens(a, b []uint32) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if a[i] != b[i] {
			return false
		}
	}
	return true
}
