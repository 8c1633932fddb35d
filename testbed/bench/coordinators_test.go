package bench

import (
	"bytes"
	"slices"
	"strings"
	"testing"
	"time"
)

// All arms answer the same requests. How long they take decides nothing here.
func TestCoordinators(t *testing.T) {
	if raceEnabled {
		t.Skip("three clusters take minutes with the race detector; the cluster's own tests run with it")
	}
	p := coordinatorsPlan{engines: 2, perSecond: 20, length: time.Second, rounds: 1, maxPrompt: 32_000, coordinators: 3, speed: 20, speedup: 1}
	r := &CoordinatorsReport{}
	if err := (Coordinators{}).run(t.Context(), p, r); err != nil {
		t.Fatal(err)
	}
	if len(r.Arms) != 3 {
		t.Fatalf("%d arms", len(r.Arms))
	}
	for i := range r.Arms {
		a := &r.Arms[i]
		t.Logf("%s: %d answered, mean %.1f ms, %.2f of one", a.name(), a.Requests, a.MeanMs, a.ToOne)
		if a.Requests == 0 || a.Lost > 0 || a.Requests != r.Arms[0].Requests || a.MeanMs <= 0 || a.P99Ms < a.P50Ms {
			t.Errorf("%+v", a)
		}
	}
	if one, k, cut := &r.Arms[0], &r.Arms[1], &r.Arms[2]; one.ToOne != 1 || one.Coordinators != 1 || k.Coordinators != 3 || k.Cut || !cut.Cut {
		t.Errorf("arms %+v", r.Arms)
	}
}

func shares() *CoordinatorsReport {
	return &CoordinatorsReport{Quick: true, Took: time.Second, Arms: []Shared{
		{Coordinators: 1, Requests: 9, MeanMs: 100, P50Ms: 90, P99Ms: 300, Reuse: .5, ToOne: 1},
		{Coordinators: 4, Requests: 9, MeanMs: 110, P50Ms: 90, P99Ms: 300, Reuse: .5, ToOne: 1.1},
		{Coordinators: 4, Cut: true, Requests: 9, MeanMs: 115, P50Ms: 90, P99Ms: 300, Reuse: .5, ToOne: 1.15},
	}}
}

func TestCoordinatorsReport(t *testing.T) {
	r := shares()
	if got := r.targets(); len(got) != 2 || !got[0].met || !got[1].met {
		t.Errorf("%+v: want two, met at their bounds", got)
	}
	var b bytes.Buffer
	if err := r.WriteJSON(&b); err != nil {
		t.Fatal(err)
	}
	keys, objects := keysOf(t, b.Bytes())
	want := []string{"coordinators", "lost", "placeCut", "ratioToOne", "requests", "reuse", "ttftMs"}
	if len(keys) != 3 {
		t.Fatalf("%d objects", len(keys))
	}
	for i := range keys {
		q, ok := objects[i]["ttftMs"].(map[string]any)
		if !slices.Equal(keys[i], want) || !ok || q["mean"] == nil || q["p50"] == nil || q["p99"] == nil {
			t.Errorf("keys %v, ttftMs %v", keys[i], objects[i]["ttftMs"])
		}
	}
	r.Arms[1].ToOne, r.Arms[2].ToOne = 1.11, 1.16
	var text bytes.Buffer
	if err := r.WriteText(&text); err != nil || strings.Count(text.String(), "not met") != 2 {
		t.Errorf("%v, want two lines with: not met\n%s", err, text.String())
	}
}
