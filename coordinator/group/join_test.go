package group

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

var up = math.NaN()

func front() *Front {
	return &Front{
		Share: Share{Process: 1, Kind: "vllm", Engine: "vllm-8000", Meeting: "10.0.0.1:29501", Nodes: 2},
		Host:  "gpu-01", Names: []string{"gpu-01", "10.0.0.1"}, Settled: true,
	}
}

// node is a share of node 1.
func node(process uint64, change ...func(*Share)) Share {
	s := Share{Process: process, Kind: "vllm", Meeting: "10.0.0.1:29501", Node: 1, Nodes: 2, Verdict: "ok", GPUUUIDs: []string{"GPU-1"}}
	for _, c := range change {
		c(&s)
	}
	return s
}

func text(members []Member) string {
	var out []string
	for i := range members {
		m := &members[i]
		s := fmt.Sprintf("%s: %s", m.String(), m.State)
		if m.Why != "" {
			s += " (" + m.Why + ")"
		}
		out = append(out, s)
	}
	return strings.Join(out, "; ")
}

// One share of two: who carries it, and how it is.
func TestJoin(t *testing.T) {
	carried := []Member{{Part: "node 1", Host: "gpu-02", Process: 7, State: OK, AwaySinceMs: up, GPUUUIDs: []string{"GPU-1"}}}
	for _, c := range []struct {
		name   string
		change func(*Front)
		hosts  []*Host
		past   []Member
		want   string
	}{
		{name: "whole", hosts: []*Host{{"gpu-02", up, true, []Share{node(7)}}}, want: "node 1 on gpu-02: ok"},
		{name: "the share's address is the front's host's name", hosts: []*Host{{"gpu-02", up, true, []Share{node(7, func(s *Share) { s.Meeting = "GPU-01:29501" })}}}, want: "node 1 on gpu-02: ok"},
		{
			name: "the front meets at its own loopback", change: func(f *Front) { f.Meeting = "127.0.0.1:29501" },
			hosts: []*Host{{"gpu-02", up, true, []Share{node(7)}}}, want: "node 1 on gpu-02: ok",
		},
		{
			name: "both on one host", change: func(f *Front) { f.Meeting = "localhost:29501" },
			hosts: []*Host{{"gpu-01", up, true, []Share{front().Share, node(7, func(s *Share) { s.Meeting = "127.0.0.1:29501" })}}}, want: "node 1 on gpu-01: ok",
		},
		{name: "loopback elsewhere is elsewhere", hosts: []*Host{{"gpu-02", up, true, []Share{node(7, func(s *Share) { s.Meeting = "127.0.0.1:29501" })}}}, want: "node 1: unknown (no host tells of it)"},
		{name: "another port", hosts: []*Host{{"gpu-02", up, true, []Share{node(7, func(s *Share) { s.Meeting = "10.0.0.1:29502" })}}}, want: "node 1: unknown (no host tells of it)"},
		{name: "another host", hosts: []*Host{{"gpu-02", up, true, []Share{node(7, func(s *Share) { s.Meeting = "10.0.0.9:29501" })}}}, want: "node 1: unknown (no host tells of it)"},
		{name: "another kind", hosts: []*Host{{"gpu-02", up, true, []Share{node(7, func(s *Share) { s.Kind = "sglang" })}}}, want: "node 1: unknown (no host tells of it)"},
		{name: "another size", hosts: []*Host{{"gpu-02", up, true, []Share{node(7, func(s *Share) { s.Nodes = 4 })}}}, want: "node 1: unknown (no host tells of it)"},
		{name: "the front's own node", hosts: []*Host{{"gpu-02", up, true, []Share{node(7, func(s *Share) { s.Node = 0 })}}}, want: "node 1: unknown (no host tells of it)"},
		{name: "a share that is served there", hosts: []*Host{{"gpu-02", up, true, []Share{node(7, func(s *Share) { s.Engine = "vllm-8000" })}}}, want: "node 1: unknown (no host tells of it)"},
		{name: "its GPUs are not known", hosts: []*Host{{"gpu-02", up, true, []Share{node(7, func(s *Share) { s.Verdict = "" })}}}, want: "node 1 on gpu-02: unknown (the state of its GPUs is not known)"},
		{name: "a word of a later version", hosts: []*Host{{"gpu-02", up, true, []Share{node(7, func(s *Share) { s.Verdict = "melting" })}}}, want: "node 1 on gpu-02: unknown (the state of its GPUs is not known)"},
		{name: "a fault", hosts: []*Host{{"gpu-02", up, true, []Share{node(7, func(s *Share) { s.Verdict = "exclude:xid_79(gpu_0)" })}}}, want: "node 1 on gpu-02: gpu_fault (xid_79(gpu_0))"},
		{name: "slower", hosts: []*Host{{"gpu-02", up, true, []Share{node(7, func(s *Share) { s.Verdict = "price:power_brake" })}}}, want: "node 1 on gpu-02: ok (power_brake)"},
		{name: "lane down", hosts: []*Host{{"gpu-02", 5000, true, []Share{node(7)}}}, want: "node 1 on gpu-02: away (the host's lane is lost)"},
		{name: "a fault before the lane went down", hosts: []*Host{{"gpu-02", 5000, true, []Share{node(7, func(s *Share) { s.Verdict = "exclude:xid_79" })}}}, want: "node 1 on gpu-02: gpu_fault (xid_79)"},
		{name: "told no more", hosts: []*Host{{"gpu-02", up, true, nil}}, past: carried, want: "node 1 on gpu-02: missing (its process is gone)"},
		{name: "looked for no more", hosts: []*Host{{"gpu-02", up, false, nil}}, past: carried, want: "node 1 on gpu-02: unknown (the host's agent does not look for it)"},
		{name: "told no more, then away", hosts: []*Host{{"gpu-02", 9, true, nil}}, past: carried, want: "node 1 on gpu-02: away (the host's lane is lost)"},
		{name: "host forgotten", past: carried, want: "node 1 on gpu-02: missing (the host is known no more)"},
		{name: "told by another host", hosts: []*Host{{"gpu-02", up, true, nil}, {"gpu-03", up, true, []Share{node(8)}}}, past: carried, want: "node 1 on gpu-03: ok"},
		{
			name: "told by two: the first keeps it", hosts: []*Host{{"gpu-00", up, true, []Share{node(8)}}, {"gpu-02", up, true, []Share{node(7)}}}, past: carried,
			want: "node 1 on gpu-02: ok (told of by gpu-00 as well)",
		},
		{
			name: "told by two, one away", hosts: []*Host{{"gpu-02", 4, true, []Share{node(7)}}, {"gpu-03", up, true, []Share{node(8)}}}, past: carried,
			want: "node 1 on gpu-03: ok (told of by gpu-02 as well)",
		},
		{
			name: "not allowed", change: func(f *Front) { f.May = func(h string) bool { return h == "gpu-03" } },
			hosts: []*Host{{"gpu-02", up, true, []Share{node(7)}}},
			want:  "node 1: unknown (gpu-02 tells of it, and no [[group]] of the fleet file has it together with gpu-01)",
		},
		{name: "declared and not told", change: func(f *Front) { f.Declared = true }, want: "node 1: missing (no host tells of it)"},
		{name: "declared and not told yet", change: func(f *Front) { f.Declared, f.Settled = true, false }, want: "node 1: unknown (no host tells of it)"},
		{
			name: "four nodes", change: func(f *Front) { f.Nodes, f.Node = 4, 2 },
			hosts: []*Host{
				{"gpu-02", up, true, []Share{node(7, func(s *Share) { s.Nodes, s.Node = 4, 0 })}},
				{"gpu-03", up, true, []Share{node(8, func(s *Share) { s.Nodes, s.Node = 4, 3 })}},
			},
			want: "node 0 on gpu-02: ok; node 1: unknown (no host tells of it); node 3 on gpu-03: ok",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := front()
			if c.change != nil {
				c.change(f)
			}
			if got := text(Join(f, c.hosts, c.past)); got != c.want {
				t.Errorf("%s\nwant %s", got, c.want)
			}
		})
	}
}

// An engine that counts neither nodes nor ranks has a member on each host whose
// processes meet where its own do, and none where another engine does too.
func TestJoinHelpers(t *testing.T) {
	ray := func(process uint64, change ...func(*Share)) Share {
		s := Share{Process: process, Kind: "vllm", Meeting: "10.0.0.1:6379", Uncounted: true, Verdict: "ok", GPUUUIDs: []string{"GPU-1"}}
		for _, c := range change {
			c(&s)
		}
		return s
	}
	served := func(name string) func(*Share) { return func(s *Share) { s.Engine = name } }
	carried := []Member{{Part: HelpersPart, Host: "gpu-02", Process: 7, State: OK, AwaySinceMs: up, GPUUUIDs: []string{"GPU-1"}}}
	for _, c := range []struct {
		name   string
		change func(*Front)
		hosts  []*Host
		past   []Member
		want   string
	}{
		{name: "one host", hosts: []*Host{{"gpu-01", up, true, []Share{ray(1, served("vllm-8000"))}}}},
		{
			name:  "two more",
			hosts: []*Host{{"gpu-01", up, true, []Share{ray(1, served("vllm-8000"))}}, {"gpu-02", up, true, []Share{ray(7)}}, {"gpu-03", up, true, []Share{ray(8, func(s *Share) { s.Verdict = "exclude:xid_79" })}}},
			want:  "ray workers on gpu-02: ok; ray workers on gpu-03: gpu_fault (xid_79)",
		},
		{name: "another head", hosts: []*Host{{"gpu-02", up, true, []Share{ray(7, func(s *Share) { s.Meeting = "10.0.0.9:6379" })}}}},
		{name: "one that counts its nodes", hosts: []*Host{{"gpu-02", up, true, []Share{node(7, func(s *Share) { s.Meeting = "10.0.0.1:6379" })}}}},
		{name: "lane down", hosts: []*Host{{"gpu-02", 5000, true, []Share{ray(7)}}}, want: "ray workers on gpu-02: away (the host's lane is lost)"},
		{name: "told no more", hosts: []*Host{{"gpu-02", up, true, nil}}, past: carried, want: "ray workers on gpu-02: missing (its process is gone)"},
		{name: "told no more, another one is", hosts: []*Host{{"gpu-02", up, true, nil}, {"gpu-03", up, true, []Share{ray(8)}}}, past: carried, want: "ray workers on gpu-02: missing (its process is gone); ray workers on gpu-03: ok"},
		{name: "of two users", hosts: []*Host{{"gpu-02", up, true, []Share{ray(7), ray(8)}}}, want: "ray workers on gpu-02: ok (another user's are on the host as well)"},
		{
			name:  "two engines at one head",
			hosts: []*Host{{"gpu-02", up, true, []Share{ray(7)}}, {"gpu-03", up, true, []Share{ray(9, served("vllm-8001")), ray(8)}}},
			past:  carried,
			want:  "ray workers: unknown (gpu-03/vllm-8001 at 10.0.0.1:6379 too, and nobody tells whose the workers on gpu-02, gpu-03 are)",
		},
		{name: "two engines at one head, no workers elsewhere", hosts: []*Host{{"gpu-03", up, true, []Share{ray(9, served("vllm-8001"))}}}},
		{
			name: "not allowed", change: func(f *Front) { f.May = func(h string) bool { return h == "gpu-03" } },
			hosts: []*Host{{"gpu-02", up, true, []Share{ray(7)}}, {"gpu-03", up, true, []Share{ray(8)}}}, past: carried,
			want: "ray workers on gpu-03: ok; ray workers: unknown (gpu-02 tells of it, and no [[group]] of the fleet file has it together with gpu-01)",
		},
		{name: "declared and not told", change: func(f *Front) { f.Declared = true }, want: "ray workers: missing (no host tells of it)"},
		{name: "declared and not told yet", change: func(f *Front) { f.Declared, f.Settled = true, false }},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := front()
			f.Share = ray(1, served("vllm-8000"))
			if c.change != nil {
				c.change(f)
			}
			if got := text(Join(f, c.hosts, c.past)); got != c.want {
				t.Errorf("%s\nwant %s", got, c.want)
			}
			for _, h := range c.hosts {
				if !Concerns(f, h, nil) {
					t.Errorf("what %s tells is taken for nothing to the front", h.Name)
				}
			}
		})
	}
	s := ray(1)
	if fault := s.Fault(); fault != "" {
		t.Error(fault)
	}
	if s.Nodes = 2; s.Fault() == "" {
		t.Error("a share that counts and does not is taken")
	}
}

// A data-parallel rank depends on the host that carries it, and on no other.
func TestJoinRanks(t *testing.T) {
	of := func(rank int) *Front {
		f := front()
		f.Nodes, f.Ranks, f.LocalRanks, f.Rank = 0, 6, 2, rank
		return f
	}
	ranks := func(process uint64, first int) Share {
		return node(process, func(s *Share) { s.Node, s.Nodes, s.Ranks, s.FirstRank, s.LocalRanks = 0, 0, 6, first, 2 })
	}
	hosts := []*Host{{"gpu-02", up, true, []Share{ranks(7, 2)}}}
	for rank, want := range []string{"", "", "rank 2 on gpu-02: ok", "rank 3 on gpu-02: ok", "rank 4: unknown (no host tells of it)", "rank 5: unknown (no host tells of it)", ""} {
		if got := text(Join(of(rank), hosts, nil)); got != want {
			t.Errorf("rank %d: %q, want %q", rank, got, want)
		}
	}
}

// The worst member decides; unknown is neither good nor bad.
func TestHealthOf(t *testing.T) {
	m := func(states ...State) (out []Member) {
		for i, s := range states {
			member := Member{Part: fmt.Sprint("node ", i+1), Host: "h", State: s, AwaySinceMs: up}
			if s == Away {
				member.AwaySinceMs = float64(10 - i)
			}
			out = append(out, member)
		}
		return out
	}
	for _, c := range []struct {
		members []Member
		state   State
		why     string
		away    float64
	}{
		{nil, OK, "", up},
		{m(OK, OK), OK, "", up},
		{m(OK, Unknown), Unknown, "node 2 on h", up},
		{m(Unknown, Away, Away), Away, "node 2 on h", 8},
		{m(Away, Missing), Missing, "node 2 on h", 10},
		{m(Missing, Fault, Away), Fault, "node 2 on h", 8},
	} {
		h := HealthOf(c.members)
		if h.State != c.state || h.Why != c.why || h.AwaySinceMs != c.away && !(math.IsNaN(h.AwaySinceMs) && math.IsNaN(c.away)) {
			t.Errorf("%s: %+v", text(c.members), h)
		}
	}
}

func TestFault(t *testing.T) {
	good := node(1)
	if fault := good.Fault(); fault != "" {
		t.Fatal(fault)
	}
	for field, change := range map[string]func(*Share){
		"process":    func(s *Share) { s.Process = 0 },
		"kind":       func(s *Share) { s.Kind = "" },
		"engine":     func(s *Share) { s.Engine = strings.Repeat("x", 600) },
		"meeting":    func(s *Share) { s.Meeting = "" },
		"nodes":      func(s *Share) { s.Nodes = 5000 },
		"node":       func(s *Share) { s.Node = 2 },
		"ranks":      func(s *Share) { s.Ranks = -1 },
		"localRanks": func(s *Share) { s.Ranks, s.FirstRank, s.LocalRanks = 4, 3, 2 },
		"gpuUuids":   func(s *Share) { s.GPUUUIDs = make([]string, 100) },
		"verdict":    func(s *Share) { s.Verdict = strings.Repeat("x", 600) },
	} {
		s := node(1, change)
		if got, _, _ := strings.Cut(s.Fault(), ":"); got != field {
			t.Errorf("%s: %q", field, s.Fault())
		}
	}
	if s := node(1, func(s *Share) { s.Nodes, s.Node = 0, 0 }); !strings.HasPrefix(s.Fault(), "nodes") {
		t.Errorf("neither nodes nor ranks: %q", s.Fault())
	}
}

// Whatever hosts tell: each part is there once, a part with a host is one that
// told of it, now or before, and no part is good without a host that says so.
func TestJoinProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		f := front()
		f.Nodes = rapid.IntRange(2, 5).Draw(t, "nodes")
		f.Node = rapid.IntRange(0, f.Nodes-1).Draw(t, "node")
		f.Declared, f.Settled = rapid.Bool().Draw(t, "declared"), rapid.Bool().Draw(t, "settled")
		var past []Member
		told := map[string]bool{}
		for range rapid.IntRange(1, 4).Draw(t, "steps") {
			var hosts []*Host
			for h := range rapid.IntRange(0, 4).Draw(t, "hosts") {
				host := &Host{Name: fmt.Sprint("h", h), AwaySinceMs: up, Looks: rapid.Bool().Draw(t, "looks")}
				if rapid.Bool().Draw(t, "down") {
					host.AwaySinceMs = float64(h)
				}
				for i := range rapid.IntRange(0, 3).Draw(t, "shares") {
					s := node(uint64(100*h+i+10), func(s *Share) {
						s.Nodes = f.Nodes
						s.Node = rapid.IntRange(0, f.Nodes-1).Draw(t, "share's node")
						s.Verdict = rapid.SampledFrom([]string{"ok", "", "exclude:x", "price:y"}).Draw(t, "verdict")
					})
					host.Shares = append(host.Shares, s)
					told[fmt.Sprintf("node %d %s", s.Node, host.Name)] = true
				}
				hosts = append(hosts, host)
			}
			members := Join(f, hosts, past)
			if len(members) != f.Nodes-1 {
				t.Fatalf("%d members of %d nodes", len(members), f.Nodes)
			}
			seen := map[string]bool{}
			for i := range members {
				m := &members[i]
				if seen[m.Part] || m.Part == fmt.Sprint("node ", f.Node) {
					t.Fatalf("%s is there again", m.Part)
				}
				seen[m.Part] = true
				if m.Host != "" && !told[m.Part+" "+m.Host] {
					t.Fatalf("%s never told of %s", m.Host, m.Part)
				}
				at := slices.IndexFunc(hosts, func(h *Host) bool { return h.Name == m.Host })
				if m.State == OK && (at < 0 || !math.IsNaN(hosts[at].AwaySinceMs) || !slices.ContainsFunc(hosts[at].Shares, func(s Share) bool {
					return s.Process == m.Process && (s.Verdict == "ok" || s.Verdict == "price:y")
				})) {
					t.Fatalf("%s is good by nobody's word: %+v", m.Part, m)
				}
				if m.State == Missing && m.Host == "" && !(f.Declared && f.Settled) {
					t.Fatalf("%s counts as missing though nobody had to tell of it", m.Part)
				}
			}
			if !Equal(members, Join(f, hosts, members)) {
				t.Fatalf("joined again: %s, was %s", text(Join(f, hosts, members)), text(members))
			}
			past = members
		}
	})
}
