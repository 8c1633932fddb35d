package enginefaults

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"testing"
	"time"

	"waypost/agent/engine"
	"waypost/agent/engine/enginetest"
	"waypost/agent/engine/kvevents"
	"waypost/agent/engine/llamacpp"
	"waypost/agent/engine/sglang"
	"waypost/agent/engine/trtllm"
	"waypost/agent/engine/vllm"
	"waypost/testbed/emulator"
	"waypost/testbed/emulator/faults"
	"waypost/testbed/emulator/profile"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	// The tests wait for engines and adapters more than they compute.
	if err := flag.Set("test.parallel", "64"); err != nil {
		panic(err)
	}
	goleak.VerifyTestMain(m)
}

// rig is an emulated engine with a fault, and what a real adapter sees of it.
type rig struct {
	*testing.T
	*enginetest.Mirror
	fault  faults.Fault
	on     *faults.Switch
	vllm   *emulator.Engine
	other  *profile.Engine
	target engine.Target
	client *http.Client
	random *rand.Rand
	make   func() engine.Adapter
}

const (
	blockTokens = 16
	poolTokens  = 4096
)

// quick looks for what was lost at the tail often, so that a test need not wait.
var quick = kvevents.StreamOptions{ProbeEvery: time.Second}

// newRig starts the engine; the adapter is the test's to start.
func newRig(t *testing.T, f faults.Fault) *rig { return newRigOf(t, f, "") }

// newRigOf is newRig of a version.
func newRigOf(t *testing.T, f faults.Fault, version string) *rig {
	r := &rig{T: t, Mirror: enginetest.NewMirror(t), fault: f, random: rand.New(rand.NewPCG(1, 2))}
	transport := &http.Transport{}
	r.client = &http.Client{Transport: transport}
	t.Cleanup(transport.CloseIdleConnections)
	r.target = engine.Target{Name: f.Name, Kind: string(f.Kind)}
	if f.Kind == faults.VLLM {
		o, err := emulator.Of(version)
		if err != nil {
			t.Fatal(err)
		}
		o.Model, o.BlockTokens, o.PoolBlocks, o.MaxModelTokens, o.Speed = "tiny", blockTokens, poolTokens/blockTokens+1, 2048, 1000
		o.Address, o.EventsAddress, o.ReplayAddress = enginetest.AnyPort(), enginetest.AnyPort(), enginetest.AnyPort()
		if f.Name == "endpoint-connects" {
			o.EventsDial = enginetest.FreeAddress(t)
		}
		r.on = f.ToVLLM(&o)
		e, err := emulator.Start(o)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(e.Close)
		r.vllm, r.target.URL = e, e.URL()
		r.make = func() engine.Adapter {
			a, err := vllm.New(vllm.Options{Options: r.options(), Stream: quick})
			if err != nil {
				t.Fatal(err)
			}
			return a
		}
		return r
	}
	if f.Kind == profile.TensorRTLLM && version == "" {
		version = "1.3.0" // polled events
	}
	o, err := profile.Of(f.Kind, version)
	if err != nil {
		t.Fatal(err)
	}
	o.Model, o.PageTokens, o.PoolTokens, o.MaxModelTokens, o.Speed = "tiny", blockTokens, poolTokens, 2048, 1000
	r.on = f.ToProfile(&o)
	e, err := profile.Start(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	r.other, r.target.URL = e, e.URL()
	if o.Streams && f.Name == "" {
		r.target.Events, r.target.Replay = e.EventsEndpoint(), e.ReplayEndpoint()
	}
	r.make = func() engine.Adapter {
		var a engine.Adapter
		var err error
		switch f.Kind {
		case profile.SGLang:
			a, err = sglang.New(sglang.Options{Options: r.options(), Stream: quick})
		case profile.TensorRTLLM:
			a, err = trtllm.New(trtllm.Options{Options: r.options(), Stream: quick})
		default:
			a, err = llamacpp.New(llamacpp.Options{Options: r.options()})
		}
		if err != nil {
			t.Fatal(err)
		}
		return a
	}
	return r
}

func (r *rig) options() engine.Options {
	return engine.Options{Target: r.target, Logger: slog.New(slog.DiscardHandler), FactsEvery: time.Second, PageTimeout: 30 * time.Second}
}

// watch starts the adapter and waits until it sees the engine serve.
func (r *rig) watch() engine.Adapter {
	r.Helper()
	a := r.make()
	enginetest.Watch(r.T, a, r.Mirror)
	r.Await("the engine serves", func() bool { return r.Up && r.Known.Model == "tiny" })
	return a
}

// full waits until the view is full.
func (r *rig) full() {
	r.Helper()
	r.Await("a full view", func() bool { return r.Of(0).Coverage == engine.CoverageFull })
}

// prompt is n tokens that no other prompt has.
func (r *rig) prompt(n int) []uint32 {
	out := make([]uint32, n)
	for i := range out {
		out[i] = uint32(r.random.IntN(50_000))
	}
	return out
}

// question is a request besides its prompt.
type question struct {
	model, salt string
	tokens      int
}

// ask sends a prompt and returns the tokens that the engine reused.
func (r *rig) ask(prompt []uint32, q question) int {
	r.Helper()
	body := map[string]any{"model": "tiny", "prompt": prompt, "max_tokens": max(1, q.tokens), "ignore_eos": true, "temperature": 0}
	if q.model != "" {
		body["model"] = q.model
	}
	if q.salt != "" {
		body["cache_salt"] = q.salt
	}
	raw, err := json.Marshal(body)
	if err != nil {
		r.Fatal(err)
	}
	status, answer := r.call(r.Context(), http.MethodPost, "/v1/completions", raw)
	var v struct {
		Usage struct {
			Details *struct {
				Cached int `json:"cached_tokens"`
			} `json:"prompt_tokens_details"`
		} `json:"usage"`
	}
	if err := json.Unmarshal(answer, &v); err != nil || status != http.StatusOK {
		r.Fatalf("status %d, %s", status, answer)
	}
	if v.Usage.Details == nil {
		return 0 // what older SGLang says of none
	}
	return v.Usage.Details.Cached
}

func (r *rig) call(ctx context.Context, method, path string, body []byte) (int, []byte) {
	r.Helper()
	req, err := http.NewRequestWithContext(ctx, method, r.target.URL+path, bytes.NewReader(body))
	if err != nil {
		r.Fatal(err)
	}
	resp, err := r.client.Do(req)
	if err != nil {
		if ctx.Err() != nil {
			return 0, nil
		}
		r.Fatal(err)
	}
	defer resp.Body.Close()
	out, err := io.ReadAll(resp.Body)
	if err != nil {
		r.Fatal(err)
	}
	return resp.StatusCode, out
}

// drive sends three conversations of three turns, two of them with one
// beginning, one request at a time, and returns their last prompts.
func (r *rig) drive() (last [][]uint32) {
	r.Helper()
	start := r.prompt(100)
	for i := range 3 {
		p := start
		if i == 2 {
			p = nil
		}
		for range 3 {
			p = append(append([]uint32{}, p...), r.prompt(75)...)
			r.ask(p, question{tokens: 9})
		}
		last = append(last, p)
	}
	return last
}

// fill sends prompts until everything older has been given up.
func (r *rig) fill() {
	r.Helper()
	for range 2 * poolTokens / 500 {
		r.ask(r.prompt(500), question{})
	}
}

// agree asks for prompts again and waits until the view says of each what the
// engine did: any difference that stays fails. With atMost the view may say
// less.
func (r *rig) agree(prompts [][]uint32, q question, atMost bool) {
	r.Helper()
	for i, p := range prompts {
		// The first time may change the cache, the second finds what the view
		// must show.
		r.ask(p, q)
		cached := r.ask(p, q)
		adapter := ""
		if q.model != "" {
			adapter = q.model
		}
		r.Await("the view of a prompt is what the engine reuses", func() bool {
			n := r.Of(0).Table.Match(p, adapter, q.salt)
			return n == cached || atMost && n < cached
		})
		if r.Failed() {
			r.Fatalf("prompt %d: the engine reused %d", i, cached)
		}
	}
}

// none waits until the view gives prompts no credit.
func (r *rig) none(prompts [][]uint32) {
	r.Helper()
	r.Await("no credit", func() bool {
		for _, p := range prompts {
			if r.Of(0).Table.Match(p, "", "") > 0 {
				return false
			}
		}
		return true
	})
}

// covered waits for a coverage and a hint that says something.
func (r *rig) covered(c engine.Coverage, says string) {
	r.Helper()
	r.Await("coverage "+string(c)+" because of "+says, func() bool {
		return r.Of(0).Coverage == c && bytes.Contains([]byte(r.Of(0).Hint), []byte(says))
	})
}

// counted waits until at least n of something have been counted.
func (r *rig) counted(what string, n int) {
	r.Helper()
	r.Await("counted "+what, func() bool { return r.Of(0).Counts[what] >= n })
}

// never is the count of something now.
func (r *rig) never(what string) {
	r.Helper()
	r.Mu.Lock()
	defer r.Mu.Unlock()
	if n := r.Of(0).Counts[what]; n > 0 {
		r.Errorf("%d %s", n, what)
	}
}
