package registry

import (
	"path"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func TestPattern(t *testing.T) {
	for _, tt := range []struct{ pattern, yes, no string }{
		{"gpu-01", "gpu-01", "gpu-1 gpu-011 xgpu-01 Gpu-01"},
		{"gpu-0[1-3]", "gpu-01 gpu-03", "gpu-00 gpu-04 gpu-0 gpu-012"},
		{"gpu-[1-12]", "gpu-1 gpu-9 gpu-10 gpu-12", "gpu-0 gpu-13 gpu-01 gpu-123 gpu-"},
		{"gpu-[01-12]", "gpu-01 gpu-12", "gpu-1 gpu-13 gpu-012"},
		{"gpu-[008-011]x", "gpu-008x gpu-011x", "gpu-8x gpu-012x gpu-0011x"},
		{"r[1,3,7-9]-*", "r1-a r3- r8-gpu", "r2-a r10-a"},
		{"gpu-*", "gpu- gpu-01", "gpu ax-gpu-1 gpu-1/x"},
		{"*", "a abc", "a/b"},
		{"*-[!a-c]", "x-d -z 1-2-3", "x-a x-"},
		{"a?c", "abc aéc", "ac abbc"},
		{"*a*b", "ab xaxb aab abab", "a b ba"},
		{"[12]", "1 2", "12 3"},
		{"[a-]", "a -", "b"},
		{"*[10-20]", "x10 x20 10", "x9 x21"},
	} {
		p, err := ParsePattern(tt.pattern)
		if err != nil {
			t.Errorf("%s: %v", tt.pattern, err)
			continue
		}
		if p.String() != tt.pattern {
			t.Errorf("%s reads back as %s", tt.pattern, p)
		}
		for name := range strings.FieldsSeq(tt.yes) {
			if !p.Match(name) {
				t.Errorf("%s does not match %s", tt.pattern, name)
			}
		}
		for name := range strings.FieldsSeq(tt.no) {
			if p.Match(name) {
				t.Errorf("%s matches %s", tt.pattern, name)
			}
		}
	}
	for _, bad := range []string{"", "a/b", "[", "[]", "a]", "[!]", "[3-1]", "[5-3,1]", "[1,]", "[01-2]", "[1-99999999999]", strings.Repeat("a", 257)} {
		if _, err := ParsePattern(bad); err == nil {
			t.Errorf("%q is taken", bad)
		}
	}
}

// TestPatternLikePathMatch: where both know the syntax, they agree.
func TestPatternLikePathMatch(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		pattern := rapid.StringMatching(`([ab]|\*|\?|\[ab\]|\[a-b\]){1,8}`).Draw(t, "pattern")
		name := rapid.StringMatching(`[abc]{0,8}`).Draw(t, "name")
		p, err := ParsePattern(pattern)
		if err != nil {
			t.Fatal(err)
		}
		want, err := path.Match(pattern, name)
		if err != nil {
			t.Fatal(err)
		}
		if got := p.Match(name); got != want {
			t.Fatalf("%q on %q: %v, path.Match says %v", pattern, name, got, want)
		}
	})
}

// TestPatternNumbers: a number matches if and only if it is in the range.
func TestPatternNumbers(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		lo := rapid.IntRange(0, 300).Draw(t, "lo")
		hi := rapid.IntRange(max(lo, 10), 400).Draw(t, "hi")
		n := rapid.IntRange(0, 450).Draw(t, "n")
		plain, err := ParsePattern(sprint("h[%d-%d]", lo, hi))
		if err != nil {
			t.Fatal(err)
		}
		padded, err := ParsePattern(sprint("h[%04d-%04d]", lo, hi))
		if err != nil {
			t.Fatal(err)
		}
		want := n >= lo && n <= hi
		if got := plain.Match(sprint("h%d", n)); got != want {
			t.Fatalf("%s on %d: %v", plain, n, got)
		}
		if got := padded.Match(sprint("h%04d", n)); got != want {
			t.Fatalf("%s on %04d: %v", padded, n, got)
		}
	})
}

func TestWorkerPattern(t *testing.T) {
	for _, tt := range []struct {
		pattern, worker string
		want            bool
	}{
		{"gpu-*", "gpu-01/vllm-8000/0", true},
		{"gpu-*/vllm-*", "gpu-01/vllm-8000/3", true},
		{"gpu-*/vllm-*", "gpu-01/sglang-30000/0", false},
		{"*/*/0", "gpu-01/vllm-8000/0", true},
		{"*/*/0", "gpu-01/vllm-8000/1", false},
		{"*/*/0", "gpu-01", false},
	} {
		p, err := ParseWorkerPattern(tt.pattern)
		if err != nil {
			t.Fatal(err)
		}
		if got := p.Match(tt.worker); got != tt.want {
			t.Errorf("%s on %s: %v", tt.pattern, tt.worker, got)
		}
	}
	for _, bad := range []string{"", "a//b", "/a", "a/b/c/d", "a/["} {
		if _, err := ParseWorkerPattern(bad); err == nil {
			t.Errorf("%q is taken", bad)
		}
	}
}

func TestUnits(t *testing.T) {
	for text, want := range map[string]uint64{
		"100Gbit/s": 12_500_000_000, "100 Gbit/s": 12_500_000_000, " 8bit/s": 1, "12.5GB/s": 12_500_000_000, "1.5 MiB/s": 1_572_864,
		"800Tbit/s": 100_000_000_000_000, "1kB/s": 1000,
	} {
		if got, err := parseBandwidth(text); err != nil || got != want {
			t.Errorf("%q: %d, %v, want %d", text, got, err, want)
		}
	}
	for _, bad := range []string{"", "100", "Gbit/s", "100Gb", "-1Gbit/s", "1e3Gbit/s", "801Tbit/s", "1bit/s", "1.2.3GB/s", "NaNGB/s", "InfGB/s"} {
		if got, err := parseBandwidth(bad); err == nil {
			t.Errorf("%q is %d", bad, got)
		}
	}
	for bytes, want := range map[uint64]string{1: "1 B/s", 1_250_000_000: "1.2 GB/s", 12_500_000_000: "12.5 GB/s", 125_000_000: "125 MB/s", 2_000_000_000: "2 GB/s", 1500: "1.5 kB/s"} {
		if got := formatBandwidth(bytes); got != want {
			t.Errorf("%d: %q, want %q", bytes, got, want)
		}
	}
	for text, want := range map[string]DelayLimit{
		"50% + 200ms": {0.5, 200 * time.Millisecond}, "50%": {0.5, 0}, "200ms": {0, 200 * time.Millisecond},
		"200ms + 12.5%": {0.125, 200 * time.Millisecond}, "0%+0s": {},
	} {
		got, err := parseDelayLimit(text)
		if err != nil || got != want {
			t.Errorf("%q: %+v, %v", text, got, err)
		}
		if again, err := parseDelayLimit(got.String()); err != nil || again != got {
			t.Errorf("%q reads back as %+v, %v", got, again, err)
		}
	}
	for _, bad := range []string{"", "50", "-1%", "1% + 2%", "1s + 2s", "10001%", "NaN%", "50% 200ms"} {
		if got, err := parseDelayLimit(bad); err == nil {
			t.Errorf("%q is %+v", bad, got)
		}
	}
	for d, want := range map[time.Duration]string{20 * time.Microsecond: "20us", 300 * time.Millisecond: "300ms", time.Minute: "1m", 2 * time.Hour: "2h", 90 * time.Second: "1m30s", 0: "0s"} {
		if got := formatDuration(d); got != want {
			t.Errorf("%v: %q, want %q", d, got, want)
		}
		if back, err := parseDuration(want); err != nil || back != d {
			t.Errorf("%q: %v, %v", want, back, err)
		}
	}
}

func TestNearest(t *testing.T) {
	for s, want := range map[string]string{"bandwith": "bandwidth", "latnecy": "latency", "LATENCY": "latency", "x": "", "colour": "", "": ""} {
		if got := nearest(s, []string{"bandwidth", "latency", "transfer"}); got != want {
			t.Errorf("%q: %q, want %q", s, got, want)
		}
	}
}
