package prefix

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/zeebo/xxh3"
)

// Mark says that the prompt holds something else than tokens at a place: an
// image, a sound, an embedding, for which placeholder tokens stand.
type Mark struct {
	// Position is the index, in the prompt, of the first token that stands for
	// the item. In NextMarked and PointMarked it counts from the start of the
	// chunk.
	Position uint32
	// Digest identifies the content: of an item that an engine calls by an
	// identifier, such as the hash of its content or a name that the caller gave,
	// the unseeded xxh3-64 of the identifier's bytes.
	Digest uint64
}

// ErrMarks reports marks that do not fit their prompt.
var ErrMarks = errors.New("marks must ascend and lie within the prompt")

// CheckMarks says whether the marks of a prompt of so many tokens are in order:
// ascending positions, each less than the number of tokens. The error wraps
// [ErrMarks].
func CheckMarks(marks []Mark, tokens int) error {
	for i, m := range marks {
		if int64(m.Position) >= int64(tokens) {
			return fmt.Errorf("%w: mark %d at token %d of %d", ErrMarks, i, m.Position, tokens)
		}
		if i > 0 && m.Position <= marks[i-1].Position {
			return fmt.Errorf("%w: mark %d at token %d follows one at %d", ErrMarks, i, m.Position, marks[i-1].Position)
		}
	}
	return nil
}

// NextMarked is [Next] for a chunk in which items stand. Positions count from
// the start of the chunk. Without marks it is Next.
func NextMarked(prev Chain, chunk []uint32, marks []Mark) Chain {
	if len(marks) == 0 {
		return Next(prev, chunk)
	}
	if len(chunk) != ChunkTokens {
		panic(fmt.Sprintf("prefix: a chunk of %d tokens, want %d", len(chunk), ChunkTokens))
	}
	return hashMarked(prev, chunk, marks)
}

// PointMarked is [Point] for a head in which items stand; those at or behind its
// end do not count. Positions count from the start of the chunk. Without marks
// it is Point.
func PointMarked(prev Chain, head []uint32, marks []Mark) Chain {
	for len(marks) > 0 && int64(marks[len(marks)-1].Position) >= int64(len(head)) {
		marks = marks[:len(marks)-1]
	}
	if len(marks) == 0 {
		return Point(prev, head)
	}
	if len(head) >= ChunkTokens {
		panic(fmt.Sprintf("prefix: a point at offset %d, want 1 to %d", len(head), ChunkTokens-1))
	}
	return hashMarked(prev, head, marks)
}

const (
	// markBytes is the length of a mark as it is hashed.
	markBytes = 4 + 8
	// stackMarks is how many marks of one chunk are hashed from the stack.
	stackMarks = 16
)

// hashMarked hashes tokens and, after them, each mark: position and digest,
// little-endian.
func hashMarked(seed Chain, tokens []uint32, marks []Mark) Chain {
	if err := CheckMarks(marks, len(tokens)); err != nil {
		panic("prefix: " + err.Error())
	}
	var buf [ChunkTokens*4 + stackMarks*markBytes]byte
	b := buf[:0]
	for _, t := range tokens {
		b = binary.LittleEndian.AppendUint32(b, t)
	}
	for _, m := range marks {
		b = binary.LittleEndian.AppendUint32(b, m.Position)
		b = binary.LittleEndian.AppendUint64(b, m.Digest)
	}
	return Chain(xxh3.HashSeed(b, uint64(seed)))
}

// within returns the marks in [from, to), counted from there, in dst.
func within(dst, marks []Mark, from, to uint32) []Mark {
	for _, m := range marks {
		if m.Position >= from && m.Position < to {
			dst = append(dst, Mark{m.Position - from, m.Digest})
		}
	}
	return dst
}
