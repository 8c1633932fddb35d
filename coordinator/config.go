package coordinator

import (
	"errors"
	"fmt"
	"time"

	"waypost/systemd/daemon"
)

// Config is coordinator.toml. The zero value of a field is not its default;
// use DefaultConfig.
type Config struct {
	Name     string        `toml:"name" help:"coordinator name; empty: c-<host>"`
	StateDir string        `toml:"state_dir" help:"directory of the Raft log, snapshots, identity and peers"`
	RunDir   string        `toml:"run_dir" help:"directory of the local socket; empty: no socket"`
	TLS      TLSConfig     `toml:"tls"`
	Mesh     MeshConfig    `toml:"mesh"`
	Cluster  ClusterConfig `toml:"cluster"`
	API      APIConfig     `toml:"api"`
	Prefix   PrefixConfig  `toml:"prefix"`
	Explain  ExplainConfig `toml:"explain"`
	Limits   LimitsConfig  `toml:"limits"`
	Log      LogConfig     `toml:"log"`
}

// TLSConfig names PEM files; all empty: no TLS, loopback only.
type TLSConfig struct {
	CAFile   string `toml:"ca_file" help:"CA of the fleet, PEM"`
	CertFile string `toml:"cert_file" help:"certificate of this coordinator, PEM"`
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

// Validate implements daemon.Validator.
func (c MeshConfig) Validate() error {
	if c.Fleet == "" || len(c.Fleet) > 64 {
		return &daemon.FieldError{Field: "fleet", Err: fmt.Errorf("%q: use 1 to 64 characters", c.Fleet)}
	}
	return nil
}

// ClusterConfig is the cluster section.
type ClusterConfig struct {
	Listen    daemon.Listen     `toml:"listen" help:"address of Raft and the agents' lanes"`
	Advertise string            `toml:"advertise" help:"host or host:port that others use; empty: the mesh address"`
	Join      []daemon.HostPort `toml:"join" help:"cluster addresses of coordinators to join"`
	Voter     bool              `toml:"voter" help:"whether it may become a voter"`
}

// TLSMode says when the API uses TLS.
type TLSMode string

// Allowed implements daemon.Enum.
func (TLSMode) Allowed() []string { return []string{"auto", "off"} }

// APIConfig is the api section.
type APIConfig struct {
	Listen    daemon.Listen `toml:"listen" help:"address of gRPC, JSON and metrics"`
	TLS       TLSMode       `toml:"tls" help:"auto: if [tls] is set; off: loopback only"`
	BodyLimit daemon.Size   `toml:"body_limit" help:"largest request body"`
}

// Validate implements daemon.Validator.
func (c APIConfig) Validate() error {
	if c.BodyLimit < 1024 || c.BodyLimit > 1<<30 {
		return &daemon.FieldError{Field: "body_limit", Err: fmt.Errorf("%s: use 1KiB to 1GiB", c.BodyLimit)}
	}
	return nil
}

// PrefixConfig is the prefix section.
type PrefixConfig struct {
	KeyFile string `toml:"key_file" help:"cluster key of the prefix keys, 32 hex digits"`
}

// ExplainConfig is the explain section.
type ExplainConfig struct {
	Keep   daemon.Duration `toml:"keep" help:"how long a decision record is kept"`
	Memory daemon.Size     `toml:"memory" help:"bound of the records in memory"`
	Disk   daemon.Size     `toml:"disk" help:"bound of the records on disk, which survive a restart; 0: memory only"`
}

// Validate implements daemon.Validator.
func (c ExplainConfig) Validate() error {
	if k := c.Keep.D(); k < time.Second || k > 30*24*time.Hour {
		return &daemon.FieldError{Field: "keep", Err: fmt.Errorf("%s: use 1s to 30d", c.Keep)}
	}
	if c.Memory < 1<<20 || c.Memory > 1<<36 {
		return &daemon.FieldError{Field: "memory", Err: fmt.Errorf("%s: use 1MiB to 64GiB", c.Memory)}
	}
	if c.Disk != 0 && (c.Disk < 1<<20 || c.Disk > 1<<40) {
		return &daemon.FieldError{Field: "disk", Err: fmt.Errorf("%s: use 0 for memory only, or 1MiB to 1TiB", c.Disk)}
	}
	return nil
}

// LimitsConfig is the limits section.
type LimitsConfig struct {
	Memory         daemon.Size `toml:"memory" help:"memory the process should stay below"`
	PlacesInFlight int         `toml:"places_in_flight" help:"placements decided at the same time"`
}

// Validate implements daemon.Validator.
func (c LimitsConfig) Validate() error {
	if c.PlacesInFlight < 1 || c.PlacesInFlight > 1<<20 {
		return &daemon.FieldError{Field: "places_in_flight", Err: fmt.Errorf("%d: use 1 to 1048576", c.PlacesInFlight)}
	}
	if c.Memory < 64<<20 || c.Memory > 1<<42 {
		return &daemon.FieldError{Field: "memory", Err: fmt.Errorf("%s: use 64MiB to 4TiB", c.Memory)}
	}
	return nil
}

// LogConfig is the log section.
type LogConfig struct {
	Level  daemon.LogLevel  `toml:"level" help:"least level of log lines" reload:"true"`
	Format daemon.LogFormat `toml:"format" help:"form of log lines" reload:"true"`
}

// DefaultConfig returns the documented defaults.
func DefaultConfig() Config {
	return Config{
		StateDir: "/var/lib/waypost/coordinator",
		RunDir:   "/run/waypost",
		Mesh:     MeshConfig{Listen: ":7716", Advertise: "auto", Fleet: "default"},
		Cluster:  ClusterConfig{Listen: ":7711", Voter: true},
		API:      APIConfig{Listen: ":7712", TLS: "auto", BodyLimit: 4 << 20},
		Explain:  ExplainConfig{Keep: daemon.Duration(time.Hour), Memory: 64 << 20, Disk: 256 << 20},
		Limits:   LimitsConfig{Memory: 2 << 30, PlacesInFlight: 4096},
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
	if !c.API.Listen.Loopback() && (c.API.TLS == "off" || !c.TLS.set()) {
		return bad("api.listen", "%q is reachable from other hosts: set [tls] ca_file, cert_file and key_file with api.tls = \"auto\", or listen on 127.0.0.1", c.API.Listen)
	}
	if !c.Cluster.Listen.Loopback() && !c.TLS.set() {
		return bad("cluster.listen", "%q is reachable from other hosts: set [tls] ca_file, cert_file and key_file", c.Cluster.Listen)
	}
	if !c.Mesh.Listen.Loopback() && c.Mesh.KeyFile == "" {
		return bad("mesh.key_file", "must be set: mesh.listen %q is reachable from other hosts", c.Mesh.Listen)
	}
	return nil
}

func bad(field, format string, args ...any) error {
	return &daemon.FieldError{Field: field, Err: fmt.Errorf(format, args...)}
}
