package fleet

import (
	"fmt"
	"math"
	"sync"
	"testing"

	"pgregory.net/rapid"

	"waypost/coordinator/placement"
	"waypost/gossip/ledger"
	"waypost/gossip/prefix"
)

// modelClaim is a claim in the obvious model.
type modelClaim struct {
	id           string
	seq          uint64
	made, born   float64
	tokens       int
	keys         bool
	first, known bool // first token seen; known to the report
}

// model is one worker kept in the plainest way: the list of claims, replayed
// from the last report that told a queue.
type model struct {
	process uint64
	claims  []*modelClaim
	steps   ledger.Steps
	base    ledger.Waiting
	live    float64
	echoing bool
}

func (m *model) waiting() ledger.Waiting {
	w := m.base
	for _, c := range m.claims {
		if !c.known && !c.first {
			w.Fold(&m.steps, c.made, 0, c.tokens)
		}
	}
	return w
}

func (m *model) drop(id string) {
	var kept []*modelClaim
	for _, c := range m.claims {
		if c.id != id {
			kept = append(kept, c)
		}
	}
	m.claims = kept
}

// Random claims, marks, reports, lost lanes and restarts, against the model.
func TestFleetAgainstModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		book := newKeyBook(t)
		r := newRig(t, 1, func(o *Options) { o.Predicted = book })
		m := &model{process: 1000, steps: ledger.NewSteps(flat, 2048, 0), live: math.NaN()}
		now, seq, serial, session := 0.0, uint64(0), 0, uint64(1)
		up := true
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			now += rapid.SampledFrom([]float64{0, 1, 30, 150, 400, 20_000}).Draw(t, "gap")
			switch rapid.SampledFrom([]string{"claim", "claim", "claim", "mark", "report", "report", "unknown", "tick", "restart", "cut", "open"}).Draw(t, "what") {
			case "claim":
				serial++
				seq++
				c := &modelClaim{id: fmt.Sprint("r", serial), seq: seq, made: now, born: now, tokens: rapid.IntRange(1, 5000).Draw(t, "tokens"), keys: rapid.Bool().Draw(t, "keys")}
				got := r.claim(now, c.id, worker0, c.tokens, func(n *NewClaim) {
					if c.keys {
						n.Keys, n.KeyDepths = []prefix.Key{1}, []uint32{uint32(c.tokens)}
					}
				})
				if got.Seq != c.seq {
					t.Fatalf("seq %d, want %d: dense", got.Seq, c.seq)
				}
				m.claims = append(m.claims, c)
			case "mark":
				if len(m.claims) == 0 {
					continue
				}
				c := rapid.SampledFrom(m.claims).Draw(t, "claim")
				mark := rapid.SampledFrom([]ledger.Mark{ledger.MarkFirst, ledger.MarkDone, ledger.MarkGone, ledger.MarkFailed}).Draw(t, "mark")
				if _, err := r.f.Mark(at(now), "pl_"+c.id, mark, 5); err != nil {
					t.Fatal(err)
				}
				if mark == ledger.MarkFirst {
					c.first, c.born = true, now
				} else {
					m.drop(c.id)
				}
			case "report", "unknown":
				if !up {
					continue
				}
				l := idle(m.process)
				queue := rapid.SampledFrom([]float64{0, 40, 3000}).Draw(t, "queue")
				l.QueueMs, l.Live = ptr(queue), ptr(uint32(rapid.IntRange(0, 9).Draw(t, "live")))
				echo := uint64(0)
				if rapid.Bool().Draw(t, "echoes") {
					echo = uint64(rapid.IntRange(0, int(seq)).Draw(t, "echo"))
					l.Echo = []ledger.Echo{{Coordinator: ownProcess, Upto: echo}}
				}
				sample := rapid.SampledFrom([]float64{0, 90, 900}).Draw(t, "sampled")
				l.CountersAgeMs = ptr(sample)
				known := rapid.Bool().Draw(t, "known")
				if !known {
					l.QueueMs = nil
				}
				r.load(now, "gpu-00", l)
				m.live = float64(*l.Live)
				if known {
					m.base = ledger.AtLoad(&m.steps, now, queue, 0)
				}
				m.echoing = m.echoing || l.Echo != nil
				for _, c := range m.claims {
					switch {
					case c.seq <= echo:
						c.known = true
					case known && m.echoing:
						c.known = now-c.made > 300
					case known:
						c.known = now-sample-c.made > 100
					}
				}
			case "tick":
				r.f.Tick(at(now))
				for _, c := range append([]*modelClaim(nil), m.claims...) {
					if now-c.born >= 60_000 {
						m.drop(c.id)
					}
				}
			case "restart":
				if !up {
					continue
				}
				m.process++
				h := hello("gpu-00", 1)
				h.Session, h.Workers[0].EngineProcess = session, m.process
				if _, err := r.f.UpdateHello(at(now), r.lanes["gpu-00"], h); err != nil {
					t.Fatal(err)
				}
				m.claims, m.base, m.live = nil, ledger.Waiting{}, math.NaN()
			case "cut":
				r.f.CloseLane(at(now), "gpu-00", r.lanes["gpu-00"])
				up = false
			case "open":
				session++
				h := hello("gpu-00", 1)
				h.Session, h.Workers[0].EngineProcess = session, m.process
				r.open(now, h)
				up = true
			}
			compare(t, r, m, book, now)
		}
	})
}

func compare(t *rapid.T, r *rig, m *model, book *keyBook, now float64) {
	s := r.snapshot(worker0)
	want := m.waiting()
	if s.Waiting != want && math.Abs(s.Waiting.F-want.F) > 1e-6 {
		t.Fatalf("at %v: waiting %+v, the list says %+v", now, s.Waiting, want)
	}
	pending, keys := 0., 0
	for _, c := range m.claims {
		if !c.known {
			pending++
		}
		if c.keys {
			keys++
		}
	}
	if s.OpenClaims != pending || s.Live != m.live+pending && !math.IsNaN(m.live) || s.Live < 0 {
		t.Fatalf("at %v: %v on top, live %v; the list says %v on %v", now, s.OpenClaims, s.Live, pending, m.live)
	}
	if r.f.OpenClaims() != len(m.claims) || book.count() != keys {
		t.Fatalf("at %v: %d open claims and %d key sets, the list says %d and %d", now, r.f.OpenClaims(), book.count(), len(m.claims), keys)
	}
}

// Many goroutines at once; the race detector judges.
func TestConcurrentUse(t *testing.T) {
	r := newRig(t, 4)
	r.loadAll(0)
	r.f.SetIntent(at(0), Intent{Way: func(string, Identity) Way { return Way{RoundTripMs: 1} }})
	var group sync.WaitGroup
	run := func(n int, do func(i int)) {
		group.Go(func() {
			for i := range n {
				do(i)
			}
		})
	}
	for g := range 2 {
		run(200, func(i int) {
			candidates, sit, err := r.f.Candidates(at(float64(i)), Query{CallerZone: fmt.Sprint("z", i%3)}, nil)
			if err != nil {
				t.Error(err)
				return
			}
			policy := placement.DefaultPolicy()
			var d placement.Decision
			id := fmt.Sprintf("r%d-%d", g, i)
			if err := placement.Decide(&placement.Request{ID: id, PromptTokens: 50}, candidates, &policy, sit, &d); err != nil {
				t.Error(err)
				return
			}
			w := candidates[d.Chosen]
			_, _, _, err = r.f.Claim(at(float64(i)), NewClaim{
				Key: RequestKey{ID: id}, Attempt: 1, Placement: id, Worker: w.ID,
				Claim: ledger.Claim{EngineProcess: w.Process, PromptTokens: 50, UncachedTokens: 50},
			})
			if err != nil {
				t.Error(err)
				return
			}
			if _, err := r.f.Mark(at(float64(i+1)), id, ledger.MarkDone, 3); err != nil {
				t.Error(err)
			}
		})
	}
	run(200, func(i int) {
		report := Report{AgentProcess: 0xa, LoadSeq: uint64(100 + i), Workers: []WorkerLoad{{Load: idle(1000)}}}
		if _, err := r.f.Load(at(float64(i)), "gpu-01", r.lanes["gpu-01"], report); err != nil {
			t.Error(err)
		}
	})
	run(50, func(i int) {
		r.f.SetIntent(at(float64(i)), Intent{Version: uint64(i), Way: func(string, Identity) Way { return Way{RoundTripMs: 2} }})
		r.f.Workers(at(float64(i)))
		r.f.Hosts(at(float64(i)))
		r.f.Tick(at(float64(i)))
	})
	run(200, func(i int) {
		r.f.TakeOutgoing(at(float64(i)))
		if _, err := r.f.Placed(at(float64(i)), peer1, placed(uint64(i+1), 1, 50)); err != nil {
			t.Error(err)
		}
	})
	group.Wait()
	if r.f.OpenClaims() != 0 {
		t.Errorf("%d claims left", r.f.OpenClaims())
	}
}
