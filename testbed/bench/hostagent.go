package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"google.golang.org/protobuf/proto"

	waypostv1 "waypost/proto/waypost/v1"
	"waypost/testbed/cluster"
	"waypost/testbed/dev"
	"waypost/testbed/emulator"
	"waypost/testbed/workload"
)

// HostAgent says how an agent is measured as a process of its own.
type HostAgent struct {
	// Quick takes shorter windows.
	Quick bool
	// Agent is the command of the agent's process, without --config; nil: this
	// program's.
	Agent []string
	// Progress is told what is being measured; nil: nobody is.
	Progress func(what string)
}

// AgentCost is what an agent took of its host and of its engines.
type AgentCost struct {
	Workers, PoolBlocks int
	// Seconds is the window in which rates are counted.
	Seconds float64
	// BlocksPerSec are stored per worker, and as many removed once its pool is
	// full; EventsPerSec are the events that tell of them.
	BlocksPerSec, EventsPerSec float64
	// HeldBlocks are mirrored of the fullest worker at the end.
	HeldBlocks int
	// LostBatches were missed in the window.
	LostBatches int
	// CPUPercent is the share of one core per worker.
	CPUPercent float64
	// RSSBytes is the agent's memory at the end of the window, PeakRSSBytes the
	// most it ever had, FileBytes what of RSSBytes are pages of the program's file,
	// which all processes of the program share; 0: not known here.
	RSSBytes, PeakRSSBytes, FileBytes int64
	// LoadPerSec are questions about load, FactsPerSec all others but /tokenize,
	// of the engine that was asked most.
	LoadPerSec, FactsPerSec float64
	// TextOffered are bytes of prompts given as text, TextAsked those of which
	// engines were asked for token ids, TextAllowed the most that may be, in
	// TextSeconds.
	TextOffered, TextAsked, TextAllowed, TextSeconds float64
}

// AgentReport is what was measured.
type AgentReport struct {
	Quick bool
	Cost  *AgentCost // nil: nothing
	Took  time.Duration
}

// agentPlan is one size of the measurement.
type agentPlan struct {
	workers, poolBlocks int
	perSecond           float64 // requests per worker
	fill, window        time.Duration
	textPrompts         int
	textEvery           time.Duration
}

const (
	// A request computes 110 blocks of 16 tokens: the last token of an answer is
	// not computed. They come as a real vLLM was recorded to publish: one batch per
	// step that stored or removed anything, one store event per request and step,
	// removals one by one. With the emulator's steps, those of a model of 8 billion
	// parameters on one H100, that is about 80 batches a second with 1.4 store events
	// each; recordings with up to eight requests at once have 0.9 to 1.2.
	agentPromptTokens = 1600
	agentOutputTokens = 161
	agentBlocks       = (agentPromptTokens + agentOutputTokens - 1) / blockTokens
	// What coordinators may have engines tokenise: about a tenth of a core.
	textBurstBytes  = 4 << 20
	textBytesPerSec = 240 << 10
	textPromptBytes = 16 << 10
	agentModel      = "bench"
)

func (o HostAgent) plan() agentPlan {
	p := agentPlan{
		workers: 8, poolBlocks: poolBlocks, perSecond: 10, fill: 45 * time.Second, window: 60 * time.Second,
		textPrompts: 1200, textEvery: 15 * time.Millisecond,
	}
	if o.Quick {
		p.fill, p.window, p.textPrompts = 40*time.Second, 20*time.Second, 700
	}
	return p
}

// Run measures. With an error it returns what was measured before.
func (o HostAgent) Run(ctx context.Context) (*AgentReport, error) {
	began := time.Now()
	r := &AgentReport{Quick: o.Quick}
	err := o.run(ctx, o.plan(), r)
	r.Took = time.Since(began)
	return r, err
}

func (o HostAgent) tell(format string, args ...any) {
	if o.Progress != nil {
		o.Progress(fmt.Sprintf(format, args...))
	}
}

func (o HostAgent) run(ctx context.Context, p agentPlan, r *AgentReport) (err error) {
	dir, err := os.MkdirTemp("", "waypost-bench")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	asked := make([]*askedOf, p.workers)
	options := make([]emulator.Options, p.workers)
	for i := range options {
		asked[i] = &askedOf{}
		options[i] = emulator.Options{Model: agentModel, PoolBlocks: p.poolBlocks + 1, BlockTokens: blockTokens, StreamInterval: 1000, Wrap: asked[i].wrap}
	}
	c, err := cluster.Start(ctx, cluster.Options{Dir: dir, Engines: options, LateAgents: true, Coordinators: 1, Version: "bench"})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.Stop()) }()
	a, err := o.startAgent(c, dir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, a.stop()) }()
	if err := c.WaitReady(ctx); err != nil {
		return errors.Join(err, a.problem())
	}
	b := &agentBench{HostAgent: o, p: p, c: c, a: a, asked: asked, cost: &AgentCost{Workers: p.workers, PoolBlocks: p.poolBlocks}}
	if err := b.measureWork(ctx); err != nil {
		return err
	}
	r.Cost = b.cost
	return b.measureText(ctx)
}

type agentBench struct {
	HostAgent
	p     agentPlan
	c     *cluster.Cluster
	a     *agentProcess
	asked []*askedOf
	cost  *AgentCost
}

// measureWork serves requests, none of which repeats another, until the caches
// turn over, and then counts.
func (b *agentBench) measureWork(ctx context.Context) error {
	p := b.p
	ctx, end := context.WithCancel(ctx)
	defer end()
	var driven sync.WaitGroup
	defer driven.Wait()
	defer end()
	driven.Go(func() { dev.Drive(ctx, b.c, agentModel, p.requests()) })
	b.tell("filling %d caches of %d blocks for %.0f s", p.workers, p.poolBlocks, p.fill.Seconds())
	if err := sleep(ctx, p.fill); err != nil {
		return err
	}
	b.tell("counting for %.0f s", p.window.Seconds())
	before, err := b.sample()
	if err != nil {
		return err
	}
	if err := sleep(ctx, p.window); err != nil {
		return err
	}
	after, err := b.sample()
	if err != nil {
		return err
	}
	b.cost.take(&before, &after)
	b.cost.RSSBytes, b.cost.PeakRSSBytes, b.cost.FileBytes = b.a.memory()
	return nil
}

// requests arrive evenly; nothing of one is in another.
func (p *agentPlan) requests() []workload.Request {
	perMs := p.perSecond * float64(p.workers) / 1000
	out := make([]workload.Request, int(float64((p.fill+p.window).Milliseconds()+5000)*perMs))
	for i := range out {
		out[i] = workload.Request{
			ArrivalMs: float64(i) / perMs, OutputTokens: agentOutputTokens, Conversation: uint64(i) + 1,
			Prompt: &workload.SegmentPrompt{FirstToken: 1000, TokenCount: 64_000, Segments: []workload.Segment{{Name: splitMix(uint64(i)), Tokens: agentPromptTokens}}},
		}
	}
	return out
}

// measureText offers more text to tokenise than engines may be asked about.
func (b *agentBench) measureText(ctx context.Context) error {
	b.tell("offering %d prompts as text", b.p.textPrompts)
	for _, e := range b.asked {
		e.take() // the probes' texts
	}
	began := time.Now()
	tick := time.NewTicker(b.p.textEvery)
	defer tick.Stop()
	for i := range b.p.textPrompts {
		text := strings.Repeat(fmt.Sprintf("%07x ", splitMix(uint64(i))>>36), textPromptBytes/8)
		b.cost.TextOffered += float64(len(text))
		// What matters is what engines are asked; the answer is of no use here.
		_, err := b.c.Placement(0).Place(ctx, &waypostv1.PlaceRequest{Input: &waypostv1.Input{Prompt: &text}, Reserve: proto.Bool(false)})
		if err != nil {
			return fmt.Errorf("placing a text: %w", err)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	b.cost.TextSeconds = time.Since(began).Seconds()
	for _, e := range b.asked {
		b.cost.TextAsked += float64(e.take().textBytes)
	}
	b.cost.TextAllowed = textBurstBytes + textBytesPerSec*b.cost.TextSeconds
	return nil
}

func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// agentSample is what was counted up to a moment.
type agentSample struct {
	at     time.Time
	asked  []askedCounts
	series map[string]float64 // of the agent, summed over workers
	// mostCached is the largest number of cached tokens of a worker.
	mostCached float64
}

func (b *agentBench) sample() (s agentSample, err error) {
	s.series, s.mostCached, err = b.a.scrape()
	s.at = time.Now()
	for _, e := range b.asked {
		s.asked = append(s.asked, e.now())
	}
	return s, err
}

func (c *AgentCost) take(before, after *agentSample) {
	c.Seconds = after.at.Sub(before.at).Seconds()
	since := func(name string) float64 { return after.series[name] - before.series[name] }
	workers := float64(c.Workers)
	c.CPUPercent = 100 * since("waypost_agent_cpu_seconds_total") / c.Seconds / workers
	c.EventsPerSec = since("waypost_engine_events_total") / c.Seconds / workers
	c.LostBatches = int(since("waypost_engine_event_batches_lost_total"))
	c.HeldBlocks = int(after.mostCached) / blockTokens
	served := 0
	for i := range after.asked {
		a, b := &after.asked[i], &before.asked[i]
		served += a.served - b.served
		c.LoadPerSec = max(c.LoadPerSec, float64(a.load-b.load)/c.Seconds)
		c.FactsPerSec = max(c.FactsPerSec, float64(a.facts-b.facts)/c.Seconds)
	}
	c.BlocksPerSec = float64(served*agentBlocks) / c.Seconds / workers
}

// askedCounts are what an engine was asked.
type askedCounts struct {
	served      int // requests of the workload that were answered
	load, facts int
	textBytes   int
}

// askedOf counts what one engine is asked.
type askedOf struct {
	mu sync.Mutex
	n  askedCounts
}

func (a *askedOf) wrap(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		text := 0
		if q.URL.Path == "/tokenize" {
			body, err := io.ReadAll(io.LimitReader(q.Body, 16<<20))
			q.Body = io.NopCloser(bytes.NewReader(body))
			var asked struct{ Prompt string }
			if err == nil && json.Unmarshal(body, &asked) == nil {
				text = len(asked.Prompt)
			}
		}
		next.ServeHTTP(w, q)
		a.mu.Lock()
		defer a.mu.Unlock()
		switch q.URL.Path {
		case "/v1/completions", "/v1/chat/completions":
			a.n.served++
		case "/metrics":
			a.n.load++
		case "/tokenize":
			a.n.textBytes += text
		default:
			a.n.facts++
		}
	})
}

func (a *askedOf) now() askedCounts {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.n
}

// take returns the counts and begins anew.
func (a *askedOf) take() askedCounts {
	a.mu.Lock()
	defer a.mu.Unlock()
	n := a.n
	a.n = askedCounts{}
	return n
}

// agentProcess is a running agent.
type agentProcess struct {
	cmd     *exec.Cmd
	metrics string
	log     *os.File
	done    chan error
}

// startAgent runs an agent that serves all engines of the cluster.
func (o HostAgent) startAgent(c *cluster.Cluster, dir string) (*agentProcess, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	a := &agentProcess{metrics: l.Addr().String(), done: make(chan error, 1)}
	if err := l.Close(); err != nil {
		return nil, err
	}
	config := filepath.Join(dir, "agent.toml")
	if err := os.WriteFile(config, []byte(agentConfig(c, a.metrics)), 0o600); err != nil {
		return nil, err
	}
	command := o.Agent
	if command == nil {
		self, err := os.Executable()
		if err != nil {
			return nil, err
		}
		command = []string{self, "agent"}
	}
	if a.log, err = os.Create(filepath.Join(dir, "agent.log")); err != nil {
		return nil, err
	}
	a.cmd = exec.Command(command[0], append(command[1:], "--config", config)...)
	a.cmd.Stdout, a.cmd.Stderr = a.log, a.log
	a.cmd.Env = slices.DeleteFunc(os.Environ(), func(e string) bool {
		return strings.HasPrefix(e, "WAYPOST_") && !strings.HasPrefix(e, "WAYPOST_BENCH_")
	})
	if err := a.cmd.Start(); err != nil {
		return nil, errors.Join(err, a.log.Close())
	}
	go func() { a.done <- a.cmd.Wait() }()
	return a, nil
}

// agentConfig is the file of an agent of the first host with all engines.
func agentConfig(c *cluster.Cluster, metrics string) string {
	cfg := c.AgentConfig(0)
	var b strings.Builder
	fmt.Fprintf(&b, "name = %q\nstate_dir = %q\nrun_dir = \"\"\n[tls]\nca_file = %q\ncert_file = %q\nkey_file = %q\n", cfg.Name, cfg.StateDir, cfg.TLS.CAFile, cfg.TLS.CertFile, cfg.TLS.KeyFile)
	fmt.Fprintf(&b, "[mesh]\nlisten = \"127.0.0.1:0\"\nkey_file = %q\nfleet = %q\njoin = [%q]\n", cfg.Mesh.KeyFile, cfg.Mesh.Fleet, cfg.Mesh.Join[0])
	fmt.Fprintf(&b, "[cluster]\ncoordinators = [%q]\n[prefix]\nkey_file = %q\n[metrics]\nlisten = %q\n", cfg.Cluster.Coordinators[0], cfg.Prefix.KeyFile, metrics)
	fmt.Fprintf(&b, "[gpu]\nenabled = \"off\"\n[discover]\nenabled = false\n[log]\nlevel = \"warn\"\n")
	for i, e := range c.Engines {
		fmt.Fprintf(&b, "[[engine]]\nname = \"vllm-%d\"\nkind = \"vllm\"\nurl = %q\nkv_events = %q\nkv_replay = %q\n", i+1, e.URL(), e.EventsEndpoint(), e.ReplayEndpoint())
	}
	return b.String()
}

// stop ends the agent in good order.
func (a *agentProcess) stop() error {
	err := a.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case e := <-a.done:
		err = errors.Join(err, e)
	case <-time.After(time.Minute):
		err = errors.Join(err, errors.New("the agent did not end"), a.cmd.Process.Kill(), <-a.done)
	}
	return errors.Join(err, a.log.Close())
}

// problem is what the agent said of why it does not work; nil: nothing.
func (a *agentProcess) problem() error {
	text, err := os.ReadFile(a.log.Name())
	if err != nil || len(text) == 0 {
		return err
	}
	return fmt.Errorf("the agent said: %s", text[max(0, len(text)-2000):])
}

// scrape reads the agent's series and sums each over its labels.
func (a *agentProcess) scrape() (sums map[string]float64, mostCached float64, err error) {
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: time.Minute}
	resp, err := client.Get("http://" + a.metrics + "/metrics")
	if err != nil {
		return nil, 0, errors.Join(err, a.problem())
	}
	page, err := io.ReadAll(io.LimitReader(resp.Body, 16<<20))
	if err = errors.Join(err, resp.Body.Close()); err != nil {
		return nil, 0, err
	}
	sums = map[string]float64{}
	for line := range strings.Lines(string(page)) {
		i := strings.LastIndexByte(line, ' ')
		if strings.HasPrefix(line, "#") || i < 0 {
			continue
		}
		name, _, _ := strings.Cut(line[:i], "{")
		v, err := strconv.ParseFloat(strings.TrimSpace(line[i+1:]), 64)
		if err != nil {
			return nil, 0, fmt.Errorf("metrics of the agent: %w", err)
		}
		sums[name] += v
		if name == "waypost_engine_cached_tokens" {
			mostCached = max(mostCached, v)
		}
	}
	if _, ok := sums["waypost_agent_cpu_seconds_total"]; !ok {
		return nil, 0, errors.New("the agent does not tell its processor time on this system")
	}
	return sums, mostCached, nil
}

// memory is what the kernel says of the agent's memory; 0: it does not.
func (a *agentProcess) memory() (now, peak, file int64) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", a.cmd.Process.Pid))
	if err != nil {
		return 0, 0, 0
	}
	for line := range strings.Lines(string(text)) {
		f := strings.Fields(line)
		if len(f) != 3 || f[2] != "kB" {
			continue
		}
		kib, err := strconv.ParseInt(f[1], 10, 64)
		if err != nil {
			continue
		}
		switch f[0] {
		case "VmRSS:":
			now = kib << 10
		case "VmHWM:":
			peak = kib << 10
		case "RssFile:":
			file = kib << 10
		}
	}
	return now, peak, file
}
