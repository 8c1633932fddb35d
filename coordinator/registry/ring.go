package registry

import "slices"

// ringChunk is how many entries a ring copies at most when one is added.
const ringChunk = 64

// ring holds the newest entries of a list, oldest first. It is a value: push
// returns a new ring and leaves the old one as it was.
type ring[T any] struct {
	chunks [][]T
	start  int // entries of the first chunk that have left
	size   int
	limit  int
}

func newRing[T any](limit int) ring[T] { return ring[T]{limit: limit} }

func (r ring[T]) push(v T) ring[T] {
	last := len(r.chunks) - 1
	if last < 0 || len(r.chunks[last]) == ringChunk {
		r.chunks = append(slices.Clone(r.chunks), []T{v})
	} else {
		chunk := append(slices.Clone(r.chunks[last]), v)
		r.chunks = slices.Clone(r.chunks)
		r.chunks[last] = chunk
	}
	r.size++
	if r.size > r.limit {
		r.size--
		r.start++
		if r.start == ringChunk {
			r.chunks, r.start = r.chunks[1:], 0
		}
	}
	return r
}

// all yields the entries, oldest first.
func (r ring[T]) all(yield func(*T) bool) {
	skip := r.start
	for _, c := range r.chunks {
		for i := skip; i < len(c); i++ {
			if !yield(&c[i]) {
				return
			}
		}
		skip = 0
	}
}

// slice copies the newest n entries, oldest first.
func (r ring[T]) slice(n int) []T {
	n = min(max(n, 0), r.size)
	out := make([]T, 0, n)
	skip := r.size - n
	for v := range r.all {
		if skip > 0 {
			skip--
			continue
		}
		out = append(out, *v)
	}
	return out
}

// ringOf holds the given entries, oldest first; there are at most limit.
func ringOf[T any](limit int, entries []T) ring[T] {
	r := ring[T]{limit: limit, size: len(entries)}
	for c := range slices.Chunk(entries, ringChunk) {
		r.chunks = append(r.chunks, slices.Clip(c))
	}
	return r
}
