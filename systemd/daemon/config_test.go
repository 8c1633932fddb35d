package daemon

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"
	"pgregory.net/rapid"
)

// sample has one field of every kind that configurations use.
type sample struct {
	Name   string   `toml:"name" help:"host name if empty"`
	Mesh   mesh     `toml:"mesh"`
	Engine []engine `toml:"engine"`
	GPU    struct {
		Enabled gpuMode  `toml:"enabled" reload:"true"`
		Poll    Duration `toml:"poll" reload:"true"`
	} `toml:"gpu"`
	Limits struct {
		Memory Size    `toml:"memory"`
		CPUs   float64 `toml:"cpus"`
		Places uint32  `toml:"places_in_flight"`
	} `toml:"limits"`
	Metrics struct {
		Listen Listen `toml:"listen"`
		On     bool   `toml:"on"`
	} `toml:"metrics"`
	Log struct {
		Level  LogLevel  `toml:"level" reload:"true" help:"least level of log lines"`
		Format LogFormat `toml:"format"`
	} `toml:"log"`
	Secret string `toml:"secret" secret:"true"`
}

type mesh struct {
	Listen  Listen     `toml:"listen"`
	Join    []HostPort `toml:"join"`
	KeyFile string     `toml:"key_file"`
}

func (m mesh) Validate() error {
	if len(m.Join) > 0 && m.KeyFile == "" {
		return &FieldError{"join", errors.New("members are joined with a key only; set mesh.key_file")}
	}
	return nil
}

type gpuMode string

func (gpuMode) Allowed() []string { return []string{"auto", "off"} }

type engine struct {
	Name string   `toml:"name"`
	Kind kind     `toml:"kind"`
	URL  string   `toml:"url"`
	Tags []string `toml:"tags"`
}

func (e *engine) SetDefaults() { e.Kind = "vllm" }

func (e engine) Validate() error {
	if e.URL == "" {
		return &FieldError{"url", errors.New(`is required, "http://127.0.0.1:8000" for example`)}
	}
	return nil
}

type kind string

func (kind) Allowed() []string { return []string{"vllm", "sglang", "trtllm", "llamacpp"} }

func defaults() *sample {
	s := &sample{Mesh: mesh{Listen: ":7710"}, Secret: "hunter2"}
	s.GPU.Enabled, s.GPU.Poll = "auto", Duration(time.Second)
	s.Limits.Memory, s.Limits.CPUs, s.Limits.Places = 128<<20, 1, 4096
	s.Metrics.Listen, s.Metrics.On = "127.0.0.1:7713", true
	s.Log.Level, s.Log.Format = "info", "logfmt"
	return s
}

// TestConfig runs the transcripts in testdata/config: a file, then environment
// and flags as arguments, then all settings with their sources, or all faults.
func TestConfig(t *testing.T) {
	datadriven.Walk(t, "testdata/config", func(t *testing.T, path string) {
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			file := filepath.Join(t.TempDir(), "agent.toml")
			if err := os.WriteFile(file, []byte(d.Input), 0o600); err != nil {
				t.Fatal(err)
			}
			opts := LoadOptions{File: file, Flags: pflag.NewFlagSet("test", pflag.ContinueOnError)}
			cfg := defaults()
			BindFlags(opts.Flags, cfg)
			for _, a := range d.CmdArgs {
				switch a.Key {
				case "env":
					opts.Env = append(opts.Env, a.Vals...)
					continue
				case "all":
					continue
				}
				if err := opts.Flags.Set(a.Key, a.Vals[0]); err != nil {
					t.Fatal(err)
				}
			}
			loaded, err := Load(cfg, opts)
			if err != nil {
				if !errors.Is(err, ErrConfig) {
					t.Errorf("%v is not an ErrConfig", err)
				}
				if diff := cmp.Diff(defaults(), cfg, cmp.AllowUnexported(sample{})); diff != "" {
					t.Errorf("configuration changed although there is an error:\n%s", diff)
				}
				return err.Error()
			}
			var out strings.Builder
			for _, s := range loaded.Settings {
				if s.Source.Kind != "default" || d.HasArg("all") {
					fmt.Fprintf(&out, "%s = %s  # %s\n", s.Key, s.Value, s.Source)
				}
			}
			for i, e := range cfg.Engine {
				fmt.Fprintf(&out, "engine %d: %+v\n", i, e)
			}
			for _, u := range loaded.UnknownEnv {
				fmt.Fprintf(&out, "unknown variable %s\n", u)
			}
			if out.Len() == 0 {
				return "all defaults"
			}
			return out.String()
		})
	})
}

func TestMissingFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "agent.toml")
	if _, err := Load(defaults(), LoadOptions{File: file}); err != nil {
		t.Errorf("the standard file may be missing: %v", err)
	}
	if _, err := Load(defaults(), LoadOptions{File: file, MustExist: true}); !errors.Is(err, ErrConfig) || !strings.Contains(err.Error(), "no such file") {
		t.Errorf("a named file may not: %v", err)
	}
	if err := os.WriteFile(file, make([]byte, maxFileBytes+1), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Load(defaults(), LoadOptions{File: file}); !errors.Is(err, ErrConfig) || !strings.Contains(err.Error(), "at most 1048576") {
		t.Errorf("huge file: %v", err)
	}
}

func TestDiff(t *testing.T) {
	a, b := defaults(), defaults()
	b.Log.Level = "debug"
	b.Mesh.Join = []HostPort{"gpu-01:7710"}
	want := []Change{
		{Key: "mesh.join", Old: "[]", New: `["gpu-01:7710"]`},
		{Key: "log.level", Old: `"info"`, New: `"debug"`, Reloadable: true},
	}
	if diff := cmp.Diff(want, Diff(a, b)); diff != "" {
		t.Error(diff)
	}
	b.Secret = "hunter3"
	changes := Diff(a, b)
	if i := slices.IndexFunc(changes, func(c Change) bool { return c.Key == "secret" }); i < 0 || changes[i].Old+changes[i].New != `"(hidden)""(hidden)"` {
		t.Errorf("a secret is shown in %+v", changes)
	}
	// What a reload cannot take over is said, once for all of it.
	var said strings.Builder
	log := slog.New(slog.NewTextHandler(&said, nil))
	if WarnRestart(log, a, b); strings.Count(said.String(), "level=WARN") != 1 || !strings.Contains(said.String(), `settings="mesh.join secret"`) {
		t.Errorf("said %q", said.String())
	}
	said.Reset()
	c := defaults()
	c.Log.Level = "debug"
	if WarnRestart(log, a, c); said.Len() != 0 {
		t.Errorf("of a setting that was taken over: %q", said.String())
	}
}

// What a value prints, a file may hold: the value comes back.
func TestValuesRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var size Size
		want := Size(rapid.Uint64Range(0, 1<<62).Draw(t, "size"))
		if err := size.UnmarshalText([]byte(want.String())); err != nil || size != want {
			t.Fatalf("size %d prints %q and reads %d, %v", want, want, size, err)
		}
		var d Duration
		span := Duration(rapid.Int64Range(0, 1<<55).Draw(t, "duration"))
		if err := d.UnmarshalText([]byte(span.String())); err != nil || d != span {
			t.Fatalf("duration %d prints %q and reads %d, %v", span, span, d, err)
		}
	})
}

func TestValues(t *testing.T) {
	for text, want := range map[string]Size{"128MiB": 128 << 20, "1.5GiB": 3 << 29, "10GB": 1e10, "4096": 4096, "0": 0, "7 KiB": 7 << 10, "5B": 5} {
		var z Size
		if err := z.UnmarshalText([]byte(text)); err != nil || z != want {
			t.Errorf("size %q = %d, %v; want %d", text, z, err, want)
		}
	}
	for _, text := range []string{"", "MiB", "-1", "1.5", "1e400GiB", "NaNGiB", "9999999TiB", "128mb", "0x10MiB", "InfMB"} {
		var z Size
		if err := z.UnmarshalText([]byte(text)); err == nil {
			t.Errorf("size %q = %d", text, z)
		}
	}
	for text, want := range map[string]time.Duration{"30d": 720 * time.Hour, "1h30m": 90 * time.Minute, "0s": 0, "200ms": 200 * time.Millisecond} {
		var d Duration
		if err := d.UnmarshalText([]byte(text)); err != nil || d.D() != want || d.String() != text {
			t.Errorf("duration %q = %v, %v, prints %q", text, d.D(), err, d)
		}
	}
	for _, text := range []string{"", "5", "-5s", "d", "1.5d", "99999999d", "soon"} {
		var d Duration
		if err := d.UnmarshalText([]byte(text)); err == nil {
			t.Errorf("duration %q = %v", text, d)
		}
	}
	for text, loopback := range map[string]bool{":7710": false, "127.0.0.1:0": true, "[::1]:1": true, "localhost:7713": true, "10.0.0.1:65535": false} {
		var l Listen
		if err := l.UnmarshalText([]byte(text)); err != nil || l.Loopback() != loopback {
			t.Errorf("listen %q: %v, loopback %v", text, err, l.Loopback())
		}
	}
	for _, text := range []string{"", "7710", "gpu-01:7710", ":99999", "::1:80", "a b:1"} {
		var l Listen
		if err := l.UnmarshalText([]byte(text)); err == nil {
			t.Errorf("listen %q was accepted", text)
		}
	}
	for text, ok := range map[string]bool{"": true, "127.0.0.1:7713": true, "7713": false} {
		var l OptionalListen
		if err := l.UnmarshalText([]byte(text)); (err == nil) != ok {
			t.Errorf("optional listen %q: %v", text, err)
		}
	}
	for _, text := range []string{"gpu-01", ":7710", "gpu-01:0", "a/b:1", "gpu-01:http"} {
		var h HostPort
		if err := h.UnmarshalText([]byte(text)); err == nil {
			t.Errorf("address %q was accepted", text)
		}
	}
}

func TestNearest(t *testing.T) {
	known := keysOf(fieldsOf(defaults()))
	for key, want := range map[string]string{
		"gosip.listen": "mesh.listen", "mesh.lisetn": "mesh.listen", "listen": "mesh.listen", "log.levle": "log.level",
		"level": "log.level", "engine.knd": "engine.kind", "nam": "name", "quite.something.else.here": "",
	} {
		if got, _ := nearest(key, known); got != want {
			t.Errorf("nearest(%q) = %q, want %q", key, got, want)
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		a, b := rapid.StringN(0, 20, 20).Draw(t, "a"), rapid.StringN(0, 20, 20).Draw(t, "b")
		d := distance(a, b)
		if d != distance(b, a) || (d == 0) != (a == b) || d > max(len(a), len(b)) {
			t.Fatalf("distance(%q, %q) = %d, the other way %d", a, b, d, distance(b, a))
		}
	})
}

func FuzzLoad(f *testing.F) {
	for _, s := range []string{
		"", "name = 'x'\n[mesh]\nlisten = ':1'", "[[engine]]\nurl='u'\n[[engine]]\nkind='sglang'\nurl='v'", "engine = [{url='x'}, 3]",
		"a.b.c = 1\n[a.b]\nd = 2", "mesh = 3", "[mesh]\njoin = [1]", "\"\" = 1", "log = {level = 'info', format = 'x'}", "limits.memory = 5\nlimits.cpus = inf",
	} {
		f.Add(s, "WAYPOST_LOG_LEVEL=debug")
	}
	f.Fuzz(func(t *testing.T, text, env string) {
		doc, err := parseDocument("x.toml", []byte(text))
		if err != nil {
			if !errors.Is(err, ErrConfig) || !strings.HasPrefix(err.Error(), "x.toml") {
				t.Fatalf("%q: error %v", text, err)
			}
			return
		}
		cfg := defaults()
		l := &loader{fields: fieldsOf(cfg), sources: map[string]Source{}, lines: map[string]string{}}
		l.document(doc)
		l.env([]string{env})
		for _, e := range l.errs {
			where, line := splitWhere(e.Where)
			if where == "x.toml" && (line < 1 || line > strings.Count(text, "\n")+1) {
				t.Fatalf("%q: %v has no line", text, e)
			}
		}
		for key, s := range l.sources {
			if s.Kind == "file" {
				if _, line := splitWhere(s.Where); line < 1 {
					t.Fatalf("%q: %s is from %s", text, key, s.Where)
				}
			}
		}
		for _, fl := range l.fields { // whatever was taken in can be shown
			fl.show()
		}
	})
}
