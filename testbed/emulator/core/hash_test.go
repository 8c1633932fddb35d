package core

import (
	"encoding/hex"
	"testing"
)

// The digests were made by the engine's own hashing with PYTHONHASHSEED=0, and
// recomputed in other languages.
func TestHashVectors(t *testing.T) {
	seq := func(from, n uint32) []uint32 {
		s := make([]uint32, n)
		for i := range s {
			s[i] = from + uint32(i)
		}
		return s
	}
	h := newHasher("0")
	block0 := h.block(h.root, seq(0, 16), nil, "")
	for _, test := range []struct {
		name string
		hash Hash
		want string
		low  uint64
	}{
		{"root of seed 0", h.root, "1973e23848344dc43a988a9b478663803cfffe1243480253f9a3cf004b14aa7c", 0},
		{"root without seed", newHasher("").root, "066b1e8987e027138e98701c46128929378935f9b6cd1549105ae6b4f0d71198", 0},
		{"block 0", block0, "6358e31578a64b75ebe28cdb99d3beae65de82a2087321dc6ec84ae048faaaa6", 7982712666671721126},
		{"block 1", h.block(block0, seq(100000, 16), nil, ""), "5be929498d05cba99c258cda33ff8b8d29c7858817a39fc1839ee6b54f5a52bf", 9484271531683631807},
	} {
		if got := hex.EncodeToString(test.hash[:]); got != test.want {
			t.Errorf("%s: %s, want %s", test.name, got, test.want)
		}
		if test.low != 0 && test.hash.Low64() != test.low {
			t.Errorf("%s: low 64 bits %d, want %d", test.name, test.hash.Low64(), test.low)
		}
	}
}

func TestHashSeparates(t *testing.T) {
	h := newHasher("")
	tokens := []uint32{1, 2, 3, 4}
	a := &Adapter{ID: 1, Name: "a", Path: "/a"}
	seen := map[Hash]string{}
	add := func(what string, x Hash) {
		if other, ok := seen[x]; ok {
			t.Errorf("%s has the hash of %s", what, other)
		}
		seen[x] = what
	}
	add("plain", h.block(h.root, tokens, nil, ""))
	add("other tokens", h.block(h.root, []uint32{1, 2, 3, 5}, nil, ""))
	add("other parent", h.block(Hash{}, tokens, nil, ""))
	add("salt", h.block(h.root, tokens, nil, "a"))
	add("other salt", h.block(h.root, tokens, nil, "b"))
	add("adapter", h.block(h.root, tokens, a, ""))
	add("adapter and salt", h.block(h.root, tokens, a, "a"))
	add("adapter at another path", h.block(h.root, tokens, &Adapter{ID: 1, Name: "a", Path: "/b"}, ""))
	add("short block", h.block(h.root, tokens[:3], nil, ""))
	if x := h.block(h.root, tokens, &Adapter{ID: 9, Name: "a", Path: "/a"}, ""); seen[x] != "adapter" {
		t.Error("the adapter's number enters the hash")
	}
}

// The salt enters the first block, and so all that descend from it; the adapter
// enters every block by itself.
func TestSaltEntersTheFirstBlockOnly(t *testing.T) {
	h := newHasher("")
	a := &Adapter{ID: 1, Name: "a", Path: "/a"}
	tokens := []uint32{1, 2, 3, 4, 5, 6, 7, 8}
	s := &Sequence{req: Request{Salt: "s", Adapter: a}, tokens: tokens}
	first := h.block(h.root, tokens[:4], a, "s")
	if got, want := s.hash(h, 2, 4), []Hash{first, h.block(first, tokens[4:], a, "")}; got[0] != want[0] || got[1] != want[1] {
		t.Errorf("hashes %x, want %x", got, want)
	}
}
