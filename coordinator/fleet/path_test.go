package fleet

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"waypost/agent/queue"
	"waypost/gossip/ledger"
)

// viewHash is what a coordinator's view of a worker rests on.
func viewHash(f *Fleet) string {
	var b strings.Builder
	for _, w := range f.slots {
		fmt.Fprintf(&b, "%s F %.3f S %.3f K %d live %v held %v echoes %v\n", w.name, w.waiting.F, w.waiting.S, w.waiting.K, w.snapshot.Live, w.snapshot.HeldBlocks, w.echoes)
		for _, p := range w.open {
			if p.pending() || p.c != nil {
				fmt.Fprintf(&b, "  %x/%d made %.3f pending %v\n", p.coordinator, p.Seq, p.MadeMs, p.pending())
			}
		}
	}
	return b.String()
}

// Doubled, reordered and late placements and reports lead to the same view as
// those in order.
func TestOrderOfArrivalDoesNotMatterToCoordinators(t *testing.T) {
	for seed := range uint64(200) {
		play := func(mess bool) string {
			day, net := rand.New(rand.NewPCG(seed, 1)), rand.New(rand.NewPCG(seed, 2))
			f := newFleet(t)
			h := hello("gpu-00", 1)
			h.EchoesClaims = true
			lane, _, err := f.OpenLane(at(0), h)
			if err != nil {
				t.Fatal(err)
			}
			type arrival struct {
				ms float64
				do func(ms float64)
			}
			var arrivals []arrival
			send := func(ms float64, do func(ms float64)) {
				times := 1
				if mess {
					times = 1 + net.IntN(2)
				}
				for range times {
					late := 2.0
					if mess {
						late += net.Float64() * 3000
					}
					arrivals = append(arrivals, arrival{ms + late, do})
				}
			}
			upto := map[uint64]uint64{}
			ms, loadSeq := 10.0, uint64(1)
			for i := range 80 {
				ms += day.ExpFloat64() * 50
				made := ms
				switch day.IntN(5) {
				case 0: // a report, which covers what was made 30 ms before
					loadSeq++
					report := Report{AgentProcess: h.AgentProcess, LoadSeq: loadSeq}
					l := idle(1000)
					l.QueueMs = ptr(float64(day.IntN(500)))
					for c, seq := range upto {
						l.Echo = append(l.Echo, ledger.Echo{Coordinator: c, Upto: max(seq, 2) - 2})
					}
					slices.SortFunc(l.Echo, func(a, b ledger.Echo) int { return int(a.Coordinator) - int(b.Coordinator) })
					report.Workers = []WorkerLoad{{Load: l}}
					send(ms, func(ms float64) {
						late := report
						late.SentMonoNs = uint64((made + 10_000) * 1e6)
						if _, err := f.Load(at(ms), "gpu-00", lane, late); err != nil {
							t.Fatal(err)
						}
					})
				case 1: // an own claim; it happens here and is not carried
					id := fmt.Sprint("r", i)
					tokens := 1 + day.IntN(900)
					arrivals = append(arrivals, arrival{ms, func(ms float64) {
						_, _, _, err := f.Claim(at(ms), NewClaim{Key: RequestKey{ID: id}, Attempt: 1, Placement: id, Claim: ledger.Claim{EngineProcess: 1000, PromptTokens: tokens, UncachedTokens: tokens}})
						if err != nil {
							t.Fatal(err)
						}
					}})
					upto[ownProcess]++
				default:
					c := []uint64{peer1, peer2}[day.IntN(2)]
					upto[c]++
					p := placed(upto[c], 0, 1+day.IntN(900), func(p *ledger.Placed) { p.RequestID = fmt.Sprint("r", i) })
					send(ms, func(ms float64) {
						late := p
						late.AgeMs = ms - made
						if _, err := f.Placed(at(ms), c, late); err != nil {
							t.Fatal(err)
						}
					})
				}
			}
			slices.SortStableFunc(arrivals, func(a, b arrival) int {
				switch {
				case a.ms < b.ms:
					return -1
				case a.ms > b.ms:
					return 1
				}
				return 0
			})
			// The first report sets the lane's clock; it is in time in both.
			if _, err := f.Load(at(5), "gpu-00", lane, Report{AgentProcess: h.AgentProcess, LoadSeq: 1, SentMonoNs: uint64(10_003 * 1e6), Workers: []WorkerLoad{{Load: echoing(0)}}}); err != nil {
				t.Fatal(err)
			}
			for _, a := range arrivals {
				a.do(a.ms)
			}
			return viewHash(f)
		}
		if diff := cmp.Diff(play(false), play(true)); diff != "" {
			t.Fatalf("seed %d: view in order (-) and as told (+):\n%s", seed, diff)
		}
	}
}

// Through the whole path the waiting work is that of the list of all claims:
// what the agent replayed, what the report carried, what coordinators folded.
func TestWholePathEqualsListReplay(t *testing.T) {
	rng := rand.New(rand.NewPCG(9, 9))
	for range 300 {
		steps := ledger.NewSteps(ledger.StepModel{P0Ms: 10, P1MsPerToken: .1}, 1000, 0)
		facts := queue.Facts{Model: steps.Model(), StepTokens: 1000}
		est, err := queue.New(queue.Options{Facts: facts, AgentProcess: 0xa})
		if err != nil {
			t.Fatal(err)
		}
		f := newFleet(t)
		h := hello("gpu-00", 1)
		model := steps.Model()
		h.EchoesClaims, h.Workers[0].StepModel, h.Workers[0].StepTokens = true, &model, 1000
		lane, _, err := f.OpenLane(at(0), h)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.Load(at(1), "gpu-00", lane, Report{AgentProcess: 0xa, LoadSeq: 1, Workers: []WorkerLoad{{Load: idle(1000)}}}); err != nil {
			t.Fatal(err)
		}
		f.TakeOutgoing(at(1))
		var jobs []ledger.Job
		ms := 100.0
		know := rng.IntN(11)
		for i := range 12 {
			tokens := 1 + rng.IntN(3000)
			id := fmt.Sprint("r", i)
			if _, _, _, err := f.Claim(at(ms), NewClaim{Key: RequestKey{ID: id}, Attempt: 1, Placement: id, Claim: ledger.Claim{EngineProcess: 1000, PromptTokens: tokens, UncachedTokens: tokens}}); err != nil {
				t.Fatal(err)
			}
			jobs = append(jobs, ledger.NewJob(ms, 0, tokens))
			if i == know {
				// The agent hears of all so far and reports at once.
				for _, host := range f.TakeOutgoing(at(ms + .25)).Hosts {
					for _, frame := range host.Claims {
						if _, err := est.Claims(at(ms+.25), &frame.ClaimFrame); err != nil {
							t.Fatal(err)
						}
					}
				}
				load := est.Load(at(ms + .5))
				load.EngineProcess = 1000
				if _, err := f.Load(at(ms+.5), "gpu-00", lane, Report{AgentProcess: 0xa, LoadSeq: 2, Workers: []WorkerLoad{{Load: load}}}); err != nil {
					t.Fatal(err)
				}
			}
			ms += float64(1 + rng.IntN(400))
		}
		replay := ledger.NewReplay(&steps, jobs[0].AtMs, jobs)
		last := jobs[len(jobs)-1].AtMs
		replay.Run(last)
		want, got := replay.Waiting(last), f.slots[0].waiting
		if math.Abs(got.F-want.F) > 1e-6 || math.Abs(got.S-want.S) > 1e-6 || got.K != want.K {
			t.Fatalf("F %.9f S %.9f K %d through report and folds, by the list %.9f %.9f %d", got.F, got.S, got.K, want.F, want.S, want.K)
		}
	}
}
