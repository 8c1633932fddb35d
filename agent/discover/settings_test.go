package discover

import (
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"
)

const (
	vllmFile = `# how we serve it
model: Qwen/Qwen3-32B   # the big one
port: 8100
api-key: sk-secret
enable-prompt-tokens-details: true
disable-log-stats: false
served-model-name:
  - qwen
  - qwen3
kv-events-config: '{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:6000","replay_endpoint":"tcp://*:6100"}'
hf-token: hf_secret
`
	nestedFile = "port: 8100\nkv_events_config:\n  enable_kv_cache_events: true\n  endpoint: \"tcp://*:6000\"\n  replay_endpoint: tcp://*:6100\n"
	trtFile    = "enable_iter_perf_stats: true\nkv_cache_config:\n  enable_block_reuse: true\n  event_buffer_max_size: 4096\n"
	all8100    = "00000000:1FA4"
)

// What a file or the environment says counts like the command line, under it, and
// no secret is kept.
func TestSettingsBesidesTheCommandLine(t *testing.T) {
	for _, c := range []struct {
		name, args, file, text, environ string
		uid                             int
		listens                         string
		want                            string
		events                          string
		problems                        []string // checks with a problem, or unknown ones with a question mark
	}{
		{
			name: "vLLM", args: "vllm serve --config /etc/vllm.yaml", file: "root/etc/vllm.yaml", text: vllmFile, listens: all8100,
			want: "vllm-8100 pid=41 here http://127.0.0.1:8100 trusted model=qwen", events: "tcp://127.0.0.1:6000 tcp://127.0.0.1:6100",
			problems: []string{"engine-reachable"}, // it wants a key
		},
		{
			name: "the command line goes first", args: "vllm serve m --config ./vllm.yaml --port 8000", file: "cwd/vllm.yaml", text: vllmFile, listens: all8000,
			want: "vllm-8000 pid=41 here http://127.0.0.1:8000 trusted model=m", events: "tcp://127.0.0.1:6000 tcp://127.0.0.1:6100", problems: []string{"engine-reachable"},
		},
		{
			name: "events as keys of their own", args: "vllm serve m --config vllm.yaml --enable-prompt-tokens-details", file: "cwd/vllm.yaml", text: nestedFile, listens: all8100,
			want: "vllm-8100 pid=41 here http://127.0.0.1:8100 trusted model=m", events: "tcp://127.0.0.1:6000 tcp://127.0.0.1:6100",
		},
		{
			name: "a share of several hosts", args: "vllm serve m --config vllm.yaml --node-rank 1", file: "cwd/vllm.yaml", text: "nnodes: 2\nmaster-addr: 10.0.0.1\nheadless: true\n",
			want:   "vllm-8000 pid=41 nowhere http://127.0.0.1:8000 trusted model=m group={Meeting:10.0.0.1:29501 Node:1 Nodes:2 FirstRank:0 LocalRanks:0 Ranks:0 Uncounted:false Front:false}",
			events: " ", problems: []string{"engine-cached-tokens", "engine-events"},
		},
		{
			name: "SGLang", args: "sglang serve --config /c/sgl.yaml", file: "root/c/sgl.yaml",
			text: "model-path: m\nport: 8100\npage-size: 16\nenable-cache-report: true\nkv-events-config: '{\"publisher\":\"zmq\",\"endpoint\":\"tcp://*:5557\",\"replay_endpoint\":\"tcp://*:5657\"}'\n", listens: all8100,
			want: "sglang-8100 pid=41 here http://127.0.0.1:8100 trusted model=m", events: "tcp://127.0.0.1:5557 tcp://127.0.0.1:5657",
		},
		{
			name: "TensorRT-LLM", args: "trtllm-serve m --extra_llm_api_options /etc/t.yaml", file: "root/etc/t.yaml", text: trtFile, listens: all8000,
			want: "trtllm-8000 pid=41 here http://127.0.0.1:8000 trusted model=m", events: " ",
		},
		{
			name: "TensorRT-LLM without events", args: "trtllm-serve m --extra_llm_api_options /etc/t.yaml", file: "root/etc/t.yaml", text: "enable_iter_perf_stats: false\n", listens: all8000,
			want: "trtllm-8000 pid=41 here http://127.0.0.1:8000 trusted model=m", events: " ", problems: []string{"engine-block-size", "engine-events"},
		},
		{
			name: "TensorRT-LLM that publishes", args: "trtllm-serve m --config t.yaml", file: "cwd/t.yaml", text: "enable_iter_perf_stats: true\nkv_cache_config:\n  kv_events_config:\n    publisher: zmq\n    endpoint: tcp://*:5557\n", listens: all8000,
			want: "trtllm-8000 pid=41 here http://127.0.0.1:8000 trusted model=m", events: " ",
		},
		{
			name: "TensorRT-LLM in one line", args: "trtllm-serve m --config t.yaml", file: "cwd/t.yaml", text: "enable_iter_perf_stats: true\nkv_cache_config: {\"event_buffer_max_size\": 16384}\n", listens: all8000,
			want: "trtllm-8000 pid=41 here http://127.0.0.1:8000 trusted model=m", events: " ",
		},
		{
			name: "TensorRT-LLM in one line of another form", args: "trtllm-serve m --config t.yaml", file: "cwd/t.yaml", text: "enable_iter_perf_stats: true\nkv_cache_config: {event_buffer_max_size: 16384}\n", listens: all8000,
			want: "trtllm-8000 pid=41 here http://127.0.0.1:8000 trusted model=m", events: " ", problems: []string{"engine-events?"},
		},
		{
			name: "llama.cpp by its environment", args: "llama-server", environ: "HOME=/root|LLAMA_ARG_PORT=8100|LLAMA_ARG_MODEL=x.gguf|LLAMA_ARG_ENDPOINT_METRICS=1|LLAMA_API_KEY=sk-secret|LLAMA_ARG_THREADS=4", listens: all8100,
			want: "llamacpp-8100 pid=41 here http://127.0.0.1:8100 trusted model=x.gguf", events: " ", problems: []string{"engine-reachable"},
		},
		{
			name: "llama.cpp's command line goes before its environment", args: "llama-server -m y.gguf --port 8000 --metrics", environ: "LLAMA_ARG_PORT=8100|LLAMA_ARG_ENDPOINT_SLOTS=0|LLAMA_ARG_CACHE_PROMPT=off", listens: all8000,
			want: "llamacpp-8000 pid=41 here http://127.0.0.1:8000 trusted model=y.gguf", events: " ", problems: []string{"engine-block-size", "engine-cached-tokens"},
		},
		{
			name: "a file that is not there", args: "vllm serve m --config /etc/other.yaml", listens: all8000,
			want: "vllm-8000 pid=41 here http://127.0.0.1:8000 trusted model=m", events: " ", problems: []string{"engine-cached-tokens?", "engine-events?"},
		},
		{
			name: "a file of an ordinary user's process", args: "vllm serve m --config /etc/vllm.yaml", uid: 1000, file: "root/etc/vllm.yaml", text: vllmFile, listens: all8000,
			want: "vllm-8000 pid=41 here http://127.0.0.1:8000 model=m", events: " ", problems: []string{"engine-cached-tokens?", "engine-events?"},
		},
		{
			name: "a file that is too large", args: "vllm serve m --config /etc/vllm.yaml", file: "root/etc/vllm.yaml", text: vllmFile + strings.Repeat("# padding\n", 8000), listens: all8000,
			want: "vllm-8000 pid=41 here http://127.0.0.1:8000 trusted model=m", events: " ", problems: []string{"engine-cached-tokens?", "engine-events?"},
		},
		{
			name: "a file above the directory", args: "vllm serve m --config ../../../etc/vllm.yaml", listens: all8000,
			want: "vllm-8000 pid=41 here http://127.0.0.1:8000 trusted model=m", events: " ", problems: []string{"engine-cached-tokens?", "engine-events?"},
		},
		{
			name: "a file that is not all read", args: "vllm serve m --config /etc/vllm.yaml", file: "root/etc/vllm.yaml", text: "kv-events-config: {enable_kv_cache_events: true}\n", listens: all8000,
			want: "vllm-8000 pid=41 here http://127.0.0.1:8000 trusted model=m", events: " ", problems: []string{"engine-cached-tokens?", "engine-events?"},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			tb := newTable()
			p := fake{pid: 41, uid: c.uid, args: c.args}
			if c.listens != "" {
				p.listens = []string{c.listens}
			}
			tb.add(p)
			if c.file != "" {
				tb.MapFS["41/"+c.file] = &fstest.MapFile{Data: []byte(c.text)}
			}
			if c.environ != "" {
				tb.MapFS["41/environ"] = &fstest.MapFile{Data: []byte(strings.ReplaceAll(c.environ, "|", "\x00"))}
			}
			r := tb.scan(t)
			if diff := cmp.Diff([]string{c.want}, shorts(r)); diff != "" {
				t.Fatal(diff)
			}
			e := &r.Engines[0]
			if live, replay := e.Events(); live+" "+replay != c.events {
				t.Errorf("events at %q, %q", live, replay)
			}
			var problems []string
			for _, a := range e.Advise(Known{Local: true}) {
				switch a.State {
				case Problem:
					problems = append(problems, a.Check)
				case Unknown:
					problems = append(problems, a.Check+"?")
				}
				if strings.Contains(fmt.Sprint(a), "secret") {
					t.Errorf("a secret is told: %+v", a)
				}
			}
			slices.Sort(problems)
			if diff := cmp.Diff(c.problems, problems); diff != "" {
				t.Error(diff)
			}
			if text := fmt.Sprintf("%+v %+v", *e, *e.settings); strings.Contains(text, "secret") {
				t.Errorf("a secret is kept: %s", text)
			}
		})
	}
}

// A file is read once per life of its engine: what it says later is not in force.
func TestSettingsAreThoseOfTheStart(t *testing.T) {
	tb := newTable()
	tb.add(fake{pid: 41, args: "vllm serve m --config /etc/v.yaml", listens: []string{all8100, all8000}})
	tb.MapFS["41/root/etc/v.yaml"] = &fstest.MapFile{Data: []byte("port: 8100\n")}
	tb.finish()
	s := New(Options{Proc: tb})
	port := func() int {
		r, err := s.Scan()
		if err != nil || len(r.Engines) != 1 {
			t.Fatal(r, err)
		}
		return r.Engines[0].Port
	}
	first := port()
	tb.MapFS["41/root/etc/v.yaml"] = &fstest.MapFile{Data: []byte("port: 8000\n")}
	second := port()
	tb.MapFS["41/stat"] = &fstest.MapFile{Data: []byte(strings.Replace(string(tb.MapFS["41/stat"].Data), "4711", "4712", 1))}
	if third := port(); first != 8100 || second != 8100 || third != 8000 {
		t.Errorf("ports %d, %d and after a restart %d", first, second, third)
	}
	delete(tb.MapFS, "41/cmdline")
	for range lookAgain + 2 {
		if _, err := s.Scan(); err != nil {
			t.Fatal(err)
		}
	}
	if len(s.settings) != 0 {
		t.Errorf("%d settings are kept of engines that are gone", len(s.settings))
	}
}

// What is no file is not opened: a pipe would hold the scan for ever.
func TestPipeIsNotRead(t *testing.T) {
	tb := newTable()
	tb.add(fake{pid: 41, args: "vllm serve m --config /tmp/pipe", listens: []string{all8000}})
	tb.MapFS["41/root/tmp/pipe"] = &fstest.MapFile{Mode: fs.ModeNamedPipe}
	if r := tb.scan(t); r.Engines[0].settings.unread != "it is no regular file" {
		t.Errorf("%+v", r.Engines[0].settings)
	}
}

func FuzzParseYAML(f *testing.F) {
	for _, s := range []string{vllmFile, nestedFile, trtFile, "a: |\n  b: c\n", "- a\n- b", "a: 'x''y' # z", "a:b", "\t", "a: \"\\u0041\""} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		list, _ := parseYAML(text)
		if len(list) > maxSettings {
			t.Errorf("%d settings", len(list))
		}
		for _, l := range list {
			if l.name == "" || strings.Count(l.name, ".") > 1 || strings.Contains(l.name, "-") {
				t.Errorf("name %q", l.name)
			}
		}
		for _, kind := range []string{"vllm", "trtllm"} {
			s := &settings{}
			s.take(kind, text)
			_ = groupOf(kind, s.words)
			_, _, _ = eventsOf(s.words)
		}
	})
}

// The forms that are read, and the line that is not.
func TestParseYAML(t *testing.T) {
	list, odd := parseYAML("---\na: 1 # one\nb-c: \"x # y\"\nd: 'it''s'\ne:\n  f: g\n  h-i: {\"j\": [1]}\nk:\n- l\n- m\nn: |\n  o: p\nq: r\n????\ns: t\n")
	want := []yamlLine{{"a", "1"}, {"b_c", "x # y"}, {"d", "it's"}, {"e.f", "g"}, {"e.h_i", `{"j": [1]}`}, {"k", "l"}, {"q", "r"}, {"s", "t"}}
	if diff := cmp.Diff(want, list, cmp.AllowUnexported(yamlLine{})); diff != "" || odd != "its line 11 is not read" {
		t.Errorf("%s; %q", diff, odd)
	}
}
