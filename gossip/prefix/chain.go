package prefix

import (
	"encoding/binary"
	"fmt"
	"unsafe"

	"github.com/zeebo/xxh3"
)

// ChunkTokens is the distance between checkpoints, in tokens.
const ChunkTokens = 512

// Chain is the unkeyed hash of all token ids of a prefix, 0 for the empty one.
// It is computable by anybody who knows the tokens and must not leave the
// process; [Keyer.Key] turns it into a name that may.
type Chain uint64

// hostLittleEndian tells whether the memory of a []uint32 is already the
// little-endian byte string that the format hashes.
var hostLittleEndian = binary.NativeEndian.Uint16([]byte{1, 0}) == 1

// Next returns the value at the next checkpoint: xxh3-64, seeded by the value at
// the previous one, over the chunk's token ids as little-endian 32-bit integers.
// It panics unless chunk holds exactly [ChunkTokens] tokens.
func Next(prev Chain, chunk []uint32) Chain {
	if len(chunk) != ChunkTokens {
		panic(fmt.Sprintf("prefix: a chunk of %d tokens, want %d", len(chunk), ChunkTokens))
	}
	return hashTokens(prev, chunk)
}

// Point returns the value at a point inside a chunk: xxh3-64, seeded by the
// value at the previous checkpoint, over the first tokens of the chunk. It
// panics unless head holds 1 to [ChunkTokens]-1 tokens.
func Point(prev Chain, head []uint32) Chain {
	if len(head) == 0 || len(head) >= ChunkTokens {
		panic(fmt.Sprintf("prefix: a point at offset %d, want 1 to %d", len(head), ChunkTokens-1))
	}
	return hashTokens(prev, head)
}

// hashTokens hashes at most ChunkTokens tokens.
func hashTokens(seed Chain, tokens []uint32) Chain {
	if !hostLittleEndian {
		return hashTokensPortable(seed, tokens)
	}
	b := unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(tokens))), len(tokens)*4)
	return Chain(xxh3.HashSeed(b, uint64(seed)))
}

// hashTokensPortable is hashTokens for hosts of any byte order.
func hashTokensPortable(seed Chain, tokens []uint32) Chain {
	var buf [ChunkTokens * 4]byte
	b := buf[:0]
	for _, t := range tokens {
		b = binary.LittleEndian.AppendUint32(b, t)
	}
	return Chain(xxh3.HashSeed(b, uint64(seed)))
}
