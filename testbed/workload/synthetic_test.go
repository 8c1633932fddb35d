package workload

import (
	"errors"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

func generator(t testing.TB, p Profile, seed uint64) *Generator {
	t.Helper()
	g, err := NewGenerator(p, seed)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

func TestSyntheticIsDecidedBySeed(t *testing.T) {
	for _, p := range []Profile{Mix, Chat} {
		list, err := generator(t, p, 7).Requests(40, 20*time.Second)
		if err != nil {
			t.Fatal(err)
		}
		again, _ := generator(t, p, 7).Requests(40, 20*time.Second)
		if d := cmp.Diff(list, again); d != "" {
			t.Errorf("%v: the same seed gives another workload:\n%.500s", p, d)
		}
		other, _ := generator(t, p, 8).Requests(40, 20*time.Second)
		if slices.Equal(arrivals(list), arrivals(other)) || slices.Equal(list[0].Prompt.AppendTokens(nil), other[0].Prompt.AppendTokens(nil)) {
			t.Errorf("%v: another seed gives the same workload", p)
		}
	}
}

func TestSyntheticRate(t *testing.T) {
	for _, p := range []Profile{Mix, Chat} {
		list, err := generator(t, p, 1).Requests(60, 300*time.Second)
		if err != nil {
			t.Fatal(err)
		}
		late := 0
		for i, r := range list {
			if i > 0 && r.ArrivalMs < list[i-1].ArrivalMs || r.ArrivalMs < 0 || r.ArrivalMs >= 300_000 {
				t.Fatalf("%v: request %d arrives at %.0f ms", p, i, r.ArrivalMs)
			}
			if r.OutputTokens < 1 || r.Answer.Len() != r.OutputTokens || r.Prompt.Len() < 1 {
				t.Fatalf("%v: request %d has %d and %d tokens, an answer of %d", p, i, r.Prompt.Len(), r.OutputTokens, r.Answer.Len())
			}
			if r.ArrivalMs >= 200_000 {
				late++
			}
		}
		// By then about as many sessions end as begin.
		if rate := float64(late) / 100; rate < 50 || rate > 66 {
			t.Errorf("%v: %.1f requests/s after the ramp: want about 60", p, rate)
		}
	}
}

// What turns share is what real ones share: the item, and in a line of turns
// the whole prompt with its answer.
func TestSessionsShareTheirContext(t *testing.T) {
	g := generator(t, Mix, 3)
	kinds := map[kind]int{}
	grown, forked := 0, 0
	for s := range g.Sessions(20, 60*time.Second) {
		kinds[g.kindOf(s.Item)]++
		item := g.items[s.Item].text
		var texts [][]uint32
		for i, r := range g.Append(nil, s) {
			p := r.Prompt.(*SegmentPrompt)
			if p.Segments[0] != item || r.Conversation != s.ID {
				t.Fatalf("session %x: its request %d begins with another item", s.ID, i)
			}
			tokens := p.AppendTokens(nil)
			if len(tokens) != p.Len() {
				t.Fatalf("%d tokens: want %d", len(tokens), p.Len())
			}
			switch {
			case r.Turn == 0 || len(texts) == 0:
			case longestCommon(texts, tokens) == len(texts[len(texts)-1]):
				grown++
			default:
				forked++
			}
			texts = append(texts, r.Answer.AppendTokens(tokens))
		}
	}
	if kinds[chatKind] == 0 || kinds[documentKind] == 0 || kinds[agentKind] == 0 || grown == 0 || forked == 0 {
		t.Errorf("sessions by kind %v, %d requests continue the one before with its answer, %d part from it: want all of them", kinds, grown, forked)
	}
}

func longestCommon(texts [][]uint32, tokens []uint32) int {
	most := 0
	for _, text := range texts {
		n := 0
		for n < min(len(text), len(tokens)) && text[n] == tokens[n] {
			n++
		}
		most = max(most, n)
	}
	return most
}

func TestDocumentsGrowWithTheFleet(t *testing.T) {
	for workers, want := range map[int]int{1: documents, 16: documents, 100: 25_000, 1000: 250_000} {
		g, err := NewFleetGenerator(Mix, 1, workers)
		if err != nil {
			t.Fatal(err)
		}
		if n := g.Items() - systemPrompts - agentKinds; n != want || !g.IsDocument(systemPrompts+want-1) || g.IsDocument(systemPrompts+want) {
			t.Errorf("%d documents for %d workers, want %d", n, workers, want)
		}
	}
}

func TestItemsFollowZipf(t *testing.T) {
	g := generator(t, Mix, 1)
	if g.Items() != systemPrompts+documents+agentKinds {
		t.Fatalf("%d items", g.Items())
	}
	sum := 0.0
	for i := range g.Items() {
		sum += g.Share(i)
	}
	if math.Abs(sum-1) > 1e-9 {
		t.Errorf("the items' shares sum to %v", sum)
	}
	if r := g.Share(systemPrompts) / g.Share(systemPrompts+9); math.Abs(r-10) > 1e-9 {
		t.Errorf("the first document is drawn %.3f times as often as the tenth: want 10", r)
	}
	if !g.IsDocument(systemPrompts) || g.IsDocument(0) || g.Cost(0) <= 0 {
		t.Error("item 200 is the first document, item 0 a system prompt")
	}
	drawn := make([]int, g.Items())
	for i := range uint64(200_000) {
		drawn[g.session(mix(i), 0).Item]++
	}
	for _, i := range []int{0, 1, 5, systemPrompts, systemPrompts + 1, systemPrompts + documents} {
		want := 200_000 * g.Share(i)
		if math.Abs(float64(drawn[i])-want) > 5*math.Sqrt(want) {
			t.Errorf("item %d was drawn %d times: want about %.0f", i, drawn[i], want)
		}
	}
	if c := generator(t, Chat, 1); c.Share(systemPrompts) != 0 || c.Share(systemPrompts+documents) != 0 {
		t.Error("chats have documents or agents")
	}
}

// Siblings begin alike with a fixed number of engine blocks and part there.
func TestSiblingsPartWithinBlocks(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		parent := rapid.Uint64().Draw(t, "parent")
		build := func(last uint64, tokens int) []uint32 {
			p := &BlockPrompt{Blocks: []uint64{parent, last}, BlockTokens: 512, Tokens: 512 + tokens, FirstToken: 1000, TokenCount: 64000, SiblingTokens: 16}
			return p.AppendTokens(nil)
		}
		a, b := build(1, 512), build(2, 512)
		n := longestCommon([][]uint32{a}, b)
		alike := int(mix(mix(parent)^siblings)%32) * 16
		if n < 512+alike || n > 512+alike+1 {
			t.Fatalf("siblings share %d tokens of their block: want %d", n-512, alike)
		}
		cut := rapid.IntRange(1, 512).Draw(t, "cut")
		if short := build(1, cut); !slices.Equal(short, a[:len(short)]) || len(short) != 512+cut {
			t.Fatal("a cut block is not the beginning of the whole one")
		}
		if c := build(3, 512); longestCommon([][]uint32{b}, c) < 512+alike {
			t.Fatal("a third sibling parts elsewhere")
		}
	})
}

func TestStreamsCanBeEntered(t *testing.T) {
	whole := appendStream(nil, 9, 0, 40, 1000, 64000)
	for from := range 40 {
		if got := appendStream(nil, 9, from, 40-from, 1000, 64000); !slices.Equal(got, whole[from:]) {
			t.Fatalf("from token %d: %v, want %v", from, got, whole[from:])
		}
	}
}

func TestSyntheticErrors(t *testing.T) {
	if _, err := NewGenerator(0, 1); !errors.Is(err, ErrOptions) {
		t.Errorf("no profile: error %v", err)
	}
	g := generator(t, Chat, 1)
	for _, rate := range []float64{0, -1, math.NaN(), 1e9} {
		if _, err := g.Requests(rate, time.Minute); !errors.Is(err, ErrOptions) {
			t.Errorf("%v requests/s: error %v", rate, err)
		}
	}
	tr := sample(t, Sample)
	if _, err := tr.Replay(Replay{Shape: Shape{SiblingTokens: -1}}); !errors.Is(err, ErrOptions) {
		t.Errorf("SiblingTokens -1: error %v", err)
	}
}

func BenchmarkSessions(b *testing.B) {
	g := generator(b, Mix, 1)
	var list []Request
	requests := 0
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		list = g.Append(list[:0], g.session(mix(uint64(i)), 0))
		requests += len(list)
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(requests), "ns/request")
}
