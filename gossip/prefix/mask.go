package prefix

import (
	"encoding/binary"

	"github.com/dchest/siphash"
)

// Mask hides values in place, or shows them again: chain values name prompts to
// everyone who can hash, so they leave a process under the cluster key only. name
// is what the values belong to, and must be another one for other values.
func (k ClusterKey) Mask(name string, values []uint64) {
	k0, k1 := binary.LittleEndian.Uint64(k[:8]), binary.LittleEndian.Uint64(k[8:])
	msg := append([]byte("waypost values "), name...)
	msg = append(msg, 0, 0, 0, 0, 0)
	place := msg[len(msg)-4:]
	for i := range values {
		binary.LittleEndian.PutUint32(place, uint32(i))
		values[i] ^= siphash.Hash(k0, k1, msg)
	}
}

// PointsOf appends the chain values of a prompt at each PointTokens tokens, the
// checkpoints among them.
func PointsOf(dst []Chain, tokens []uint32) []Chain {
	var before Chain
	for from := 0; from < len(tokens); from += ChunkTokens {
		chunk := tokens[from:min(from+ChunkTokens, len(tokens))]
		for o := PointTokens; o <= len(chunk) && o < ChunkTokens; o += PointTokens {
			dst = append(dst, Point(before, chunk[:o]))
		}
		if len(chunk) == ChunkTokens {
			before = Next(before, chunk)
			dst = append(dst, before)
		}
	}
	return dst
}
