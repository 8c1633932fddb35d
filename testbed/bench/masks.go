package bench

// masks maps block hashes to the set of at most 64 workers that hold them.
type masks struct {
	hashes []uint64
	sets   []uint64
	used   int
}

func newMasks(expect int) *masks {
	size := 64
	for size < expect*2 {
		size *= 2
	}
	return &masks{hashes: make([]uint64, size), sets: make([]uint64, size)}
}

func (m *masks) slot(hash uint64) int {
	mask := len(m.hashes) - 1
	for i := int(hash >> 20 & uint64(mask)); ; i = (i + 1) & mask {
		if h := m.hashes[i]; h == hash || h == 0 {
			return i
		}
	}
}

// get gives the workers that hold a block.
func (m *masks) get(hash uint64) uint64 { return m.sets[m.slot(hash)] }

// set lists a worker for a block.
func (m *masks) set(hash uint64, worker int) {
	if m.used*2 >= len(m.hashes) {
		m.grow()
	}
	i := m.slot(hash)
	if m.hashes[i] == 0 {
		m.hashes[i] = hash
		m.used++
	}
	m.sets[i] |= 1 << worker
}

// clear takes a worker off a block.
func (m *masks) clear(hash uint64, worker int) {
	i := m.slot(hash)
	if m.hashes[i] == 0 {
		return
	}
	if m.sets[i] &^= 1 << worker; m.sets[i] == 0 {
		m.remove(i)
	}
}

func (m *masks) remove(i int) {
	m.used--
	mask := len(m.hashes) - 1
	for j := (i + 1) & mask; m.hashes[j] != 0; j = (j + 1) & mask {
		if home := int(m.hashes[j] >> 20 & uint64(mask)); (j-home)&mask >= (j-i)&mask {
			m.hashes[i], m.sets[i] = m.hashes[j], m.sets[j]
			i = j
		}
	}
	m.hashes[i], m.sets[i] = 0, 0
}

func (m *masks) grow() {
	old := *m
	*m = masks{hashes: make([]uint64, 2*len(old.hashes)), sets: make([]uint64, 2*len(old.hashes)), used: old.used}
	for i, h := range old.hashes {
		if h != 0 {
			j := m.slot(h)
			m.hashes[j], m.sets[j] = h, old.sets[i]
		}
	}
}

// matches sets, for each worker of lengths, how many leading blocks of a chain
// it holds. It relies on nobody holding a block without those before it.
func (m *masks) matches(chain []uint64, lengths []int) {
	clear(lengths)
	left := uint64(1)<<len(lengths) - 1
	for i, h := range chain {
		now := left & m.get(h)
		for gone := left &^ now; gone != 0; gone &= gone - 1 {
			lengths[trailing(gone)] = i
		}
		if left = now; left == 0 {
			return
		}
	}
	for ; left != 0; left &= left - 1 {
		lengths[trailing(left)] = len(chain)
	}
}
