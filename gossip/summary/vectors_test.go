package summary_test

import (
	"bufio"
	"encoding/json"
	"os"
	"strconv"
	"strings"
	"testing"

	"waypost/gossip/prefix"
	"waypost/gossip/summary"
)

// TestIndexVectors reads values that were computed in another language with a
// SipHash and xxHash of its own.
func TestIndexVectors(t *testing.T) {
	f, err := os.Open("testdata/index_vectors.txt")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	n := 0
	for sc := bufio.NewScanner(f); sc.Scan(); {
		w := strings.Fields(sc.Text())
		if len(w) == 0 || w[0] == "#" {
			continue
		}
		if len(w) != 9 || w[0] != "index" {
			t.Fatalf("unknown line %q", sc.Text())
		}
		key, err := prefix.ParseClusterKey([]byte(w[1]))
		if err != nil {
			t.Fatal(err)
		}
		var d prefix.Domain
		for i, s := range []*string{&d.Model, &d.Adapter, &d.Salt} {
			if err := json.Unmarshal([]byte(w[2+i]), s); err != nil {
				t.Fatal(err)
			}
		}
		var nums [3]int
		for i := range nums {
			if nums[i], err = strconv.Atoi(w[5+i]); err != nil {
				t.Fatal(err)
			}
		}
		want, err := strconv.ParseUint(w[8], 16, 64)
		if err != nil {
			t.Fatal(err)
		}
		tokens := make([]uint32, nums[2])
		for i := range tokens {
			tokens[i] = uint32(nums[0] + i*nums[1])
		}
		if got := indexKeyOf(tokens, prefix.NewKeyer(key, d)); uint64(got) != want {
			t.Errorf("%s: got %016x", sc.Text(), uint64(got))
		}
		if _, got := plainChain(tokens, prefix.NewKeyer(key, d)); got != want {
			t.Errorf("%s: the oracle of these tests says %016x", sc.Text(), got)
		}
		n++
	}
	if n < 20 {
		t.Errorf("only %d vectors", n)
	}
}

// indexKeyOf is the index key of a whole sequence by the exported functions.
func indexKeyOf(tokens []uint32, k *prefix.Keyer) (key summary.IndexKey) {
	var p prefix.Probe
	p.ResetTokens(tokens, k)
	for j := 1; j*prefix.ChunkTokens <= len(tokens); j++ {
		name, _ := p.Checkpoint(j)
		key = summary.CheckpointKey(key, uint32(j*prefix.ChunkTokens), name)
	}
	if len(tokens)%prefix.ChunkTokens != 0 {
		name, _ := p.At(len(tokens))
		key = summary.PointKey(key, uint32(len(tokens)), name)
	}
	return key
}
