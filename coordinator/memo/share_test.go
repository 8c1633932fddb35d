package memo

import (
	"errors"
	"math/rand/v2"
	"slices"
	"testing"

	"waypost/gossip/prefix"
)

// Four coordinators: conversations that stick lose little without sharing.
// Sprayed requests lose much without it, some when heads and documents are
// shared, and almost nothing when the ends of prompts are told as well.
func TestSprayedAndSticky(t *testing.T) {
	if testing.Short() {
		t.Skip("left out with -short: seven replays of one workload")
	}
	work := workload(11, defaultMix(), appendOnly)
	at := rand.New(rand.NewPCG(1, 1))
	spray := func(int, *request, *Request) int { return at.IntN(4) }
	stick := func(_ int, _ *request, q *Request) int { return int(q.Conversation() >> 32 % 4) }
	one := func(int, *request, *Request) int { return 0 }
	run := func(name string, k int, to func(int, *request, *Request) int, share string) float64 {
		p := replay{to: to, share: share, answers: true}
		for range k {
			p.memos = append(p.memos, newMemo(t))
		}
		got := p.run(t, work)
		t.Logf("%-28s %s", name, got)
		if got.overShare() > .001 {
			t.Errorf("%s: over-prediction %.4f", name, got.overShare())
		}
		for _, m := range p.memos {
			check(t, m)
		}
		return got.cover()
	}
	whole := run("one coordinator", 1, one, "")
	sticky := run("4 sticky", 4, stick, "")
	stickyShared := run("4 sticky, branches shared", 4, stick, "branched")
	sprayed := run("4 sprayed", 4, spray, "")
	heads := run("4 sprayed, branches shared", 4, spray, "branched")
	all := run("4 sprayed, all shared", 4, spray, "all")
	two := run("2 sprayed, all shared", 2, func(int, *request, *Request) int { return at.IntN(2) }, "all")
	t.Logf("points lost: sticky %.1f, with branches %.1f; sprayed %.1f, with branches %.1f, with all %.1f (2 coordinators: %.1f)",
		100*(whole-sticky), 100*(whole-stickyShared), 100*(whole-sprayed), 100*(whole-heads), 100*(whole-all), 100*(whole-two))
	if whole-sprayed < .1 {
		t.Errorf("spraying without sharing costs %.1f points only: the workload shows nothing", 100*(whole-sprayed))
	}
	if whole-all > .02 || whole-two > .02 {
		t.Errorf("sprayed and shared: %.1f and %.1f points lost, want at most 2", 100*(whole-all), 100*(whole-two))
	}
	if sticky < sprayed || heads < sprayed || stickyShared < sticky-.002 {
		t.Errorf("sharing or sticking costs: sticky %.3f, shared %.3f, sprayed %.3f, heads %.3f", sticky, stickyShared, sprayed, heads)
	}
}

// A coordinator that joins takes the branched nodes over and predicts with them
// at once; a lost entry costs a miss.
func TestSnapshot(t *testing.T) {
	m, other := newMemo(t), newMemo(t)
	for i := range 6 {
		d := talk("system:"+someText(rng(1), 900), "user:"+someText(rng(uint64(i)), 30))
		teach(t, m, d, words(appendOnly(d)))
	}
	entries := m.Snapshot(vectorKey, 1<<20)
	if len(entries) == 0 {
		t.Fatal("nothing has branches")
	}
	size := 0
	for _, e := range entries {
		size += 16 + 8*len(e.Values)
		if err := other.Take(vectorKey, m.Epoch(), e); err != nil {
			t.Fatal(err)
		}
	}
	if again := m.Snapshot(vectorKey, size/2); len(again) == 0 || len(again) >= len(entries) && len(entries) > 1 {
		t.Errorf("%d of %d entries within half the size", len(again), len(entries))
	}
	check(t, other)
	d := talk("system:"+someText(rng(1), 900), "user:"+someText(rng(50), 30))
	predicted, right, _ := teach(t, other, d, words(appendOnly(d)))
	if predicted < 800 || predicted != right {
		t.Errorf("%d tokens predicted, %d so", predicted, right)
	}
}

func TestEntriesAreChecked(t *testing.T) {
	m := newMemo(t)
	for _, e := range []Entry{{}, {Key: 2, Tokens: 16}, {Key: 2, Tokens: 17, Values: []uint64{1}}, {Key: 2, Tokens: 512, Values: []uint64{1, 2}}, {Key: 2, Tokens: 1 << 30, Values: nil}, {Key: 2, Tokens: 16, Answer: 3, Values: []uint64{1}}} {
		if err := m.Take(vectorKey, 1, e); !errors.Is(err, ErrEntry) {
			t.Errorf("%+v: error %v", e, err)
		}
	}
	good := Entry{Key: 2, Tokens: 528, Values: []uint64{1, 2}}
	if err := m.Take(vectorKey, 1, good); err != nil || m.Records() != 1 {
		t.Fatalf("%v, %d records", err, m.Records())
	}
	// A later epoch of a peer is begun here too; one before is of no use.
	if err := m.Take(vectorKey, 3, good); err != nil || m.Epoch() != 3 || m.Records() != 1 {
		t.Errorf("%v, epoch %d, %d records", err, m.Epoch(), m.Records())
	}
	if err := m.Take(vectorKey, 2, Entry{Key: 4, Tokens: 16, Values: []uint64{1}}); err != nil || m.Records() != 1 {
		t.Errorf("%v, %d records", err, m.Records())
	}
	check(t, m)
}

// What travels does not show the chain values, which anybody could compare with
// those of a text he guesses.
func TestEntriesAreMasked(t *testing.T) {
	m := newMemo(t)
	d := talk("system:"+someText(rng(1), 900), "user:x")
	ids := words(appendOnly(d))
	teach(t, m, d, ids)
	var plain tape
	plain.reset(ids)
	values := slices.Clone(plain.chains)
	for i := range plain.points {
		values = append(values, plain.pointsOf(i)...)
		if i == len(plain.chains) {
			break
		}
	}
	n := 0
	for _, e := range m.Share(vectorKey, 1<<20, true) {
		for _, v := range e.Values {
			n++
			if slices.Contains(values, prefix.Chain(v)) {
				t.Fatal("a chain value travels in clear")
			}
		}
	}
	if n == 0 {
		t.Fatal("nothing is shared")
	}
}

// What waits to be told is bounded, and so is what is told at once.
func TestSharesAreBounded(t *testing.T) {
	m := newMemo(t)
	for i := range 2 * maxShares {
		d := talk("user:" + someText(rng(uint64(i)), 40))
		teach(t, m, d, words(appendOnly(d)))
	}
	if n := len(m.shares.ends); n > maxShares {
		t.Errorf("%d wait", n)
	}
	if got := m.Share(vectorKey, 1000, true); len(got) == 0 || len(got) > 1000/16 {
		t.Errorf("%d entries within 1000 bytes", len(got))
	}
	m.Share(vectorKey, 1<<30, true)
	if got := m.Share(vectorKey, 1<<30, true); len(got) != 0 {
		t.Errorf("%d entries told twice", len(got))
	}
}

// What found no room in the queue waits again once it is met again, and a node
// behind which paths part goes before the ends of prompts, though it waited as
// one of them.
func TestSharesThatWaitAgain(t *testing.T) {
	m := newMemo(t)
	first := talk("user:" + someText(rng(1), 40))
	teach(t, m, first, words(appendOnly(first)))
	m.Share(vectorKey, 1<<30, true)
	teach(t, m, first, words(appendOnly(first)))
	for i := range maxShares {
		d := talk("user:" + someText(rng(uint64(2+i)), 40))
		teach(t, m, d, words(appendOnly(d)))
	}
	for _, e := range m.shares.ends {
		if n := m.nodes[m.byKey[e]]; !n.queued {
			t.Fatal("one that waits is not marked")
		}
	}
	waiting := 0
	for _, id := range m.byKey {
		waiting += bit(m.nodes[id].queued)
	}
	if waiting != len(m.shares.ends)+len(m.shares.branched) {
		t.Errorf("%d nodes are marked, %d wait", waiting, len(m.shares.ends)+len(m.shares.branched))
	}
	m.Share(vectorKey, 1<<30, true)

	system := "system:" + someText(rng(7), 900)
	for i := range uint64(3) {
		d := talk(system, "user:"+someText(rng(1<<20+i), 30))
		teach(t, m, d, words(appendOnly(d)))
	}
	told := m.Share(vectorKey, 1, false) // room for one
	if len(told) != 1 || !m.nodes[m.byKey[told[0].Key]].branched {
		t.Errorf("%d told, want what has branches", len(told))
	}
}
