package blocktable

// index is an open-addressed set of node ids by a 32-bit key of the node, in
// Robin Hood order: along a probe the entries farthest from home come first, and
// those of equal key side by side. A slot holds the key above and the id below,
// 0 if it is free, so that probes, insertions and removals need no node but the
// sought one: in a large table each is a cache miss.
type index struct {
	slots []uint64
	count int
}

const indexMinSlots = 64

func newIndex(expect int) index {
	return index{slots: make([]uint64, max(indexMinSlots, expect+expect/3+2))}
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

func (x *index) next(i int) int {
	if i++; i == len(x.slots) {
		return 0
	}
	return i
}

func slotOf(key, id uint32) uint64 { return uint64(key)<<32 | uint64(id) }
func keyIn(slot uint64) uint32     { return uint32(slot >> 32) }
func idIn(slot uint64) uint32      { return uint32(slot) }

// distance is how far the entry v at slot i is from its home.
func (x *index) distance(i int, v uint64) int {
	d := i - x.home(keyIn(v))
	if d < 0 {
		d += len(x.slots)
	}
	return d
}

// find gives the first id of a key at or after slot i, which is d slots from the
// key's home, and its distance; id 0: there is none.
func (x *index) find(key uint32, d int) (id uint32, at int) {
	i := x.home(key) + d
	if i >= len(x.slots) {
		i -= len(x.slots)
	}
	for {
		v := x.slots[i]
		if keyIn(v) == key && v != 0 {
			return idIn(v), d
		}
		// An entry nearer its home than this probe: the sought one would have
		// taken the slot.
		if v == 0 || x.distance(i, v) < d {
			return 0, d
		}
		i = x.next(i)
		d++
	}
}

// insert adds an id that is not in the set, unless it holds most others of the
// same key. It reports whether it did.
func (x *index) insert(key, id uint32, most int) bool {
	if (x.count+1)*4 > len(x.slots)*3 {
		x.grow()
	}
	if !x.place(slotOf(key, id), most) {
		return false
	}
	x.count++
	return true
}

func (x *index) place(entry uint64, most int) bool {
	i, d, twins := x.home(keyIn(entry)), 0, 0
	for {
		v := x.slots[i]
		if v == 0 {
			x.slots[i] = entry
			return true
		}
		if keyIn(v) == keyIn(entry) {
			if twins++; twins == most {
				return false
			}
		}
		// All of the entry's own key lie before the first one that it displaces.
		if vd := x.distance(i, v); vd < d {
			x.slots[i] = entry
			entry, d, most = v, vd, 0
		}
		d++
		i = x.next(i)
	}
}

func (x *index) grow() {
	old := x.slots
	x.slots = make([]uint64, len(old)+len(old)/4)
	for _, v := range old {
		if v != 0 {
			x.place(v, 0)
		}
	}
}

// remove takes out an id of a key, if it is in the set.
func (x *index) remove(key, id uint32) {
	i, sought := x.home(key), slotOf(key, id)
	for x.slots[i] != sought {
		if x.slots[i] == 0 {
			return
		}
		i = x.next(i)
	}
	x.count--
	for {
		j := x.next(i)
		v := x.slots[j]
		if v == 0 || x.distance(j, v) == 0 {
			x.slots[i] = 0
			return
		}
		x.slots[i] = v
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
	for id, d := t.byHash.find(key, 0); id != 0; id, d = t.byHash.find(key, d+1) {
		if t.nodes.at(id).hash == h {
			return id
		}
	}
	return 0
}

// appendAttached appends the attached children of parent that hold exactly the
// tokens: none, one, or twins. Tokens are compared, so a tenant who can make
// fingerprints collide gains nothing.
func (t *Table) appendAttached(dst []uint32, parent uint32, tokens []uint32) []uint32 {
	first := t.nodes.at(parent).first
	if first == 0 {
		return dst
	}
	n := t.nodes.at(first)
	if n.flags&(flagUnlisted|flagAttached) == flagUnlisted|flagAttached && t.holds(n, tokens) {
		dst = append(dst, first)
	}
	if n.flags&flagUnlisted != 0 && n.siblings == 0 {
		return dst // the only child
	}
	key := t.contentKey(parent, tokens)
	for id, d := t.byContent.find(key, 0); id != 0; id, d = t.byContent.find(key, d+1) {
		if n := t.nodes.at(id); n.parent == parent && n.flags&flagAttached != 0 && t.holds(n, tokens) {
			dst = append(dst, id)
		}
	}
	return dst
}

// maxTwins bounds the blocks of equal content below one parent that are found
// by content, a first child not counted. An engine has a few when it reloads an adapter; one that gives
// every copy a new hash would otherwise make one endless probe of the index.
const maxTwins = 32
