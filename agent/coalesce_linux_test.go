package agent

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"waypost/agent/engine/enginetest"
	"waypost/testbed/emulator"
)

// An agent of a busy engine reads on ticks, and reads at once again when there is
// little to read.
func TestBusyAgentReadsOnTicks(t *testing.T) {
	dir := t.TempDir()
	key := filepath.Join(dir, "prefix.key")
	if err := os.WriteFile(key, fmt.Appendf(nil, "%032x\n", 1), 0o600); err != nil {
		t.Fatal(err)
	}
	e, err := emulator.Start(emulator.Options{Model: "m", BlockTokens: 16})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	p := enginetest.NewPublisher(t)
	defer p.Close()
	cfg := DefaultConfig()
	cfg.Name, cfg.StateDir, cfg.RunDir, cfg.Prefix.KeyFile, cfg.Mesh.Listen, cfg.GPU.Enabled = "gpu-01", dir, "", key, "127.0.0.1:0", "off"
	cfg.Metrics.Listen, cfg.Discover.Enabled = "", false
	cfg.Engines = []EngineConfig{{
		Name: "e", Kind: "vllm", URL: e.URL(), KVEvents: fmt.Sprintf("tcp://%s:%d", enginetest.Host, p.Port()), KVReplay: fmt.Sprintf("tcp://%s:%d", enginetest.Host, p.ReplayPort()),
	}}
	a, err := New(Options{Config: cfg, Version: "test", Process: 0xa1})
	if err != nil {
		t.Fatal(err)
	}
	if err := a.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := a.Stop(context.Background()); err != nil {
			t.Error(err)
		}
	}()
	p.AwaitSubscriber()
	until := time.Now().Add(time.Minute)
	for n := 1; !a.ticks.Ticking(); n++ {
		if time.Now().After(until) {
			t.Fatal("a busy agent does not read on ticks")
		}
		p.Publish(false, enginetest.Stored(0, n%1000+1))
		if n%8 == 0 {
			time.Sleep(time.Millisecond)
		}
	}
	for until = time.Now().Add(time.Minute); a.ticks.Ticking(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(until) {
			t.Fatal("an agent that has nothing to read ticks on")
		}
	}
}
