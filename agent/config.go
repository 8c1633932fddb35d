package agent

import (
	"errors"
	"fmt"
	"net"
	"net/url"
	"strings"
	"time"

	"waypost/gossip/boundary"
	"waypost/systemd/daemon"
)

// Config is agent.toml. The zero value of a field is not its default; use
// DefaultConfig.
type Config struct {
	Name     string        `toml:"name" help:"host name; empty: the system's"`
	StateDir string        `toml:"state_dir" help:"directory of remembered peers and learnt speeds"`
	RunDir   string        `toml:"run_dir" help:"directory of the local socket; empty: no socket"`
	TLS      TLSConfig     `toml:"tls"`
	Mesh     MeshConfig    `toml:"mesh"`
	Cluster  ClusterConfig `toml:"cluster"`
	Prefix   PrefixConfig  `toml:"prefix"`
	Hint     HintConfig    `toml:"hint"`
	// Discover finds engines, Engines are those that it cannot find, or not so.
	Discover DiscoverConfig `toml:"discover"`
	Engines  []EngineConfig `toml:"engine"`
	GPU      GPUConfig      `toml:"gpu"`
	Limits   LimitsConfig   `toml:"limits"`
	Metrics  MetricsConfig  `toml:"metrics"`
	Log      LogConfig      `toml:"log"`
}

// TLSConfig names PEM files; all empty: no TLS, loopback only.
type TLSConfig struct {
	CAFile   string `toml:"ca_file" help:"CA of the fleet, PEM"`
	CertFile string `toml:"cert_file" help:"certificate of this host, PEM"`
	KeyFile  string `toml:"key_file" help:"its private key, PEM"`
}

// set says whether TLS is configured.
func (c TLSConfig) set() bool { return c.CAFile != "" || c.CertFile != "" || c.KeyFile != "" }

// Validate implements daemon.Validator.
func (c TLSConfig) Validate() error {
	for _, f := range []struct{ key, value string }{{"ca_file", c.CAFile}, {"cert_file", c.CertFile}, {"key_file", c.KeyFile}} {
		if c.set() && f.value == "" {
			return &daemon.FieldError{Field: f.key, Err: errors.New("must be set when another key of [tls] is")}
		}
	}
	return nil
}

// MeshConfig is the mesh section.
type MeshConfig struct {
	Listen    daemon.Listen     `toml:"listen" help:"TCP and UDP address of the gossip"`
	Advertise string            `toml:"advertise" help:"address, interface, CIDR or auto"`
	Join      []daemon.HostPort `toml:"join" help:"gossip addresses of members to meet"`
	KeyFile   string            `toml:"key_file" help:"gossip keys, one per line, the first encrypts"`
	Fleet     string            `toml:"fleet" help:"name of the fleet; members of another are refused"`
}

// ClusterConfig is the cluster section.
type ClusterConfig struct {
	Coordinators []daemon.HostPort `toml:"coordinators" help:"cluster addresses, beside those the mesh knows"`
}

// PrefixConfig is the prefix section.
type PrefixConfig struct {
	KeyFile string `toml:"key_file" help:"cluster key of the prefix keys, 32 hex digits; two lines while it is changed, the new one first"`
}

// HintConfig is the hint section.
type HintConfig struct {
	Zone string `toml:"zone" help:"zone of this host; the fleet file wins"`
	Rack string `toml:"rack" help:"rack of this host; the fleet file wins"`
}

// DiscoverConfig is the discover section.
type DiscoverConfig struct {
	Enabled bool            `toml:"enabled" help:"find engines among this host's processes; those of root, system users and containers are served" reload:"true"`
	Every   daemon.Duration `toml:"every" help:"how often processes are looked at" reload:"true"`
	Ignore  []string        `toml:"ignore" help:"names of engines that are found and not to be served, vllm-8000 for example" reload:"true"`
	// An agent puts no work on an engine unless it is allowed to.
	SelfTest bool `toml:"self_test" help:"allow engines that are found from now on to be tested as [[engine]] self_test tells: nothing is sent to an engine unasked" reload:"true"`
}

// Validate implements daemon.Validator.
func (c DiscoverConfig) Validate() error {
	if d := c.Every.D(); d < time.Second || d > 10*time.Minute {
		return &daemon.FieldError{Field: "every", Err: fmt.Errorf("%s: use 1s to 10m", c.Every)}
	}
	return nil
}

// Kind is an engine kind that an adapter exists for.
type Kind string

// Allowed implements daemon.Enum.
func (Kind) Allowed() []string { return kinds() }

// EngineConfig is one engine to watch.
type EngineConfig struct {
	Name         string             `toml:"name" help:"name on this host; empty: <kind>-<port>"`
	Kind         Kind               `toml:"kind" help:"engine kind"`
	URL          string             `toml:"url" help:"where the agent reaches the engine"`
	Advertise    string             `toml:"advertise_url" help:"where callers reach it; empty: url with this host's address"`
	KVEvents     string             `toml:"kv_events" help:"ZeroMQ endpoint of KV events of rank 0, other ranks count on; tcp://*:port listens; empty: the engine is asked"`
	KVReplay     string             `toml:"kv_replay" help:"ZeroMQ endpoint of their replay; empty: the engine is asked"`
	APIKeyFile   string             `toml:"api_key_file" help:"key of an engine that needs one"`
	HostCacheMiB daemon.OptionalInt `toml:"host_cache_mib" help:"llama.cpp's --cache-ram, MiB; -1: no limit, 0: off; unset: read from its command line, or learnt"`
	Boundary     string             `toml:"boundary" help:"for an engine that tells no token ids: a word, equal on engines that make the same tokens of the same text; empty: its model's name"`
	SelfTest     bool               `toml:"self_test" help:"allow one tiny prompt to be run twice on each rank when the engine comes up and has no requests, to compare what it reuses with what its events say"`
	// The rest says how saved KV may travel; what is empty is asked of the
	// engine.
	Role          Role            `toml:"role" help:"part of each request that the engine serves, prefill or decode; empty: all of it, or what the engine says"`
	KVConnector   string          `toml:"kv_connector" help:"KV transfer connector, OffloadingConnector for example; empty: the engine is asked"`
	KVSideChannel daemon.HostPort `toml:"kv_side_channel" help:"host:port where peers reach the connector of rank 0, other ranks count on; empty: the engine is asked"`
	KVFingerprint string          `toml:"kv_fingerprint" help:"equal on engines that can read each other's KV: same weights, KV type, layout, parallelism, connector; empty: from what the engine says"`
	KVExported    Tier            `toml:"kv_exported_tier" help:"memory that the connector reads for others, gpu or host; empty: the engine is asked"`
	KVBytes       float64         `toml:"kv_bytes_per_token" help:"KV of one token, bytes; 0: the engine is asked"`
	KVHostRate    float64         `toml:"kv_host_bytes_per_sec" help:"how fast the engine reads KV back from host memory, bytes per second; 0: 18e9 is assumed, less where the GPU's link carries less"`
}

// Role is a part of a request.
type Role string

// Allowed implements daemon.Enum.
func (Role) Allowed() []string { return []string{"prefill", "decode"} }

// Tier is a memory that holds KV.
type Tier string

// Allowed implements daemon.Enum.
func (Tier) Allowed() []string { return []string{"gpu", "host"} }

// maxKVText bounds the texts about transfers, maxKVBytesPerToken the KV of one
// token: what coordinators accept.
const (
	maxKVText          = 256
	maxKVBytesPerToken = 1e9
	// maxKVHostRate is more than any memory reads.
	maxKVHostRate = 1e13
	// maxHostCacheMiB is 64 TiB.
	maxHostCacheMiB = 1 << 26
)

// validateKV names the first key about KV that cannot be used.
func (e *EngineConfig) validateKV(key func(string) string) error {
	for _, f := range []struct{ key, value string }{{"kv_connector", e.KVConnector}, {"kv_fingerprint", e.KVFingerprint}} {
		if len(f.value) > maxKVText || strings.ContainsAny(f.value, "\n\r\t") {
			return bad(key(f.key), "%.40q must be one line of at most %d bytes", f.value, maxKVText)
		}
	}
	if !(e.KVHostRate >= 0 && e.KVHostRate <= maxKVHostRate) {
		return bad(key("kv_host_bytes_per_sec"), "%v: use 0 to %g bytes per second; 0 assumes %g", e.KVHostRate, float64(maxKVHostRate), float64(assumedHostRate))
	}
	if !(e.KVBytes >= 0 && e.KVBytes <= maxKVBytesPerToken) {
		return bad(key("kv_bytes_per_token"), "%v: use 0 to %g bytes; 0 asks the engine", e.KVBytes, float64(maxKVBytesPerToken))
	}
	if n := e.HostCacheMiB; n.Set && (n.Value < -1 || n.Value > maxHostCacheMiB) {
		return bad(key("host_cache_mib"), "%d: use 1 to %d MiB, 0 if it is off or -1 if it has no limit", n.Value, maxHostCacheMiB)
	}
	return nil
}

// Mode switches something on when it is there, or off.
type Mode string

// Allowed implements daemon.Enum.
func (Mode) Allowed() []string { return []string{"auto", "off"} }

// GPUConfig is the gpu section.
type GPUConfig struct {
	Enabled Mode            `toml:"enabled" help:"read GPUs through NVML" reload:"true"`
	Poll    daemon.Duration `toml:"poll" help:"how often GPUs are read" reload:"true"`
	Helper  string          `toml:"helper" help:"program built with NVML; empty: this one" reload:"true"`
}

// Validate implements daemon.Validator.
func (c GPUConfig) Validate() error {
	if p := c.Poll.D(); p < 100*time.Millisecond || p > time.Minute {
		return &daemon.FieldError{Field: "poll", Err: fmt.Errorf("%s: use 100ms to 1m", c.Poll)}
	}
	return nil
}

// LimitsConfig is the limits section.
type LimitsConfig struct {
	Memory daemon.Size `toml:"memory" help:"bound of the block tables"`
	CPUs   int         `toml:"cpus" help:"processors used at most"`
}

// Validate implements daemon.Validator.
func (c LimitsConfig) Validate() error {
	if c.CPUs < 1 || c.CPUs > 64 {
		return &daemon.FieldError{Field: "cpus", Err: fmt.Errorf("%d: use 1 to 64", c.CPUs)}
	}
	if c.Memory < 16<<20 {
		return &daemon.FieldError{Field: "memory", Err: fmt.Errorf("%s: use at least 16MiB", c.Memory)}
	}
	return nil
}

// MetricsConfig is the metrics section.
type MetricsConfig struct {
	Listen daemon.OptionalListen `toml:"listen" help:"address of /metrics, /healthz and /readyz; empty: not served"`
}

// LogConfig is the log section.
type LogConfig struct {
	Level  daemon.LogLevel  `toml:"level" help:"least level of log lines" reload:"true"`
	Format daemon.LogFormat `toml:"format" help:"form of log lines" reload:"true"`
}

// DefaultConfig returns the documented defaults.
func DefaultConfig() Config {
	return Config{
		StateDir: "/var/lib/waypost/agent",
		RunDir:   "/run/waypost",
		Mesh:     MeshConfig{Listen: ":7710", Advertise: "auto", Fleet: "default"},
		Discover: DiscoverConfig{Enabled: true, Every: daemon.Duration(5 * time.Second)},
		GPU:      GPUConfig{Enabled: "auto", Poll: daemon.Duration(time.Second)},
		Limits:   LimitsConfig{Memory: 128 << 20, CPUs: 1},
		Metrics:  MetricsConfig{Listen: "127.0.0.1:7713"},
		Log:      LogConfig{Level: "info", Format: "logfmt"},
	}
}

// Validate names the first key that cannot be used together with the others,
// and the fix.
func (c *Config) Validate() error {
	if c.StateDir == "" {
		return bad("state_dir", "must name a directory")
	}
	if c.Prefix.KeyFile == "" {
		return bad("prefix.key_file", "must name the file with the fleet's prefix key (waypost dev certs makes one)")
	}
	loopback := c.Mesh.Listen.Loopback()
	if c.Mesh.KeyFile == "" && !loopback {
		return bad("mesh.key_file", "must be set: mesh.listen %q is reachable from other hosts", c.Mesh.Listen)
	}
	if !c.TLS.set() {
		for i, a := range c.Cluster.Coordinators {
			if !daemon.Listen(a).Loopback() {
				return bad(fmt.Sprintf("cluster.coordinators[%d]", i), "%q is another host: set [tls] ca_file, cert_file and key_file", a)
			}
		}
		if !loopback {
			return bad("tls.ca_file", "must be set: mesh.listen %q is reachable from other hosts", c.Mesh.Listen)
		}
	}
	return c.validateEngines()
}

func bad(field, format string, args ...any) error {
	return &daemon.FieldError{Field: field, Err: fmt.Errorf(format, args...)}
}

func (c *Config) validateEngines() error {
	seen := map[string]bool{}
	for i := range c.Engines {
		e := &c.Engines[i]
		key := func(k string) string { return fmt.Sprintf("engine[%d].%s", i, k) }
		u, err := url.Parse(e.URL)
		if err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Host == "" {
			return bad(key("url"), "%q is not a URL such as http://127.0.0.1:8000", e.URL)
		}
		if e.Kind == "" {
			return bad(key("kind"), "must be set: one of %s", strings.Join(e.Kind.Allowed(), ", "))
		}
		if e.Name == "" {
			port := u.Port()
			if port == "" {
				port = map[string]string{"http": "80", "https": "443"}[u.Scheme]
			}
			e.Name = string(e.Kind) + "-" + port
		}
		if strings.ContainsAny(e.Name, "/ \t") {
			return bad(key("name"), "%q must not hold a slash or space", e.Name)
		}
		if seen[e.Name] {
			return bad(key("name"), "%q is used twice", e.Name)
		}
		seen[e.Name] = true
		if err := e.validateKV(key); err != nil {
			return err
		}
		if len(e.Boundary) > boundary.MaxTextBytes || strings.ContainsAny(e.Boundary, "\n\r\t") {
			return bad(key("boundary"), "%.40q must be one line of at most %d bytes", e.Boundary, boundary.MaxTextBytes)
		}
		for k, v := range map[string]string{"kv_events": e.KVEvents, "kv_replay": e.KVReplay} {
			if v == "" {
				continue
			}
			if host, ok := strings.CutPrefix(v, "tcp://"); !ok || !hasPort(host) {
				return bad(key(k), "%q is not an endpoint such as tcp://127.0.0.1:5557", v)
			}
		}
	}
	return nil
}

func hasPort(hostport string) bool {
	_, port, err := net.SplitHostPort(hostport)
	return err == nil && port != ""
}
