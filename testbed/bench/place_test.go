package bench

import (
	"bytes"
	"slices"
	"strings"
	"testing"
	"time"
)

// Both transports reach the same coordinator and agree on the reuse.
func TestPlace(t *testing.T) {
	p := placePlan{workers: []int{10}, blocks: 1000, window: 20 * time.Millisecond, rounds: 1}
	r := &PlaceReport{}
	if err := (Place{}).run(t.Context(), p, r); err != nil {
		t.Fatal(err)
	}
	if len(r.Places) != 4 {
		t.Fatalf("%d measurements, want 2 transports × 2 prompts", len(r.Places))
	}
	for _, one := range r.Places {
		t.Logf("%+v", one)
		if one.Workers != 10 || one.Place.P50 <= 0 || one.Place.P99 < one.Place.P50 || one.PlacesPerSec <= 0 || one.CPU <= 0 {
			t.Errorf("%+v was not measured", one)
		}
		if one.Matched < 1 {
			t.Errorf("%s, %d tokens: reuse in %.2f of the placements; every prompt is in some cache", one.Transport, one.PromptTokens, one.Matched)
		}
	}
}

func places() *PlaceReport {
	place := func(workers int, t Transport, tokens int, us, perSec float64) Placed {
		return Placed{Workers: workers, Transport: t, PromptTokens: tokens, Place: quantiles{1000 * us, 5000 * us}, PlacesPerSec: perSec, CPU: 300 * time.Microsecond, Matched: 1}
	}
	long := chainBlocks * blockTokens
	return &PlaceReport{Quick: true, Took: time.Second, Places: []Placed{
		place(64, TransportGRPC, shortPrompt, 100, 10_000), place(64, TransportJSON, shortPrompt, 150, 8000),
		place(64, TransportGRPC, long, 250, 4000), place(64, TransportJSON, long, 600, 1500),
		place(1000, TransportGRPC, long, 300, 4000), place(1000, TransportJSON, long, 720, 1400),
	}}
}

func TestPlaceTargets(t *testing.T) {
	r := places()
	met := map[string]bool{}
	for _, x := range r.targets() {
		met[x.what] = x.met
	}
	if len(met) != 8 {
		t.Fatalf("%v: want 8 targets", met)
	}
	for what, m := range met {
		// 1,000 workers cost more here than 64 may by the peer's figure, not by
		// the ratio to 64.
		if beyond := strings.HasPrefix(what, "1000 workers, ") && strings.HasSuffix(what, ": p50"); m == beyond {
			t.Errorf("%s: met %v", what, m)
		}
	}
	for i := range r.Places {
		if r.Places[i].Workers == 1000 {
			r.Places[i].Place.P50++
		}
		r.Places[i].PlacesPerSec--
	}
	for _, x := range r.targets() {
		if x.met && !strings.HasPrefix(x.what, "64 workers") {
			t.Errorf("%s: met beyond its bound", x.what)
		}
	}
	var text bytes.Buffer
	if err := r.WriteText(&text); err != nil || !strings.Contains(text.String(), "not met") {
		t.Errorf("%v\n%s", err, text.String())
	}
}

func TestPlaceAsJSON(t *testing.T) {
	var b bytes.Buffer
	if err := places().WriteJSON(&b); err != nil {
		t.Fatal(err)
	}
	keys, objects := keysOf(t, b.Bytes())
	if len(keys) != 6 {
		t.Fatalf("%d objects", len(keys))
	}
	want := []string{"cpuUsPerPlace", "matchedShare", "placeUs", "placesPerSec", "promptTokens", "transport", "workers"}
	for i := range keys {
		if !slices.Equal(keys[i], want) {
			t.Errorf("keys %v", keys[i])
		}
		if q, ok := objects[i]["placeUs"].(map[string]any); !ok || len(q) != 2 || q["p50"] == nil || q["p99"] == nil {
			t.Errorf("placeUs is %v: want p50 and p99", objects[i]["placeUs"])
		}
	}
	if q := objects[0]["placeUs"].(map[string]any); q["p50"] != 100. {
		t.Errorf("placeUs of 100 µs is %v", q)
	}
}
