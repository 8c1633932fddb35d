package core

import (
	"fmt"
	"testing"

	"pgregory.net/rapid"
)

// mirror is what a consumer knows from the events alone.
type mirror map[Hash]int

func (m mirror) apply(t *rapid.T, events []Event) {
	for _, e := range events {
		switch e.Op {
		case OpStored:
			if e.HasParent && m[e.Parent] == 0 {
				t.Fatalf("a store names a parent that is not in the cache")
			}
			for _, h := range e.Hashes {
				m[h]++
			}
		case OpRemoved:
			if m[e.Hashes[0]] == 0 {
				t.Fatalf("a removal of a block that was never stored")
			}
			m[e.Hashes[0]]--
		case OpCleared:
			clear(m)
		}
	}
}

func (m mirror) copies() int {
	n := 0
	for _, c := range m {
		n += c
	}
	return n
}

// Whatever happens to the core, its books agree, and the events tell a
// consumer exactly what is cached.
func TestEventsTellTheCache(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		o := Options{BlockTokens: 3, PoolBlocks: 12, MaxModelTokens: 30, StepTokens: 9, MaxRunning: 3, StepTime: Llama8BH100}
		c, err := New(o)
		if err != nil {
			t.Fatal(err)
		}
		m := mirror{}
		next := 0
		var live []*Sequence
		pending := false // a reset waits for the next step to be announced
		finish := func() {
			out, ok := c.Finish(0)
			if !ok {
				return
			}
			m.apply(t, out.Events)
			pending = false
		}
		t.Repeat(map[string]func(*rapid.T){
			"add": func(t *rapid.T) {
				if len(live) > 6 {
					t.Skip("enough")
				}
				family := rapid.IntRange(0, 2).Draw(t, "family")
				n := rapid.IntRange(1, 25).Draw(t, "tokens")
				p := make([]uint32, n)
				for i := range p {
					p[i] = uint32(family*100 + i/5)
				}
				s, err := c.Add(Request{ID: fmt.Sprint(next), Prompt: p, MaxTokens: rapid.IntRange(1, 8).Draw(t, "answer"), Generate: func(i int) (uint32, bool) { return uint32(family*100 + i), false }}, 0)
				if err != nil {
					t.Fatal(err)
				}
				next++
				live = append(live, s)
			},
			"schedule": func(t *rapid.T) { c.Schedule(0) },
			"finish":   func(*rapid.T) { finish() },
			"abort": func(t *rapid.T) {
				if len(live) > 0 {
					c.Abort(live[rapid.IntRange(0, len(live)-1).Draw(t, "which")].ID())
				}
			},
			"reset": func(t *rapid.T) {
				if c.Reset(rapid.Bool().Draw(t, "evict running")) {
					pending = true
				}
			},
			"": func(t *rapid.T) {
				kept := live[:0]
				for _, s := range live {
					if s.Finish() == "" {
						kept = append(kept, s)
					}
				}
				live = kept
				checkBooks(t, c)
				if !c.inStep && !pending && len(c.pool.events) == 0 && m.copies() != c.pool.copies {
					t.Fatalf("the events tell of %d cached blocks, the pool has %d", m.copies(), c.pool.copies)
				}
			},
		})
		for range 500 {
			finish()
			if _, ok := c.Schedule(0); !ok {
				break
			}
		}
		if !c.Idle() || c.pool.used() != 0 {
			t.Fatalf("at rest %d blocks are used, idle %t", c.pool.used(), c.Idle())
		}
	})
}

func checkBooks(t *rapid.T, c *Core) {
	refs := make([]int32, len(c.pool.blocks))
	for _, s := range c.byID {
		for _, id := range s.blocks {
			refs[id]++
		}
	}
	free, hashed := 0, 0
	for id := c.pool.head; id != none; id = c.pool.blocks[id].next {
		free++
	}
	for i, b := range c.pool.blocks {
		if b.refs != refs[i] {
			t.Fatalf("block %d has %d references, requests hold %d", i, b.refs, refs[i])
		}
		if b.queued != (refs[i] == 0 && i != 0) {
			t.Fatalf("block %d: queued %t with %d references", i, b.queued, refs[i])
		}
		if b.hashed {
			hashed++
		}
	}
	if free != c.pool.free || hashed != c.pool.copies || c.pool.blocks[0].hashed {
		t.Fatalf("free %d counted %d, cached %d counted %d", c.pool.free, free, c.pool.copies, hashed)
	}
	if len(c.running) > c.opts.MaxRunning {
		t.Fatalf("%d running", len(c.running))
	}
}
