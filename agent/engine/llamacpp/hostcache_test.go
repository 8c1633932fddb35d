package llamacpp

import (
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"waypost/agent/engine"
	"waypost/agent/engine/llamacpp/slots"
	"waypost/agent/engine/process"
)

func TestHostCacheIsRead(t *testing.T) {
	mib := func(n int) *int { return &n }
	for name, c := range map[string]struct {
		target engine.Target
		args   string
		env    map[string]string // nil: not readable
		gone   bool              // no process is found
		want   slots.Options
	}{
		"a flag":                          {args: "llama-server --cache-ram 6", want: slots.Options{HostKnown: true, HostTokens: 6 << 20 / 268}},
		"its short form, the last counts": {args: "llama-server -cram 1 -cram 6", want: slots.Options{HostKnown: true, HostTokens: 6 << 20 / 268}},
		"underscores":                     {args: "llama-server --cache_ram=6", want: slots.Options{HostKnown: true, HostTokens: 6 << 20 / 268}},
		"off":                             {args: "llama-server --cache-ram 0", want: slots.Options{HostKnown: true}},
		"no limit":                        {args: "llama-server --cache-ram -1", want: slots.Options{HostKnown: true, HostTokens: 4096, HostTokensOwn: 16384}},
		"the environment":                 {args: "llama-server", env: map[string]string{"LLAMA_ARG_CACHE_RAM": "6"}, want: slots.Options{HostKnown: true, HostTokens: 6 << 20 / 268}},
		"a flag goes before it":           {args: "llama-server -cram 6", env: map[string]string{"LLAMA_ARG_CACHE_RAM": "7"}, want: slots.Options{HostKnown: true, HostTokens: 6 << 20 / 268}},
		"the default":                     {args: "llama-server", env: map[string]string{}, want: slots.Options{HostKnown: true, HostTokens: 8192 << 20 / 268}},
		"neither flag nor environment":    {args: "llama-server", want: slots.Options{HostTokens: 4096}},
		"a flag that makes no sense":      {args: "llama-server --cache-ram much", want: slots.Options{HostTokens: 4096}},
		"no process":                      {gone: true, want: slots.Options{HostTokens: 4096}},
		"smaller KV":                      {args: "llama-server -cram 6 -ctk q8_0 -ctv q8_0", want: slots.Options{HostKnown: true, HostTokens: 6 << 20 / 148}},
		"KV of a kind that nobody knows":  {args: "llama-server -cram 6 -ctk q1", want: slots.Options{HostTokens: 4096}},
		"a draft model is saved along":    {args: "llama-server -cram 6 --model-draft m", want: slots.Options{HostTokens: 4096}},
		"the configuration":               {target: engine.Target{HostCacheMiB: mib(6), KVBytesPerToken: 500}, gone: true, want: slots.Options{HostKnown: true, HostTokens: 6 << 20 / 512}},
		"it goes before the flag":         {target: engine.Target{HostCacheMiB: mib(6)}, args: "llama-server -cram 7", want: slots.Options{HostKnown: true, HostTokens: 6 << 20 / 268}},
		"it says off":                     {target: engine.Target{HostCacheMiB: mib(0)}, gone: true, want: slots.Options{HostKnown: true}},
		"a size without KV":               {target: engine.Target{HostCacheMiB: mib(6)}, gone: true, want: slots.Options{HostTokens: 4096}},
		"an engine of another host":       {target: engine.Target{URL: "http://192.0.2.1:1"}, args: "llama-server -cram 6", want: slots.Options{HostTokens: 4096}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			model := filepath.Join(dir, "model.gguf")
			if err := os.Symlink("/", filepath.Join(dir, "root")); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(model, head(tiny...), 0o600); err != nil {
				t.Fatal(err)
			}
			if c.target.URL == "" {
				c.target.URL = "http://127.0.0.1:8080"
			}
			h := readHostCache(c.target, model, func(at netip.AddrPort) (process.Process, bool) {
				if at != netip.MustParseAddrPort("127.0.0.1:8080") {
					t.Errorf("asked for %v", at)
				}
				return process.Process{Args: strings.Fields(c.args), Env: c.env, Dir: dir}, !c.gone
			})
			c.want.Slots = 4
			if got := h.options(&engine.Facts{MaxRunning: 4, MaxModelTokens: 4096}); got != c.want {
				t.Errorf("%+v, want %+v", got, c.want)
			}
		})
	}
}

// A server that comes back with another flag is followed by it.
func TestHostCacheOfTheNextLife(t *testing.T) {
	f := &fake{version: "b11434", start: "1"}
	args := []string{"llama-server", "-cram", "0"}
	s, _, _ := runWith(t, f, func(a *Adapter) {
		a.find = func(netip.AddrPort) (p process.Process, ok bool) {
			f.set(func() { p.Args = args })
			return p, true
		}
	})
	s.eventually(t, "mirror", func() bool { return s.mirror != nil })
	s.with(func() {
		if n := s.mirror.(*slots.Replay).HostTokens(); n != 0 {
			t.Errorf("it is off, and believed to hold %d tokens", n)
		}
		if s.facts[len(s.facts)-1].Capabilities.Has(engine.ReadsHostTier) {
			t.Error("it is off, and believed to be read")
		}
	})
	f.set(func() { f.start, args = "2", []string{"llama-server", "-cram", "-1"} })
	s.eventually(t, "the next life", func() bool {
		return s.mirror.(*slots.Replay).HostTokens() > 0 && s.facts[len(s.facts)-1].Capabilities.Has(engine.ReadsHostTier)
	})
}
