package memo

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"waypost/gossip/prefix"
)

// teach learns a dialogue's prompt after looking it up, and returns what was
// predicted and how much of it is so.
func teach(t testing.TB, m *Memo, d *dialogue, ids []uint32) (predicted, right int, out Learnt) {
	t.Helper()
	var rd Reader
	q, err := rd.Chat(vectorKey, "p", m.Epoch(), d.body())
	if err != nil {
		t.Fatal(err)
	}
	p := &Prediction{}
	m.Lookup(q, p)
	if predicted = p.Tokens; p.Withheld {
		predicted = 0
	}
	var mine tape
	mine.reset(ids)
	right = min(p.Tokens, mine.common(p.Chains, p.pointsOf))
	return predicted, right, m.Learn(q, ids, p)
}

func talk(contents ...string) *dialogue {
	d := &dialogue{Model: "tiny"}
	for _, c := range contents {
		who, text, _ := strings.Cut(c, ":")
		d.Messages = append(d.Messages, turn{Role: who, Content: text})
	}
	return d
}

func rng(seed uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, 2)) }

// After one prompt the bound from its end is tight where the last message is
// short, and never too high, wherever tools are rendered.
func TestBoundFromTheEnd(t *testing.T) {
	// Rounded down to a point, 32 tokens become up to 15 more.
	const slack = 32 + pointTokens
	system := someText(rng(1), 2416)
	one, two := talk("system:"+system, "user:ok"), talk("system:"+system, "user:"+someText(rng(2), 9))
	for _, c := range []struct {
		render string
		tools  []string
	}{{"append only", nil}, {"append only", []string{someText(rng(3), 300)}}, {"tools after the system text", []string{someText(rng(3), 300)}}} {
		m, render := newMemo(t), rendererOf(c.render)
		one.Tools, two.Tools = c.tools, c.tools
		a, b := words(render(one)), words(render(two))
		truth := len(words(strings.TrimSuffix(render(one), " <|user|> ok <|end|>"+ask)))
		teach(t, m, one, a)
		predicted, right, _ := teach(t, m, two, b)
		if predicted != right {
			t.Errorf("%s: %d tokens predicted, %d are so", c.render, predicted, right)
		}
		if c.tools == nil && predicted < truth-slack {
			t.Errorf("%s: %d tokens after one request, want %d less %d", c.render, predicted, truth, slack)
		}
		// From the third on the common prefix tells the boundary.
		three := talk("system:"+system, "user:"+someText(rng(4), 40))
		three.Tools = c.tools
		if predicted, right, _ = teach(t, m, three, words(render(three))); predicted != right || predicted < truth-slack {
			t.Errorf("%s: third request: %d tokens predicted, %d are so, truth %d", c.render, predicted, right, truth)
		}
	}
}

// Tools that are rendered behind the system text come after every piece of it:
// one that shares half of the text shares none of them.
func TestToolsComeBehindTheSystemText(t *testing.T) {
	m, render := newMemo(t), rendererOf("tools after the system text")
	half := someText(rng(1), 1200)
	one, two := talk("system:"+half+" "+someText(rng(2), 300), "user:ok"), talk("system:"+half+" "+someText(rng(3), 300), "user:ok")
	one.Tools = []string{someText(rng(4), 2500)}
	two.Tools = one.Tools
	teach(t, m, one, words(render(one)))
	if predicted, right, _ := teach(t, m, two, words(render(two))); predicted != right {
		t.Errorf("%d tokens predicted, %d are so", predicted, right)
	}
}

// Two siblings that begin alike do not make the boundary before them grow.
func TestSiblingsThatBeginAlike(t *testing.T) {
	m := newMemo(t)
	system, alike := someText(rng(1), 600), "tell me all that you know about"
	for i, end := range []string{"ships and harbours", "trees and forests", "x"} {
		d := talk("system:"+system, "user:"+alike+" "+end)
		teach(t, m, d, words(appendOnly(d)))
		if i == 0 {
			continue
		}
		other := talk("system:"+system, "user:other words")
		var rd Reader
		q, err := rd.Chat(vectorKey, "p", 1, other.body())
		if err != nil {
			t.Fatal(err)
		}
		var p Prediction
		m.Lookup(q, &p)
		if most := len(words(" <|system|> " + system + " <|end|> <|user|>")); p.Tokens > most || p.Tokens < most-48 {
			t.Errorf("after %d siblings: %d tokens, at most %d are shared", i+1, p.Tokens, most)
		}
	}
}

// A prompt that ended open and goes on closed: the node of the open state is
// used only once the class has shown that it holds.
func TestStateIsNotCrossedUntrusted(t *testing.T) {
	for _, c := range []struct {
		render  string
		crosses bool
	}{{"append only", true}, {"empty think block in the last turn", false}} {
		m, render := newMemo(t), rendererOf(c.render)
		// Some prompt goes on from the end of another.
		for _, more := range [][]string{nil, {"assistant:a", "tool:b"}} {
			d := talk(append([]string{"user:" + someText(rng(1), 100)}, more...)...)
			teach(t, m, d, words(render(d)))
		}
		// Closed nodes come from other conversations' ends only.
		conversation := func(seed uint64) (deepOpen, predicted, right int) {
			r := rng(seed)
			d := talk("system:s", "user:"+someText(r, 50), "assistant:"+someText(r, 100), "tool:"+someText(r, 200))
			ids := words(render(d))
			teach(t, m, d, ids)
			d.Messages = append(d.Messages, turn{Role: "assistant", Content: someText(r, 50)}, turn{Role: "user", Content: someText(r, 40)})
			predicted, right, _ = teach(t, m, d, words(render(d)))
			return len(ids), predicted, right
		}
		for i := range 8 {
			open, predicted, right := conversation(uint64(10 + i))
			if predicted != right {
				t.Errorf("%s: conversation %d: %d predicted, %d so", c.render, i, predicted, right)
			}
			if used := predicted > open-40; used != (c.crosses && i >= classProof) {
				t.Errorf("%s: conversation %d: predicted %d of %d", c.render, i, predicted, open)
			}
		}
	}
}

// All ids shift behind the fifth token: two wrong predictions, then the memo has
// begun anew and is right again.
func TestEpoch(t *testing.T) {
	m, wrong, news := newMemo(t), 0, 0
	shifted := false
	render := func(d *dialogue) []uint32 {
		ids := words(appendOnly(d))
		if shifted {
			for i := 5; i < len(ids); i++ {
				ids[i] ^= 1 << 20
			}
		}
		return ids
	}
	last := 0
	for i := range 60 {
		shifted = i >= 20
		r := rng(uint64(i % 5))
		d := talk("system:"+someText(r, 300), "user:"+someText(rng(uint64(100+i)), 30))
		predicted, right, out := teach(t, m, d, render(d))
		if predicted != right {
			wrong++
		}
		news += bit(out.NewEpoch)
		last = right
	}
	if wrong != 2 || news != 1 || m.Epoch() != 2 {
		t.Errorf("%d wrong predictions and %d new epochs, want 2 and 1", wrong, news)
	}
	if last < 240 {
		t.Errorf("at the end %d tokens are predicted", last)
	}
	if open, _, _ := m.Breaker(); open {
		t.Error("the breaker opened")
	}
}

// A breaker that opened closes when predictions prove right again, and only
// then.
func TestBreakerCloses(t *testing.T) {
	m := newMemo(t)
	render := rendererOf("system text in the last user message")
	opened, closedAt := false, 0
	for i := range 400 {
		if i == 40 {
			render = appendOnly
		}
		r := rng(uint64(i % 3))
		d := talk("system:"+someText(r, 200), "user:"+someText(rng(uint64(1000+i/4)), 20))
		for k := range i % 4 {
			d.Messages = append(d.Messages, turn{Role: "assistant", Content: someText(rng(uint64(k)), 20)}, turn{Role: "user", Content: someText(rng(uint64(50+k)), 20)})
		}
		_, _, out := teach(t, m, d, words(render(d)))
		open, _, _ := m.Breaker()
		opened = opened || open
		if out.BreakerChanged && !open {
			closedAt = i
		}
		if open && closedAt > 0 {
			t.Fatalf("it opened again at %d", i)
		}
	}
	if !opened || closedAt < 40+breakerQuiet || closedAt > 250 {
		t.Errorf("opened %v, closed at %d", opened, closedAt)
	}
}

// A disagreement lowers the bound of a node: the old value is never kept.
func TestDisagreementLowersTheBound(t *testing.T) {
	m := newMemo(t)
	d := talk("system:"+someText(rng(1), 800), "user:hello")
	ids := words(appendOnly(d))
	teach(t, m, d, ids)
	other := slices.Clone(ids)
	other[400]++
	_, _, out := teach(t, m, d, other)
	predicted, right, _ := teach(t, m, d, other)
	if out.OverTokens == 0 || predicted > 400 || predicted != right {
		t.Errorf("over %d, then %d predicted, %d so", out.OverTokens, predicted, right)
	}
	if m.Stats().Disagreements == 0 {
		t.Error("no disagreement is counted")
	}
}

// Behind an image nothing is known: its tokens stand for any image.
func TestImagesEndWhatIsKnown(t *testing.T) {
	m := newMemo(t)
	system := someText(rng(1), 400)
	body := func(url string, more string) []byte {
		return []byte(fmt.Sprintf(`{"model":"m","messages":[{"role":"system","content":%s},{"role":"user","content":[{"type":"text","text":"what is this"},{"type":"image_url","image_url":{"url":%q}}]}%s]}`, AppendText(nil, system), url, more))
	}
	ids := slices.Concat(words(" <|system|> "+system+" <|end|> <|user|> what is this"), slices.Repeat([]uint32{7}, 600), words(someText(rng(2), 300)))
	text := talk("system:"+system, "user:hello")
	text.Model = "m"
	teach(t, m, text, words(appendOnly(text)))
	var rd Reader
	for _, url := range []string{"data:image/png;base64,AAAA", "data:image/png;base64,AAAA", "data:image/png;base64,BBBB", "https://example.org/a.png"} {
		for _, more := range []string{"", `,{"role":"assistant","content":"a cat"},{"role":"user","content":"why"}`} {
			q, err := rd.Chat(vectorKey, "p", m.Epoch(), body(url, more))
			if err != nil || !q.Opaque() {
				t.Fatalf("opaque %v, %v", q.Opaque(), err)
			}
			var p Prediction
			m.Lookup(q, &p)
			if p.Tokens > 405 || p.Tokens < 350 {
				t.Errorf("%s: %d tokens, want those of the system text", url, p.Tokens)
			}
			m.Learn(q, ids, &p)
			for i := range q.units {
				if u := &q.units[i]; u.opaque && (m.byKey[keyOf(u, true)] != 0 || m.byKey[keyOf(u, false)] != 0) {
					t.Errorf("%s: something is known of unit %d", url, i)
				}
			}
		}
	}
}

// Memory is bounded: what was used longest ago goes, what is used stays.
func TestMemoryIsBounded(t *testing.T) {
	m, err := New(Options{MaxBytes: 256 << 10})
	if err != nil {
		t.Fatal(err)
	}
	kept := talk("system:"+someText(rng(1), 700), "user:kept")
	teach(t, m, kept, words(appendOnly(kept)))
	for i := range 3000 {
		d := talk("system:"+someText(rng(uint64(i+10)), 60), "user:"+someText(rng(uint64(i)), 30))
		teach(t, m, d, words(appendOnly(d)))
		if i%50 == 0 {
			if p, _, _ := teach(t, m, kept, words(appendOnly(kept))); p < 600 {
				t.Fatalf("after %d others what is in use is gone: %d", i, p)
			}
		}
		if b := m.Bytes(); b > 256<<10 {
			t.Fatalf("%d bytes", b)
		}
	}
	if m.Stats().Evicted == 0 {
		t.Error("nothing was evicted")
	}
	check(t, m)
	if _, err := New(Options{MaxBytes: 1}); !errors.Is(err, ErrOptions) {
		t.Errorf("error %v", err)
	}
}

// The bytes that are counted are those of the heap, and at most 600 for each
// request learnt.
func TestBytesPerLearntRequest(t *testing.T) {
	work := workload(5, defaultMix(), appendOnly)
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	m := newMemo(t)
	p := replay{memos: []*Memo{m}, answers: true}
	p.run(t, work)
	m.tape, m.lcp = tape{}, map[int32]int{}
	runtime.GC()
	runtime.ReadMemStats(&after)
	heap, counted := int(after.HeapAlloc-before.HeapAlloc)/len(work), m.Bytes()/len(work)
	t.Logf("%d bytes counted, %d on the heap for each of %d requests of %d tokens", counted, heap, len(work), func() (n int) {
		for i := range work {
			n += len(work[i].ids)
		}
		return n / len(work)
	}())
	if counted > 600 {
		t.Errorf("%d bytes for each learnt request, want at most 600", counted)
	}
	if !raceEnabled && heap > counted*5/4 {
		t.Errorf("%d bytes are counted and %d are there", counted, heap)
	}
	runtime.KeepAlive(work)
}

// check looks whether the parts of a memo fit together.
func check(t testing.TB, m *Memo) {
	t.Helper()
	refs := map[int32]int32{}
	live, tail := 0, 0
	for id := int32(1); id < int32(len(m.records.all)); id++ {
		r := &m.records.all[id]
		if r.tokens == 0 {
			continue
		}
		live++
		tail += 8 * len(r.tail)
		refs[r.tip]++
		n := 0
		for x := r.nodes; x != 0; x = m.nodes[x].succ {
			if nd := &m.nodes[x]; nd.record != id || nd.tokens > r.tokens || nd.tokens%pointTokens != 0 || m.byKey[nd.key] != x {
				t.Fatalf("node %d of record %d: %+v", x, id, *nd)
			}
			n++
		}
		if n == 0 {
			t.Fatalf("record %d has no node", id)
		}
	}
	points := 0
	for i, c := range m.records.chunks {
		if i > 0 && c.depth > 0 {
			refs[c.parent]++
			points += bit(c.points != nil)
			if m.records.byValue[c.value] != int32(i) {
				t.Fatalf("chunk %d is not found", i)
			}
		}
	}
	for i, c := range m.records.chunks {
		if i > 0 && c.depth > 0 && c.refs != refs[int32(i)] {
			t.Fatalf("chunk %d: %d references counted, %d are there", i, c.refs, refs[int32(i)])
		}
	}
	if live != m.records.live || tail != m.records.tailBytes || points != m.records.points {
		t.Fatalf("%d records, %d tail bytes, %d chunks with points; counted %d, %d, %d", live, tail, points, m.records.live, m.records.tailBytes, m.records.points)
	}
	n := 0
	for id := m.records.oldest; id != 0; id = m.records.all[id].newer {
		n++
	}
	if n != live {
		t.Fatalf("%d records by age, %d in all", n, live)
	}
}

// Whatever comes in whatever order: the parts fit together, memory is bounded,
// and what is predicted are chain values of a prompt that was learnt.
func TestAnyOrder(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		m, err := New(Options{MaxBytes: 64 << 10})
		if err != nil {
			rt.Fatal(err)
		}
		render := renderers[rapid.IntRange(0, len(renderers)-1).Draw(rt, "renderer")].render
		seen := map[prefix.Chain]bool{}
		var rd Reader
		for range rapid.IntRange(1, 60).Draw(rt, "steps") {
			d := &dialogue{Model: "tiny"}
			for i := range rapid.IntRange(1, 6).Draw(rt, "messages") {
				d.Messages = append(d.Messages, turn{Role: rapid.SampledFrom([]string{"system", "user", "assistant", "tool"}).Draw(rt, "role"), Content: someText(rng(uint64(i)), rapid.SampledFrom([]int{1, 40, 700}).Draw(rt, "words"))})
			}
			q, err := rd.Chat(vectorKey, "p", m.Epoch(), d.body())
			if err != nil {
				rt.Fatal(err)
			}
			ids := words(render(d))
			var p Prediction
			m.Lookup(q, &p)
			var mine tape
			mine.reset(ids)
			for _, c := range p.Chains {
				if !seen[c] {
					rt.Fatal("a chain value that was never learnt")
				}
			}
			if p.Tokens > 0 {
				if _, known := p.end(); !known {
					rt.Fatalf("the value at the end, %d tokens, is missing", p.Tokens)
				}
			}
			if rapid.Bool().Draw(rt, "by blocks") {
				m.LearnStored(q, prefix.PointsOf(nil, ids[:len(ids)/64*64]), &p)
			} else {
				m.Learn(q, ids, &p)
			}
			for _, c := range mine.chains {
				seen[c] = true
			}
			if rapid.Bool().Draw(rt, "answered") {
				full := slices.Concat(ids, words(someText(rng(9), 30)))
				mine.reset(full)
				for _, c := range mine.chains {
					seen[c] = true
				}
				if err := m.Answer(q, full, []byte(`{"role":"assistant","content":"x","reasoning":"y"}`)); err != nil {
					rt.Fatal(err)
				}
			}
			if b := m.Bytes(); b > 64<<10 && m.Records() > 1 {
				rt.Fatalf("%d bytes", b)
			}
			check(t, m)
		}
	})
}

func FuzzBody(f *testing.F) {
	f.Add([]byte(`{"messages":[{"role":"user","content":"a\u00e9\ud83d\ude00"}],"tools":[{"a":1}]}`))
	f.Add([]byte(`{"messages":[{"role":"user","content":[{"type":"image_url"}]},{"role":"system","x":null}]}`))
	f.Add([]byte(`{"messages":[{"role":"user","content":"` + strings.Repeat("long ", 700) + `"}]}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		var rd Reader
		r, err := rd.Chat(vectorKey, "p", 1, body)
		if err != nil {
			if !errors.Is(err, ErrBody) {
				t.Fatalf("error %v", err)
			}
			return
		}
		if len(r.units) < 2 || r.units[0].behind < 0 || r.TextBytes() <= 0 {
			t.Fatalf("%d units, bound %v", len(r.units), r.units[0].behind)
		}
		// The canonical form of the canonical form is itself.
		var s scanner
		s.b = body
		once, err := s.value(nil)
		if err != nil {
			t.Fatal(err)
		}
		s = scanner{b: once}
		if twice, err := s.value(nil); err != nil || string(twice) != string(once) {
			t.Fatalf("%q becomes %q: %v", once, twice, err)
		}
		m := newMemo(t)
		m.Learn(r, []uint32{1, 2, 3}, nil)
		check(t, m)
	})
}
