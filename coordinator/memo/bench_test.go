package memo

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"waypost/gossip/prefix"
)

// longTalk is a conversation of about 8,000 tokens, and what follows it.
func longTalk(t testing.TB, key Key, epoch uint32) (first, next *Request, firstIDs, nextIDs []uint32) {
	t.Helper()
	d := talk("system:" + someText(rng(1), 2400))
	for i := range 12 {
		d.Messages = append(d.Messages, turn{Role: "user", Content: someText(rng(uint64(2*i+10)), 60)}, turn{Role: "assistant", Content: someText(rng(uint64(2*i+11)), 400)})
	}
	d.Messages = append(d.Messages, turn{Role: "user", Content: someText(rng(99), 40)})
	read := func() (*Request, []uint32) {
		var rd Reader
		q, err := rd.Chat(key, "p", epoch, d.body())
		if err != nil {
			t.Fatal(err)
		}
		return q, words(appendOnly(d))
	}
	first, firstIDs = read()
	d.Messages = append(d.Messages, turn{Role: "assistant", Content: someText(rng(98), 300)}, turn{Role: "user", Content: someText(rng(97), 40)})
	next, nextIDs = read()
	return first, next, firstIDs, nextIDs
}

func TestLookupAllocatesNothing(t *testing.T) {
	if raceEnabled {
		t.Skip("allocations are not counted with the race detector")
	}
	m := newMemo(t)
	first, next, ids, _ := longTalk(t, vectorKey, 1)
	m.Learn(first, ids, nil)
	var p Prediction
	m.Lookup(next, &p)
	if p.Tokens < 7000 {
		t.Fatalf("%d tokens", p.Tokens)
	}
	if n := testing.AllocsPerRun(100, func() { m.Lookup(next, &p) }); n != 0 {
		t.Errorf("%v allocations for a look-up", n)
	}
}

func BenchmarkLookup(b *testing.B) {
	m := newMemo(b)
	first, next, ids, _ := longTalk(b, vectorKey, 1)
	m.Learn(first, ids, nil)
	var p Prediction
	b.ReportAllocs()
	for b.Loop() {
		m.Lookup(next, &p)
	}
	b.ReportMetric(float64(p.Tokens), "tokens")
}

// The keys of a look-up are made as the index asks for them; this makes all.
func BenchmarkLookupAndKeys(b *testing.B) {
	m := newMemo(b)
	first, next, ids, _ := longTalk(b, vectorKey, 1)
	m.Learn(first, ids, nil)
	var p Prediction
	var probe prefix.Probe
	keyer := prefix.NewKeyer(prefix.ClusterKey{1}, prefix.Domain{Model: "tiny"})
	b.ReportAllocs()
	for b.Loop() {
		m.Lookup(next, &p)
		probe.ResetChains(p.Tokens, p.Chains, p.Points, keyer)
		for j := 1; j <= len(p.Chains); j++ {
			probe.Checkpoint(j)
		}
	}
}

// Learning a prompt of which all but the last turn was learnt before, and one of
// which nothing was.
func BenchmarkLearn(b *testing.B) {
	for _, fresh := range []bool{false, true} {
		b.Run(fmt.Sprintf("fresh=%v", fresh), func(b *testing.B) {
			first, next, ids, nextIDs := longTalk(b, vectorKey, 1)
			b.ReportAllocs()
			var m *Memo
			i := uint32(0)
			for b.Loop() {
				// A new memo each time would measure its making: another conversation
				// is another hash and other ids.
				if i%256 == 0 {
					m = newMemo(b)
				}
				i++
				q, at := *next, nextIDs
				if fresh {
					q = *first
					at = ids
				}
				q.units = slices.Clone(q.units)
				shift := rand.Uint64()
				if fresh {
					for k := range q.units {
						q.units[k].hash ^= shift
					}
					at[0] = i
				}
				m.Learn(&q, at, nil)
			}
			b.ReportMetric(float64(len(ids)), "tokens")
		})
	}
}

func BenchmarkRead(b *testing.B) {
	d := talk("system:" + someText(rng(1), 20000))
	body, err := json.Marshal(d)
	if err != nil {
		b.Fatal(err)
	}
	b.SetBytes(int64(len(body)))
	b.ReportAllocs()
	var rd Reader
	for b.Loop() {
		if _, err := rd.Chat(vectorKey, "p", 1, body); err != nil {
			b.Fatal(err)
		}
	}
}
