package workload

import (
	"errors"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

func sample(t testing.TB, read func() (*Trace, error)) *Trace {
	t.Helper()
	tr, err := read()
	if err != nil {
		t.Fatal(err)
	}
	return tr
}

// reuse is the share of prompt tokens that an unbounded cache of whole blocks
// would have had.
func reuse(list []Request, block int) float64 {
	seen := make(map[string]bool)
	hit, total := 0, 0
	for _, r := range list {
		tokens := r.Prompt.AppendTokens(nil)
		total += len(tokens)
		missed := false
		for end := block; end <= len(tokens); end += block {
			key := tokenKey(tokens[:end])
			if !missed && seen[key] {
				hit += block
				continue
			}
			missed = true
			seen[key] = true
		}
	}
	return float64(hit) / float64(total)
}

// tokenKey names a whole prefix by a chain of its tokens.
func tokenKey(tokens []uint32) string {
	a, b := uint64(1), uint64(2)
	for _, t := range tokens {
		a, b = mix(a^uint64(t)), mix(b+uint64(t))
	}
	return string([]byte{byte(a), byte(a >> 8), byte(a >> 16), byte(a >> 24), byte(a >> 32), byte(a >> 40), byte(b), byte(b >> 8), byte(b >> 16), byte(b >> 24)})
}

// The figures are counted in the files by other means.
func TestSamplesAreTheirTraces(t *testing.T) {
	for _, test := range []struct {
		name     string
		read     func() (*Trace, error)
		requests int
		lastMs   int64
		reuse    float64
	}{
		{"first requests", Sample, 600, 200999, .17131},
		{"whole conversations", SampleConversations, 570, 3398999, .48364},
	} {
		tr := sample(t, test.read)
		if n := len(tr.Requests); n != test.requests || tr.Requests[n-1].TimestampMs != test.lastMs {
			t.Errorf("%s: %d requests, the last at %d ms", test.name, n, tr.Requests[n-1].TimestampMs)
		}
		// A scale of 1/64 keeps the sharing and makes blocks of 8 tokens.
		list, err := tr.Replay(Replay{Shape: Shape{LengthScale: 1. / 64}})
		if err != nil {
			t.Fatal(err)
		}
		if got := reuse(list, 8); math.Abs(got-test.reuse) > .002 {
			t.Errorf("%s: %.4f of the tokens can be reused, the trace says %.4f", test.name, got, test.reuse)
		}
	}
}

func TestReplaySpreadsGroups(t *testing.T) {
	tr := sample(t, Sample)
	list, err := tr.Replay(Replay{Seed: 7})
	if err != nil {
		t.Fatal(err)
	}
	distinct := map[float64]bool{}
	for i, r := range list {
		ms := float64(tr.Requests[i].TimestampMs)
		if r.ArrivalMs < ms-1 || r.ArrivalMs > ms+MooncakeGroupMs+1 {
			t.Errorf("request %d arrives at %.1f ms, its group began at %.0f", i, r.ArrivalMs, ms)
		}
		if i > 0 && r.ArrivalMs < list[i-1].ArrivalMs {
			t.Errorf("request %d arrives before the one before it", i)
		}
		if r.Prompt.Len() != tr.Requests[i].InputTokens || r.OutputTokens != tr.Requests[i].OutputTokens {
			t.Errorf("request %d has %d and %d tokens", i, r.Prompt.Len(), r.OutputTokens)
		}
		distinct[r.ArrivalMs] = true
	}
	if len(distinct) != len(list) {
		t.Errorf("%d different arrivals of %d", len(distinct), len(list))
	}
	fast, err := tr.Replay(Replay{Seed: 7, Speedup: 10, MaxRequests: 50})
	if err != nil || len(fast) != 50 || math.Abs(fast[49].ArrivalMs*10-list[49].ArrivalMs) > 1e-6 {
		t.Errorf("%d requests, error %v, ten times as fast", len(fast), err)
	}
	other, _ := tr.Replay(Replay{Seed: 8})
	again, _ := tr.Replay(Replay{Seed: 7})
	if arrivals(list)[0] != arrivals(again)[0] || !slices.Equal(arrivals(list), arrivals(again)) || slices.Equal(arrivals(list), arrivals(other)) {
		t.Error("arrivals must depend on the seed and nothing else")
	}
}

func arrivals(list []Request) []float64 {
	out := make([]float64, len(list))
	for i, r := range list {
		out[i] = r.ArrivalMs
	}
	return out
}

// Two prompts have equal tokens exactly as far as their blocks are equal, at
// any scale, and a cut block is the beginning of the whole one.
func TestTokensFollowBlocks(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		scale := rapid.Float64Range(1./64, 3).Draw(t, "scale")
		s, err := Shape{LengthScale: scale}.withDefaults()
		if err != nil {
			t.Fatal(err)
		}
		common := rapid.IntRange(0, 4).Draw(t, "common blocks")
		build := func(label string, other uint64) *BlockPrompt {
			n := rapid.IntRange(max(common*MooncakeBlockTokens, 1), (common+2)*MooncakeBlockTokens).Draw(t, label)
			blocks := make([]uint64, blocksFor(n, MooncakeBlockTokens))
			for i := range blocks {
				if blocks[i] = uint64(i) + 1; i >= common {
					blocks[i] = other + uint64(i)
				}
			}
			p, _ := s.prompt(n, blocks)
			return p
		}
		a, b := build("a", 1000), build("b", 2000)
		ta, tb := a.AppendTokens(nil), b.AppendTokens(nil)
		if len(ta) != a.Len() || len(tb) != b.Len() {
			t.Fatalf("%d and %d tokens: want %d and %d", len(ta), len(tb), a.Len(), b.Len())
		}
		same := 0
		for same < min(len(ta), len(tb)) && ta[same] == tb[same] {
			same++
		}
		if want := min(common*s.scaled(MooncakeBlockTokens), len(ta), len(tb)); same < want || same > want+2 {
			t.Fatalf("%d tokens are common: want %d", same, want)
		}
		for _, x := range ta {
			if x < 1000 || x >= 100000 {
				t.Fatalf("token id %d", x)
			}
		}
		cut := *a
		cut.Tokens -= rapid.IntRange(0, (a.Tokens-1)%a.BlockTokens).Draw(t, "cut")
		if got := cut.AppendTokens(nil); !slices.Equal(got, ta[:len(got)]) || len(got) != cut.Tokens {
			t.Fatal("a cut prompt is not the beginning of the whole one")
		}
	})
}

func TestTokensAreFixed(t *testing.T) {
	p := &BlockPrompt{Blocks: []uint64{0, 7}, BlockTokens: 3, Tokens: 5, FirstToken: 1000, TokenCount: 99000}
	want := []uint32{30815, 65592, 98326, 49986, 72429}
	if got := p.AppendTokens(nil); !slices.Equal(got, want) {
		t.Errorf("tokens %v, want %v: recorded results depend on them", got, want)
	}
	if got := TokenPrompt(want).AppendTokens([]uint32{1}); !slices.Equal(got, append([]uint32{1}, want...)) || TokenPrompt(want).Len() != 5 {
		t.Errorf("a held prompt gives %v", got)
	}
}

func TestMaxPromptTokens(t *testing.T) {
	tr := sample(t, Sample)
	list, err := tr.Replay(Replay{Shape: Shape{MaxPromptTokens: 8000}})
	if err != nil {
		t.Fatal(err)
	}
	want := 0
	for _, q := range tr.Requests {
		if q.InputTokens <= 8000 {
			want++
		}
	}
	if len(list) != want || want == len(tr.Requests) {
		t.Errorf("%d requests: want %d of %d", len(list), want, len(tr.Requests))
	}
}

func TestConversations(t *testing.T) {
	tr := sample(t, SampleConversations)
	o := Sampling{Seed: 3, RequestsPerSecond: 20, Duration: 5 * time.Minute, Speedup: 20, Shape: Shape{LengthScale: 1. / 64}}
	list, err := tr.Conversations(o)
	if err != nil {
		t.Fatal(err)
	}
	if n := len(list); n < 5400 || n > 6600 {
		t.Errorf("%d requests in 300 s: want about 6000", n)
	}
	turns := map[uint64]int{}
	last := map[uint64]float64{}
	for i, r := range list {
		if r.ArrivalMs < 0 || r.ArrivalMs >= 300_000 || i > 0 && r.ArrivalMs < list[i-1].ArrivalMs || r.OutputTokens < 1 {
			t.Fatalf("request %d: %+v", i, r)
		}
		if n, seen := turns[r.Conversation]; seen && r.Turn <= n {
			t.Fatalf("conversation %d: turn %d after %d", r.Conversation, r.Turn, n)
		}
		turns[r.Conversation], last[r.Conversation] = r.Turn, r.ArrivalMs
	}
	// Steady from the start: the first minute has as much as the last.
	minute := func(from float64) (n int) {
		for _, r := range list {
			if r.ArrivalMs >= from && r.ArrivalMs < from+60_000 {
				n++
			}
		}
		return n
	}
	if a, b := minute(0), minute(240_000); a < b*8/10 || b < a*8/10 {
		t.Errorf("%d requests in the first minute and %d in the last", a, b)
	}
	if got := reuse(list, 8); got < .3 || got > .5 {
		t.Errorf("%.3f of the tokens can be reused: want about what the trace has", got)
	}
	again, _ := tr.Conversations(o)
	if d := cmp.Diff(list, again); d != "" {
		t.Errorf("the same seed gives another workload:\n%.500s", d)
	}
	o.Seed++
	if other, _ := tr.Conversations(o); slices.Equal(arrivals(list), arrivals(other)) {
		t.Error("another seed gives the same workload")
	}
}

// Copies of one conversation share what unrelated conversations share.
func TestCopiesAreStrangers(t *testing.T) {
	tr := &Trace{Requests: []TraceRequest{
		{0, 1500, 10, []uint64{0, 1, 2}}, {3000, 1500, 10, []uint64{0, 3, 4}}, {6000, 2000, 10, []uint64{0, 1, 5, 6}},
	}}
	list, err := tr.Conversations(Sampling{RequestsPerSecond: 5, Duration: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	owner := map[uint64]uint64{}
	names := map[uint64]int{}
	for _, r := range list {
		p := r.Prompt.(*BlockPrompt)
		if p.Blocks[0] != 0 {
			t.Fatalf("block %d: want the shared one", p.Blocks[0])
		}
		for _, b := range p.Blocks[1:] {
			if was, seen := owner[b]; seen && was != r.Conversation {
				t.Fatalf("conversations %d and %d share a block", was, r.Conversation)
			}
			owner[b] = r.Conversation
			names[b]++
		}
	}
	repeated := 0
	for _, n := range names {
		if n > 1 {
			repeated++
		}
	}
	if len(list) < 200 || repeated == 0 {
		t.Errorf("%d requests, %d blocks seen in two turns: want both", len(list), repeated)
	}
}

func TestTraceErrors(t *testing.T) {
	const good = `{"timestamp": 3, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}`
	for name, text := range map[string]string{
		"no request":               "\n\n",
		"line 1":                   "{",
		"line 2: timestamp 2":      good + "\n" + strings.Replace(good, ": 3", ": 2", 1),
		"timestamp is missing":     strings.Replace(good, `"timestamp": 3,`, "", 1),
		"input_length is missing":  strings.Replace(good, "600", "0", 1),
		"output_length is missing": strings.Replace(good, `"output_length": 5,`, "", 1),
		"hash_ids has 2 entries":   strings.Replace(good, "600", "512", 1),
		"cannot unmarshal":         strings.Replace(good, "[0, 1]", `["a"]`, 1),
		"token too long":           `{"hash_ids": [` + strings.Repeat("1,", maxLineBytes/2),
	} {
		if _, err := ReadMooncake(strings.NewReader(text)); !errors.Is(err, ErrTrace) || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: error %v", name, err)
		}
	}
}

func TestOptionErrors(t *testing.T) {
	tr := sample(t, Sample)
	good := Sampling{RequestsPerSecond: 1, Duration: time.Second}
	for name, try := range map[string]func() error{
		"LengthScale": func() error { _, err := tr.Replay(Replay{Shape: Shape{LengthScale: -1}}); return err },
		"Speedup":     func() error { _, err := tr.Replay(Replay{Speedup: math.NaN()}); return err },
		"token ids": func() error {
			_, err := tr.Replay(Replay{Shape: Shape{FirstToken: 5, TokenCount: math.MaxUint32}})
			return err
		},
		"requests/s": func() error { _, err := tr.Conversations(Sampling{Duration: time.Second}); return err },
		"Speedup is": func() error { o := good; o.Speedup = -1; _, err := tr.Conversations(o); return err },
		"at most":    func() error { o := good; o.RequestsPerSecond = 1e9; _, err := tr.Conversations(o); return err },
	} {
		if err := try(); !errors.Is(err, ErrOptions) || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: error %v", name, err)
		}
	}
}

func FuzzReadMooncake(f *testing.F) {
	f.Add([]byte(`{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}`))
	f.Add([]byte(`{"timestamp": 1e3, "input_length": 1, "output_length": 0, "hash_ids": [18446744073709551615]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		tr, err := ReadMooncake(strings.NewReader(string(b)))
		if err != nil {
			return
		}
		list, err := tr.Replay(Replay{MaxRequests: 3, Shape: Shape{LengthScale: 1. / 64}})
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range list {
			if n := len(r.Prompt.AppendTokens(nil)); n != r.Prompt.Len() || n < 1 {
				t.Fatalf("%d tokens: want %d", n, r.Prompt.Len())
			}
		}
	})
}

func BenchmarkAppendTokens(b *testing.B) {
	tr := sample(b, Sample)
	list, err := tr.Replay(Replay{})
	if err != nil {
		b.Fatal(err)
	}
	var dst []uint32
	tokens := 0
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		dst = list[i%len(list)].Prompt.AppendTokens(dst[:0])
		tokens += len(dst)
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(tokens), "ns/token")
}
