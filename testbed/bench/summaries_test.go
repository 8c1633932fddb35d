package bench

import (
	"bytes"
	"context"
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"waypost/testbed/workload"
)

func TestMain(m *testing.M) {
	runAgent()
	goleak.VerifyTestMain(m)
}

// A small workload through the production chain.
func smallStream(t *testing.T) Stream {
	t.Helper()
	s, err := benchStreams(streamOptions{name: "small", workers: 4, blocks: 8192, durationMs: 80_000, warmUp: .5, requests: mixRequests(t, 12, 80)})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestStreams(t *testing.T) {
	s := smallStream(t)
	t.Logf("%+v", s)
	if s.Requests < 50 || s.Pairs < 50 || s.Shape.BlocksPerSec < 100 {
		t.Fatalf("%d requests, %d pairs: too few to tell anything", s.Requests, s.Pairs)
	}
	// The index never claims what the exact list of the same age does not have.
	if s.Summary.Over > 0 || s.Exact.Over+s.Exact.Under+s.Exact.Gross > 0 {
		t.Errorf("over the exact list: summary %+v, the list itself %+v", s.Summary, s.Exact)
	}
	if share := s.GrossShare(); share > .001 {
		t.Errorf("%.4f of the pairs are more than 512 tokens off: want less than .001", share)
	}
	if s.Exact.Regret < 0 || s.Summary.Regret < 0 {
		t.Errorf("regret below the best worker's cost: %+v, %+v", s.Summary, s.Exact)
	}
	if s.StreamBytes <= 0 || s.StreamBytes > s.RawBytes/50 || s.RawWideBytes <= s.RawBytes || s.SnapshotBits <= 0 || s.SnapshotBits > bloomBits {
		t.Errorf("%.0f B/s of %.0f raw, %.2f bits per block", s.StreamBytes, s.RawBytes, s.SnapshotBits)
	}
	if s.Recovery <= 0 || s.Recovery > float64(s.RecoveryMost) || s.AgentNs <= 0 {
		t.Errorf("replay of %.0f bytes, at most %d; %.0f ns per block event", s.Recovery, s.RecoveryMost, s.AgentNs)
	}
	again := smallStream(t)
	if again.AgentNs = s.AgentNs; again != s {
		t.Errorf("another run gives other counts: %+v", again)
	}
}

func smallFleet(churnMs float64) fleetOptions {
	return fleetOptions{workload: "mix", workers: 70, blocks: 4096, requestsPerSecond: 1, fillMs: 60_000, churnMs: churnMs, seed: 1, references: true}
}

func TestIndex(t *testing.T) {
	x, lives, err := benchIndex(indexOptions{smallFleet(6000), 2 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%+v", x)
	if x.Blocks < 70*2000 || x.LongQueries < 10 || x.Pairs < 30 || x.Matches <= 1 || len(lives) != 70 {
		t.Fatalf("%d blocks, %d queries, %d pairs: too few to tell anything", x.Blocks, x.LongQueries, x.Pairs)
	}
	if x.Differs.Over > 0 || float64(x.Differs.Gross) > .001*float64(x.Pairs) {
		t.Errorf("of %d pairs %d are above the exact index and %d more than 512 tokens off", x.Pairs, x.Differs.Over, x.Differs.Gross)
	}
	if x.DecideAllocs > .01 && !raceEnabled {
		t.Errorf("%.3f allocations per decision", x.DecideAllocs)
	}
	if x.Frames < 70*3 || x.FramesPerSec <= 0 || x.EventsPerSec <= 0 || x.WrittenPerSec <= 0 {
		t.Errorf("%d frames, %.0f/s, %.0f block events/s, %.0f written/s", x.Frames, x.FramesPerSec, x.EventsPerSec, x.WrittenPerSec)
	}
	// A frame has an operation or more, and an operation stands for many blocks.
	if x.OpsPerSec < x.FramesPerSec/2 || x.OpsPerSec > x.EventsPerSec/10 {
		t.Errorf("%.0f operations/s of %.0f frames/s and %.0f block events/s", x.OpsPerSec, x.FramesPerSec, x.EventsPerSec)
	}
	if x.HeapFill <= 0 || x.HeapChurned <= 0 || x.HeapFill > x.ExactBytes {
		t.Errorf("%.2f and %.2f bytes per block; the exact index has %.2f", x.HeapFill, x.HeapChurned, x.ExactBytes)
	}
}

// The lives of workers do not depend on who simulates them, and affinity keeps
// them equally busy.
func TestLives(t *testing.T) {
	names := func() ([]life, map[int]int) {
		blocks := map[int]int{}
		lives, err := livesOf(smallFleet(0), func(w int, hashes []uint64) { blocks[w] = len(hashes) })
		if err != nil {
			t.Fatal(err)
		}
		return lives, blocks
	}
	a, blocks := names()
	b, _ := names()
	least, most := 1<<30, 0
	for w := range a {
		if len(a[w].snapshot) == 0 || !bytes.Equal(bytes.Join(a[w].snapshot, nil), bytes.Join(b[w].snapshot, nil)) {
			t.Fatalf("worker %d: two runs give other snapshots", w)
		}
		if blocks[w] != a[w].blocks {
			t.Errorf("worker %d: %d blocks in the engine, %d in the table", w, blocks[w], a[w].blocks)
		}
		least, most = min(least, a[w].blocks), max(most, a[w].blocks)
	}
	if least < 1500 {
		t.Errorf("workers hold %d to %d blocks: want all of them filled", least, most)
	}
}

// Affinity does not make some workers busier than others.
func TestAssignBalances(t *testing.T) {
	g, err := workload.NewGenerator(workload.Mix, 1)
	if err != nil {
		t.Fatal(err)
	}
	o := smallFleet(0)
	o.fillMs = 300_000
	sum, most, homes := 0.0, 0.0, map[int]map[int]bool{}
	for w, list := range assign(g, o) {
		busy := 0.0
		for _, s := range list {
			busy += g.Cost(s.Item)
			if g.IsDocument(s.Item) {
				if homes[s.Item] == nil {
					homes[s.Item] = map[int]bool{}
				}
				homes[s.Item][w] = true
			}
		}
		sum += busy
		most = max(most, busy)
	}
	if mean := sum / float64(o.workers); most > 1.35*mean {
		t.Errorf("the busiest worker has %.2f times the mean", most/mean)
	}
	for item, at := range homes {
		if n := max(2, int(math.Ceil(homesPerTraffic*g.Share(item)*float64(o.workers)))); len(at) > n {
			t.Errorf("document %d is read on %d workers: its traffic needs %d", item, len(at), n)
		}
	}
}

// A benchmark whose frames do not fit measures nothing and must say so.
func TestReceiverTellsLoss(t *testing.T) {
	x := &indexBench{opt: indexOptions{smallFleet(6000), time.Millisecond}}
	x.opt.workers, x.opt.references = 2, false
	if err := x.live(); err != nil {
		t.Fatal(err)
	}
	if err := x.fill(); err != nil {
		t.Fatal(err)
	}
	if err := x.receivers[0].take(x.lives[0].frame(1)); err == nil || !strings.Contains(err.Error(), "although nothing was lost") {
		t.Errorf("a frame too early: error %v", err)
	}
	if err := x.receivers[0].take(x.lives[0].frame(0)); err != nil {
		t.Errorf("the next frame: error %v", err)
	}
	if err := x.receivers[1].take([]byte{99}); err == nil {
		t.Error("a frame of another version: no error")
	}
	x.lives[0].keys++
	x.opt.churnMs = 1000
	if x.verify() == nil {
		t.Error("keys that are missing at the coordinator are not noticed")
	}
}

func TestChains(t *testing.T) {
	x, _, err := benchIndex(indexOptions{chains(70, 3000), time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	// The first 300 blocks and what the chain's own worker has beyond them.
	if x.Differs.Over > 0 || x.Differs.Gross > 0 || x.LongQueries != probedChains || x.Matches < 5 {
		t.Errorf("%+v", x)
	}
	if len(x.Cases) != 2 || x.Cases[0].Holders != 1 || x.Cases[1].Holders != 64 {
		t.Errorf("cases %+v: want chains held by 1 and 64", x.Cases)
	}
}

func TestColdStart(t *testing.T) {
	o := smallFleet(0)
	o.workers, o.references = 12, false
	lives, err := livesOf(o, nil)
	if err != nil {
		t.Fatal(err)
	}
	c, err := benchColdStart(t.Context(), coldOptions{hosts: 4, workersPerHost: 3, lives: lives, rounds: 2})
	if err != nil {
		t.Fatal(err)
	}
	want := 0
	for i := range lives {
		for _, f := range lives[i].snapshot {
			want += len(f)
		}
	}
	if c.Workers != 12 || c.Ms <= 0 || c.SnapshotBytes < want*9/10 || c.SnapshotBytes > want {
		t.Errorf("%+v: want at least 99 %% of the keys in %d bytes", c, want)
	}
	if c.Threads > 0 && (c.Descriptors < 4 || c.Descriptors > 4+20) {
		t.Errorf("%d descriptors for 4 lanes", c.Descriptors)
	}
}

func TestColdStartGivesUp(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	lives, err := livesOf(fleetOptions{workload: "mix", workers: 2, blocks: 4096, requestsPerSecond: 1, fillMs: 5000}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := benchColdStart(ctx, coldOptions{hosts: 2, workersPerHost: 1, lives: lives, rounds: 1}); err == nil || !strings.Contains(err.Error(), "cold start") {
		t.Errorf("error %v", err)
	}
}

// A run that is stopped gives what it has measured, which may be nothing.
func TestRunStops(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	r, err := Summaries{Quick: true}.Run(ctx)
	if !errors.Is(err, context.Canceled) || r == nil || !r.IsEmpty() || reportOfNumbers().IsEmpty() {
		t.Errorf("report %+v, error %v", r, err)
	}
}

func TestCommand(t *testing.T) {
	c := Command()
	for name, flags := range map[string][]string{"summaries": {"quick", "json", "trace"}, "decide": {"quick", "json"}, "place": {"quick", "json"}, "coordinators": {"quick", "json"}} {
		found, _, err := c.Find([]string{name})
		if err != nil || found.Name() != name {
			t.Fatalf("command %v, error %v", found, err)
		}
		for _, flag := range flags {
			if found.Flags().Lookup(flag) == nil {
				t.Errorf("%s has no flag --%s", name, flag)
			}
		}
		if !strings.Contains(found.Example, "waypost testbed bench "+name) {
			t.Errorf("%s has no example", name)
		}
	}
	c.SetArgs([]string{"summaries", "--quick", "--trace", "/nowhere/trace.jsonl"})
	c.SetOut(new(bytes.Buffer))
	c.SetErr(new(bytes.Buffer))
	if err := c.Execute(); err == nil || !strings.Contains(err.Error(), "/nowhere/trace.jsonl") {
		t.Errorf("error %v: want the file named", err)
	}
}
