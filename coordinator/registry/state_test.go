package registry

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "write golden files anew")

func sprint(format string, args ...any) string { return fmt.Sprintf(format, args...) }

var noon = time.Date(2026, 10, 20, 12, 0, 0, 0, time.UTC)

func stamp(id string) Stamp {
	return Stamp{RequestID: id, At: noon, By: "anna", Via: "c-gpu-01"}
}

func encode(t testing.TB, id string, body Body) []byte {
	t.Helper()
	cmd, err := Encode(stamp(id), body)
	if err != nil {
		t.Fatal(err)
	}
	return cmd
}

// apply applies a command that must end well.
func apply(t testing.TB, s *State, id string, body Body) (*State, Result) {
	t.Helper()
	next, r := s.Apply(encode(t, id, body))
	if err := r.Err(); err != nil {
		t.Fatalf("%s %+v: %v", id, body, err)
	}
	return next, r
}

func selectors(cordons []Cordon) string {
	var out []string
	for _, c := range cordons {
		out = append(out, c.Selector)
	}
	return strings.Join(out, " ")
}

func TestPutFleetComparesVersions(t *testing.T) {
	s, r := apply(t, Empty(), "1", PutFleet{TOML: "[policy]\nobjective = \"throughput\"\n", Message: "first"})
	if r.FleetVersion != 1 || s.Fleet().Policy.Objective.Value != ObjectiveThroughput || s.FleetFile().By != "anna" || !s.FleetFile().At().Equal(noon) {
		t.Fatalf("%+v, file %+v", r, s.FleetFile())
	}
	for v := range uint32(6) {
		s, _ = apply(t, s, sprint("to %d", v+2), PutFleet{TOML: sprint("# %d", v), BaseVersion: v + 1})
	}
	before := s.Hash()
	next, r := s.Apply(encode(t, "late", PutFleet{TOML: "# late", BaseVersion: 5}))
	if want := "fleet.toml was made from version 5, the fleet is at 7; run: waypost fleet diff"; r.Message != want || !errors.Is(r.Err(), ErrConflict) || r.Err().Error() != want {
		t.Errorf("conflict is %+v, want %q", r, want)
	}
	if r.FleetVersion != 7 || r.Changed || next.Revision() != s.Revision() || next.FleetFile() != s.FleetFile() {
		t.Errorf("a conflict changed something: %+v", r)
	}
	if s.Hash() != before {
		t.Error("Apply changed the state it was called on")
	}
	next, r = apply(t, s, "same", PutFleet{TOML: "# 5", BaseVersion: 7})
	if r.Changed || r.FleetVersion != 7 || next.FleetFile().Version != 7 {
		t.Errorf("the same text again made %+v", r)
	}
}

func TestFleetHistoryIsBounded(t *testing.T) {
	s := Empty()
	for v := range uint32(FleetVersions + 5) {
		s, _ = apply(t, s, sprint("%d", v), PutFleet{TOML: sprint("# %d", v), BaseVersion: v})
	}
	files := s.FleetFiles()
	if len(files) != FleetVersions || files[0].Version != 6 || files[FleetVersions-1] != s.FleetFile() || s.FleetFile().TOML != "# 14" {
		t.Errorf("%d files, %+v … %+v", len(files), files[0], files[len(files)-1])
	}
}

// TestUnreadableFleetIsKept: a file that a newer coordinator let in and this one
// cannot read is stored all the same, and said to be unreadable.
func TestUnreadableFleetIsKept(t *testing.T) {
	body, err := marshal(PutFleet{TOML: "[policy]\nobjective = \"fairness\"\n"})
	if err != nil {
		t.Fatal(err)
	}
	text, err := marshal(envelope{KindPutFleet, "1", noon.UnixMilli(), "anna", "", body})
	if err != nil {
		t.Fatal(err)
	}
	s, r := Empty().Apply(append([]byte{commandVersion}, text...))
	if r.Err() != nil || s.FleetFile().Version != 1 {
		t.Fatalf("%+v", r)
	}
	if err := s.FleetProblem(); err == nil || !strings.Contains(err.Error(), "fleet version 1 cannot be read") || !strings.Contains(err.Error(), "fairness") {
		t.Errorf("problem is %v", err)
	}
	restored, err := DecodeSnapshot(s.AppendSnapshot(nil))
	if err != nil || restored.FleetProblem() == nil || restored.Fleet() == nil {
		t.Errorf("restored: %v, problem %v", err, restored.FleetProblem())
	}
	s, _ = apply(t, s, "2", PutFleet{BaseVersion: 1})
	if s.FleetProblem() != nil {
		t.Errorf("the problem outlives the file: %v", s.FleetProblem())
	}
}

func TestCordonsFor(t *testing.T) {
	const gpu, gpu2 = "GPU-8a1f0000-0000-0000-0000-000000000001", "GPU-8a1f0000-0000-0000-0000-000000000002"
	s := Empty()
	for i, c := range []SetCordon{
		{Selector: "gpu-02", Drain: true},
		{Selector: "gpu-03/vllm-8000", GPUUUIDs: []string{gpu}, Model: "m"},
		{Selector: "gpu-04/vllm-8000/1"},
		{Selector: strings.ToUpper(gpu2[:4]) + strings.ToUpper(gpu2[4:])},
		{Selector: "nothing-yet"},
	} {
		c.Reason = "fan swap INC-431"
		var r Result
		s, r = apply(t, s, sprint("%d", i), c)
		if r.Cordon == nil || r.Cordon.By != "anna" || r.Cordon.Reason != c.Reason || !r.Cordon.At().Equal(noon) || r.Cordon.Drain != c.Drain {
			t.Errorf("%s: cordon %+v", c.Selector, r.Cordon)
		}
	}
	for _, tt := range []struct {
		worker, model string
		gpus          []string
		want          string
	}{
		{"gpu-02/vllm-8000/0", "", nil, "gpu-02"},
		{"gpu-02/other/3", "x", nil, "gpu-02"},
		{"gpu-021/vllm-8000/0", "", nil, ""},
		{"gpu-03/vllm-8000/0", "", nil, "gpu-03/vllm-8000"},
		{"gpu-03/vllm-80001/0", "m", nil, ""},
		// The engine came back on another port.
		{"gpu-03/vllm-8001/0", "m", []string{gpu}, "gpu-03/vllm-8000"},
		{"gpu-03/vllm-8001/0", "other model", []string{gpu}, ""},
		{"gpu-03/vllm-8001/0", "", []string{gpu}, ""},
		{"gpu-09/vllm-8000/0", "m", []string{gpu}, ""}, // the GPU moved to another host: not that engine
		{"gpu-04/vllm-8000/1", "", nil, "gpu-04/vllm-8000/1"},
		{"gpu-04/vllm-8000/0", "", nil, ""},
		{"gpu-04/vllm-8000/10", "", nil, ""},
		{"gpu-07/vllm-8000/0", "", []string{gpu2}, gpu2},
		{"gpu-02/vllm-8000/0", "", []string{gpu2, gpu2, "?"}, gpu2 + " gpu-02"},
		{"nothing-yet/vllm-8000/0", "", nil, "nothing-yet"},
	} {
		if got := selectors(s.CordonsFor(tt.worker, tt.model, tt.gpus)); got != tt.want {
			t.Errorf("%s %q %v: %q, want %q", tt.worker, tt.model, tt.gpus, got, tt.want)
		}
	}
	if got := Empty().CordonsFor("gpu-02/vllm-8000/0", "", nil); got != nil {
		t.Errorf("no cordons, but %v", got)
	}
}

func TestCordonSetAgainKeepsWhatIsKnown(t *testing.T) {
	const gpu = "GPU-8a1f0000-0000-0000-0000-000000000001"
	s, _ := apply(t, Empty(), "1", SetCordon{Selector: "h/vllm-8000", Reason: "a", Drain: true, GPUUUIDs: []string{gpu}, Model: "m"})
	s, r := apply(t, s, "2", SetCordon{Selector: "h/vllm-8000", Reason: "b"})
	if got := selectors(s.CordonsFor("h/vllm-9000/0", "m", []string{gpu})); got != "h/vllm-8000" {
		t.Errorf("after the second cordon the moved engine has cordons %q", got)
	}
	if len(s.Cordons()) != 1 || r.Cordon.Reason != "b" || r.Cordon.Drain {
		t.Errorf("cordons %+v", s.Cordons())
	}
}

func TestUncordon(t *testing.T) {
	s, _ := apply(t, Empty(), "1", SetCordon{Selector: "gpu-02", Reason: "x"})
	s, _ = apply(t, s, "2", SetCordon{Selector: "gpu-02/vllm-8000", Reason: "y"})
	s, r := apply(t, s, "3", RemoveCordon{Selector: "gpu-02", Reason: "done"})
	if !r.Removed || r.Cordon.Reason != "x" || selectors(s.Cordons()) != "gpu-02/vllm-8000" {
		t.Errorf("%+v, left %q", r, selectors(s.Cordons()))
	}
	revision := s.Revision()
	s, r = apply(t, s, "4", RemoveCordon{Selector: "gpu-02"})
	if r.Removed || r.Changed || s.Revision() != revision {
		t.Errorf("a second uncordon: %+v", r)
	}
}

func TestCoordinatorNumbersAreNeverReused(t *testing.T) {
	reg := func(n int) RegisterCoordinator {
		return RegisterCoordinator{ID: sprint("id-%d", n), Name: sprint("c-%d", n), ClusterAddress: sprint("10.0.0.%d:7711", n), APIAddress: sprint("10.0.0.%d:7712", n), Voter: true}
	}
	s, r1 := apply(t, Empty(), "1", reg(1))
	s, r2 := apply(t, s, "2", reg(2))
	s, again := apply(t, s, "2 again", reg(2))
	moved := reg(2)
	moved.ClusterAddress = "10.0.9.9:7711"
	s, r2moved := apply(t, s, "2 moved", moved)
	if r1.Number != 1 || r2.Number != 2 || again.Number != 2 || again.Changed || r2moved.Number != 2 || !r2moved.Changed {
		t.Errorf("numbers %d %d %d %d", r1.Number, r2.Number, again.Number, r2moved.Number)
	}
	if c, ok := s.Coordinator("id-2"); !ok || c.ClusterAddress != "10.0.9.9:7711" {
		t.Errorf("the new address is not there: %+v", c)
	}
	for id, body := range map[string]RegisterCoordinator{
		"name":    {ID: "id-9", Name: "c-1", ClusterAddress: "10.0.0.9:7711"},
		"address": {ID: "id-9", Name: "c-9", ClusterAddress: "10.0.0.1:7711"},
	} {
		_, r := s.Apply(encode(t, id, body))
		if !errors.Is(r.Err(), ErrRefused) || !strings.Contains(r.Message, "waypost coordinators remove c-1") {
			t.Errorf("%s of another is taken: %+v", id, r)
		}
	}
	s, r := apply(t, s, "remove", RemoveCoordinator{ID: "id-2"})
	if !r.Removed || r.Number != 2 {
		t.Errorf("%+v", r)
	}
	if _, r := s.Apply(encode(t, "back", reg(2))); !errors.Is(r.Err(), ErrRefused) || !strings.Contains(r.Message, "was removed by anna") {
		t.Errorf("a removed coordinator returned: %+v", r)
	}
	_, r3 := apply(t, s, "3", reg(3))
	if r3.Number != 3 {
		t.Errorf("the next number is %d, 2 was given before", r3.Number)
	}
}

func TestFeatureLevelRises(t *testing.T) {
	if _, err := Encode(stamp("x"), SetFeatureLevel{SupportedFeatureLevel + 1}); !errors.Is(err, ErrInvalid) {
		t.Errorf("a level this version does not know was proposed: %v", err)
	}
	raise := func(level uint32) []byte {
		return []byte(sprint("\x01"+`{"kind":"set_feature_level","request_id":"%d","at_ms":0,"by":"a","body":{"level":%d}}`, level, level))
	}
	s, r := Empty().Apply(raise(3))
	if r.Err() != nil || s.FeatureLevel() != 3 {
		t.Fatalf("%+v", r)
	}
	s, r = s.Apply(raise(2))
	if !errors.Is(r.Err(), ErrRefused) || s.FeatureLevel() != 3 {
		t.Errorf("back to 2: %+v", r)
	}
}

func TestClusterIsNamedOnce(t *testing.T) {
	s, _ := apply(t, Empty(), "1", InitCluster{"c1", "default"})
	s, r := apply(t, s, "2", InitCluster{"c1", "other"})
	if r.Changed || s.FleetName() != "default" {
		t.Errorf("%+v %q", r, s.FleetName())
	}
	if s, r = s.Apply(encode(t, "3", InitCluster{"c2", "default"})); !errors.Is(r.Err(), ErrRefused) || s.ClusterID() != "c1" {
		t.Errorf("%+v %q", r, s.ClusterID())
	}
}

func TestRetryGetsTheFirstAnswer(t *testing.T) {
	put := PutFleet{TOML: "# a", BaseVersion: 0}
	s, first := apply(t, Empty(), "wish-1", put)
	s, _ = apply(t, s, "wish-2", PutFleet{TOML: "# b", BaseVersion: 1})
	// The same wish through another coordinator, later.
	late := stamp("wish-1")
	late.At, late.Via = noon.Add(time.Minute), "c-gpu-02"
	cmd, err := Encode(late, put)
	if err != nil {
		t.Fatal(err)
	}
	before := s.Hash()
	s, again := s.Apply(cmd)
	first.Duplicate = true
	if d := cmp.Diff(first, again); d != "" {
		t.Errorf("-first +again\n%s", d)
	}
	if s.Hash() != before || s.FleetFile().TOML != "# b" {
		t.Error("a retry changed the state")
	}
	// A conflict is an answer too.
	s, conflict := s.Apply(encode(t, "wish-3", put))
	_, again = s.Apply(encode(t, "wish-3", put))
	if conflict.Code != CodeConflict || again.Code != CodeConflict || !again.Duplicate {
		t.Errorf("%+v, again %+v", conflict, again)
	}
	if _, r := s.Apply(encode(t, "wish-1", PutFleet{TOML: "# c", BaseVersion: 2})); !errors.Is(r.Err(), ErrRequestReused) {
		t.Errorf("another change under a used request id: %+v", r)
	}
}

func TestDedupWindowIsBounded(t *testing.T) {
	s := Empty()
	for i := range DedupWindow + 1 {
		s, _ = s.Apply(encode(t, sprint("%d", i), RemoveCordon{Selector: "x"}))
	}
	if s.answers.size != DedupWindow {
		t.Errorf("%d answers kept", s.answers.size)
	}
	if _, r := s.Apply(encode(t, "1", RemoveCordon{Selector: "x"})); !r.Duplicate {
		t.Error("the oldest of the window is forgotten")
	}
	if _, r := s.Apply(encode(t, "0", RemoveCordon{Selector: "x"})); r.Duplicate {
		t.Error("one beyond the window is remembered")
	}
}

func TestAuditIsBoundedAndComplete(t *testing.T) {
	s := Empty()
	const n = AuditEntries + 30
	for i := range n {
		s, _ = s.Apply(encode(t, sprint("%d", i), SetCordon{Selector: "gpu-02", Reason: sprint("r%d", i), Drain: i == n-1}))
	}
	all := s.Audit(n)
	if len(all) != AuditEntries || all[0].Revision != 31 || all[len(all)-1].Revision != n {
		t.Fatalf("%d entries, %+v … %+v", len(all), all[0], all[len(all)-1])
	}
	want := AuditEntry{n, noon.UnixMilli(), "anna", "c-gpu-01", KindSetCordon, sprint("drain gpu-02: r%d", n-1)}
	if got := s.Audit(1); len(got) != 1 || got[0] != want || !got[0].At().Equal(noon) {
		t.Errorf("newest is %+v, want %+v", got, want)
	}
}

func TestCordonsAreBounded(t *testing.T) {
	s := Empty()
	sorted := make([]Cordon, MaxCordons)
	for i := range sorted {
		sorted[i] = Cordon{Selector: sprint("host-%05d", i), By: "a", Reason: "r"}
	}
	full := *s
	full.cordons = newCordonSet(sorted)
	if _, r := full.Apply(encode(t, "1", SetCordon{Selector: "one-more", Reason: "r"})); !errors.Is(r.Err(), ErrRefused) {
		t.Errorf("%+v", r)
	}
	if _, r := full.Apply(encode(t, "2", SetCordon{Selector: "host-00000", Reason: "again"})); r.Err() != nil {
		t.Errorf("one that is there cannot be set again: %+v", r)
	}
}

func TestUnreadableCommandsChangeNothing(t *testing.T) {
	s, _ := apply(t, Empty(), "1", SetCordon{Selector: "gpu-02", Reason: "x"})
	good := string(encode(t, "2", SetCordon{Selector: "gpu-03", Reason: "x"}))
	for name, tt := range map[string]struct {
		cmd  string
		code Code
		want string
	}{
		"empty":            {"", CodeUnknown, "it is empty"},
		"newer format":     {"\x02" + good[1:], CodeUnknown, "format 2, this version reads format 1"},
		"newer kind":       {"\x01" + `{"kind":"teleport","request_id":"3","at_ms":0,"by":"a","body":{}}`, CodeUnknown, `kind "teleport"`},
		"newer field":      {strings.Replace(good, `"reason":`, `"until":3,"reason":`, 1), CodeInvalid, "until"},
		"not JSON":         {"\x01{", CodeInvalid, "command"},
		"two values":       {good + good[1:], CodeInvalid, "data after the end"},
		"not UTF-8":        {strings.Replace(good, "gpu-03", "gpu-\xff", 1), CodeInvalid, "not UTF-8"},
		"no request id":    {strings.Replace(good, `"request_id":"2"`, `"request_id":""`, 1), CodeInvalid, "request_id: it is empty"},
		"no author":        {strings.Replace(good, `"by":"anna"`, `"by":" "`, 1), CodeInvalid, "by: it is empty"},
		"no reason":        {strings.Replace(good, `"reason":"x"`, `"reason":""`, 1), CodeInvalid, "reason: it is empty"},
		"bad selector":     {strings.Replace(good, `"gpu-03"`, `"gpu-03//0"`, 1), CodeInvalid, "selector"},
		"before 1970":      {strings.Replace(good, `"at_ms":`, `"at_ms":-`, 1), CodeInvalid, "at:"},
		"control in text":  {strings.Replace(good, `"reason":"x"`, `"reason":"a\nb"`, 1), CodeInvalid, "control character"},
		"too long":         {good + strings.Repeat(" ", MaxCommandBytes), CodeInvalid, "at most"},
		"body is missing":  {strings.Replace(good, `"body":{`, `"bodx":{`, 1), CodeInvalid, "bodx"},
		"a reason too far": {strings.Replace(good, `"reason":"x"`, `"reason":"`+strings.Repeat("x", 513)+`"`, 1), CodeInvalid, "reason: it has 513 bytes, at most 512"},
	} {
		next, r := s.Apply([]byte(tt.cmd))
		if next != s || r.Code != tt.code || !strings.Contains(r.Message, tt.want) || r.Err() == nil {
			t.Errorf("%s: %+v, want %s with %q", name, r, tt.code, tt.want)
		}
	}
}

func TestEncodeNamesTheField(t *testing.T) {
	for want, body := range map[string]Body{
		"cluster_id":      InitCluster{Fleet: "x"},
		"toml":            PutFleet{TOML: strings.Repeat("#", MaxFleetBytes+1)},
		"objective":       PutFleet{TOML: "[policy]\nobjective = \"x\"\n"},
		"selector":        SetCordon{Selector: "a/b/c/d", Reason: "x"},
		"rank":            SetCordon{Selector: "a/b/01", Reason: "x"},
		"reason":          SetCordon{Selector: "a"},
		"gpu_uuids[0]":    SetCordon{Selector: "a/b", Reason: "x", GPUUUIDs: []string{"0"}},
		"gpu_uuids: they": SetCordon{Selector: "a", Reason: "x", Model: "m"},
		"name":            RegisterCoordinator{ID: "i", Name: "-", ClusterAddress: "h:1"},
		"cluster_address": RegisterCoordinator{ID: "i", Name: "n", ClusterAddress: "10.0.0.1"},
		"api_address":     RegisterCoordinator{ID: "i", Name: "n", ClusterAddress: "[fd00::1]:7711", APIAddress: "[fd00::1:7712"},
		"level":           SetFeatureLevel{},
	} {
		if _, err := Encode(stamp("1"), body); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want it to name %s", body, err, want)
		}
	}
	if _, err := Encode(Stamp{RequestID: "1", By: "a"}, RemoveCordon{Selector: "x"}); err == nil || !strings.Contains(err.Error(), "at:") {
		t.Errorf("a stamp without time: %v", err)
	}
}

func TestResultTravels(t *testing.T) {
	s, _ := apply(t, Empty(), "1", SetCordon{Selector: "gpu-02", Reason: "x"})
	_, r := s.Apply(encode(t, "2", RemoveCordon{Selector: "gpu-02"}))
	b, err := r.Encode()
	if err != nil {
		t.Fatal(err)
	}
	back, err := DecodeResult(b)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(r, back); d != "" {
		t.Errorf("-sent +received\n%s", d)
	}
	for _, bad := range []string{"", "\x02{}", "\x01{}", "\x01{", "\x01" + `{"code":"ok","x":1}`} {
		if _, err := DecodeResult([]byte(bad)); err == nil {
			t.Errorf("%q is taken", bad)
		}
	}
}

// sample is a state with something of everything.
func sample(t testing.TB) *State {
	s := Empty()
	for i, body := range []Body{
		InitCluster{"6b1f1f0e-9a51-4a53-8a4e-0a8f1ad6a7f1", "default"},
		RegisterCoordinator{ID: "id-1", Name: "c-gpu-01", ClusterAddress: "10.0.0.11:7711", APIAddress: "10.0.0.11:7712", Voter: true},
		RegisterCoordinator{ID: "id-2", Name: "c-gpu-02", ClusterAddress: "[fd00::12]:7711"},
		PutFleet{TOML: readTestdata(t, "operator.toml"), Message: "RoCE links"},
		SetCordon{Selector: "gpu-02", Reason: "fan swap INC-431", Drain: true},
		SetCordon{Selector: "gpu-03/vllm-8000", Reason: "<slow> & \"hot\"", GPUUUIDs: []string{"GPU-8a1f0000-0000-0000-0000-000000000001"}, Model: "m"},
		RemoveCoordinator{ID: "id-2"},
		RemoveCordon{Selector: "gpu-02", Reason: "done"},
	} {
		s, _ = apply(t, s, sprint("request-%d", i), body)
	}
	s, r := s.Apply(encode(t, "conflict", PutFleet{TOML: "# other"}))
	if r.Code != CodeConflict {
		t.Fatalf("%+v", r)
	}
	return s
}

// TestGolden pins the bytes of a snapshot and of each kind of command: other
// versions read them. A difference needs a new format number, not a new file.
func TestGolden(t *testing.T) {
	commands := bytes.Buffer{}
	for i, body := range []Body{
		InitCluster{"c", "default"},
		PutFleet{"# <a>", 3, "m"},
		SetCordon{"h/e/0", "r", true, []string{"GPU-8a1f0000-0000-0000-0000-000000000001"}, "m"},
		RemoveCordon{"h", "r"},
		RegisterCoordinator{"i", "n", "h:1", "h:2", true},
		RemoveCoordinator{"i"},
		SetFeatureLevel{1},
	} {
		fmt.Fprintf(&commands, "%q\n", encode(t, sprint("%d", i), body))
	}
	for name, got := range map[string][]byte{"snapshot-v1.golden": sample(t).AppendSnapshot(nil), "commands-v1.golden": commands.Bytes()} {
		path := "testdata/" + name
		if *update {
			if err := os.WriteFile(path, got, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(string(want), string(got)); d != "" {
			t.Errorf("%s: -golden +now\n%s", name, d)
		}
	}
	old, err := os.ReadFile("testdata/snapshot-v1.golden")
	if err != nil {
		t.Fatal(err)
	}
	s, err := DecodeSnapshot(old)
	if err != nil {
		t.Fatal(err)
	}
	if s.Hash() != sample(t).Hash() {
		t.Error("the golden snapshot decodes to another state")
	}
}

func TestDamagedSnapshots(t *testing.T) {
	good := string(sample(t).AppendSnapshot(nil))
	for name, bad := range map[string]string{
		"empty":          "",
		"newer format":   strings.Replace(good, "waypost-registry 1\n", "waypost-registry 2\n", 1),
		"cut":            good[:len(good)/2],
		"newer field":    strings.Replace(good, `"revision":`, `"colour":1,"revision":`, 1),
		"more after":     good + "{}",
		"number reused":  strings.Replace(good, `"next_number":3`, `"next_number":1`, 1),
		"level 0":        strings.Replace(good, `"feature_level":1`, `"feature_level":0`, 1),
		"audit ahead":    strings.Replace(good, `"revision":8,"feature`, `"revision":2,"feature`, 1),
		"selector":       strings.Replace(good, `"cordons":[{"selector":"gpu-03/vllm-8000"`, `"cordons":[{"selector":"gpu-03//0"`, 1),
		"fleet version":  strings.Replace(good, `"fleet_files":[{"version":1`, `"fleet_files":[{"version":0`, 1),
		"request twice":  strings.Replace(good, `{"request_id":"request-1"`, `{"request_id":"request-0"`, 1),
		"uuid shouted":   strings.Replace(good, `"gpu_uuids":["GPU-8a1f`, `"gpu_uuids":["GPU-8A1F`, 1),
		"too many bytes": good + strings.Repeat(" ", MaxSnapshotBytes),
	} {
		if bad == good {
			t.Fatalf("%s: the damage missed", name)
		}
		if _, err := DecodeSnapshot([]byte(bad)); !errors.Is(err, ErrSnapshot) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
