package discover

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
)

// State is the result of a check.
type State string

// The results. Unknown says that it could not be looked at.
const (
	OK      State = "ok"
	Problem State = "problem"
	Unknown State = "unknown"
)

// Names of the checks on an engine, as operators and metrics know them.
const (
	CheckReachable    = "engine-reachable"
	CheckEvents       = "engine-events"
	CheckReplay       = "engine-replay"
	CheckCachedTokens = "engine-cached-tokens"
	CheckBlockSize    = "engine-block-size"
)

// Advice is one check of an engine's flags.
type Advice struct {
	// Check is the name of the check.
	Check string
	State State
	// What is what was found, Cause why it matters, Fix what to paste; empty: there
	// is nothing to add.
	What, Cause, Fix string
}

// Known is what is known of an engine besides its flags.
type Known struct {
	// Version is the engine's version; empty: unknown, it is taken for the newest.
	Version string
	// HasKey says that the agent has a key for it.
	HasKey bool
	// Local says that all callers are on this host.
	Local bool
}

// Advise checks the flags of an engine. It looks at flags alone: that events
// really come is seen on the engine's stream.
func (e *Engine) Advise(k Known) []Advice {
	a := &adviser{e: e, f: e.Flags, set: e.settings, v: parseVersion(k.Version), known: k}
	if a.set == nil {
		a.set = &settings{file: settingsFile(e.Kind, e.Flags)}
		if a.set.file != "" {
			a.set.unread = "nobody has looked at it"
		}
	}
	switch e.Kind {
	case "vllm":
		a.vllm()
	case "sglang":
		a.sglang()
	case "trtllm":
		a.trtllm()
	case "llamacpp":
		a.llamacpp()
	}
	return a.out
}

// adviser collects the advice on one engine.
type adviser struct {
	e     *Engine
	f     Flags
	set   *settings
	v     []int
	known Known
	out   []Advice
}

func (a *adviser) add(check string, state State, what, cause, fix string) {
	a.out = append(a.out, Advice{check, state, what, cause, fix})
}

// fault adds a problem, good a check that found none.
func (a *adviser) fault(check, what, cause, fix string) { a.add(check, Problem, what, cause, fix) }
func (a *adviser) good(check, what string)              { a.add(check, OK, what, "", "") }

// before says whether the engine is known to be older than a version.
func (a *adviser) before(version string) bool {
	if len(a.v) == 0 {
		return false
	}
	b := parseVersion(version)
	for i := range max(len(a.v), len(b)) {
		x, y := 0, 0
		if i < len(a.v) {
			x = a.v[i]
		}
		if i < len(b) {
			y = b[i]
		}
		if x != y {
			return x < y
		}
	}
	return false
}

// parseVersion reads the leading numbers of a version: 0.10.2rc1 is 0.10.2.
func parseVersion(s string) (v []int) {
	for part := range strings.SplitSeq(strings.TrimPrefix(s, "v"), ".") {
		digits := part
		for i, r := range part {
			if r < '0' || r > '9' {
				digits = part[:i]
				break
			}
		}
		n, err := strconv.Atoi(digits)
		if err != nil {
			return v
		}
		v = append(v, n)
		if digits != part {
			return v
		}
	}
	return v
}

// unread says of a file with further settings that it, or a part of it, is not
// known; empty: there is none, or all of it is.
func (a *adviser) unread() string {
	if a.set.unread == "" {
		return ""
	}
	return "further settings stand in " + a.set.file + ", which is not read: " + a.set.unread
}

// events are the settings of an event publisher.
type events struct {
	Enabled   *bool   `json:"enable_kv_cache_events"`
	Publisher *string `json:"publisher"`
	Endpoint  string  `json:"endpoint"`
	Replay    *string `json:"replay_endpoint"`
}

// eventsOf reads --kv-events-config; given is false if it is not there.
func eventsOf(f Flags) (e events, given bool, err error) {
	const flag = "--kv-events-config"
	text, given := f.Get(flag)
	if given && text != "" {
		if err := json.Unmarshal([]byte(text), &e); err != nil {
			return e, true, err
		}
	}
	for key, v := range f.Under(flag) {
		given = true
		switch v := v; key {
		case "enable_kv_cache_events":
			on := strings.EqualFold(v, "true") || v == "1"
			e.Enabled = &on
		case "publisher":
			e.Publisher = &v
		case "endpoint":
			e.Endpoint = v
		case "replay_endpoint":
			e.Replay = &v
		}
	}
	return e, given, nil
}

const defaultEvents = "tcp://*:5557"

// endpoint is where events are published.
func (e *events) endpoint() string {
	if e.Endpoint == "" {
		return defaultEvents
	}
	return e.Endpoint
}

func (e *events) replay() string {
	if e.Replay == nil {
		return ""
	}
	return *e.Replay
}

// binds says whether an endpoint makes the engine listen: any other makes it
// dial, and nobody is there.
func binds(endpoint string, allZero bool) bool {
	return strings.Contains(endpoint, "*") || strings.Contains(endpoint, "::") || strings.HasPrefix(endpoint, "ipc://") ||
		strings.HasPrefix(endpoint, "inproc://") || allZero && strings.Contains(endpoint, "0.0.0.0")
}

// endpointPort is the port of an endpoint; 0: it has none.
func endpointPort(endpoint string) int {
	port := endpoint[strings.LastIndexByte(endpoint, ':')+1:]
	n, err := strconv.Atoi(port)
	if err != nil || n < 1 || n > 65535 {
		return 0
	}
	return n
}

// eventPort says whether a port is one of the event publisher's.
func eventPort(port int, f Flags) bool {
	const maxRanks = 256
	e, given, err := eventsOf(f)
	if !given || err != nil {
		return false
	}
	for _, endpoint := range []string{e.endpoint(), e.replay()} {
		if p := endpointPort(endpoint); p > 0 && port >= p && port < p+maxRanks {
			return true
		}
	}
	return false
}

// Events are the endpoints at which this host reads the events of an engine whose
// flags have it publish them; empty: they do not, or not so that it can be read.
func (e *Engine) Events() (live, replay string) {
	if e.Kind != "vllm" && e.Kind != "sglang" {
		return "", ""
	}
	ev, given, err := eventsOf(e.Flags)
	if !given || err != nil || e.Kind == "vllm" && (ev.Enabled == nil || !*ev.Enabled) ||
		e.Kind == "sglang" && ev.Publisher == nil || ev.Publisher != nil && *ev.Publisher != "zmq" || !binds(ev.endpoint(), e.Kind == "sglang") {
		return "", ""
	}
	here := func(endpoint string) string {
		port := endpointPort(endpoint)
		if port == 0 || !strings.HasPrefix(endpoint, "tcp://") {
			return ""
		}
		return "tcp://127.0.0.1:" + strconv.Itoa(port)
	}
	if live = here(ev.endpoint()); live == "" {
		return "", ""
	}
	return live, here(ev.replay())
}

// ranks is how many data-parallel ranks publish on ports that count on.
func ranks(f Flags) int {
	n, ok := f.Int("--data-parallel-size", "-dp", "--dp-size", "--dp")
	if !ok {
		return 1
	}
	return max(1, n)
}

// published checks what vLLM and SGLang have alike: where events and their replay
// are published. enable is the flag to paste.
func (a *adviser) published(ev *events, allZero bool, enable string) {
	if !binds(ev.endpoint(), allZero) {
		a.fault(CheckEvents, "the engine's publisher dials "+ev.endpoint()+" instead of listening", `endpoint has no "*": with any other address the engine dials, and nobody listens there`,
			enable)
	} else {
		a.good(CheckEvents, "publishes KV events at "+ev.endpoint())
	}
	n, live, replay := ranks(a.f), endpointPort(ev.endpoint()), endpointPort(ev.replay())
	switch {
	case ev.replay() == "":
		a.fault(CheckReplay, "the engine replays no events", "replay_endpoint is not set: after each gap, and after each restart of the agent, part of the cache is unknown", enable)
	case live > 0 && replay > 0 && abs(live-replay) < n:
		a.fault(CheckReplay, fmt.Sprintf("events and replay meet on one port: %d ranks count on from %d and from %d", n, live, replay),
			"endpoint and replay_endpoint must be at least as many ports apart as there are data-parallel ranks", enable)
	default:
		a.good(CheckReplay, "replays events at "+ev.replay())
	}
}

func abs(n int) int { return max(n, -n) }

// ports are the ports of events and replay to paste, far enough apart for the
// ranks.
func (a *adviser) ports() (live, replay int) { return 5557, 5557 + max(100, ranks(a.f)) }

// vllmEvents is the flag that makes vLLM publish and replay.
func (a *adviser) vllmEvents() string {
	live, replay := a.ports()
	return fmt.Sprintf(`--kv-events-config '{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:%d","replay_endpoint":"tcp://*:%d"}'`, live, replay)
}

func (a *adviser) vllm() {
	if unread := a.unread(); unread != "" && !a.f.Has("--kv-events-config") && a.f.Under("--kv-events-config") == nil {
		a.add(CheckEvents, Unknown, unread, "", "")
	} else {
		a.vllmPublisher()
	}
	a.vllmCounters()
}

func (a *adviser) vllmPublisher() {
	ev, given, err := eventsOf(a.f)
	off, _ := a.f.Get("--enable-prefix-caching")
	algo, _ := a.f.Get("--prefix-caching-hash-algo")
	switch {
	case a.before("0.9.0"):
		a.fault(CheckEvents, "vLLM "+a.known.Version+" publishes no KV events", "they came with vLLM 0.9.0", "upgrade to vLLM 0.9.0 or newer, then start it with "+a.vllmEvents())
	case a.f.Has("--no-enable-prefix-caching") || strings.EqualFold(off, "false"):
		a.fault(CheckEvents, "prefix caching is off: nothing is reused and nothing is published", "the engine was started with --no-enable-prefix-caching",
			"start it without --no-enable-prefix-caching, and with "+a.vllmEvents())
	case err != nil:
		a.fault(CheckEvents, "--kv-events-config cannot be read", err.Error(), a.vllmEvents())
	case !given:
		a.fault(CheckEvents, "the engine publishes no KV events", "it was started without --kv-events-config; placements still work", a.vllmEvents())
	case ev.Enabled == nil || !*ev.Enabled:
		a.fault(CheckEvents, "the engine publishes no KV events", `enable_kv_cache_events is not true in --kv-events-config: vLLM only warns`, a.vllmEvents())
	case ev.Publisher == nil && a.before("0.12.0"):
		a.fault(CheckEvents, "events are made and thrown away", `before vLLM 0.12 publisher is "null" unless it is set`, a.vllmEvents())
	case ev.Publisher != nil && *ev.Publisher != "zmq":
		a.fault(CheckEvents, "events are made and thrown away", fmt.Sprintf(`publisher is %q in --kv-events-config`, *ev.Publisher), a.vllmEvents())
	case a.before("0.10.2") && algo == "sha256":
		a.fault(CheckEvents, "every batch of events is lost in the engine", "before vLLM 0.10.2 hashes of --prefix-caching-hash-algo sha256 cannot be encoded",
			"--prefix-caching-hash-algo builtin")
	default:
		a.published(&ev, false, a.vllmEvents())
	}
}

func (a *adviser) vllmCounters() {
	if a.f.Has("--disable-log-stats") {
		a.fault(CheckBlockSize, "the engine tells neither its queue nor the size of its blocks", "it was started with --disable-log-stats", "start it without --disable-log-stats")
	}
	a.wants(CheckCachedTokens, "--enable-prompt-tokens-details")
	a.key()
	a.reach()
}

// wants checks a flag that makes answers tell what was reused.
func (a *adviser) wants(check, flag string) {
	switch {
	case a.f.Has(flag):
		a.good(check, "answers tell how many tokens were reused")
	case a.unread() != "":
		a.add(check, Unknown, a.unread(), "", "")
	default:
		a.fault(check, "answers do not tell how many tokens were reused", "predictions are then confirmed by events alone", flag)
	}
}

// reach checks that callers on other hosts come through to the engine.
func (a *adviser) reach() {
	if !a.known.Local && a.e.Place == Here && a.e.Address.IsLoopback() {
		a.fault(CheckReachable, fmt.Sprintf("listens at %s only: callers on other hosts cannot reach it", a.e.Address), "", "--host 0.0.0.0")
	}
}

// key checks that the agent has the key of an engine that wants one.
func (a *adviser) key() {
	if a.f.Has("--api-key", "--api-key-file") && !a.known.HasKey {
		a.fault(CheckReachable, "the engine wants a key and the agent has none", "it was started with --api-key",
			a.e.Allow()+fmt.Sprintf("\napi_key_file = \"/etc/waypost/%s.key\"", a.e.Name()))
	}
}

// sglangEvents is the flag that makes SGLang publish and replay.
func (a *adviser) sglangEvents() string {
	live, replay := a.ports()
	return fmt.Sprintf(`--kv-events-config '{"publisher":"zmq","endpoint":"tcp://*:%d","replay_endpoint":"tcp://*:%d"}'`, live, replay)
}

func (a *adviser) sglang() {
	ev, given, err := eventsOf(a.f)
	unread := a.unread()
	switch {
	case a.f.Has("--disable-radix-cache"):
		a.fault(CheckEvents, "the engine keeps no prefixes: nothing is reused and nothing is published", "it was started with --disable-radix-cache",
			"start it without --disable-radix-cache, and with "+a.sglangEvents())
	case err != nil:
		a.fault(CheckEvents, "--kv-events-config cannot be read", err.Error(), a.sglangEvents())
	case !given && unread != "":
		a.add(CheckEvents, Unknown, unread, "", "")
	case !given:
		a.fault(CheckEvents, "the engine publishes no KV events", "it was started without --kv-events-config; placements still work", a.sglangEvents())
	case ev.Publisher == nil || *ev.Publisher != "zmq":
		a.fault(CheckEvents, "events are made and thrown away", `publisher is not "zmq" in --kv-events-config: SGLang's default is "null"`, a.sglangEvents())
	case ev.Enabled != nil:
		a.fault(CheckEvents, "--kv-events-config has a key of vLLM's", "newer SGLang refuses enable_kv_cache_events", a.sglangEvents())
	case ranks(a.f) > 1 && a.before("0.5.15") && !a.f.Has("--enable-dp-attention"):
		a.fault(CheckEvents, "all replicas publish on one port, so only one is heard", "before SGLang 0.5.15 ports do not count on with --dp-size", "upgrade to SGLang 0.5.15 or newer")
	default:
		a.published(&ev, true, a.sglangEvents())
	}
	const leastPage = 16
	page, set := a.f.Int("--page-size")
	switch {
	case set && page >= leastPage:
		a.good(CheckBlockSize, fmt.Sprintf("pages of %d tokens", page))
	case set || unread == "":
		a.fault(CheckBlockSize, "pages are small: an event names every few tokens", "without --page-size most backends use 1", fmt.Sprintf("--page-size %d", leastPage))
	}
	a.wants(CheckCachedTokens, "--enable-cache-report")
	a.key()
	a.reach()
}

// trtllmEvents makes TensorRT-LLM keep what it stores for reading, and count.
const trtllmEvents = "enable_iter_perf_stats: true\nreturn_perf_metrics: true\nkv_cache_config:\n  enable_block_reuse: true\n  event_buffer_max_size: 16384"

func (a *adviser) trtllm() {
	const usual = "/etc/trtllm.yaml"
	set := a.set
	fix := func(file string) string { return "# " + file + ":\n" + trtllmEvents }
	events, told := set.values["kv_cache_config.event_buffer_max_size"]
	switch size, err := strconv.Atoi(events); {
	case set.file == "":
		a.fault(CheckEvents, "the engine publishes no KV events", "it was started without --extra_llm_api_options, and event_buffer_max_size is 0 by default",
			"--extra_llm_api_options "+usual+"\n"+fix(usual))
	case isFalse(set.values["kv_cache_config.enable_block_reuse"]):
		a.fault(CheckEvents, "the engine keeps no prefixes: nothing is reused and nothing is published", "enable_block_reuse is false in "+set.file, fix(set.file))
	case told && err == nil && size > 0:
		a.good(CheckEvents, fmt.Sprintf("keeps up to %d KV events for reading", size))
	case !told && set.unread != "":
		a.add(CheckEvents, Unknown, a.unread(), "", "")
	default:
		a.fault(CheckEvents, "the engine publishes no KV events", "event_buffer_max_size is 0 unless it is set in "+set.file, fix(set.file))
	}
	if set.file != "" && set.unread == "" && !isTrue(set.values["enable_iter_perf_stats"]) {
		a.fault(CheckBlockSize, "the engine tells neither its queue nor the size of its blocks", "enable_iter_perf_stats is not true in "+set.file, fix(set.file))
	}
	a.good(CheckCachedTokens, "answers tell how many tokens were reused")
	a.reach()
}

func (a *adviser) llamacpp() {
	a.good(CheckEvents, "llama.cpp publishes none: what is cached follows from the requests placed here")
	if a.f.Has("--no-slots") {
		a.fault(CheckBlockSize, "its slots are not shown, so what they hold is not known", "it was started with --no-slots", "start it without --no-slots")
	}
	if a.f.Has("--no-cache-prompt") {
		a.fault(CheckCachedTokens, "prompts are not kept: nothing is reused", "it was started with --no-cache-prompt", "start it without --no-cache-prompt")
	} else {
		a.good(CheckCachedTokens, "answers tell how many tokens were reused")
	}
	if !a.f.Has("--metrics") {
		a.fault(CheckReachable, "the engine shows no counters", "llama-server has /metrics only when asked", "--metrics")
	}
	a.key()
	a.reach()
}
