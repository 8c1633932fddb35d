package bench

import (
	"math"
	"os"
	"path/filepath"
	"testing"

	"waypost/testbed/workload"
)

// within fails unless got is at most off from want.
func within(t *testing.T, what string, got, want, off float64) {
	t.Helper()
	if math.Abs(got-want) > off {
		t.Errorf("%s %.3f: want %.3f ± %.3f", what, got, want, off)
	}
}

func shapeOf(t *testing.T, o streamOptions, err error) Shape {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	s := newClosed(closedOptions{workers: o.workers, blocks: o.blocks, durationMs: o.durationMs, warmUp: o.warmUp, tickMs: 1000}).run(o.requests)
	t.Logf("%s: %+v", o.name, s)
	return s
}

// The synthetic workloads have the shape that the design's figures were
// measured with, also as short as --quick runs them.
func TestShapes(t *testing.T) {
	if testing.Short() {
		t.Skip("simulates 16 engines for minutes of virtual time; left out with -short")
	}
	t.Parallel()
	quick := Summaries{Quick: true}.plan()
	o, err := synthetic(workload.Mix, mixPerWorker, quick.streamSeconds["mix"], quick.warmUp)
	s := shapeOf(t, o, err)
	within(t, "mix: hit rate", s.HitRate, .81, .02)
	within(t, "mix: blocks/s", s.BlocksPerSec, 960, 96)
	within(t, "mix: runs", s.Runs, 148, 15)
	within(t, "mix: blocks per run", s.RunBlocks, 220, 20)
	within(t, "mix: requests/s", s.RequestsPerSec, 7.2, .5)
	o, err = synthetic(workload.Chat, chatPerWorker, quick.streamSeconds["chat"], quick.warmUp)
	s = shapeOf(t, o, err)
	within(t, "chat: blocks/s", s.BlocksPerSec, 1005, 100.5)
	within(t, "chat: runs", s.Runs, 226, 20)
	within(t, "chat: blocks per run", s.RunBlocks, 137, 15)
	within(t, "chat: requests/s", s.RequestsPerSec, 8.1, .5)
	o, err = conv("", quick.streamSeconds["conv"], quick.warmUp)
	within(t, "conv from the sample: blocks/s", shapeOf(t, o, err).BlocksPerSec, 1112, 111)
}

func TestShapeOfWholeTrace(t *testing.T) {
	if testing.Short() {
		t.Skip("simulates 16 engines for minutes of virtual time; left out with -short")
	}
	t.Parallel()
	o, err := conv(wholeTrace(t), 0, .3)
	s := shapeOf(t, o, err)
	within(t, "conv: blocks/s", s.BlocksPerSec, 1112, 111)
	within(t, "conv: requests/s", s.RequestsPerSec, 2, .2)
	within(t, "conv: runs", s.Runs, 57, 6)
	within(t, "conv: blocks per run", s.RunBlocks, 570, 57)
	within(t, "conv: hit rate", s.HitRate, .255, .03)
}

// wholeTrace finds the trace where the recordings are.
func wholeTrace(t *testing.T) string {
	t.Helper()
	dir := os.Getenv("WAYPOST_SHARED")
	if dir == "" {
		dir = filepath.Join("..", "..", "..", "shared")
	}
	file := filepath.Join(dir, "traces", "mooncake_fast25_conversation.jsonl")
	if _, err := os.Stat(file); err != nil {
		t.Skip("the whole trace is not at hand: set WAYPOST_SHARED")
	}
	return file
}

// A reduced form with counts that must come out the same everywhere.
func TestClosedIsDeterministic(t *testing.T) {
	requests := mixRequests(t, 12, 60)
	run := func() Shape {
		c := newClosed(closedOptions{workers: 4, blocks: 8192, durationMs: 60_000, warmUp: .3, tickMs: 1000})
		return c.run(requests)
	}
	if a, b := run(), run(); a != b || a.Requests < 100 || a.HitRate <= 0 || a.Runs <= 0 {
		t.Errorf("two runs: %+v and %+v", a, b)
	}
}

// The router sends a request where the least is left to compute.
func TestCheapest(t *testing.T) {
	for _, test := range []struct {
		queued, match []int
		want          int
	}{
		{[]int{0, 0, 0}, []int{0, 0, 0}, 0},
		{[]int{100, 0, 0}, []int{0, 0, 0}, 1},
		{[]int{160, 0, 0}, []int{11, 0, 0}, 0},
		{[]int{160, 0, 0}, []int{10, 0, 0}, 0},
		{[]int{160, 0, 0}, []int{9, 0, 0}, 1},
	} {
		if got := cheapest(test.queued, test.match, 1000); got != test.want {
			t.Errorf("queued %v, match %v: worker %d, want %d", test.queued, test.match, got, test.want)
		}
	}
}
