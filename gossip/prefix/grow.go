package prefix

import (
	"fmt"
	"math/bits"
)

// Growing computes the values of one prefix as it grows within a chunk. Each is a
// hash over all tokens since the checkpoint: of what the one before had in common
// with it nothing is hashed again. The zero value is for any checkpoint.
type Growing struct {
	secret  [secretWords]uint64 // if there are stripes
	sums    [stripeWords]uint64
	stripes int // of the head that sums hold
}

// Reset begins with another checkpoint, or with other tokens after it.
func (g *Growing) Reset() { g.stripes = 0 }

// To returns the value at the end of head, the first tokens after a checkpoint with
// value prev: [Point], or [Next] of a whole chunk. Since Reset prev is the same, and
// no head has other tokens than the one before, as far as both reach. It panics
// unless head holds 1 to [ChunkTokens] tokens.
func (g *Growing) To(prev Chain, head []uint32) Chain {
	switch {
	case len(head) == 0 || len(head) > ChunkTokens:
		panic(fmt.Sprintf("prefix: a head of %d tokens, want 1 to %d", len(head), ChunkTokens))
	case len(head) <= shortTokens:
		g.stripes = 0
		return hashTokens(prev, head)
	}
	secret := &g.secret
	if g.stripes == 0 {
		seeded(secret, uint64(prev))
	}
	whole := (len(head) - 1) / stripeTokens
	if g.stripes == 0 || g.stripes > whole {
		g.sums, g.stripes = firstSums, 0
	}
	for ; g.stripes < whole; g.stripes++ {
		k := g.stripes % blockStripes
		addStripe(&g.sums, (*[stripeTokens]uint32)(head[g.stripes*stripeTokens:]), (*[stripeWords]uint64)(secret[k:]))
		if k == blockStripes-1 {
			scramble(&g.sums, (*[stripeWords]uint64)(secret[blockStripes:]))
		}
	}
	sums := g.sums
	var key [stripeWords]uint64
	for i := range key { // from byte 121 on
		key[i] = secret[15+i]>>8 | secret[16+i]<<56
	}
	addStripe(&sums, (*[stripeTokens]uint32)(head[len(head)-stripeTokens:]), &key)
	for i := range key { // from byte 11 on
		sums[i] ^= secret[1+i]>>24 | secret[2+i]<<40
	}
	h := uint64(len(head)*4) * prime64x1
	for i := 0; i < stripeWords; i += 2 {
		hi, lo := bits.Mul64(sums[i], sums[i+1])
		h += hi ^ lo
	}
	h ^= h >> 37
	h *= 0x165667919e3779f9
	return Chain(h ^ h>>32)
}

// What follows is the form that xxh3-64 with a seed has for more than 240 bytes.
const (
	stripeWords  = 8
	stripeTokens = 2 * stripeWords
	secretWords  = 24
	// blockStripes is the number of stripes between two scramblings.
	blockStripes = secretWords - stripeWords
	shortTokens  = 240 / 4

	prime32x1 = 0x9e3779b1
	prime32x2 = 0x85ebca77
	prime32x3 = 0xc2b2ae3d
	prime64x1 = 0x9e3779b185ebca87
	prime64x2 = 0xc2b2ae3d27d4eb4f
	prime64x3 = 0x165667b19e3779f9
	prime64x4 = 0x85ebca77c2b2ae63
	prime64x5 = 0x27d4eb2f165667c5
)

var firstSums = [stripeWords]uint64{prime32x3, prime64x1, prime64x2, prime64x3, prime64x4, prime32x2, prime64x5, prime32x1}

// unseeded is the secret of seed 0.
var unseeded = [secretWords]uint64{
	0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072, 0x78e5c0cc4ee679cb, 0x2172ffcc7dd05a82,
	0x8e2443f7744608b8, 0x4c263a81e69035e0, 0xcb00c391bb52283c, 0xa32e531b8b65d088, 0x4ef90da297486471, 0xd8acdea946ef1938,
	0x3f349ce33f76faa8, 0x1d4f0bc7c7bbdcf9, 0x3159b4cd4be0518a, 0x647378d9c97e9fc8, 0xc3ebd33483acc5ea, 0xeb6313faffa081c5,
	0x49daf0b751dd0d17, 0x9e68d429265516d3, 0xfca1477d58be162b, 0xce31d07ad1b8f88f, 0x280416958f3acb45, 0x7e404bbbcafbd7af,
}

func seeded(s *[secretWords]uint64, seed uint64) {
	for i := 0; i < secretWords; i += 2 {
		s[i], s[i+1] = unseeded[i]+seed, unseeded[i+1]-seed
	}
}

func addStripe(sums *[stripeWords]uint64, t *[stripeTokens]uint32, key *[stripeWords]uint64) {
	addPair(&sums[0], &sums[1], t[0:4], key[0], key[1])
	addPair(&sums[2], &sums[3], t[4:8], key[2], key[3])
	addPair(&sums[4], &sums[5], t[8:12], key[4], key[5])
	addPair(&sums[6], &sums[7], t[12:16], key[6], key[7])
}

func addPair(sa, sb *uint64, t []uint32, ka, kb uint64) {
	a, b := uint64(t[0])|uint64(t[1])<<32, uint64(t[2])|uint64(t[3])<<32
	ka, kb = ka^a, kb^b
	*sa += b + ka&0xffffffff*(ka>>32)
	*sb += a + kb&0xffffffff*(kb>>32)
}

func scramble(sums, key *[stripeWords]uint64) {
	for i, v := range sums {
		sums[i] = (v ^ v>>47 ^ key[i]) * prime32x1
	}
}
