package bench

import (
	"bytes"
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"slices"
	"strings"
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
				Workload: "mix", Workers: 1000, PoolBlocks: 32768, ChurnSeconds: 900, Blocks: 32_000_000, Runs: 148, Keys: 5, Refused: 6, LongQueries: 7, Queries: 8, Matches: 9.5,
				Lookup: quantiles{2500, 6900}, LookupList: quantiles{3600, 8200}, LookupAny: quantiles{2840, 8800}, LookupTokens: quantiles{9000, 12000}, LookupResting: quantiles{2510, 6800}, LookupWriting: quantiles{2600, 7900}, WrittenPerSec: 4990,
				Decide: quantiles{5400, 10300}, Frames: 10, FramesPerSec: 333_000, OpsPerSec: 621_000, EventsPerSec: 88.4e6, HeapFill: .85, HeapChurned: .95,
				References: true, Exact: quantiles{20100, 51300}, Bloom: quantiles{58000, 153500}, ExactBytes: 18.4, BloomBytes: 1.25, Pairs: 4000, Differs: Deviation{Gross: 1, Over: 2},
			},
			{
				Workload: "chains", Workers: 1000, PoolBlocks: 32000, Blocks: 31_000_000, Runs: 31, Matches: 870, Lookup: quantiles{1100, 1500}, HeapFill: .5, HeapChurned: .5,
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

// Each bound is named by its figure, and a figure beyond it is told as such.
func TestTargets(t *testing.T) {
	verdicts := func(r *Report) map[string]bool {
		out := map[string]bool{}
		for _, v := range r.targets() {
			if _, twice := out[v.what]; twice && !strings.HasSuffix(v.what, "updates") {
				t.Errorf("%q is told twice", v.what)
			}
			out[v.what+" "+v.reach] = v.met
		}
		return out
	}
	shape := func(hit, blocks, runs, length float64) Shape {
		return Shape{HitRate: hit, BlocksPerSec: blocks, Runs: runs, RunBlocks: length}
	}
	good := Stream{StreamBytes: 100, AgentNs: 400, Recovery: 1500, Pairs: 1}
	mix, chat := good, good
	mix.Workload, mix.Shape, mix.SnapshotBits = "mix", shape(.829, 870, 162, 201), 1.3
	chat.Workload, chat.Shape = "chat", shape(.2, 1100, 207, 151)
	index := Index{Workload: "mix", Workers: coldWorkers, PoolBlocks: 8192, WrittenPerSec: 1, Lookup: quantiles{3000, 10_000}, LookupResting: quantiles{1, 10_000}, LookupWriting: quantiles{1, 15_000}, Decide: quantiles{6000, 15_000}, OpsPerSec: 5e5, EventsPerSec: 5e7, HeapFill: 1, HeapChurned: 1}
	other := index
	other.Workers, other.HeapFill = 100, 9 // bounds are for 1,000 workers
	cold := ColdStart{Hosts: coldHosts, Workers: coldWorkers, Ms: 2000, Threads: 50, Descriptors: 1100}
	many := ColdStart{Hosts: coldWorkers, Workers: coldWorkers, Ms: 9000, Threads: 50, Descriptors: 1100}
	all := verdicts(&Report{Streams: []Stream{mix, chat}, Indexes: []Index{index, other}, Cold: []ColdStart{cold, many}})
	for what, met := range all {
		if !met {
			t.Errorf("%s: not met at its bound", what)
		}
	}
	mix.Shape, mix.SnapshotBits = shape(.831, 860, 164, 199), 1.31
	mix.AgentNs, mix.Recovery, mix.Summary = 501, 2001, Deviation{Regret: 5.1, Gross: 1}
	chat.Shape, chat.StreamBytes = shape(.2, 1110, 205, 153), 201
	chat.AgentNs, chat.Recovery, chat.Summary = 501, 2001, Deviation{Regret: 5.1, Gross: 1}
	index = Index{Workload: "mix", Workers: coldWorkers, PoolBlocks: 8192, WrittenPerSec: 1, Lookup: quantiles{2000, 10_001}, LookupResting: quantiles{1, 10_000}, LookupWriting: quantiles{1, 15_002}, Decide: quantiles{6001, 15_000}, DecideAllocs: .1, OpsPerSec: 4e5, EventsPerSec: 4e7, HeapFill: 1.1, HeapChurned: 1.1}
	cold.Ms, cold.Threads, cold.Descriptors = 2001, 51, 1101
	many.Threads, many.Descriptors = 51, 1101
	beyond := verdicts(&Report{Streams: []Stream{mix, chat}, Indexes: []Index{index}, Cold: []ColdStart{cold, many}})
	for what := range all {
		if met, ok := beyond[what]; !ok || met {
			t.Errorf("%s: met %v, told %v, beyond its bound", what, met, ok)
		}
	}
	var text bytes.Buffer
	if err := (&Report{Cold: []ColdStart{cold}}).WriteText(&text); err != nil || strings.Count(text.String(), "not met") != 3 {
		t.Errorf("%v, want three lines with: not met\n%s", err, text.String())
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
