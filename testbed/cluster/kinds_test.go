package cluster

import (
	"bufio"
	"cmp"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"testing"

	"waypost/agent"
	"waypost/agent/engine/enginetest"
	"waypost/testbed/emulator"
	"waypost/testbed/emulator/profile"
)

// recordedFrame is a line of a recorded event stream, recordedRequest one of the
// requests beside it.
type recordedFrame struct {
	Kind  string   `json:"kind"`
	T     float64  `json:"t"`
	Parts []string `json:"parts"`
}

type recordedRequest struct {
	Sent     float64 `json:"t_send"`
	Response struct {
		Usage *struct {
			Details *struct {
				Cached *int `json:"cached_tokens"`
			} `json:"prompt_tokens_details"`
		} `json:"usage"`
	} `json:"response"`
	Tokens []uint32 `json:"prompt_token_ids"`
}

func (q *recordedRequest) cached() (n int, told bool) {
	if u := q.Response.Usage; u != nil && u.Details != nil && u.Details.Cached != nil {
		return *u.Details.Cached, true
	}
	return 0, false
}

// readLines reads a file of JSON lines.
func readLines[T any](t *testing.T, path string) (out []T) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	s := bufio.NewScanner(f)
	s.Buffer(nil, 8<<20)
	for s.Scan() {
		var v T
		if err := json.Unmarshal(s.Bytes(), &v); err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		out = append(out, v)
	}
	if s.Err() != nil {
		t.Fatal(s.Err())
	}
	return out
}

// startKind runs an emulated engine of another kind than vLLM with an agent and a
// coordinator; change changes what the agent is told of it.
func startKind(t *testing.T, o profile.Options, change func(*agent.EngineConfig)) (*rig, *profile.Engine, string) {
	t.Helper()
	o.Model, o.Speed = "Llama-3.1-8B", 1000
	e, err := profile.Start(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	cfg := agent.EngineConfig{Name: string(o.Kind) + "-1", Kind: agent.Kind(o.Kind), URL: e.URL()}
	if o.Streams {
		cfg.KVEvents, cfg.KVReplay = e.EventsEndpoint(), e.ReplayEndpoint()
	}
	if change != nil {
		change(&cfg)
	}
	r := start(t, 0, 1, emulator.Options{}, func(o *Options) { o.External = []agent.EngineConfig{cfg} })
	return r, e, HostName(0) + "/" + cfg.Name + "/0"
}

// The frames that a real SGLang published, as it published them, through the agent
// and the coordinator: before each recorded request what is expected of its prompt
// is what the engine then said it reused, never more, and of the prompts that
// continue one another all of it.
func TestRecordedFramesOfSGLang(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		// least is the share of the reused tokens that is expected: of prompts that
		// part for the first time less is known.
		least float64
	}{{"sglang-two-turns", 1}, {"sglang-hot-prefix", .85}} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			p := enginetest.NewPublisher(t)
			t.Cleanup(p.Close)
			r, _, worker := startKind(t, profile.Options{Kind: profile.SGLang, PageTokens: 32}, func(cfg *agent.EngineConfig) {
				cfg.KVEvents, cfg.KVReplay = fmt.Sprintf("tcp://%s:%d", enginetest.Host, p.Port()), fmt.Sprintf("tcp://%s:%d", enginetest.Host, p.ReplayPort())
			})
			frames := readLines[recordedFrame](t, "../replay/testdata/"+c.name+".frames.jsonl")
			slices.SortStableFunc(frames, func(a, b recordedFrame) int { return cmp.Compare(a.T, b.T) })
			compared, found, reused := 0, 0, 0
			for i, q := range readLines[recordedRequest](t, "../replay/testdata/"+c.name+".requests.jsonl") {
				for len(frames) > 0 && frames[0].T < q.Sent {
					if f := frames[0]; f.Kind == "live" {
						payload, err := hex.DecodeString(f.Parts[2])
						if err != nil {
							t.Fatal(err)
						}
						p.PublishRaw(false, payload)
					}
					frames = frames[1:]
				}
				// What comes behind them is seen: so are they.
				mark := tokens(uint32(5000+i), 65)
				p.Publish(false, map[string]any{
					"type": "BlockStored", "block_hashes": []any{uint64(1<<40 + 2*i), uint64(1<<40 + 2*i + 1)}, "parent_block_hash": nil,
					"token_ids": anyTokens(mark[:64]), "block_size": 32, "lora_id": nil, "medium": "GPU",
				})
				r.eventually("the frames are not seen", func() string {
					if n := r.expectsNow(0, worker, ask{tokens: mark}); n != 64 {
						return fmt.Sprintf("%d of 64 tokens are expected", n)
					}
					return ""
				})
				actual, told := q.cached()
				if !told {
					continue
				}
				expected := r.expects(0, worker, ask{tokens: q.Tokens})
				if expected > actual {
					t.Errorf("request %d of %d tokens: %d expected, %d reused", i, len(q.Tokens), expected, actual)
				}
				compared, found, reused = compared+1, found+expected, reused+actual
			}
			if compared < 3 || reused < 256 {
				t.Fatalf("%d requests with %d reused tokens prove little", compared, reused)
			}
			if float64(found) < c.least*float64(reused) {
				t.Errorf("%d of %d reused tokens were expected", found, reused)
			}
		})
	}
}

func anyTokens(ids []uint32) []any {
	out := make([]any, len(ids))
	for i, id := range ids {
		out[i] = id
	}
	return out
}

// Engines of the other kinds that publish events, TensorRT-LLM's rebuilt from its
// source, through the agent and the coordinator: growing conversations are never
// reused less than was expected, at rest exactly as much, and nothing is expected of a
// cache that was cleared or whose process is gone. Polled events come late and but
// once: what the view lacks meanwhile must not cost what it has.
func TestOtherKindsTellWhatTheyReuse(t *testing.T) {
	t.Parallel()
	for name, o := range map[string]profile.Options{
		"SGLang":                         {Kind: profile.SGLang, PageTokens: 16},
		"SGLang by single tokens":        {Kind: profile.SGLang, PageTokens: 1},
		"TensorRT-LLM polled":            {Kind: profile.TensorRTLLM, PageTokens: 32},
		"TensorRT-LLM streaming":         {Kind: profile.TensorRTLLM, PageTokens: 32, Streams: true},
		"TensorRT-LLM by its newer hash": {Kind: profile.TensorRTLLM, PageTokens: 32, Hash: profile.TRTSHA256},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r, e, worker := startKind(t, o, nil)
			prompts := make([][]uint32, 4)
			system := tokens(7, 320)
			for i := range prompts {
				prompts[i] = append(append([]uint32(nil), system...), tokens(uint32(100+i), 200+64*i)...)
			}
			hits := 0
			for round := range 4 {
				for i := range prompts {
					s := r.serve(0, ask{tokens: prompts[i], output: 8})
					if s.expected > s.actual {
						t.Errorf("round %d, conversation %d: %d tokens expected, %d reused", round, i, s.expected, s.actual)
					}
					if s.actual > 0 {
						hits++
					}
					prompts[i] = append(prompts[i], tokens(uint32(1000+10*round+i), 64)...)
				}
			}
			if hits < 12 {
				t.Fatalf("%d of 16 requests hit the cache: the test proves little", hits)
			}
			for i := range prompts {
				a := ask{tokens: prompts[i], output: 1}
				r.serve(0, a)
				r.settled(worker, a, len(a.tokens), o.PageTokens)
				if s := r.serve(0, a); s.expected != s.actual {
					t.Errorf("conversation %d at rest: %d tokens expected, %d reused", i, s.expected, s.actual)
				}
			}
			gone := func(what string) {
				r.eventually("what is gone is expected still, "+what, func() string {
					for i := range prompts {
						if n := r.expectsNow(0, worker, ask{tokens: prompts[i]}); n != 0 {
							return fmt.Sprintf("%d tokens of conversation %d", n, i)
						}
					}
					return ""
				})
				s := r.serve(0, ask{tokens: prompts[0], output: 1})
				if s.expected > s.actual {
					t.Errorf("%s: %d tokens expected, %d reused", what, s.expected, s.actual)
				}
				r.settled(worker, ask{tokens: prompts[0], output: 1}, len(prompts[0]), o.PageTokens)
			}
			// Engines whose events are polled have no event for it.
			if polled := o.Kind == profile.TensorRTLLM && !o.Streams; !polled {
				r.eventually("the cache is not cleared", func() string {
					if !e.Clear() {
						return "requests still run"
					}
					return ""
				})
				gone("cleared")
			}
			if err := e.Restart(); err != nil {
				t.Fatal(err)
			}
			gone("restarted")
		})
	}
}
