package registry

import (
	"errors"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
	"github.com/google/go-cmp/cmp"

	"waypost/nvml"
)

func readTestdata(t testing.TB, name string) string {
	t.Helper()
	b, err := os.ReadFile("testdata/" + name)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func mustFleet(t testing.TB, text string) *Fleet {
	t.Helper()
	f, err := ParseFleet("fleet.toml", text)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// TestFleetErrors is golden: -rewrite writes the file anew.
func TestFleetErrors(t *testing.T) {
	datadriven.RunTest(t, "testdata/errors.txt", func(t *testing.T, d *datadriven.TestData) string {
		_, err := ParseFleet("fleet.toml", d.Input)
		var fe *FleetError
		if !errors.As(err, &fe) {
			t.Fatalf("%s: got %v, want a *FleetError", d.Pos, err)
		}
		for _, p := range fe.Problems {
			if p.Line == 0 {
				t.Errorf("%s: no line in %+v", d.Pos, p)
			}
		}
		return err.Error() + "\n"
	})
}

func TestOperatorFile(t *testing.T) {
	f := mustFleet(t, readTestdata(t, "operator.toml"))
	got := []any{
		f.Policy.Objective, f.Policy.Objective.Value.Theta(), f.Policy.OwnDelayLimit, f.Policy.IfInfeasible,
		f.Policy.AgentSilentFor, f.Policy.NoProgressFor, f.Policy.GPU.Price,
		f.Racks[0].Name, f.Racks[0].Zone, joinTexts(f.Racks[0].Hosts),
		f.Links[0].String(), f.Links[0].BandwidthBytesPerSec, f.Links[0].Latency, f.Links[0].Transfer, f.Links[0].PlaceSurcharge,
		f.Links[1].String(), f.Links[1].BandwidthBytesPerSec, f.Links[1].Latency, f.Links[1].Transfer, f.Links[1].PlaceSurcharge,
		f.Pools[0].Name, f.Pools[0].Model, joinTexts(f.Pools[0].Workers.Value), joinTexts(f.Pools[0].Tenants.Value),
		f.Pools[0].StayIn, f.Pools[0].MaxTransfer, f.Pools[0].TTFT, f.Pools[0].ITL,
		f.Tenants[0].Name, f.Tenants[0].Share, f.Tenants[0].MaxInflightTokens, len(f.Tenants[0].APIKeySHA256), len(f.Tenants[0].Networks),
	}
	want := []any{
		Sourced[Objective]{ObjectiveBalanced, Declared},
		5.0,
		Sourced[DelayLimit]{DelayLimit{0.5, 200 * time.Millisecond}, Declared},
		Sourced[IfInfeasible]{BestEffort, Declared},
		Sourced[time.Duration]{30 * time.Second, Declared},
		Sourced[time.Duration]{10 * time.Second, Declared},
		Sourced[[]string]{[]string{"thermal_throttle", "power_brake"}, Declared},
		"a1", "a", "gpu-0[1-3]",
		"rack a1 ↔ rack a1",
		Sourced[uint64]{12_500_000_000, Declared},
		Sourced[time.Duration]{20 * time.Microsecond, Declared},
		Sourced[TransferRule]{TransferAllow, Assumed},
		Sourced[time.Duration]{0, Assumed},
		"zone a ↔ zone b",
		Sourced[uint64]{1_250_000_000, Declared},
		Sourced[time.Duration]{12 * time.Millisecond, Declared},
		Sourced[TransferRule]{TransferNever, Declared},
		Sourced[time.Duration]{15 * time.Millisecond, Declared},
		"qwen3-32b", "Qwen/Qwen3-32B", "gpu-*/vllm-*", "*",
		Sourced[StayIn]{StayInZone, Declared},
		Sourced[time.Duration]{300 * time.Millisecond, Declared},
		Sourced[time.Duration]{2 * time.Second, Declared},
		Sourced[time.Duration]{80 * time.Millisecond, Declared},
		"team-a",
		Sourced[int]{3, Declared},
		Sourced[int64]{400000, Declared},
		1, 0,
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("-want +got\n%s", d)
	}
}

// TestDefaultsAreTheOnesShown: the values that the operator's file writes out
// as the defaults of policy are those of an empty file.
func TestDefaultsAreTheOnesShown(t *testing.T) {
	declared, assumed := mustFleet(t, readTestdata(t, "operator.toml")).Policy, mustFleet(t, "").Policy
	for i, d := range policyAttributes(&declared) {
		a := policyAttributes(&assumed)[i]
		if a.text != d.text || a.source != Assumed || d.source != Declared {
			t.Errorf("%s: assumed %q (%s), declared %q (%s)", a.name, a.text, a.source, d.text, d.source)
		}
	}
	if d := cmp.Diff(assumed, EmptyFleet().Policy); d != "" {
		t.Errorf("an empty file is not the empty fleet: %s", d)
	}
}

// TestFleetKeysAreComplete: the list that suggestions come from is what the
// parser asks for.
func TestFleetKeysAreComplete(t *testing.T) {
	text := "version = 1\n[policy]\n[policy.gpu]\n[policy.unplaceable_after]\n[[zone]]\n[[rack]]\n[[link]]\n[[group]]\n[[pool]]\n[[tenant]]\n"
	doc, top, err := openDocument("fleet.toml", text, false)
	if err != nil {
		t.Fatal(err)
	}
	var asked []string
	collect := func(s *section) {
		for _, k := range s.asked {
			asked = append(asked, s.dotted(k))
		}
	}
	policy := top.table("policy")
	readPolicy(policy)
	collect(policy)
	after, gpu := policy.table("unplaceable_after"), policy.table("gpu")
	asked = append(asked, after.dotted("agent_silent"), after.dotted("no_progress"))
	readGPUPolicy(gpu)
	collect(gpu)
	r := &reader{EmptyFleet(), doc.namesOf("zone"), doc.namesOf("rack"), doc.namesOf("tenant")}
	for key, read := range map[string]func(*section){
		"zone":   func(s *section) { r.zone(s) },
		"rack":   func(s *section) { r.rack(s) },
		"link":   func(s *section) { r.link(s) },
		"pool":   func(s *section) { r.pool(s) },
		"group":  func(s *section) { r.group(s) },
		"tenant": func(s *section) { r.tenant(s) },
	} {
		s := top.tables(key)[0]
		read(s)
		collect(s)
	}
	asked = append(asked, "version", "policy", "zone", "rack", "link", "group", "pool", "tenant", "pool.slo.ttft", "pool.slo.itl")
	slices.Sort(asked)
	asked = slices.Compact(asked)
	known := slices.Clone(fleetKeys)
	slices.Sort(known)
	if d := cmp.Diff(asked, known); d != "" {
		t.Errorf("-asked +known\n%s", d)
	}
}

// TestGPUConditionsAgree: the fleet file takes exactly the conditions that the
// judge of GPUs knows.
func TestGPUConditionsAgree(t *testing.T) {
	for _, c := range append(slices.Clone(gpuConditions), "xid:79,31") {
		if _, err := nvml.ParsePolicy([]string{c}, nil, nil); err != nil {
			t.Errorf("%s: %v", c, err)
		}
	}
	_, err := nvml.ParsePolicy([]string{"?"}, nil, nil)
	if err == nil {
		t.Fatal("the judge takes any condition")
	}
	_, list, _ := strings.Cut(err.Error(), " and ")
	for name := range strings.SplitSeq(list, ", ") {
		if !slices.Contains(gpuConditions, name) {
			t.Errorf("the judge knows %q, a fleet file may not name it", name)
		}
	}
}

func TestDeclaredConditionLeavesAssumedLists(t *testing.T) {
	f := mustFleet(t, `[policy.gpu]
exclude = ["xid:31", "thermal_throttle"]
`)
	want := GPUPolicy{
		Exclude: Sourced[[]string]{[]string{"xid:31", "thermal_throttle"}, Declared},
		Price:   Sourced[[]string]{[]string{"power_brake"}, Assumed},
		Ignore:  Sourced[[]string]{[]string{"xid:13,43,45,68,109", "ecc_corrected"}, Assumed},
	}
	if d := cmp.Diff(want, f.Policy.GPU); d != "" {
		t.Errorf("-want +got\n%s", d)
	}
	if _, err := nvml.ParsePolicy(f.Policy.GPU.Exclude.Value, f.Policy.GPU.Price.Value, f.Policy.GPU.Ignore.Value); err != nil {
		t.Errorf("the judge of GPUs refuses it: %v", err)
	}
}

func TestLenientParseKeepsWhatItKnows(t *testing.T) {
	text := readTestdata(t, "operator.toml") + "\n[future]\nkey = 1\n[[rack]]\nname = \"a2\"\nzone = \"a\"\ncooling = \"water\"\n"
	if _, err := ParseFleet("fleet.toml", text); err == nil {
		t.Error("a strict parse takes unknown keys")
	}
	f, err := parseFleet("fleet.toml", text, true)
	if err != nil {
		t.Fatal(err)
	}
	if len(f.Racks) != 2 || len(f.Pools) != 1 {
		t.Errorf("racks %d, pools %d", len(f.Racks), len(f.Pools))
	}
	if _, err := parseFleet("fleet.toml", "[policy]\nobjective = \"fast\"\n", true); err == nil {
		t.Error("a lenient parse takes a wrong value of a known key")
	}
}

func TestDiff(t *testing.T) {
	var old *Fleet
	datadriven.RunTest(t, "testdata/diff.txt", func(t *testing.T, d *datadriven.TestData) string {
		f := mustFleet(t, d.Input)
		if d.Cmd == "old" {
			old = f
			return ""
		}
		if self := Diff(f, mustFleet(t, d.Input)); len(self) > 0 {
			t.Errorf("%s: a file differs from itself: %v", d.Pos, self)
		}
		lines := Diff(old, f)
		if back := Diff(f, old); (len(back) == 0) != (len(lines) == 0) {
			t.Errorf("%s: %d lines there, %d back", d.Pos, len(lines), len(back))
		}
		return strings.Join(append(lines, ""), "\n")
	})
}

func TestHostPlace(t *testing.T) {
	f := mustFleet(t, `
[[zone]]
name = "a"
networks = ["10.0.0.0/8"]
[[zone]]
name = "b"
hosts = ["gpu-*"]
networks = ["10.1.0.0/16", "fd00::/8"]
[[rack]]
name = "a1"
zone = "a"
hosts = ["gpu-0[1-3]", "gpu-[10-12]"]
[[rack]]
name = "a2"
zone = "a"
hosts = ["gpu-0*"]
`)
	for host, want := range map[string]Place{
		"gpu-01":  {"gpu-01", "a1", "a", Declared},
		"gpu-11":  {"gpu-11", "a1", "a", Declared},
		"gpu-04":  {"gpu-04", "a2", "a", Declared},
		"gpu-13":  {"gpu-13", "", "b", Declared},
		"cpu-01":  {"cpu-01", "", "", NotSet},
		"gpu-1/x": {"gpu-1/x", "", "", NotSet},
	} {
		if got := f.HostPlace(host); got != want {
			t.Errorf("%s: %+v, want %+v", host, got, want)
		}
	}
	if got, want := EmptyFleet().HostPlace("x"), (Place{"x", "", DefaultZone, Assumed}); got != want {
		t.Errorf("without a topology: %+v, want %+v", got, want)
	}
	for addr, want := range map[string]string{"10.2.3.4": "a", "10.1.3.4": "b", "::ffff:10.1.3.4": "b", "fd00::1": "b", "192.168.0.1": ""} {
		if got, ok := f.ZoneOfAddr(netip.MustParseAddr(addr)); got != want || ok != (want != "") {
			t.Errorf("%s: zone %q %v, want %q", addr, got, ok, want)
		}
	}
}

func TestPathBetween(t *testing.T) {
	f := mustFleet(t, `
[[rack]]
name = "a1"
zone = "a"
hosts = ["a1-*"]
[[rack]]
name = "a2"
zone = "a"
hosts = ["a2-*"]
[[rack]]
name = "b1"
zone = "b"
hosts = ["b1-*"]
[[link]]
between = ["rack:a1", "rack:a1"]
bandwidth = "100Gbit/s"
latency = "20us"
[[link]]
between = ["zone:a", "zone:b"]
bandwidth = "10Gbit/s"
transfer = "never"
[[link]]
between = ["rack:b1", "zone:a"]
bandwidth = "8Gbit/s"
[[link]]
between = ["zone:b", "rack:a1"]
bandwidth = "4Gbit/s"
[[link]]
between = ["host:a1-1", "host:a1-1"]
bandwidth = "50GB/s"
[[link]]
between = ["host:a1-1", "host:a1-2"]
bandwidth = "25GB/s"
`)
	tests := []struct {
		a, b, name  string
		bytesPerSec uint64
		latency     time.Duration
		from        [2]Source // of bandwidth and latency
		transfer    TransferRule
	}{
		{"a1-3", "a1-4", "rack a1 ↔ rack a1", 12_500_000_000, 20 * time.Microsecond, [2]Source{Declared, Declared}, TransferAllow},
		{"a1-1", "a1-2", "host a1-1 ↔ host a1-2", 25_000_000_000, 100 * time.Microsecond, [2]Source{Declared, Assumed}, TransferAllow},
		{"a1-1", "a1-1", "host a1-1 ↔ host a1-1", 50_000_000_000, 20 * time.Microsecond, [2]Source{Declared, Assumed}, TransferAllow},
		// One rack's fast link does not make the inside of its hosts fast.
		{"a1-3", "a1-3", "same host", 1_250_000_000, 20 * time.Microsecond, [2]Source{Assumed, Assumed}, TransferAllow},
		{"a1-3", "a2-1", "same zone", 1_250_000_000, 100 * time.Microsecond, [2]Source{Assumed, Assumed}, TransferAllow},
		{"a2-1", "b1-1", "rack b1 ↔ zone a", 1_000_000_000, 10 * time.Millisecond, [2]Source{Declared, Assumed}, TransferAllow},
		// Two links name this path as closely as each other: the slower counts.
		{"a1-3", "b1-1", "zone b ↔ rack a1", 500_000_000, 10 * time.Millisecond, [2]Source{Declared, Assumed}, TransferAllow},
		{"a2-1", "?", "unknown zone", 125_000_000, 10 * time.Millisecond, [2]Source{Assumed, Assumed}, TransferAllow},
		{"?", "!", "unknown zone", 125_000_000, 10 * time.Millisecond, [2]Source{Assumed, Assumed}, TransferAllow},
	}
	for _, tt := range tests {
		for _, p := range []Path{f.Link(tt.a, tt.b), f.Link(tt.b, tt.a)} {
			if p.Name != tt.name || p.BandwidthBytesPerSec != (Sourced[uint64]{tt.bytesPerSec, tt.from[0]}) ||
				p.Latency != (Sourced[time.Duration]{tt.latency, tt.from[1]}) || p.Transfer.Value != tt.transfer {
				t.Errorf("%s – %s: %+v, want %+v", tt.a, tt.b, p, tt)
			}
		}
	}
	// A caller of which only the zone is known.
	if p := f.PathBetween(Place{Zone: "b"}, f.HostPlace("a2-1")); p.Name != "zone a ↔ zone b" || p.Transfer.Value != TransferNever {
		t.Errorf("zone b – a2-1: %+v", p)
	}
	if p := EmptyFleet().Link("x", "y"); p.Name != "same zone" || p.Source != Assumed {
		t.Errorf("without a topology: %+v", p)
	}
}

func TestPoolOf(t *testing.T) {
	f := mustFleet(t, `
[[tenant]]
name = "team-a"
[[pool]]
name = "narrow"
model = "m"
workers = ["gpu-01/vllm-*/0"]
tenants = ["team-*"]
[[pool]]
name = "wide"
model = "m"
workers = ["gpu-*/vllm-*"]
[[pool]]
name = "other"
model = "n"
`)
	for _, tt := range []struct{ worker, model, want, why string }{
		{"gpu-01/vllm-8000/0", "m", "narrow", ""},
		{"gpu-01/vllm-8000/1", "m", "wide", ""},
		{"gpu-07/vllm-8000/0", "m", "wide", ""},
		{"gpu-07/sglang-30000/0", "m", "", "pool narrow serves m but its workers are gpu-01/vllm-*/0"},
		{"anything/at-all/0", "n", "other", ""},
		{"gpu-01/vllm-8000/0", "o", "", "no pool serves o; pools are for m, n"},
		{"gpu-01/vllm-8000/0", "", "", "the served model is not known yet"},
	} {
		got := ""
		if p := f.PoolOf(tt.worker, tt.model); p != nil {
			got = p.Name
		}
		if why := f.WhyNoPool(tt.worker, tt.model); got != tt.want || why != tt.why {
			t.Errorf("%s %s: pool %q because %q, want %q, %q", tt.worker, tt.model, got, why, tt.want, tt.why)
		}
	}
	if p := EmptyFleet().PoolOf("a/b/0", "Org/Model"); p == nil || p.Name != "Org/Model" || p.Source != Assumed || !p.AdmitsTenant("x") {
		t.Errorf("without a file: %+v", p)
	}
	narrow, _ := f.Pool("narrow")
	if narrow == nil || !narrow.AdmitsTenant("team-a") || narrow.AdmitsTenant("default") {
		t.Errorf("narrow admits the wrong tenants: %+v", narrow)
	}
	if got := f.Tenant(""); got.Name != DefaultTenant || got.Share.Value != 1 || got.Share.Source != Assumed {
		t.Errorf("the default tenant is %+v", got)
	}
	if _, limited := f.Tenant("team-a").MaxInflightTokens.Get(); limited {
		t.Error("a limit nobody set is in force")
	}
}

// A salt belongs to its tenant: who has salts of its own uses no others, and
// nobody else uses those.
func TestSaltsBelongToTheirTenant(t *testing.T) {
	f, err := ParseFleet("fleet.toml", "[[tenant]]\nname = \"a\"\ncache_salts = [\"a-*\", \"shared\"]\n[[tenant]]\nname = \"b\"\n[[tenant]]\nname = \"c\"\ncache_salts = [\"c\"]\n")
	if err != nil {
		t.Fatal(err)
	}
	const others, ownOnly = "this cache salt belongs to another tenant", "tenant a has cache salts of its own and uses no others: a-* shared"
	for _, c := range []struct{ tenant, salt, want string }{
		{"a", "a-1", ""},
		{"a", "shared", ""},
		{"a", "", ownOnly},
		{"a", "c", ownOnly},
		{"a", "free", ownOnly},
		{"b", "", ""},
		{"b", "free", ""},
		{"b", "a-1", others},
		{"b", "c", others},
		{"", "shared", others},
		{"", "", ""},
		{"made-up", "c", others},
	} {
		if got := f.SaltFault(c.tenant, c.salt); got != c.want {
			t.Errorf("tenant %q, salt %q: %q, want %q", c.tenant, c.salt, got, c.want)
		}
	}
	if got := EmptyFleet().SaltFault("a", "x"); got != "" {
		t.Errorf("without a file: %q", got)
	}
}
