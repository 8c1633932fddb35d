package prefix

import (
	"bufio"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/dchest/siphash"

	"github.com/zeebo/xxh3"
)

// vector is one line of testdata/vectors.txt. The file was computed with
// python-xxhash and with a SipHash written from its paper, neither of which
// shares code with this package.
type vector struct {
	t      *testing.T
	fields []string
}

func (v *vector) text() string {
	v.t.Helper()
	if len(v.fields) == 0 {
		v.t.Fatal("too few fields")
	}
	f := v.fields[0]
	v.fields = v.fields[1:]
	return f
}

func (v *vector) uint(base int) uint64 {
	v.t.Helper()
	n, err := strconv.ParseUint(v.text(), base, 64)
	if err != nil {
		v.t.Fatal(err)
	}
	return n
}

func (v *vector) bytes() []byte {
	v.t.Helper()
	b, err := hex.DecodeString(strings.TrimPrefix(v.text(), "-"))
	if err != nil {
		v.t.Fatal(err)
	}
	return b
}

func (v *vector) json() (s string) {
	v.t.Helper()
	if err := json.Unmarshal([]byte(v.text()), &s); err != nil {
		v.t.Fatal(err)
	}
	return s
}

func (v *vector) clusterKey() ClusterKey {
	v.t.Helper()
	k, err := ParseClusterKey([]byte(v.text()))
	if err != nil {
		v.t.Fatal(err)
	}
	return k
}

func (v *vector) domain() Domain {
	v.t.Helper()
	return Domain{Model: v.json(), Adapter: v.json(), Salt: v.json()}
}

func (v *vector) tokens() []uint32 {
	v.t.Helper()
	start, step, count := v.uint(10), v.uint(10), v.uint(10)
	out := make([]uint32, count)
	for i := range out {
		out[i] = uint32(start + uint64(i)*step)
	}
	return out
}

func (v *vector) marks() (out []Mark) {
	v.t.Helper()
	for _, f := range strings.Split(v.text(), ",") {
		var m Mark
		if _, err := fmt.Sscanf(f, "%d:%x", &m.Position, &m.Digest); err != nil {
			v.t.Fatal(err)
		}
		out = append(out, m)
	}
	return out
}

// chainOf is the chain value of a whole sequence by the exported functions.
func chainOf(tokens []uint32, marks ...Mark) Chain {
	var c Chain
	from := uint32(0)
	for ; len(tokens) >= ChunkTokens; from += ChunkTokens {
		c = NextMarked(c, tokens[:ChunkTokens], within(nil, marks, from, from+ChunkTokens))
		tokens = tokens[ChunkTokens:]
	}
	if len(tokens) > 0 {
		c = PointMarked(c, tokens, within(nil, marks, from, from+ChunkTokens))
	}
	return c
}

func TestVectors(t *testing.T) {
	f, err := os.Open("testdata/vectors.txt")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	counts := map[string]int{}
	for sc := bufio.NewScanner(f); sc.Scan(); {
		line := sc.Text()
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		v := &vector{t: t, fields: strings.Fields(line)}
		word := v.text()
		counts[word]++
		checkVector(v, word, line)
		if len(v.fields) != 0 {
			t.Fatalf("%s: %d fields too many", line, len(v.fields))
		}
	}
	for _, word := range []string{"sip", "id", "hash", "chain", "domain", "key", "digest", "marked"} {
		if counts[word] == 0 {
			t.Errorf("no %s vectors", word)
		}
	}
}

func checkVector(v *vector, word, line string) {
	v.t.Helper()
	equal := func(got, want any) {
		v.t.Helper()
		if got != want {
			v.t.Errorf("%s: got %v, want %v", line, got, want)
		}
	}
	switch word {
	case "sip":
		k, msg := NewKeyer(v.clusterKey(), Domain{}), v.bytes()
		equal(siphash.Hash(k.k0, k.k1, msg), v.uint(16))
	case "id":
		equal(v.clusterKey().ID(), v.text())
	case "hash":
		seed, tokens := Chain(v.uint(16)), v.tokens()
		want := Chain(v.uint(16))
		equal(hashTokens(seed, tokens), want)
		equal(hashTokensPortable(seed, tokens), want)
	case "chain":
		equal(chainOf(v.tokens()), Chain(v.uint(16)))
	case "domain":
		equal(hex.EncodeToString(v.domain().Append(nil)), v.text())
	case "key":
		k := NewKeyer(v.clusterKey(), v.domain())
		tokens := v.tokens()
		want := Key(v.uint(16))
		equal(k.Key(chainOf(tokens), uint32(len(tokens))), want)
		var p Probe
		p.ResetTokens(tokens, k)
		got, _ := p.At(len(tokens))
		equal(got, want)
	case "digest":
		equal(xxh3.HashString(v.json()), v.uint(16)) // the format names the hash
	case "marked":
		tokens, marks := v.tokens(), v.marks()
		want := Chain(v.uint(16))
		equal(chainOf(tokens, marks...), want)
		k := NewKeyer(ClusterKey{}, Domain{})
		var p Probe
		if err := p.ResetMarked(tokens, marks, k); err != nil {
			v.t.Fatal(err)
		}
		got, _ := p.At(len(tokens))
		equal(got, k.Key(want, uint32(len(tokens))))
	default:
		v.t.Fatalf("%s: unknown word", line)
	}
}
