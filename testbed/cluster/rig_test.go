package cluster

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/http"
	"os"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/protobuf/proto"

	waypostv1 "waypost/proto/waypost/v1"
	"waypost/testbed/emulator"
)

func TestMain(m *testing.M) {
	if options := os.Getenv(engineProcessEnv); options != "" {
		if err := runEngineProcess(options); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	flag.Parse()
	// These tests mostly wait: for elections, reports and time-outs. What runs
	// at once is bounded by slots.
	if f := flag.Lookup("test.parallel"); f.Value.String() == f.DefValue {
		if err := f.Value.Set("12"); err != nil {
			panic(err)
		}
	}
	goleak.VerifyTestMain(m,
		goleak.Cleanup(func(code int) {
			if err := errors.Join(os.RemoveAll(binaryDir), os.RemoveAll(driverDir)); err != nil {
				fmt.Fprintln(os.Stderr, err)
				code = 1
			}
			os.Exit(code)
		}),
		// A probe under way ends by its own time-out: memberlist's shutdown does
		// not wait for it.
		goleak.IgnoreTopFunction("github.com/hashicorp/memberlist.(*Memberlist).probeNode"),
		// The HTTP client's idle connections end with the engines they lead to.
		goleak.IgnoreTopFunction("internal/poll.runtime_pollWait"),
		goleak.IgnoreTopFunction("net/http.(*persistConn).writeLoop"))
}

// slots bounds the clusters that run at once.
var slots = make(chan struct{}, 4)

// takeSlot waits for room for one more cluster and gives it back with the test.
func takeSlot(t *testing.T) {
	t.Helper()
	slots <- struct{}{}
	t.Cleanup(func() { <-slots })
}

// rig is a running cluster with what a test does to it.
type rig struct {
	*Cluster
	t      *testing.T
	client *http.Client
	n      int
}

// ownLoopback is a loopback address that no other test uses: nobody takes a port
// there that is closed for a moment.
func ownLoopback() string {
	return fmt.Sprintf("127.%d.%d.%d", 1+rand.IntN(254), rand.IntN(256), 1+rand.IntN(254))
}

// start runs n engines of the same kind and a number of coordinators.
func start(t *testing.T, n, coordinators int, opt emulator.Options, change ...func(*Options)) *rig {
	t.Helper()
	if opt.Model == "" {
		opt.Model = "Llama-3.1-8B"
	}
	takeSlot(t)
	o := Options{Dir: t.TempDir(), Coordinators: coordinators, Version: "0.0.0-test", DeltaEvery: 50 * time.Millisecond, PageTimeout: 30 * time.Second, Loopback: ownLoopback()}
	for range n {
		o.Engines = append(o.Engines, opt)
	}
	if os.Getenv("WAYPOST_TEST_LOG") != "" {
		o.Logger = slog.New(slog.NewTextHandler(os.Stderr, nil))
	}
	for _, c := range change {
		c(&o)
	}
	c, err := Start(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{Cluster: c, t: t, client: &http.Client{Transport: &http.Transport{}, Timeout: patience}}
	t.Cleanup(func() {
		r.client.CloseIdleConnections()
		if err := c.Stop(); err != nil {
			t.Errorf("stop: %v", err)
		}
	})
	return r
}

// patience bounds what must happen sooner or later. It decides no pass: what is
// tested is that it happens.
const patience = 3 * time.Minute

// eventually waits until fn answers "".
func (r *rig) eventually(what string, fn func() string) {
	r.t.Helper()
	deadline := time.Now().Add(patience)
	for {
		state := fn()
		if state == "" {
			return
		}
		if time.Now().After(deadline) {
			r.t.Fatalf("%s: %s", what, state)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// ask is one request to place and serve.
type ask struct {
	tokens  []uint32
	output  int
	salt    string
	adapter string
	exclude []string
	id      string
	attempt uint32
}

// served is what the view listed of it and what happened.
type served struct {
	placement *waypostv1.Placement
	expected  int
	actual    int
	class     string
	output    []uint32
}

// place asks a coordinator for a worker.
func (r *rig) place(coordinator int, a ask) (*waypostv1.Placement, error) {
	r.n++
	req := &waypostv1.PlaceRequest{
		RequestId: proto.String(fmt.Sprintf("r-%d", r.n)), Input: &waypostv1.Input{TokenIds: a.tokens}, OutputTokensMax: proto.Uint32(uint32(max(1, a.output))),
		Adapter: &a.adapter, CacheSalt: &a.salt, Exclude: a.exclude, Explain: proto.String("terms"),
	}
	if a.id != "" {
		req.RequestId = &a.id
	}
	if a.attempt > 0 {
		req.Attempt = &a.attempt
	}
	resp, err := r.Placement(coordinator).Place(r.t.Context(), req)
	if err != nil {
		return nil, err
	}
	if resp.GetPlacement() == nil {
		return nil, fmt.Errorf("refused: %v", resp.GetRefused())
	}
	return resp.GetPlacement(), nil
}

// expects is the reuse that would be expected of a worker, as soon as it is known:
// a view that has just come up is unknown until its age was told.
func (r *rig) expects(coordinator int, worker string, a ask) (n int) {
	r.t.Helper()
	r.eventually("the reuse expected of "+worker+" is not known", func() string {
		if n = r.expectsNow(coordinator, worker, a); n < 0 {
			return "unknown"
		}
		return ""
	})
	return n
}

// expectsNow is the reuse that would be expected of a worker now; -1: unknown.
func (r *rig) expectsNow(coordinator int, worker string, a ask) int {
	r.t.Helper()
	resp, err := r.Placement(coordinator).Place(r.t.Context(), &waypostv1.PlaceRequest{
		Input: &waypostv1.Input{TokenIds: a.tokens}, Adapter: &a.adapter, CacheSalt: &a.salt, Explain: proto.String("terms"), Reserve: proto.Bool(false),
	})
	if err != nil {
		r.t.Fatal(err)
	}
	for _, term := range resp.GetPlacement().GetTerms() {
		if term.GetWorker() == worker && term.ReuseTokens != nil {
			return int(term.GetReuseTokens())
		}
	}
	return -1
}

// send serves a request on a worker as its placement says.
func (r *rig) send(p *waypostv1.Placement, a ask) (cached int, output []uint32, err error) {
	return r.sendContext(r.t.Context(), p, a)
}

func (r *rig) sendContext(ctx context.Context, p *waypostv1.Placement, a ask) (cached int, output []uint32, err error) {
	return r.sendTo(ctx, p.GetWorker(), a)
}

// sendTo serves a request on a worker with what the placement adds to it.
func (r *rig) sendTo(ctx context.Context, w *waypostv1.WorkerRef, a ask) (cached int, output []uint32, err error) {
	model := "Llama-3.1-8B"
	if a.adapter != "" {
		model = a.adapter
	}
	body := map[string]any{"model": model, "prompt": a.tokens, "max_tokens": max(1, a.output), "ignore_eos": true, "temperature": 0, "return_token_ids": true}
	if a.salt != "" {
		body["cache_salt"] = a.salt
	}
	maps.Copy(body, w.GetBodyPatch().AsMap())
	b, err := json.Marshal(body)
	if err != nil {
		return 0, nil, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, w.GetUrl()+"/v1/completions", bytes.NewReader(b))
	if err != nil {
		return 0, nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	for k, v := range w.GetHeaders() {
		req.Header.Set(k, v)
	}
	resp, err := r.client.Do(req)
	if err != nil {
		return 0, nil, err
	}
	raw, err := io.ReadAll(resp.Body)
	_ = resp.Body.Close()
	if err != nil || resp.StatusCode != http.StatusOK {
		return 0, nil, fmt.Errorf("engine: %d %v %.200s", resp.StatusCode, err, raw)
	}
	var out struct {
		Choices []struct {
			TokenIDs []uint32 `json:"token_ids"`
		} `json:"choices"`
		Usage struct {
			Details struct {
				CachedTokens int `json:"cached_tokens"`
			} `json:"prompt_tokens_details"`
		} `json:"usage"`
	}
	if err := json.Unmarshal(raw, &out); err != nil {
		return 0, nil, err
	}
	if len(out.Choices) > 0 {
		output = out.Choices[0].TokenIDs
	}
	return out.Usage.Details.CachedTokens, output, nil
}

// listed is what the view of the chosen worker's cache lists of a prompt; how
// likely that is still there when the request comes is another matter.
func listed(p *waypostv1.Placement) int {
	for _, t := range p.GetTerms() {
		if t.GetWorker() == p.GetWorker().GetName() {
			return int(t.GetReuseTokens())
		}
	}
	return -1
}

// serve places a request, sends it and reports what happened.
func (r *rig) serve(coordinator int, a ask) served {
	r.t.Helper()
	p, err := r.place(coordinator, a)
	if err != nil {
		r.t.Fatal(err)
	}
	cached, output, err := r.send(p, a)
	if err != nil {
		r.t.Fatal(err)
	}
	out := served{placement: p, expected: listed(p), actual: cached, output: output}
	resp, err := r.Placement(coordinator).ReportOutcome(r.t.Context(), &waypostv1.ReportOutcomeRequest{
		PlacementId: p.PlacementId, Result: proto.String("done"), CachedTokens: proto.Uint32(uint32(cached)), PromptTokens: proto.Uint32(uint32(len(a.tokens))),
	})
	if err != nil {
		r.t.Fatal(err)
	}
	if !resp.GetJoined() {
		r.t.Errorf("outcome of %s was not joined", p.GetPlacementId())
	}
	out.class = resp.GetReuseClass()
	return out
}

// worker is a coordinator's view of a worker; nil: unknown.
func (r *rig) worker(coordinator int, name string) *waypostv1.Worker {
	ctx, cancel := context.WithTimeout(r.t.Context(), 5*time.Second)
	defer cancel()
	resp, err := r.Operator(coordinator).ListWorkers(ctx, &waypostv1.ListWorkersRequest{Name: &name})
	if err != nil || len(resp.GetWorkers()) != 1 {
		return nil
	}
	return resp.GetWorkers()[0]
}

// tokens makes n token ids that differ between seeds from the first one on.
func tokens(seed uint32, n int) []uint32 {
	out := make([]uint32, n)
	x := seed*2654435761 + 12345
	for i := range out {
		x = x*1664525 + 1013904223
		out[i] = 1000 + x>>16%90000
	}
	return out
}
