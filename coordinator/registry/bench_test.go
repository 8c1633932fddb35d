package registry

import (
	"strings"
	"testing"
)

// bigFleet is a file of 1,000 hosts in 50 racks and 8,000 workers in 20 pools.
func bigFleet() string {
	var b strings.Builder
	for r := range 50 {
		b.WriteString(sprint("[[rack]]\nname = \"r%d\"\nzone = \"z%d\"\nhosts = [\"gpu-%02d[01-20]\"]\n", r, r/10, r))
		b.WriteString(sprint("[[link]]\nbetween = [\"rack:r%d\", \"rack:r%d\"]\nbandwidth = \"400Gbit/s\"\nlatency = \"10us\"\n", r, r))
	}
	for p := range 20 {
		b.WriteString(sprint("[[pool]]\nname = \"p%d\"\nmodel = \"m%d\"\nworkers = [\"gpu-*/vllm-*\"]\n", p, p))
	}
	return b.String()
}

func BenchmarkParseFleet(b *testing.B) {
	text := bigFleet()
	b.SetBytes(int64(len(text)))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := ParseFleet("fleet.toml", text); err != nil {
			b.Fatal(err)
		}
	}
}

// fullState has a full audit trail and window, the big fleet and 100 cordons.
func fullState(b *testing.B) *State {
	s, _ := apply(b, Empty(), "fleet", PutFleet{TOML: bigFleet()})
	for i := range AuditEntries {
		s, _ = s.Apply(encode(b, sprint("%d", i), SetCordon{Selector: sprint("gpu-%04d", i%100), Reason: "fan swap INC-431"}))
	}
	return s
}

func BenchmarkApplyCordon(b *testing.B) {
	s := fullState(b)
	cmd := encode(b, "new", SetCordon{Selector: "gpu-0042", Reason: "fan swap INC-432"})
	b.ReportAllocs()
	for b.Loop() {
		if _, r := s.Apply(cmd); !r.Changed {
			b.Fatal(r)
		}
	}
}

func BenchmarkSnapshot(b *testing.B) {
	s := fullState(b)
	var buf []byte
	b.ReportAllocs()
	for b.Loop() {
		buf = s.AppendSnapshot(buf[:0])
	}
	b.ReportMetric(float64(len(buf)), "bytes")
}

func BenchmarkRestore(b *testing.B) {
	snapshot := fullState(b).AppendSnapshot(nil)
	b.SetBytes(int64(len(snapshot)))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := DecodeSnapshot(snapshot); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkCordonsFor(b *testing.B) {
	s := fullState(b)
	gpus := []string{"GPU-8a1f0000-0000-0000-0000-000000000001", "GPU-8a1f0000-0000-0000-0000-000000000002"}
	b.ReportAllocs()
	for b.Loop() {
		if s.CordonsFor("gpu-0142/vllm-8000/0", "m1", gpus) != nil {
			b.Fatal("hit")
		}
	}
}

func BenchmarkLink(b *testing.B) {
	f := fullState(b).Fleet()
	x, y := f.HostPlace("gpu-0301"), f.HostPlace("gpu-0317")
	b.ReportAllocs()
	for b.Loop() {
		if p := f.PathBetween(x, y); p.Source != Declared {
			b.Fatal(p)
		}
	}
}

func BenchmarkHostPlaceAndPool(b *testing.B) {
	f := fullState(b).Fleet()
	b.ReportAllocs()
	for b.Loop() {
		if p := f.HostPlace("gpu-4917"); p.Rack != "r49" {
			b.Fatal(p)
		}
		if p := f.PoolOf("gpu-4917/vllm-8000/0", "m19"); p == nil {
			b.Fatal("no pool")
		}
	}
}
