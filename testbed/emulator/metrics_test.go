package emulator

import (
	"context"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"waypost/testbed/emulator/core"
)

// stepClock passes time by sleeping: each sleep returns at once, at its end.
type stepClock struct {
	mu  sync.Mutex
	now time.Time
	sum time.Duration
}

func newStepClock() *stepClock { return &stepClock{now: time.Unix(1_800_000_000, 0)} }

func (c *stepClock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *stepClock) SleepUntil(_ context.Context, t time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if d := t.Sub(c.now); d > 0 {
		c.sum += d
		c.now = t
	}
}

func (c *stepClock) advance(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
}

func (c *stepClock) slept() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.sum
}

var (
	seriesLine = regexp.MustCompile(`^([^{ ]+)(?:\{(.*)\})? (\S+)$`)
	labelName  = regexp.MustCompile(`([a-zA-Z_]+)="`)
)

// parsePage finds every series with its type and the names of its labels.
func parsePage(t *testing.T, page string) map[string][2]string {
	t.Helper()
	kinds := map[string]string{}
	series := map[string][2]string{}
	for line := range strings.Lines(page) {
		line = strings.TrimSpace(line)
		if f := strings.Fields(line); strings.HasPrefix(line, "# TYPE ") {
			kinds[f[2]] = f[3]
			continue
		}
		if line == "" || line[0] == '#' {
			continue
		}
		m := seriesLine.FindStringSubmatch(line)
		if m == nil {
			t.Fatalf("line %q", line)
		}
		kind := kinds[m[1]]
		if kind == "" {
			kind = kinds[regexp.MustCompile(`_(bucket|count|sum)$`).ReplaceAllString(m[1], "")]
		}
		var names []string
		for _, l := range labelName.FindAllStringSubmatch(m[2], -1) {
			names = append(names, l[1])
		}
		if !slices.IsSorted(names) {
			t.Errorf("labels %v are not in order", names)
		}
		series[m[1]] = [2]string{kind, strings.Join(names, ",")}
	}
	return series
}

// Every series of the emulator exists in the real engine with the same type and
// labels.
func TestMetricsAreTheRecordedOnes(t *testing.T) {
	raw, err := os.ReadFile("testdata/metric-series.txt")
	if err != nil {
		t.Fatal(err)
	}
	recorded := map[string][2]string{}
	for line := range strings.Lines(string(raw)) {
		f := strings.SplitN(strings.TrimSuffix(line, "\n"), " ", 3)
		recorded[f[0]] = [2]string{f[1], f[2]}
	}
	o := small()
	o.Adapters, o.Ranks = []Adapter{{Name: "tiny-lora"}}, 2
	e, c := start(t, o), client(t)
	send(t, c, "POST", e.URL()+"/v1/completions", object{"model": "tiny-lora", "prompt": ids(1, 40), "max_tokens": 2})
	page := send(t, c, "GET", e.URL()+"/metrics", nil).body
	got := parsePage(t, page)
	if len(got) < 80 {
		t.Errorf("%d series", len(got))
	}
	for name, s := range got {
		want, ok := recorded[name]
		if !ok || s[0] != want[0] {
			t.Errorf("%s is a %s, recorded %q", name, s[0], want[0])
			continue
		}
		if name == "vllm:cache_config_info" {
			for _, l := range strings.Split(s[1], ",") {
				if !slices.Contains(strings.Split(want[1], ","), l) {
					t.Errorf("%s has the label %s", name, l)
				}
			}
		} else if s[1] != want[1] {
			t.Errorf("%s has labels %s, recorded %s", name, s[1], want[1])
		}
	}
}

func metric(t *testing.T, page, series string) float64 {
	t.Helper()
	for line := range strings.Lines(page) {
		if rest, ok := strings.CutPrefix(line, series+" "); ok {
			v, err := strconv.ParseFloat(strings.TrimSpace(rest), 64)
			if err != nil {
				t.Fatal(err)
			}
			return v
		}
	}
	t.Fatalf("no series %s", series)
	return 0
}

func TestMetricValues(t *testing.T) {
	o := small()
	clock := newStepClock()
	o.Clock, o.Speed, o.Ranks = clock, 1, 2
	o.StepTime = core.StepTime{P0: 30, D0: 20}
	e, c := start(t, o), client(t)
	for range 2 {
		complete(t, c, e, ids(1, 40), 4, "X-data-parallel-rank", "1")
	}
	page := send(t, c, "GET", e.URL()+"/metrics", nil).body
	for series, want := range map[string]float64{
		`vllm:prompt_tokens_total{engine="1",model_name="tiny"}`:                                    80,
		`vllm:prompt_tokens_by_source_total{engine="1",model_name="tiny",source="local_cache_hit"}`: 32,
		`vllm:prompt_tokens_by_source_total{engine="1",model_name="tiny",source="local_compute"}`:   48,
		`vllm:prefix_cache_queries_total{engine="1",model_name="tiny"}`:                             80,
		`vllm:prefix_cache_hits_total{engine="1",model_name="tiny"}`:                                32,
		`vllm:generation_tokens_total{engine="1",model_name="tiny"}`:                                8,
		`vllm:generation_tokens_total{engine="0",model_name="tiny"}`:                                0,
		`vllm:request_success_total{engine="1",finished_reason="length",model_name="tiny"}`:         2,
		`vllm:time_to_first_token_seconds_count{engine="1",model_name="tiny"}`:                      2,
		`vllm:time_to_first_token_seconds_bucket{engine="1",le="0.02",model_name="tiny"}`:           0,
		`vllm:time_to_first_token_seconds_bucket{engine="1",le="0.04",model_name="tiny"}`:           2,
		`vllm:inter_token_latency_seconds_count{engine="1",model_name="tiny"}`:                      6,
		`vllm:inter_token_latency_seconds_bucket{engine="1",le="0.025",model_name="tiny"}`:          6,
		`vllm:request_prefill_kv_computed_tokens_sum{engine="1",model_name="tiny"}`:                 48,
		`vllm:iteration_tokens_total_count{engine="1",model_name="tiny"}`:                           8,
		`vllm:iteration_tokens_total_sum{engine="1",model_name="tiny"}`:                             88,
		`vllm:num_requests_running{engine="1",model_name="tiny"}`:                                   0,
		`vllm:kv_cache_usage_perc{engine="1",model_name="tiny"}`:                                    0,
		`vllm:engine_sleep_state{engine="0",model_name="tiny",sleep_state="awake"}`:                 1,
		`vllm:request_params_max_tokens_sum{engine="1",model_name="tiny"}`:                          8,
		`process_start_time_seconds`:                                                                1_800_000_000,
	} {
		if got := metric(t, page, series); got != want {
			t.Errorf("%s is %v, want %v", series, got, want)
		}
	}
	for _, want := range []string{`num_gpu_blocks="200"`, `num_gpu_blocks_override="100"`, `kv_cache_size_tokens="3200"`, `process_start_time_seconds 1.8e+09`} {
		if !strings.Contains(page, want) {
			t.Errorf("the page lacks %s", want)
		}
	}
}

// The gauges tell the past; the counters do not lag.
func TestGaugeLag(t *testing.T) {
	o := small()
	clock := newStepClock()
	o.Clock, o.MaxRunning, o.GaugeLag = clock, 1, 5*time.Second
	e, c := start(t, o), client(t)
	r, err := e.rank(0)
	if err != nil {
		t.Fatal(err)
	}
	running := func() float64 {
		return metric(t, send(t, c, "GET", e.URL()+"/metrics", nil).body, `vllm:num_requests_running{engine="0",model_name="tiny"}`)
	}
	eventually(t, "the idle engine has noted its state", func() bool { return e.Status(0).UsableBlocks > 0 })
	r.stats.record(clock.Now(), core.Status{Running: 1, UsableBlocks: 99})
	clock.advance(3 * time.Second)
	r.stats.record(clock.Now(), core.Status{Running: 2, UsableBlocks: 99})
	if got := running(); got != 0 {
		t.Errorf("running %v after 3 s: want the state before", got)
	}
	clock.advance(2 * time.Second)
	if got := running(); got != 1 {
		t.Errorf("running %v after 5 s, want 1", got)
	}
	clock.advance(3 * time.Second)
	if got := running(); got != 2 {
		t.Errorf("running %v after 8 s, want 2", got)
	}
	if err := e.SetGaugeLag(0); err != nil {
		t.Fatal(err)
	}
	r.stats.record(clock.Now(), core.Status{Running: 3, UsableBlocks: 99})
	if got := running(); got != 3 {
		t.Errorf("running %v without lag, want 3", got)
	}
}

func TestPythonFloat(t *testing.T) {
	for v, want := range map[float64]string{
		0: "0.0", 1: "1.0", 16: "16.0", .6464646464646464: "0.6464646464646464", 48860: "48860.0", 123456: "123456.0",
		1.79597389631e9: "1.79597389631e+09", 5.20051968e9: "5.20051968e+09", 1e6: "1e+06", 1234567: "1.234567e+06", .001: "0.001",
	} {
		if got := pythonFloat(v); got != want {
			t.Errorf("%v is written %s, want %s", v, got, want)
		}
	}
}

func TestTokenBounds(t *testing.T) {
	if got := tokenBounds(2048); !slices.Equal(got, []float64{1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000}) {
		t.Errorf("buckets %v", got)
	}
}
