package sim

import (
	"math"
	"strings"
	"testing"

	"waypost/testbed/workload"
)

func traceOf(t *testing.T, lines string) *workload.Trace {
	t.Helper()
	tr, err := workload.ReadMooncake(strings.NewReader(lines))
	if err != nil {
		t.Fatal(err)
	}
	return tr
}

// Row "ids" of the engine model: one id of the trace is 8 blocks of 64, only
// full blocks of the real length count, the last id is cut.
func TestPromptsOfATrace(t *testing.T) {
	tr := traceOf(t, `{"timestamp":0,"input_length":1000,"output_length":1,"hash_ids":[7,9]}
{"timestamp":0,"input_length":1024,"output_length":0,"hash_ids":[7,8]}
{"timestamp":3000,"input_length":63,"output_length":1,"hash_ids":[1]}`)
	list, err := replay(tr, traceOptions{speedup: 1})
	if err != nil {
		t.Fatal(err)
	}
	a, b, c := list[0].prompt, list[1].prompt, list[2].prompt
	if len(a.Blocks) != 15 || len(b.Blocks) != 16 || len(c.Blocks) != 0 || a.Tokens != 1000 {
		t.Errorf("%d, %d and %d blocks: want 15, 16, 0", len(a.Blocks), len(b.Blocks), len(c.Blocks))
	}
	seen := map[uint32]bool{}
	for i, name := range a.Blocks {
		if same := name == b.Blocks[i]; same != (i < 8) {
			t.Errorf("block %d: equal is %v", i, same)
		}
		if seen[name] || name == 0 {
			t.Errorf("block %d has the name %d", i, name)
		}
		seen[name] = true
	}
	if list[1].outputTokens != 1 {
		t.Error("an answer of no token cannot be served")
	}
	unique, _ := replay(tr, traceOptions{speedup: 1, unique: true})
	if unique[0].prompt.Blocks[0] == unique[1].prompt.Blocks[0] {
		t.Error("unique requests share a block")
	}
}

func TestArrivalsOfATrace(t *testing.T) {
	tr := traceOf(t, `{"timestamp":0,"input_length":1,"output_length":1,"hash_ids":[1]}
{"timestamp":0,"input_length":1,"output_length":1,"hash_ids":[1]}
{"timestamp":1000,"input_length":1,"output_length":1,"hash_ids":[1]}
{"timestamp":1000,"input_length":1,"output_length":1,"hash_ids":[1]}
{"timestamp":1000,"input_length":1,"output_length":1,"hash_ids":[1]}`)
	for _, test := range []struct {
		spread bool
		want   []float64
	}{{true, []float64{0, 250, 500, 1000, 1500}}, {false, []float64{0, 0, 500, 500, 500}}} {
		list, err := replay(tr, traceOptions{spread: test.spread, speedup: 2})
		if err != nil {
			t.Fatal(err)
		}
		for i, a := range list {
			if a.atMs != test.want[i] {
				t.Errorf("spread %v: request %d comes at %v ms, want %v", test.spread, i, a.atMs, test.want[i])
			}
		}
	}
	moved, _ := replay(tr, traceOptions{speedup: 2, jitterMs: 2, seed: 3})
	for i, a := range moved {
		if off := a.atMs - []float64{0, 0, 500, 500, 500}[i]; off < 0 || off > 2 || off == 0 {
			t.Errorf("request %d moved by %v ms", i, off)
		}
	}
	if _, err := replay(tr, traceOptions{}); err == nil {
		t.Error("a speed-up of 0 was accepted")
	}
}

func TestCrowd(t *testing.T) {
	tr := traceOf(t, `{"timestamp":0,"input_length":1,"output_length":1,"hash_ids":[1]}`)
	list, err := replay(tr, traceOptions{speedup: 1, seed: 1, crowd: crowd{
		perSec: crowdPerSec, seconds: crowdSeconds, startMs: 5000, prefixTokens: crowdPrefix, ownTokens: crowdOwn, outputToks: crowdOutput,
	}})
	if err != nil {
		t.Fatal(err)
	}
	if n := len(list) - 1; math.Abs(float64(n)-7200) > 300 {
		t.Errorf("%d requests in a minute, want about 7200", n)
	}
	a, b := list[1], list[2]
	if a.class != classCrowd || a.prompt.Tokens != 8448 || len(a.prompt.Blocks) != 132 || a.outputTokens != 100 || a.atMs < 5000 {
		t.Errorf("%+v with %d blocks", a, len(a.prompt.Blocks))
	}
	if a.prompt.Blocks[127] != b.prompt.Blocks[127] || a.prompt.Blocks[128] == b.prompt.Blocks[128] || list[0].class != classTrace {
		t.Error("the crowd shares its prefix of 128 blocks and nothing else")
	}
}

// Row "same time stamp" of the engine model: all arrivals of an instant are
// queued before an idle worker starts.
func TestArrivalsOfOneInstantShareAStep(t *testing.T) {
	tr := traceOf(t, `{"timestamp":0,"input_length":600,"output_length":1,"hash_ids":[1,2]}
{"timestamp":0,"input_length":700,"output_length":1,"hash_ids":[3,4]}`)
	o := options(policyRoundRobin, 1)
	o.Workers, o.Spread = 1, false
	run, err := runT2(tr, o, 0, nil)
	if err != nil {
		t.Fatal(err)
	}
	if a, b := run.requests[0].engine, run.requests[1].engine; a.FirstMs != b.FirstMs {
		t.Errorf("first tokens at %v and %v", a.FirstMs, b.FirstMs)
	}
}

// Row "ITL column" of the engine model: the token-weighted mean of gaps.
func TestFigures(t *testing.T) {
	tr := traceOf(t, `{"timestamp":0,"input_length":64,"output_length":3,"hash_ids":[1]}
{"timestamp":9000,"input_length":64,"output_length":1,"hash_ids":[2]}
{"timestamp":18000,"input_length":6400,"output_length":11,"hash_ids":[3,4,5,6,7,8,9,10,11,12,13,14,15]}`)
	o := options(policyRoundRobin, 1)
	o.Workers, o.Spread = 1, false
	run, err := runT2(tr, o, 0, nil)
	if err != nil {
		t.Fatal(err)
	}
	a, c := &run.requests[0].engine, &run.requests[2].engine
	f := run.figuresOf(func(*served) bool { return true })
	if want := (a.LastMs - a.FirstMs + c.LastMs - c.FirstMs) / 12; math.Abs(f.ITLMs.Mean-want) > 1e-9 {
		t.Errorf("mean gap %v, want %v", f.ITLMs.Mean, want)
	}
	if f.Requests != 3 || f.Reuse != 0 || f.PredictionMs != nil {
		t.Errorf("%+v", f)
	}
	d := describe([]float64{4, 1, 3, 2})
	if d.Mean != 2.5 || d.P50 != 2.5 || math.Abs(d.P99-3.97) > 1e-9 {
		t.Errorf("%+v", d)
	}
	if e := describeErrors([]float64{-3, 1}); e.Bias != -1 || e.P50 != 2 {
		t.Errorf("%+v", e)
	}
}
