package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"
)

// One fleet of 70 workers, of which some hold parts of the prompts.
func TestDecide(t *testing.T) {
	x := &indexBench{opt: indexOptions{smallFleet(0), 2 * time.Millisecond}}
	for _, step := range []func() error{x.live, x.prepareQueries, x.fill} {
		if err := step(); err != nil {
			t.Fatal(err)
		}
	}
	x.warm()
	for _, load := range []Load{LoadBusy, LoadMixed, LoadIdle} {
		one, err := benchDecide(x, load, 2)
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("%+v", one)
		if one.Workers != 70 || one.Load != load || one.ClaimsPerWorker != 2 || one.Matches <= 1 || one.Priced < 2 {
			t.Errorf("%+v: not what was asked, or too little to tell anything", one)
		}
		for _, q := range []quantiles{one.Lookup, one.Rule, one.Record, one.Decide} {
			if q.P50 <= 0 || q.P99 < q.P50 {
				t.Errorf("%s: %+v was not measured", load, one)
			}
		}
		// The first records of a store make its tables grow.
		if one.Allocs > .1 && !raceEnabled {
			t.Errorf("%s: %.2f allocations per decision beside the record's, want none", load, one.Allocs)
		}
		if one.RecordAllocs < 1 {
			t.Errorf("%s: %.2f allocations per record: none was kept", load, one.RecordAllocs)
		}
	}
}

func decisions() *DecideReport {
	free := Decided{Workers: 1000, Load: LoadBusy, Matches: 9, Priced: 20, Lookup: quantiles{1000, 2000}, Rule: quantiles{7000, 9000}, Record: quantiles{500, 600}, Decide: quantiles{10_000, 25_000}, Allocs: .25, RecordAllocs: 1.75}
	claims := free
	claims.ClaimsPerWorker, claims.Rule.P50 = 64, 7700
	large := free
	large.Workers, large.Decide = 8000, quantiles{40_000, 100_000}
	small := free
	small.Workers, small.Decide = 100, quantiles{90_000, 900_000} // nothing is promised of it
	return &DecideReport{Quick: true, Fleets: []Decided{small, free, claims, large}, Took: time.Second}
}

func TestDecideTargets(t *testing.T) {
	r := decisions()
	if n := len(r.targets()); n != 7 {
		t.Errorf("%d targets, want 7", n)
	}
	for _, x := range r.targets() {
		if !x.met {
			t.Errorf("%s: not met at its bound", x.what)
		}
	}
	for i := range r.Fleets {
		f := &r.Fleets[i]
		f.Decide.P99++
		f.Allocs += .01
		if f.ClaimsPerWorker > 0 {
			f.Rule.P50++
		}
	}
	for _, x := range r.targets() {
		if x.met {
			t.Errorf("%s: met beyond its bound", x.what)
		}
	}
	var text bytes.Buffer
	if err := r.WriteText(&text); err != nil || strings.Count(text.String(), "not met") != 7 {
		t.Errorf("%v, want seven lines with: not met\n%s", err, text.String())
	}
}

// keysOf are the keys of each line's object.
func keysOf(t *testing.T, lines []byte) (out [][]string, objects []map[string]any) {
	t.Helper()
	for line := range bytes.Lines(lines) {
		var one map[string]any
		if err := json.Unmarshal(line, &one); err != nil {
			t.Fatal(err)
		}
		var keys []string
		for k := range one {
			keys = append(keys, k)
		}
		slices.Sort(keys)
		out, objects = append(out, keys), append(objects, one)
	}
	return out, objects
}

func TestDecideAsJSON(t *testing.T) {
	var b bytes.Buffer
	if err := decisions().WriteJSON(&b); err != nil {
		t.Fatal(err)
	}
	want := []string{"allocations", "decideNs", "load", "lookupNs", "matches", "openClaimsPerWorker", "priced", "recordAllocations", "recordNs", "ruleNs", "workers"}
	keys, objects := keysOf(t, b.Bytes())
	if len(keys) != 4 {
		t.Fatalf("%d objects", len(keys))
	}
	for i := range keys {
		if !slices.Equal(keys[i], want) {
			t.Errorf("keys %v", keys[i])
		}
		q, ok := objects[i]["decideNs"].(map[string]any)
		if !ok || len(q) != 2 || q["p50"] == nil || q["p99"] == nil {
			t.Errorf("decideNs is %v: want p50 and p99", objects[i]["decideNs"])
		}
	}
}

// What was measured before the end is told, and the end too.
func TestDecideCancelled(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	r, err := Decide{Quick: true}.Run(ctx)
	if !errors.Is(err, context.Canceled) || !r.IsEmpty() {
		t.Errorf("%v, %+v", err, r)
	}
	var b bytes.Buffer
	if err := show(&b, decisions(), true, context.Canceled); !errors.Is(err, context.Canceled) || b.Len() == 0 {
		t.Errorf("%v, %d bytes: what was measured is lost", err, b.Len())
	}
}
