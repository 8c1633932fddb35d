package bench

import (
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// modelCache is the same pool as lists.
type modelCache struct {
	queue []int // free blocks, the next to be evicted first
	hash  []uint64
	uses  []int
}

func (m *modelCache) find(hash uint64) []int {
	var out []int
	for b, h := range m.hash {
		if h == hash && b > 0 {
			out = append(out, b)
		}
	}
	return out
}

func TestCacheAgainstLists(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		size := rapid.IntRange(1, 24).Draw(t, "blocks")
		c := newCache(size)
		c.slots = make([]uint32, 64)
		m := &modelCache{hash: make([]uint64, size+1), uses: make([]int, size+1)}
		for b := 1; b <= size; b++ {
			m.queue = append(m.queue, b)
		}
		var gone []uint64
		c.evicted = func(hash uint64, last bool) {
			gone = append(gone, hash)
			if left := m.find(hash); last != (len(left) == 1) { // the model still has it
				t.Fatalf("the last copy: %v, %d in the model", last, len(left))
			}
		}
		var held []uint32
		for range rapid.IntRange(1, 200).Draw(t, "steps") {
			switch op := rapid.IntRange(0, 3).Draw(t, "op"); {
			case op <= 1 && len(m.queue) > 0: // fill a block
				gone = nil
				b := c.take()
				want := m.queue[0]
				if int(b) != want || m.hash[want] != 0 && !slices.Equal(gone, []uint64{m.hash[want]}) {
					t.Fatalf("took block %d, evicted %v: want %d with %d", b, gone, want, m.hash[want])
				}
				// Few hashes that fall on few slots: copies and long probes.
				hash := uint64(rapid.IntRange(1, 9).Draw(t, "hash"))<<20 | 1
				first := len(m.find(hash)) == 0 || len(m.find(hash)) == 1 && m.find(hash)[0] == want
				m.queue, m.hash[want], m.uses[want] = m.queue[1:], hash, 1
				if c.store(b, hash, 0) != first {
					t.Fatalf("first copy of %x: want %v", hash, first)
				}
				held = append(held, b)
			case op == 2 && len(held) > 0: // let go
				i := rapid.IntRange(0, len(held)-1).Draw(t, "which")
				b := held[i]
				held = slices.Delete(held, i, i+1)
				c.release(b)
				if m.uses[b]--; m.uses[b] == 0 {
					m.queue = append(m.queue, int(b))
				}
			case op == 3: // use again
				hash := uint64(rapid.IntRange(1, 9).Draw(t, "hash"))<<20 | 1
				b := c.find(hash)
				if (b == 0) != (len(m.find(hash)) == 0) || b != 0 && !slices.Contains(m.find(hash), int(b)) {
					t.Fatalf("found block %d of %x, the model has %v", b, hash, m.find(hash))
				}
				if b == 0 {
					continue
				}
				c.use(b)
				if m.uses[b]++; m.uses[b] == 1 {
					m.queue = slices.DeleteFunc(m.queue, func(x int) bool { return x == int(b) })
				}
				held = append(held, b)
			}
			if c.free != len(m.queue) {
				t.Fatalf("%d blocks are free: want %d", c.free, len(m.queue))
			}
		}
	})
}

// Runs are counted as the definition says, over random trees that lose leaves.
func TestRuns(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		c := newCache(64)
		c.evicted = func(uint64, bool) {}
		var alive []uint64
		parents := map[uint64]uint64{}
		next := uint64(1)
		want := map[uint64][]uint64{} // blocks of each run, by its first block
		runOf := map[uint64]uint64{}
		for range 150 {
			if len(alive) < 40 && rng.IntN(3) > 0 {
				hash, parent := next<<21, uint64(0)
				next++
				if len(alive) > 0 && rng.IntN(8) > 0 {
					parent = alive[rng.IntN(len(alive))]
				}
				c.store(c.take(), hash, parent)
				alive, parents[hash] = append(alive, hash), parent
				run := hash
				if r, ok := runOf[parent]; ok && want[r][len(want[r])-1] == parent {
					run = r
				}
				runOf[hash] = run
				want[run] = append(want[run], hash)
			} else if leaf, ok := someLeaf(rng, alive, parents); ok {
				b := c.find(leaf)
				c.forget(b, leaf)
				c.release(b)
				alive = slices.DeleteFunc(alive, func(h uint64) bool { return h == leaf })
				r := runOf[leaf]
				want[r] = slices.DeleteFunc(want[r], func(h uint64) bool { return h == leaf })
				if len(want[r]) == 0 {
					delete(want, r)
				}
				delete(runOf, leaf)
				delete(parents, leaf)
			}
			if c.runs.count != len(want) {
				t.Fatalf("%d runs: want %d", c.runs.count, len(want))
			}
		}
	}
}

func someLeaf(rng *rand.Rand, alive []uint64, parents map[uint64]uint64) (uint64, bool) {
	inner := map[uint64]bool{}
	for _, p := range parents {
		inner[p] = true
	}
	for _, i := range rng.Perm(len(alive)) {
		if !inner[alive[i]] {
			return alive[i], true
		}
	}
	return 0, false
}

func TestMasksAgainstMap(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	m := newMasks(1)
	want := map[uint64]uint64{}
	for range 20_000 {
		hash, worker := (rng.Uint64N(300)+1)<<18, rng.IntN(3)*31 // four hashes per home
		if rng.IntN(2) == 0 {
			m.set(hash, worker)
			want[hash] |= 1 << worker
		} else {
			m.clear(hash, worker)
			want[hash] &^= 1 << worker
		}
		if got := m.get(hash); got != want[hash] {
			t.Fatalf("workers %x of %x: want %x", got, hash, want[hash])
		}
	}
	for hash, set := range want {
		if got := m.get(hash); got != set {
			t.Fatalf("in the end workers %x of %x: want %x", got, hash, set)
		}
	}
}

func TestMasksMatches(t *testing.T) {
	m := newMasks(16)
	for w, n := range []int{3, 0, 5, 1} {
		for i := range n {
			m.set(uint64(i+1)<<20, w)
		}
	}
	chain := []uint64{1 << 20, 2 << 20, 3 << 20, 4 << 20}
	got := make([]int, 4)
	if m.matches(chain, got); !slices.Equal(got, []int{3, 0, 4, 1}) {
		t.Errorf("matches %v", got)
	}
}
