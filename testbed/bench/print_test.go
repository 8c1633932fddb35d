package bench

import (
	"bytes"
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "rewrite golden files")

// reportOfNumbers is a report with a different number in every place.
func reportOfNumbers() *Report {
	return &Report{
		Quick: true, Took: 61 * time.Second,
		Streams: []Stream{{
			Workload: "conv", Source: "a trace", Workers: 16,
			Shape:        Shape{Requests: 101, Seconds: 102, HitRate: .103, BlocksPerSec: 104, RequestsPerSec: 1.05, Runs: 106, RunBlocks: 107, Utilisation: .108, FullWaits: 1},
			SnapshotBits: .66, StreamBytes: 112, RawBytes: 97500, RawWideBytes: 186400, AgentNs: 290, Recovery: 1100, RecoveryMost: 1600,
			Requests: 1000, Pairs: 2000, Summary: Deviation{Regret: 2.6, Gross: 1, Over: 2, Under: 3, Absolute: .34}, Exact: Deviation{Regret: 2.25, Absolute: .1},
			Bloom: Deviation{Regret: 2.5, Over: 4, Absolute: .11}, BloomBytes: 7100,
		}},
		Indexes: []Index{
			{
				Workload: "mix", Workers: 1000, PoolBlocks: 32768, ChurnSeconds: 900, Blocks: 32_000_000, Keys: 5, Refused: 6, LongQueries: 7, Queries: 8, Matches: 9.5,
				Lookup: quantiles{2500, 6900}, LookupAny: quantiles{2840, 8800}, LookupTokens: quantiles{9000, 12000}, LookupWriting: quantiles{2600, 7900}, WrittenPerSec: 4990,
				Decide: quantiles{5400, 10300}, Frames: 10, FramesPerSec: 333_000, OpsPerSec: 621_000, EventsPerSec: 88.4e6, HeapFill: .85, HeapChurned: .95,
				References: true, Exact: quantiles{20100, 51300}, Bloom: quantiles{58000, 153500}, ExactBytes: 18.4, BloomBytes: 1.25, Pairs: 4000, Differs: Deviation{Gross: 1, Over: 2},
			},
			{
				Workload: "chains", Workers: 1000, PoolBlocks: 32000, Blocks: 31_000_000, Matches: 870, Lookup: quantiles{1100, 1500}, HeapFill: .5, HeapChurned: .5,
				Cases: []Case{{Name: "chain held in full by 64", Lookup: quantiles{600, 700}, Holders: 64}},
			},
		},
		Cold: []ColdStart{{Hosts: 125, Workers: 1000, Ms: 480, SnapshotBytes: 3_400_000, Threads: 12, Descriptors: 130}, {Hosts: 1000, Workers: 1000, Ms: 2500}},
	}
}

func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	file := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(file, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(string(want), string(got)); d != "" {
		t.Errorf("%s (-update rewrites it):\n%s", name, d)
	}
}

func TestReportAsText(t *testing.T) {
	var b bytes.Buffer
	if err := reportOfNumbers().WriteText(&b); err != nil {
		t.Fatal(err)
	}
	golden(t, "report.txt", b.Bytes())
}

func TestReportAsJSON(t *testing.T) {
	var b bytes.Buffer
	if err := reportOfNumbers().WriteJSON(&b); err != nil {
		t.Fatal(err)
	}
	golden(t, "report.jsonl", b.Bytes())
	// Every object has all keys and no others, whatever it measures.
	want := []string{
		"agentNsPerBlockEvent", "blockEventsPerSec", "coldStartMs", "decideNs", "grossErrorShare", "heapBytesPerBlock", "lookupNs", "opsPerSec",
		"rawBytesPerSec", "regretTokens", "snapshotBitsPerBlock", "streamBytesPerSec", "workers", "workload",
	}
	for line := range bytes.Lines(b.Bytes()) {
		var one map[string]any
		if err := json.Unmarshal(line, &one); err != nil {
			t.Fatal(err)
		}
		var keys []string
		for k := range one {
			keys = append(keys, k)
		}
		if slices.Sort(keys); !slices.Equal(keys, want) {
			t.Errorf("keys %v", keys)
		}
		for _, k := range []string{"lookupNs", "decideNs"} {
			if q, ok := one[k].(map[string]any); one[k] != nil && (!ok || len(q) != 2 || q["p50"] == nil || q["p99"] == nil) {
				t.Errorf("%s is %v: want p50 and p99", k, one[k])
			}
		}
	}
}

// A failing writer is told, not lost.
func TestReportToNowhere(t *testing.T) {
	f, err := os.Open(os.DevNull) // for reading
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if reportOfNumbers().WriteText(f) == nil || reportOfNumbers().WriteJSON(f) == nil {
		t.Error("no error")
	}
}
