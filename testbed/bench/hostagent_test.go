package bench

import (
	"bytes"
	"encoding/json"
	"os"
	"strings"
	"testing"
	"time"

	waypostagent "waypost/agent"
)

// agentEnv has this test's program be the agent that is measured.
const agentEnv = "WAYPOST_BENCH_AGENT"

// runAgent is the agent if this program was started as one.
func runAgent() {
	if os.Getenv(agentEnv) == "" {
		return
	}
	if err := waypostagent.Command("bench").Execute(); err != nil {
		os.Exit(1)
	}
	os.Exit(0)
}

// A real agent in a process of its own is fed by real engines, and everything is
// counted. How much it took decides nothing here.
func TestHostAgent(t *testing.T) {
	if raceEnabled {
		t.Skip("the agent's own tests run with the race detector; here two processes would share it")
	}
	t.Setenv(agentEnv, "1")
	o := HostAgent{Agent: []string{os.Args[0]}}
	p := agentPlan{workers: 2, poolBlocks: 400, perSecond: 3, fill: 2 * time.Second, window: 3 * time.Second, textPrompts: 3, textEvery: time.Millisecond}
	r := &AgentReport{}
	if err := o.run(t.Context(), p, r); err != nil {
		t.Fatal(err)
	}
	c := r.Cost
	t.Logf("%+v", *c)
	if c.Workers != 2 || c.BlocksPerSec <= 0 || c.EventsPerSec <= 0 || c.HeldBlocks <= 0 || c.HeldBlocks > p.poolBlocks || c.CPUPercent <= 0 || c.LoadPerSec <= 0 {
		t.Errorf("%+v", *c)
	}
	if c.RSSBytes > c.PeakRSSBytes || c.FileBytes > c.RSSBytes || c.RSSBytes > 0 && c.RSSBytes < 1<<20 {
		t.Errorf("memory %d, peak %d", c.RSSBytes, c.PeakRSSBytes)
	}
	if c.TextOffered != 3*textPromptBytes || c.TextAsked > c.TextOffered {
		t.Errorf("text offered %v, asked %v", c.TextOffered, c.TextAsked)
	}
}

func agentCost() *AgentReport {
	return &AgentReport{Quick: true, Took: time.Minute, Cost: &AgentCost{
		Workers: 8, PoolBlocks: 32768, Seconds: 20, BlocksPerSec: 1100, EventsPerSec: 1200, HeldBlocks: 32000, CPUPercent: .9, RSSBytes: 59e6, PeakRSSBytes: 61e6,
		LoadPerSec: 4, FactsPerSec: .3, TextOffered: 2e7, TextAsked: 9e6, TextAllowed: 9.1e6, TextSeconds: 20,
	}}
}

// Each figure that is missed is said to be, and no other.
func TestAgentFigures(t *testing.T) {
	verdicts := func(r *AgentReport) (missed []string) {
		for _, f := range r.targets() {
			if !f.met {
				missed = append(missed, f.what)
			}
		}
		return missed
	}
	if m := verdicts(agentCost()); len(m) != 0 {
		t.Errorf("missed %q", m)
	}
	for want, change := range map[string]func(*AgentCost){
		"blocks stored per second": func(c *AgentCost) { c.BlocksPerSec = 500 },
		"event batches lost":       func(c *AgentCost) { c.LostBatches = 1 },
		"processor time":           func(c *AgentCost) { c.CPUPercent = 1.2 },
		"questions about load":     func(c *AgentCost) { c.LoadPerSec = 4.2 },
		"other questions":          func(c *AgentCost) { c.FactsPerSec = 1.1 },
		"memory with 8 workers":    func(c *AgentCost) { c.RSSBytes = 61e6 },
		"text that engines":        func(c *AgentCost) { c.TextAsked = 9.2e6 },
	} {
		r := agentCost()
		change(r.Cost)
		if m := verdicts(r); len(m) != 1 || !strings.HasPrefix(m[0], want) {
			t.Errorf("missed %q, want %s", m, want)
		}
	}
}

func TestAgentReports(t *testing.T) {
	r := agentCost()
	var text bytes.Buffer
	if err := r.WriteText(&text); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"0.90 %", "59.0 MB", "20.0 MB offered", "≤ 60 MB", "--quick"} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("%q is not in\n%s", want, text.String())
		}
	}
	// What was not measured is unknown, and not 0.
	r.Cost.RSSBytes, r.Cost.PeakRSSBytes, r.Cost.TextAllowed = 0, 0, 0
	var out bytes.Buffer
	if err := r.WriteJSON(&out); err != nil {
		t.Fatal(err)
	}
	var row map[string]any
	if err := json.Unmarshal(out.Bytes(), &row); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"rssBytes", "peakRssBytes", "rssFileBytes", "textAllowedBytes"} {
		if v, ok := row[name]; !ok || v != nil {
			t.Errorf("%s is %v", name, v)
		}
	}
	if row["cpuPercentPerWorker"] != .9 || row["loadRequestsPerSec"] != 4. {
		t.Errorf("%v", row)
	}
	if !(&AgentReport{}).IsEmpty() || r.IsEmpty() {
		t.Error("what is empty is not told apart")
	}
}
