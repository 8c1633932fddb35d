package profile

import (
	"crypto/sha256"
	"encoding/binary"
)

// TRTHash is how TensorRT-LLM names blocks.
type TRTHash string

// The hashes. The first is 64 bits of arithmetic, the second a digest in
// hexadecimal.
const (
	TRTBlockKey TRTHash = "v1_block_key"
	TRTSHA256   TRTHash = "v2_sha256"
)

func mix32(v, s uint64) uint64 {
	x := uint32(v)
	x = (x>>16 ^ x) * 0x45D9F3B
	x = (x>>16 ^ x) * 0x45D9F3B
	x = x>>16 ^ x
	x += 0x9E3779B9
	return s ^ (uint64(x) + s<<6 + s>>2)
}

func mix64(v, s uint64) uint64 {
	v = (v ^ v>>30) * 0xBF58476D1CE4E5B9
	v = (v ^ v>>27) * 0x94D049BB133111EB
	v ^= v >> 31
	return s ^ (v + 0x9E3779B9 + s<<6 + s>>2)
}

func saltID(salt string) uint64 {
	d := sha256.Sum256([]byte(salt))
	return binary.LittleEndian.Uint64(d[:])
}

// blockKey is the default hash: over the parent's, the number of tokens and the
// tokens, from the salt on at the beginning.
func blockKey(prev *digest, salt string, tokens []uint32) (d digest) {
	parent := uint64(0)
	if prev != nil {
		parent = uint64(prev.first64())
	}
	seed := uint64(len(tokens)) ^ parent*0xBF58476D1CE4E5B9
	if prev == nil && salt != "" {
		seed = mix64(saltID(salt), seed)
	}
	for _, t := range tokens {
		seed = mix32(uint64(t), seed)
	}
	binary.BigEndian.PutUint64(d[:], seed)
	return d
}

// blockSHA is the newer hash: over the parent's digest and the tokens as eight
// bytes each, from a root that says what separates caches.
func blockSHA(prev *digest, salt string, tokens []uint32) digest {
	if prev == nil {
		root := []byte{0}
		if salt != "" {
			root = binary.LittleEndian.AppendUint64([]byte{2}, saltID(salt))
		}
		d := digest(sha256.Sum256(root))
		prev = &d
	}
	b := prev[:len(prev):len(prev)]
	for _, t := range tokens {
		b = binary.LittleEndian.AppendUint64(b, uint64(t))
	}
	return sha256.Sum256(b)
}

func (h TRTHash) page() hashPage {
	if h == TRTSHA256 {
		return blockSHA
	}
	return blockKey
}
