package lane

import (
	"math"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func TestFreshness(t *testing.T) {
	type frame struct {
		sent, received time.Duration // each on its own clock
		want           time.Duration
	}
	const s, ms = time.Second, time.Millisecond
	for name, frames := range map[string][]frame{
		"first frame sets the scale":       {{5 * s, 100 * s, 0}, {6 * s, 101 * s, 0}},
		"a frame that waited":              {{0, 10 * s, 0}, {1 * s, 13 * s, 2 * s}, {2 * s, 13 * s, 1 * s}, {3 * s, 13 * s, 0}},
		"a faster frame lowers the floor":  {{0, 10 * s, 0}, {1 * s, 10*s + 900*ms, 0}, {2 * s, 12 * s, 100 * ms}},
		"a stopped receiver reads it late": {{0, 0, 0}, {1 * s, 31 * s, 30 * s}, {2 * s, 31 * s, 29 * s}, {31 * s, 31 * s, 0}},
		"a slow clock is forgiven after the window": {
			{0, 0, 0}, {30 * s, 30*s + 3*ms, 3 * ms}, {60 * s, 60*s + 6*ms, 3 * ms}, {90 * s, 90*s + 9*ms, 3 * ms}, {120 * s, 120*s + 12*ms, 3 * ms},
		},
		"after a long silence the scale is new": {{0, 0, 0}, {500 * s, 510 * s, 0}},
	} {
		t.Run(name, func(t *testing.T) {
			var f Freshness
			for i, x := range frames {
				if got := f.Observe(uint64(x.sent), int64(x.received)); got != x.want {
					t.Errorf("frame %d sent %v received %v: late %v, want %v", i, x.sent, x.received, got, x.want)
				}
			}
		})
	}
}

// The zero of either clock must not matter, nor may a hostile sender make the
// lateness negative or absurd.
func TestFreshnessProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		sentZero, receivedZero := rapid.Uint64().Draw(t, "sent zero"), rapid.Int64Range(0, math.MaxInt64/2).Draw(t, "received zero")
		var plain, shifted Freshness
		now := int64(0)
		for range rapid.IntRange(1, 60).Draw(t, "frames") {
			now += rapid.Int64Range(0, int64(20*time.Second)).Draw(t, "gap")
			waited := rapid.Int64Range(0, int64(5*time.Second)).Draw(t, "waited")
			sent := uint64(now - waited)
			a := plain.Observe(sent, now)
			if a < 0 || a > 5*time.Second {
				t.Fatalf("lateness %v, frames wait 0 to 5 s", a)
			}
			// A shift by whole buckets changes nothing at all.
			bucket := int64(freshWindow / freshBuckets)
			if b := shifted.Observe(sent+sentZero, now+receivedZero/bucket*bucket); a != b {
				t.Fatalf("lateness %v, with shifted clocks %v", a, b)
			}
		}
	})
	rapid.Check(t, func(t *rapid.T) {
		var f Freshness
		now := int64(0)
		for range 20 {
			now += rapid.Int64Range(0, int64(time.Hour)).Draw(t, "gap")
			if late := f.Observe(rapid.Uint64().Draw(t, "sent"), now); late < 0 || late > maxLateness {
				t.Fatalf("lateness %v", late)
			}
		}
	})
}

func TestFreshnessDoesNotAllocate(t *testing.T) {
	var f Freshness
	now := int64(0)
	if n := testing.AllocsPerRun(1000, func() { now += int64(200 * time.Millisecond); f.Observe(uint64(now), now) }); n != 0 {
		t.Errorf("%v allocations per frame", n)
	}
}

func BenchmarkFreshness(b *testing.B) {
	var f Freshness
	b.ReportAllocs()
	now := int64(0)
	for b.Loop() {
		now += int64(200 * time.Millisecond)
		f.Observe(uint64(now), now)
	}
}
