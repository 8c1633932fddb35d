package prefix

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

var testKey = ClusterKey{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}

func randomTokens(seed uint64, n int) []uint32 {
	rng := rand.New(rand.NewPCG(seed, 0))
	out := make([]uint32, n)
	for i := range out {
		out[i] = rng.Uint32()
	}
	return out
}

func TestPortableHashEqualsDirect(t *testing.T) {
	if !hostLittleEndian {
		t.Log("this host always takes the portable path")
	}
	rapid.Check(t, func(t *rapid.T) {
		tokens := rapid.SliceOfN(rapid.Uint32(), 1, ChunkTokens).Draw(t, "tokens")
		seed := Chain(rapid.Uint64().Draw(t, "seed"))
		if d, p := hashTokens(seed, tokens), hashTokensPortable(seed, tokens); d != p {
			t.Fatalf("direct %x, portable %x", d, p)
		}
	})
}

func TestChunkLengthsAreChecked(t *testing.T) {
	for name, f := range map[string]func(){
		"short chunk":        func() { Next(0, make([]uint32, ChunkTokens-1)) },
		"long chunk":         func() { Next(0, make([]uint32, ChunkTokens+1)) },
		"empty point":        func() { Point(0, nil) },
		"long point":         func() { Point(0, make([]uint32, ChunkTokens)) },
		"short marked chunk": func() { NextMarked(0, make([]uint32, 5), []Mark{{0, 1}}) },
		"long marked point":  func() { PointMarked(0, make([]uint32, ChunkTokens), []Mark{{0, 1}}) },
		"mark past the end":  func() { NextMarked(0, make([]uint32, ChunkTokens), []Mark{{ChunkTokens, 1}}) },
	} {
		t.Run(name, func(t *testing.T) {
			defer func() {
				if recover() == nil {
					t.Fatal("accepted")
				}
			}()
			f()
		})
	}
}

func TestParseClusterKey(t *testing.T) {
	const digits = "00112233445566778899aAbBcCdDeEfF"
	want := ClusterKey{0, 0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88, 0x99, 0xaa, 0xbb, 0xcc, 0xdd, 0xee, 0xff}
	for _, in := range []string{digits, " " + digits + "\r\n", "\t\n" + digits} {
		if k, err := ParseClusterKey([]byte(in)); err != nil || k != want {
			t.Errorf("%q: %x, %v", in, k[:], err)
		}
	}
	for _, in := range []string{"", "00", digits + "0", digits[:31], digits[:31] + "g", digits[:16] + " " + digits[16:]} {
		_, err := ParseClusterKey([]byte(in))
		if !errors.Is(err, ErrClusterKey) {
			t.Errorf("%q: error %v", in, err)
		} else if len(in) > 8 && strings.Contains(err.Error(), in[:8]) {
			t.Errorf("error %q quotes the key", err)
		}
	}
}

func TestParseClusterKeys(t *testing.T) {
	a, b := strings.Repeat("ab", 16), strings.Repeat("cd", 16)
	for in, want := range map[string]int{a: 1, a + "\n": 1, "\n " + a + "\r\n\n" + b + "\n": 2} {
		keys, err := ParseClusterKeys([]byte(in))
		if err != nil || len(keys) != want || keys[0][0] != 0xab {
			t.Errorf("%q: %d keys, %v", in, len(keys), err)
		}
	}
	for name, in := range map[string]string{"empty": "", "blank": " \n", "three": a + "\n" + b + "\n" + strings.Repeat("ef", 16), "twice": a + "\n" + a, "second bad": a + "\nxyz"} {
		if _, err := ParseClusterKeys([]byte(in)); !errors.Is(err, ErrClusterKey) {
			t.Errorf("%s: error %v", name, err)
		} else if strings.Contains(err.Error(), "abab") {
			t.Errorf("%s: error %q quotes a key", name, err)
		}
	}
	if _, err := ParseClusterKeys([]byte(a + "\nxyz")); err == nil || !strings.Contains(err.Error(), "line 2") {
		t.Errorf("error %v does not name the line", err)
	}
}

func TestClusterKeyNeverPrints(t *testing.T) {
	j, err := json.Marshal(struct{ K ClusterKey }{testKey})
	if err != nil {
		t.Fatal(err)
	}
	shown := "prefix-key:" + testKey.ID()
	for got, want := range map[string]string{
		fmt.Sprint(testKey):         shown,
		fmt.Sprintf("%+v", testKey): shown,
		fmt.Sprintf("%#v", testKey): shown,
		string(j):                   `{"K":"` + shown + `"}`,
	} {
		if got != want {
			t.Errorf("shown as %q, want %q", got, want)
		}
	}
}

// TestDomainsDoNotRunTogether guards the length prefixes: without them the
// model "ab" and the model "a" with the adapter "b" would share keys.
func TestDomainsDoNotRunTogether(t *testing.T) {
	seen := map[string]Domain{}
	for _, d := range []Domain{{}, {"ab", "", ""}, {"a", "b", ""}, {"", "ab", ""}, {"a", "", "b"}, {"", "", "ab"}, {"", "a", "b"}} {
		b := string(d.Append([]byte{}))
		if other, dup := seen[b]; dup {
			t.Errorf("%+v and %+v are the same bytes", d, other)
		}
		seen[b] = d
	}
}

func TestCheckMarks(t *testing.T) {
	for name, c := range map[string]struct {
		marks []Mark
		ok    bool
	}{
		"none":         {nil, true},
		"first, last":  {[]Mark{{0, 1}, {9, 1}}, true},
		"past the end": {[]Mark{{10, 1}}, false},
		"equal":        {[]Mark{{3, 1}, {3, 2}}, false},
		"descending":   {[]Mark{{3, 1}, {2, 2}}, false},
	} {
		if err := CheckMarks(c.marks, 10); (err == nil) != c.ok || err != nil && !errors.Is(err, ErrMarks) {
			t.Errorf("%s: %v", name, err)
		}
	}
	var p Probe
	p.ResetTokens(randomTokens(1, 600), NewKeyer(testKey, Domain{}))
	if err := p.ResetMarked(randomTokens(1, 600), []Mark{{600, 1}}, NewKeyer(testKey, Domain{})); !errors.Is(err, ErrMarks) {
		t.Errorf("error %v", err)
	}
	if _, ok := p.At(1); ok || p.PromptTokens() != 0 {
		t.Error("a refused prompt left something")
	}
}

// TestMarksChangeWhatFollows: an item changes every key behind its first token
// and none before; two items at one place differ, and one item at two places.
func TestMarksChangeWhatFollows(t *testing.T) {
	k := NewKeyer(testKey, Domain{Model: "m"})
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 4*ChunkTokens).Draw(t, "tokens")
		tokens := randomTokens(rapid.Uint64().Draw(t, "seed"), n)
		at := uint32(rapid.IntRange(0, n-1).Draw(t, "position"))
		var plain, marked, other, moved Probe
		plain.ResetTokens(tokens, k)
		moveTo := (at + 1) % uint32(n)
		for p, m := range map[*Probe]Mark{&marked: {at, 5}, &other: {at, 6}, &moved: {moveTo, 5}} {
			if err := p.ResetMarked(tokens, []Mark{m}, k); err != nil {
				t.Fatal(err)
			}
		}
		for range 20 {
			d := rapid.IntRange(1, n).Draw(t, "depth")
			a, _ := plain.At(d)
			b, _ := marked.At(d)
			c, _ := other.At(d)
			m, _ := moved.At(d)
			if behind := d > int(at); behind != (a != b) || behind != (b != c) {
				t.Fatalf("depth %d, item at %d: plain %x, marked %x, other item %x", d, at, a, b, c)
			}
			if d > int(max(at, moveTo)) && n > 1 && b == m {
				t.Fatalf("depth %d: an item at %d and at %d is the same", d, at, moveTo)
			}
		}
	})
}

func TestRekey(t *testing.T) {
	tokens := randomTokens(3, 1700)
	marks := []Mark{{700, 9}}
	a, b := NewKeyer(testKey, Domain{Model: "m"}), NewKeyer(ClusterKey{9}, Domain{Model: "m"})
	var p, fresh Probe
	if err := errors.Join(p.ResetMarked(tokens, marks, a), fresh.ResetMarked(tokens, marks, b)); err != nil {
		t.Fatal(err)
	}
	p.At(1699)
	p.Rekey(b)
	for _, d := range []int{1, 512, 700, 701, 1024, 1536, 1699, 1700} {
		got, ok := p.At(d)
		want, _ := fresh.At(d)
		if got != want || !ok {
			t.Errorf("depth %d: %x, %v, want %x", d, got, ok, want)
		}
	}
	p.ResetKeys(600, []Key{5}, nil)
	p.Rekey(b)
	if _, ok := p.Checkpoint(1); ok || p.PromptTokens() != 0 {
		t.Error("keys survived a change of the cluster key")
	}
}

func TestZeroIsNotAKey(t *testing.T) {
	for h, want := range map[uint64]Key{0: 1, 1: 1, 2: 2} {
		if got := nonZero(h); got != want {
			t.Errorf("hash %d became key %d, want %d", h, got, want)
		}
	}
}

func TestKeyDependsOnEverything(t *testing.T) {
	base := NewKeyer(testKey, Domain{Model: "m"}).Key(7, 512)
	other := testKey
	other[15]++
	for name, k := range map[string]Key{
		"cluster key": NewKeyer(other, Domain{Model: "m"}).Key(7, 512),
		"model":       NewKeyer(testKey, Domain{Model: "n"}).Key(7, 512),
		"adapter":     NewKeyer(testKey, Domain{Model: "m", Adapter: "a"}).Key(7, 512),
		"salt":        NewKeyer(testKey, Domain{Model: "m", Salt: "s"}).Key(7, 512),
		"chain":       NewKeyer(testKey, Domain{Model: "m"}).Key(8, 512),
		"depth":       NewKeyer(testKey, Domain{Model: "m"}).Key(7, 513),
	} {
		if k == base {
			t.Errorf("key does not depend on the %s", name)
		}
	}
}

// TestProbeEqualsDefinition asks one reused probe in random order and compares
// each answer with a computation from scratch.
func TestProbeEqualsDefinition(t *testing.T) {
	var p Probe
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(0, 5*ChunkTokens).Draw(t, "tokens")
		tokens := randomTokens(rapid.Uint64().Draw(t, "seed"), n)
		k := NewKeyer(testKey, Domain{Model: rapid.SampledFrom([]string{"m", "n", strings.Repeat("x", 400)}).Draw(t, "model")})
		p.ResetTokens(tokens, k)
		if p.PromptTokens() != n {
			t.Fatalf("prompt of %d tokens, want %d", p.PromptTokens(), n)
		}
		for range 60 {
			depth := rapid.IntRange(-1, n+2).Draw(t, "depth")
			got, ok := p.At(depth)
			if want := depth >= 1 && depth <= n; ok != want {
				t.Fatalf("depth %d of %d: ok=%v", depth, n, ok)
			}
			if ok && got != k.Key(chainOf(tokens[:depth]), uint32(depth)) {
				t.Fatalf("wrong key at depth %d", depth)
			}
			j := rapid.IntRange(-1, n/ChunkTokens+1).Draw(t, "checkpoint")
			got, ok = p.Checkpoint(j)
			if want := j >= 1 && j*ChunkTokens <= n; ok != want {
				t.Fatalf("checkpoint %d of %d tokens: ok=%v", j, n, ok)
			}
			if ok && got != k.Key(chainOf(tokens[:j*ChunkTokens]), uint32(j*ChunkTokens)) {
				t.Fatalf("wrong key at checkpoint %d", j)
			}
		}
	})
}

func TestProbeOfKeys(t *testing.T) {
	var p Probe
	p.ResetTokens(randomTokens(1, 3000), NewKeyer(testKey, Domain{}))
	p.At(700) // must not survive the reset
	p.ResetKeys(1200, []Key{11, 0, 13}, map[uint32]Key{700: 17, 701: 0, 5000: 19})
	for depth, want := range map[int]Key{0: 0, 1: 0, 512: 11, 700: 17, 701: 0, 1024: 0, 1100: 0, 1536: 0, 5000: 0} {
		if got, ok := p.At(depth); got != want || ok != (want != 0) {
			t.Errorf("depth %d: %d, %v, want %d", depth, got, ok, want)
		}
	}
	if _, ok := p.Chain(1); ok {
		t.Error("a probe of keys told a chain value")
	}
	p.ResetKeys(-5, []Key{1}, nil)
	if _, ok := p.Checkpoint(1); ok || p.PromptTokens() != 0 {
		t.Error("a negative prompt length is not empty")
	}
}

func TestPointCacheSurvivesGenerationWrap(t *testing.T) {
	var c pointCache
	c.reset()
	c.slot(700).key = 5
	c.generation = ^uint32(0) // 2^32-2 resets later
	c.reset()
	if got := c.slot(700).key; got != 0 {
		t.Fatalf("key %d of an earlier request", got)
	}
}

func TestNothingAllocatesWhenWarm(t *testing.T) {
	tokens := randomTokens(1, 16<<10)
	short, long := NewKeyer(testKey, Domain{Model: "m"}), NewKeyer(testKey, Domain{Model: strings.Repeat("x", 1000)})
	var p Probe
	ask := func(k *Keyer) {
		p.ResetTokens(tokens, k)
		p.Checkpoint(32)
		for d := 1; d < len(tokens); d += 101 {
			p.At(d)
		}
	}
	marks := []Mark{{0, 1}, {600, 2}, {9000, 3}}
	askMarked := func() {
		if err := p.ResetMarked(tokens, marks, short); err != nil {
			t.Fatal(err)
		}
		p.Checkpoint(32)
		p.At(9001)
		p.Rekey(long)
		p.At(9001)
	}
	askMarked()
	if n := testing.AllocsPerRun(20, askMarked); n != 0 && !raceEnabled {
		t.Errorf("%v allocations per request with items", n)
	}
	ask(short)
	if n := testing.AllocsPerRun(20, func() { ask(short) }); n != 0 {
		t.Errorf("%v allocations per request", n)
	}
	// The race detector makes sync.Pool forget on purpose.
	if n := testing.AllocsPerRun(200, func() { long.Key(1, 2) }); n != 0 && !raceEnabled {
		t.Errorf("%v allocations per key of a long domain", n)
	}
}

func BenchmarkNextChunk(b *testing.B) {
	chunk := randomTokens(1, ChunkTokens)
	b.SetBytes(ChunkTokens * 4)
	b.ReportAllocs()
	var c Chain
	for b.Loop() {
		c = Next(c, chunk)
	}
}

func BenchmarkKey(b *testing.B) {
	for _, d := range []Domain{{Model: "meta-llama/Llama-3.1-8B-Instruct"}, {Model: strings.Repeat("x", 300)}} {
		b.Run(fmt.Sprintf("domain=%dB", len(d.Append(nil))), func(b *testing.B) {
			k := NewKeyer(testKey, d)
			b.ReportAllocs()
			for i := uint32(0); b.Loop(); i++ {
				k.Key(Chain(i), i)
			}
		})
	}
}

// BenchmarkProbe16k names all checkpoints of a prompt of 16k tokens.
func BenchmarkProbe16k(b *testing.B) {
	tokens := randomTokens(1, 16<<10)
	k := NewKeyer(testKey, Domain{Model: "meta-llama/Llama-3.1-8B-Instruct"})
	var p Probe
	b.ReportAllocs()
	for b.Loop() {
		p.ResetTokens(tokens, k)
		for j := 1; j <= 32; j++ {
			p.Checkpoint(j)
		}
	}
}
