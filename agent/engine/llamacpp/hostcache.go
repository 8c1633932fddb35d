package llamacpp

import (
	"math"
	"net/netip"
	"strconv"
	"strings"

	"waypost/agent/engine"
	"waypost/agent/engine/llamacpp/slots"
	"waypost/agent/engine/process"
)

const (
	// defaultHostCacheMiB is what a server takes that is told nothing.
	defaultHostCacheMiB = 8192
	// stateBytes is what a saved token takes besides its KV: its position and
	// the sequences it belongs to.
	stateBytes = 12
	// guessTokens is the most that is believed of a host cache of unknown size:
	// 8 GiB, the default, of 256 KiB a token, which is the KV of a model of
	// about 30 billion parameters. What is promised in vain costs more than what
	// is found by surprise, so the least that servers have had is the guess.
	guessTokens = 32768
)

// elementBytes are the sizes of the types of a KV cache, with their scales.
var elementBytes = map[string]float64{
	"f32": 4, "f16": 2, "bf16": 2, "q8_0": 34. / 32, "q4_0": 18. / 32, "q4_1": 20. / 32, "iq4_nl": 18. / 32, "q5_0": 22. / 32, "q5_1": 24. / 32,
}

// hostCache is what is known of the server's cache in host memory.
type hostCache struct {
	// mib is its size as --cache-ram has it: -1: as many tokens as the KV
	// buffer, 0: none; known says that it is known.
	mib   int
	known bool
	// bytesPerToken is the KV of one token; 0: not known.
	bytesPerToken float64
}

// flags are the values of a command line's flags, the last one counting. The
// server takes underscores for dashes in long ones.
func flags(args []string) map[string]string {
	out := map[string]string{}
	for i, a := range args {
		if !strings.HasPrefix(a, "-") {
			continue
		}
		name, value, whole := strings.Cut(a, "=")
		if !whole && i+1 < len(args) {
			value = args[i+1]
		}
		if strings.HasPrefix(name, "--") {
			name = strings.ReplaceAll(name, "_", "-")
		}
		out[name] = value
	}
	return out
}

// either is a setting of the server: a flag in its long or short form, else a
// variable of its environment.
func either(p *process.Process, given map[string]string, long, short, variable string) (value string, ok bool) {
	if value, ok = given[long]; !ok {
		if value, ok = given[short]; !ok {
			value, ok = p.Env[variable]
		}
	}
	return value, ok
}

// readHostCache finds out what the configuration leaves open: from how the
// server was started, which it does not tell over HTTP, and from the head of its
// model's file.
func readHostCache(t engine.Target, model string, find func(at netip.AddrPort) (process.Process, bool)) hostCache {
	h := hostCache{bytesPerToken: t.KVBytesPerToken}
	if t.HostCacheMiB != nil {
		h.mib, h.known = *t.HostCacheMiB, true
	}
	if h.known && (h.mib <= 0 || h.bytesPerToken > 0) {
		return h
	}
	at, ok := process.Local(t.URL)
	if !ok {
		return h
	}
	p, ok := find(at)
	if !ok {
		return h
	}
	given := flags(p.Args)
	if !h.known {
		h.mib, h.known = defaultHostCacheMiB, true
		if text, ok := either(&p, given, "--cache-ram", "-cram", "LLAMA_ARG_CACHE_RAM"); ok {
			n, err := strconv.Atoi(text)
			h.mib, h.known = max(n, -1), err == nil
		} else if p.Env == nil {
			h.known = false // its environment may name another size
		}
	}
	if h.bytesPerToken == 0 && model != "" {
		h.bytesPerToken = kvBytes(&p, given, model)
	}
	return h
}

// kvBytes is the KV of one token by the model's file and the types of the cache;
// 0: not known.
func kvBytes(p *process.Process, given map[string]string, model string) float64 {
	for name := range given {
		// What a second model keeps is saved along.
		if strings.Contains(name, "draft") || strings.HasPrefix(name, "--spec") || name == "-md" || name == "-hfd" {
			return 0
		}
	}
	s, err := readShape(p.Path(model))
	if err != nil {
		return 0
	}
	size := func(long, short, variable string) float64 {
		if kind, ok := either(p, given, long, short, variable); ok {
			return elementBytes[kind]
		}
		return elementBytes["f16"]
	}
	k, v := size("--cache-type-k", "-ctk", "LLAMA_ARG_CACHE_TYPE_K"), size("--cache-type-v", "-ctv", "LLAMA_ARG_CACHE_TYPE_V")
	if k == 0 || v == 0 {
		return 0
	}
	return float64(s.keys)*k + float64(s.values)*v
}

// options are those of the replay. A server never keeps fewer tokens for want of
// a limit than its KV buffer has, which is a slot's if they share one.
func (h *hostCache) options(f *engine.Facts) slots.Options {
	o := slots.Options{Slots: f.MaxRunning}
	switch {
	case h.known && h.mib == 0:
		o.HostKnown = true
	case h.known && h.mib < 0:
		o.HostKnown, o.HostTokens, o.HostTokensOwn = true, f.MaxModelTokens, f.MaxModelTokens*f.MaxRunning
	case h.known && h.bytesPerToken > 0:
		o.HostKnown = true
		o.HostTokens = max(1, int(min(float64(h.mib)*(1<<20)/(h.bytesPerToken+stateBytes), math.MaxInt32)))
	default:
		o.HostTokens = guessTokens
		if f.MaxModelTokens > 0 {
			o.HostTokens = min(o.HostTokens, f.MaxModelTokens)
		}
	}
	return o
}
