package ctl

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"github.com/spf13/cobra"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"waypost/coordinator/api"
	rule "waypost/coordinator/placement"
	waypostv1 "waypost/proto/waypost/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fleet answers as a coordinator of the fictional fleet in the reference
// screens would. Its answers are JSON in testdata, so that the API's field
// names are part of what the golden files hold.
type fleet struct {
	waypostv1.UnimplementedPlacementServiceServer
	waypostv1.UnimplementedOperatorServiceServer
	t *testing.T
}

func load[M proto.Message](f fleet, name string, m M) M {
	b, err := os.ReadFile(filepath.Join("testdata", name+".json"))
	if err != nil {
		f.t.Error(err)
		return m
	}
	if err := protojson.Unmarshal(b, m); err != nil {
		f.t.Errorf("%s: %v", name, err)
	}
	return m
}

func (f fleet) ListWorkers(_ context.Context, r *waypostv1.ListWorkersRequest) (*waypostv1.ListWorkersResponse, error) {
	all := load(f, "workers", &waypostv1.ListWorkersResponse{})
	out := &waypostv1.ListWorkersResponse{}
	for _, w := range all.GetWorkers() {
		if (r.Name == nil || r.GetName() == w.GetName()) && (r.Pool == nil || r.GetPool() == w.GetPool()) {
			out.Workers = append(out.Workers, w)
		}
	}
	return out, nil
}

func (f fleet) ListMembers(context.Context, *waypostv1.ListMembersRequest) (*waypostv1.ListMembersResponse, error) {
	return load(f, "members", &waypostv1.ListMembersResponse{}), nil
}

func (f fleet) ListHosts(context.Context, *waypostv1.ListHostsRequest) (*waypostv1.ListHostsResponse, error) {
	return load(f, "hosts", &waypostv1.ListHostsResponse{}), nil
}

func (f fleet) ListGpus(context.Context, *waypostv1.ListGpusRequest) (*waypostv1.ListGpusResponse, error) {
	return load(f, "gpus", &waypostv1.ListGpusResponse{}), nil
}

func (f fleet) AckGpu(_ context.Context, r *waypostv1.AckGpuRequest) (*waypostv1.AckGpuResponse, error) {
	out := &waypostv1.AckGpuResponse{Gpu: r.Gpu, Uuid: proto.String("GPU-c04d"), Verdict: proto.String("ok")}
	switch r.GetGpu() {
	case "gpu-02/1":
		out.Xids = []uint32{79}
	case "gpu-01/0":
	case "gpu-09/1":
		return nil, api.Unavailable("host gpu-09 has no lane to this coordinator")
	default:
		return nil, api.NotFound("gpu", "no such GPU was seen on gpu-02 (ok); see: waypost gpus gpu-02")
	}
	return out, nil
}

func (f fleet) Doctor(_ context.Context, r *waypostv1.DoctorRequest) (*waypostv1.DoctorResponse, error) {
	all := load(f, "doctor", &waypostv1.DoctorResponse{})
	switch r.GetHost() {
	case "":
		return all, nil
	case "gpu-01":
		// What is left has no problem.
		return &waypostv1.DoctorResponse{Checks: all.GetChecks()[4:], AnsweredBy: all.AnsweredBy}, nil
	}
	return nil, api.NotFound("host", "no host "+r.GetHost())
}

func (f fleet) ListCoordinators(context.Context, *waypostv1.ListCoordinatorsRequest) (*waypostv1.ListCoordinatorsResponse, error) {
	return load(f, "coordinators", &waypostv1.ListCoordinatorsResponse{}), nil
}

func (f fleet) InspectWorker(_ context.Context, r *waypostv1.InspectWorkerRequest) (*waypostv1.InspectWorkerResponse, error) {
	name := map[string]string{"gpu-01/vllm-8000/0": "inspect", "gpu-02/vllm-8000/0": "inspect-differs", "gpu-03/vllm-8000/0": "inspect-new"}[r.GetWorker()]
	switch {
	case name == "":
		return nil, api.NotFound("worker", "no worker")
	case name == "inspect-new" && r.GetVerify():
		return nil, api.Unavailable("the agent of host gpu-03 has no lane to this coordinator nor to another, so nobody can ask it; see: waypost members gpu-03")
	}
	m := load(f, name, &waypostv1.InspectWorkerResponse{})
	if !r.GetVerify() {
		m.Comparison = nil
	}
	return m, nil
}

func (f fleet) GetBoundary(_ context.Context, r *waypostv1.GetBoundaryRequest) (*waypostv1.GetBoundaryResponse, error) {
	all := load(f, "boundary", &waypostv1.GetBoundaryResponse{})
	out := &waypostv1.GetBoundaryResponse{}
	for _, p := range all.GetPools() {
		if r.Pool == nil || r.GetPool() == p.GetPool() {
			out.Pools = append(out.Pools, p)
		}
	}
	if r.Pool != nil && len(out.GetPools()) == 0 {
		return nil, api.NotFound("pool", "no pool of that name; see: waypost status")
	}
	return out, nil
}

func (f fleet) GetTopology(_ context.Context, r *waypostv1.GetTopologyRequest) (*waypostv1.GetTopologyResponse, error) {
	if r.From == nil {
		return load(f, "topology", &waypostv1.GetTopologyResponse{}), nil
	}
	for field, name := range map[string]string{"from": r.GetFrom(), "to": r.GetTo()} {
		if !strings.HasPrefix(name, "gpu-0") {
			return nil, api.NotFound(field, fmt.Sprintf("no worker of %q is here; see: waypost workers", name))
		}
	}
	return load(f, "topology-prices", &waypostv1.GetTopologyResponse{}), nil
}

func (f fleet) ProbeLink(_ context.Context, r *waypostv1.ProbeLinkRequest) (*waypostv1.ProbeLinkResponse, error) {
	switch {
	case r.GetFrom() != "gpu-01" && r.GetFrom() != "gpu-02":
		return nil, api.NotFound("from", fmt.Sprintf("no host %q; see: waypost hosts", r.GetFrom()))
	case r.GetTo() == "gpu-03":
		return nil, api.Unavailable("host gpu-03 has no lane to this coordinator, so its agent cannot be asked; see: waypost members gpu-03")
	case r.GetMaxBytes() != 1<<30 || r.GetMaxMs() != 2000:
		return nil, api.BadField("max_bytes", fmt.Sprintf("asked for %v bytes in %v ms", r.GetMaxBytes(), r.GetMaxMs()))
	}
	return load(f, "topology-probe", &waypostv1.ProbeLinkResponse{}), nil
}

func (f fleet) GetStatus(context.Context, *waypostv1.GetStatusRequest) (*waypostv1.GetStatusResponse, error) {
	return load(f, "status", &waypostv1.GetStatusResponse{}), nil
}

func (f fleet) GetFleet(context.Context, *waypostv1.GetFleetRequest) (*waypostv1.GetFleetResponse, error) {
	return &waypostv1.GetFleetResponse{Version: proto.Uint32(7), Toml: proto.String("version = 1\n"), AppliedBy: proto.String("anna"), AppliedAt: proto.String("2026-01-01T00:00:00Z"), Message: proto.String("RoCE links")}, nil
}

func (f fleet) PutFleet(_ context.Context, r *waypostv1.PutFleetRequest) (*waypostv1.PutFleetResponse, error) {
	if r.GetBaseVersion() != 7 {
		return nil, api.Conflict("base_version", fmt.Sprintf("fleet.toml was made from version %d, the fleet is at 7; run: waypost fleet diff", r.GetBaseVersion()))
	}
	if r.GetDryRun() {
		return load(f, "fleet-diff", &waypostv1.PutFleetResponse{}), nil
	}
	return &waypostv1.PutFleetResponse{Version: proto.Uint32(8), Changes: []string{"+ pool  qwen3-32b  max_transfer 300ms"}, AppliedOn: proto.Uint32(3), Coordinators: proto.Uint32(3)}, nil
}

func (f fleet) CordonTarget(_ context.Context, r *waypostv1.CordonTargetRequest) (*waypostv1.CordonTargetResponse, error) {
	if r.GetSelector() == "gpu-09" {
		return nil, api.Unavailable("no leader: 1 of 3 voters reachable; on gpu-09 itself nothing changes")
	}
	resp := &waypostv1.CordonTargetResponse{Workers: []string{"gpu-02/vllm-8000/0"}}
	resp.AppliedOn, resp.PendingOn = confirmedBy(r.GetReason())
	return resp, nil
}

func (f fleet) UncordonTarget(_ context.Context, r *waypostv1.UncordonTargetRequest) (*waypostv1.UncordonTargetResponse, error) {
	resp := &waypostv1.UncordonTargetResponse{Removed: proto.Bool(r.GetSelector() == "gpu-02"), Workers: []string{"gpu-02/vllm-8000/0"}}
	if !r.GetDryRun() {
		resp.AppliedOn, resp.PendingOn = confirmedBy(r.GetReason())
	}
	return resp, nil
}

// confirmedBy are the coordinators that confirm a change and those that do not, by
// its reason: one is cut off, none answers in time, or a server does not say.
func confirmedBy(reason string) (applied, pending []string) {
	switch all := []string{"c-gpu-01", "c-gpu-02", "c-gpu-03"}; reason {
	case "cut":
		return all[:2], all[2:]
	case "slow":
		return nil, all
	case "untold":
		return nil, nil
	default:
		return all, nil
	}
}

func (f fleet) Place(_ context.Context, r *waypostv1.PlaceRequest) (*waypostv1.PlaceResponse, error) {
	if r.GetPool() == "none" {
		return load(f, "refused", &waypostv1.PlaceResponse{}), nil
	}
	if r.GetPool() == "lama" {
		return nil, api.NotFound("pool", `no pool "lama"; pools: qwen3-32b`)
	}
	rec := load(f, "record", &waypostv1.PlacementRecord{})
	return &waypostv1.PlaceResponse{Answer: &waypostv1.PlaceResponse_Placement{Placement: rec.GetPlacement()}}, nil
}

func (f fleet) GetPlacement(_ context.Context, r *waypostv1.GetPlacementRequest) (*waypostv1.GetPlacementResponse, error) {
	switch r.GetPlacementId() {
	case "pl_c2_gone":
		return nil, api.Unavailable("record is on c-gpu-02, lost 4 min ago")
	case "pl_c1_old":
		return nil, api.NotFound("placement_id", "no record of pl_c1_old is kept (any more); records are kept for 1h0m0s")
	case "pl_c1_large":
		rec := load(f, "record", &waypostv1.PlacementRecord{})
		b := rec.GetPlacement().GetBasis()
		b.UnpricedWorkers, b.ExcludedWorkers = proto.Uint32(1936), map[string]uint32{"cordoned": 12, "gpu_fault": 1}
		return &waypostv1.GetPlacementResponse{Record: rec}, nil
	case "pl_c1_refused":
		return &waypostv1.GetPlacementResponse{Record: load(f, "record-refused", &waypostv1.PlacementRecord{})}, nil
	case "pl_c1_moved":
		return &waypostv1.GetPlacementResponse{Record: load(f, "record-moved", &waypostv1.PlacementRecord{})}, nil
	case "pl_c1_spare":
		rec := load(f, "record", &waypostv1.PlacementRecord{})
		rec.GetPlacement().Pull = &waypostv1.PullPlan{
			Source: &waypostv1.WorkerRef{Name: proto.String("gpu-02/vllm-8000/0")}, Tokens: proto.Uint32(5120), TransferMs: proto.Float64(61), OnlyIfGone: proto.Bool(true),
		}
		chosen := rec.GetPlacement().GetTerms()[0]
		chosen.PullMs, chosen.PullNote, chosen.DoubtMs = proto.Float64(170), proto.String(rule.PullSpare.String()), proto.Float64(4)
		chosen.OwnMs, chosen.TotalMs = proto.Float64(269), proto.Float64(386)
		return &waypostv1.GetPlacementResponse{Record: rec}, nil
	}
	return &waypostv1.GetPlacementResponse{Record: load(f, "record", &waypostv1.PlacementRecord{})}, nil
}

func (f fleet) ListPlacements(_ context.Context, r *waypostv1.ListPlacementsRequest) (*waypostv1.ListPlacementsResponse, error) {
	switch r.GetRequestId() {
	case "nobody":
		return &waypostv1.ListPlacementsResponse{}, nil
	case "chatcmpl-91bb":
		return &waypostv1.ListPlacementsResponse{Records: []*waypostv1.PlacementRecord{load(f, "record-refused", &waypostv1.PlacementRecord{})}}, nil
	}
	return &waypostv1.ListPlacementsResponse{Records: []*waypostv1.PlacementRecord{load(f, "record", &waypostv1.PlacementRecord{})}}, nil
}

func (f fleet) SummarizePlacements(_ context.Context, r *waypostv1.SummarizePlacementsRequest) (*waypostv1.SummarizePlacementsResponse, error) {
	if r.GetPool() == "none" {
		return &waypostv1.SummarizePlacementsResponse{}, nil
	}
	return load(f, "summary", &waypostv1.SummarizePlacementsResponse{}), nil
}

func (f fleet) WatchPlacements(r *waypostv1.WatchPlacementsRequest, stream waypostv1.PlacementService_WatchPlacementsServer) error {
	if r.GetTenant() == "crowd" {
		return status.Error(codes.ResourceExhausted, "too many watch this coordinator already; ask another one")
	}
	rec := load(f, "record", &waypostv1.PlacementRecord{})
	placed := proto.CloneOf(rec)
	placed.Outcome, placed.ReuseClass = nil, nil
	rec.ReuseClass, rec.Provisional, rec.Outcome.CachedTokens = proto.String("evicted_since_view"), proto.Bool(true), proto.Uint32(0)
	return errors.Join(
		stream.Send(&waypostv1.WatchPlacementsResponse{Kind: proto.String("placed"), Record: placed}),
		stream.Send(&waypostv1.WatchPlacementsResponse{Kind: proto.String("outcome"), Record: rec, Missed: proto.Uint32(3)}))
}

func (f fleet) Watch(r *waypostv1.WatchRequest, stream waypostv1.OperatorService_WatchServer) error {
	send := func(kind, rev string, ageMs float64, level, event, message string, fields map[string]string) error {
		m := &waypostv1.WatchResponse{Kind: &kind, Rev: &rev}
		if event != "" {
			m.Event = &waypostv1.Event{Event: &event, Level: &level, Message: &message, AgeMs: &ageMs, At: proto.String("2026-10-01T10:00:00Z"), Fields: fields}
		}
		return stream.Send(m)
	}
	var errs error
	if r.After != nil {
		errs = stream.Send(&waypostv1.WatchResponse{Kind: proto.String("restart")})
	}
	return errors.Join(errs,
		send("events", "c1.1", 600_000, "WARN", "host_lost", "lane down", map[string]string{"host": "gpu-03", "error": "connection reset by peer", "coordinator": "c-gpu-01"}),
		send("events", "c1.2", 1000, "INFO", "engine_restarted", "engine restarted", map[string]string{"worker": "gpu-02/vllm-8000/0", "old": "17", "new": "18"}),
		send("synced", "c1.2", 0, "", "", "", nil),
		send("events", "c1.3", 0, "INFO", "cordoned", "cordoned", map[string]string{"target": "gpu-02", "by": "anna", "reason": ""}))
}

func (f fleet) ExplainWorker(_ context.Context, r *waypostv1.ExplainWorkerRequest) (*waypostv1.ExplainWorkerResponse, error) {
	switch r.GetWorker() {
	case "gpu-01/vllm-8000/0":
		return load(f, "why", &waypostv1.ExplainWorkerResponse{}), nil
	case "gpu-02/vllm-8000/0":
		return load(f, "failing", &waypostv1.ExplainWorkerResponse{}), nil
	case "gpu-03/vllm-8000/0":
		return load(f, "unpriced", &waypostv1.ExplainWorkerResponse{}), nil
	}
	return nil, api.NotFound("worker", "no worker "+r.GetWorker())
}

func (f fleet) GetReuse(_ context.Context, r *waypostv1.GetReuseRequest) (*waypostv1.GetReuseResponse, error) {
	if r.GetPool() != "" {
		// Its requests come as text.
		out := load(f, "reuse", &waypostv1.GetReuseResponse{})
		state := "on"
		if r.GetPool() == "mistral" {
			state = "off: 13% of its latest predictions were wrong, as with chat templates that move text"
		}
		out.Pools[0].Pool, out.Pools[0].Memo = r.Pool, &waypostv1.MemoReuse{
			State: &state, Lookups: new(21_112.), Hits: new(19_004.), Learnt: map[string]float64{"engine": 20_700, "render": 212, "tokenize": 200}, PromptTokens: new(78e6),
			KnownTokens: new(72.7e6), CoveredTokens: new(71.9e6), OverTokens: new(14_500.), Bytes: new(9.4e6), Opened: new(0.), Epochs: new(0.),
		}
		return out, nil
	}
	return load(f, "reuse", &waypostv1.GetReuseResponse{}), nil
}

func (f fleet) ReportOutcome(_ context.Context, r *waypostv1.ReportOutcomeRequest) (*waypostv1.ReportOutcomeResponse, error) {
	return &waypostv1.ReportOutcomeResponse{Joined: proto.Bool(true), ReuseClass: proto.String("as_predicted")}, nil
}

// run executes one command line and returns what a person would see.
func run(t *testing.T, sockets []string, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	root := &cobra.Command{Use: "waypost"}
	noTLS := func(string, string, string) (*tls.Config, error) { return nil, errors.New("no TLS in this test") }
	root.AddCommand(Commands(Options{Version: "0.0.0-test", ClientTLS: noTLS, Sockets: sockets})...)
	var out, errOut bytes.Buffer
	root.SetOut(&out)
	root.SetErr(&errOut)
	code = Execute(t.Context(), root, args, &errOut)
	return out.String(), errOut.String(), code
}

// serveFleet serves the fictional fleet and returns its address.
func serveFleet(t *testing.T, f fleet) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer()
	waypostv1.RegisterPlacementServiceServer(s, f)
	waypostv1.RegisterOperatorServiceServer(s, f)
	done := make(chan error, 1)
	go func() { done <- s.Serve(l) }()
	t.Cleanup(func() {
		s.Stop()
		<-done
	})
	return l.Addr().String()
}

// TestScreens runs the command lines in testdata/screens against the fictional
// fleet; what is printed, and the exit code, are the golden part.
func TestScreens(t *testing.T) {
	addr := serveFleet(t, fleet{t: t})
	dead, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	deadAddr := dead.Addr().String()
	_ = dead.Close()

	datadriven.Walk(t, "testdata/screens", func(t *testing.T, path string) {
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			args := strings.Fields(d.Input)
			switch d.Cmd {
			case "waypost":
				args = append(args, "--addr", addr)
			case "nobody":
				args = append(args, "--addr", deadAddr)
			case "unset":
			default:
				d.Fatalf(t, "unknown directive %s", d.Cmd)
			}
			stdout, stderr, code := run(t, []string{"/nonexistent.sock"}, args...)
			if stderr != "" {
				stderr = "stderr: " + stderr
			}
			all := plainJSON(t, stdout) + stderr + fmt.Sprintf("exit %d\n", code)
			return strings.ReplaceAll(all, deadAddr, "HOST:PORT")
		})
	})
}

// plainJSON takes out the blanks that the encoder puts in at will, so that
// nobody relies on where they are.
func plainJSON(t *testing.T, out string) string {
	lines := strings.SplitAfter(out, "\n")
	for i, line := range lines {
		if !strings.HasPrefix(line, "{\"") {
			continue
		}
		var b bytes.Buffer
		if err := json.Compact(&b, []byte(line)); err != nil {
			t.Errorf("%v: %s", err, line)
			continue
		}
		lines[i] = b.String() + "\n"
	}
	return strings.Join(lines, "")
}

func TestEveryCommandHelps(t *testing.T) {
	var walk func(c *cobra.Command)
	walk = func(c *cobra.Command) {
		if c.Runnable() && (c.Example == "" || c.Short == "") {
			t.Errorf("%s has no example or no short help", c.CommandPath())
		}
		if c.Runnable() && c.Flags().Lookup("json") == nil && c.PersistentFlags().Lookup("json") == nil && c.InheritedFlags().Lookup("json") == nil {
			t.Errorf("%s has no --json", c.CommandPath())
		}
		for _, sub := range c.Commands() {
			walk(sub)
		}
	}
	for _, c := range Commands(Options{Version: "x"}) {
		walk(c)
	}
}

func TestNearest(t *testing.T) {
	if got := nearest("gpu-2", []string{"gpu-01", "gpu-02"}); got != "gpu-02" {
		t.Errorf("got %q", got)
	}
	if got := nearest("zzz", []string{"gpu-01"}); got != "" {
		t.Errorf("got %q for something unlike all names", got)
	}
}

// TestInspectPrintsTheAPIsJSON: field for field, and the exit code is that of
// the table.
func TestInspectPrintsTheAPIsJSON(t *testing.T) {
	f := fleet{t: t}
	addr := serveFleet(t, f)
	for worker, want := range map[string]struct {
		file string
		code int
	}{"gpu-01/vllm-8000/0": {"inspect", ExitOK}, "gpu-02/vllm-8000/0": {"inspect-differs", ExitFailed}} {
		stdout, _, code := run(t, nil, "inspect", "stream", worker, "--verify", "--json", "--addr", addr)
		got := &waypostv1.InspectWorkerResponse{}
		if err := protojson.Unmarshal([]byte(stdout), got); err != nil {
			t.Fatalf("%v in %s", err, stdout)
		}
		if !proto.Equal(got, load(f, want.file, &waypostv1.InspectWorkerResponse{})) || code != want.code {
			t.Errorf("%s: exit %d, %v", worker, code, got)
		}
	}
	// What is not known is null, not 0.
	stdout, _, _ := run(t, nil, "inspect", "stream", "gpu-03/vllm-8000/0", "--json", "--addr", addr)
	var m map[string]any
	if err := json.Unmarshal([]byte(stdout), &m); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"epoch", "seq", "runs", "streamKeys", "ageMs", "lastResyncMs", "comparison"} {
		if v, ok := m[name]; !ok || v != nil {
			t.Errorf("%s is %v", name, v)
		}
	}
	// A name can be completed.
	stdout, _, _ = run(t, nil, "__complete", "--addr", addr, "inspect", "index", "")
	if !strings.Contains(stdout, "gpu-02/vllm-8000/0\n") {
		t.Errorf("completion: %s", stdout)
	}
}

// TestTopologyPrintsTheAPIsJSON: field for field, with null for what is not
// known, and names of its flags can be completed.
func TestTopologyPrintsTheAPIsJSON(t *testing.T) {
	f := fleet{t: t}
	addr := serveFleet(t, f)
	for file, args := range map[string][]string{"topology": nil, "topology-prices": {"--from", "gpu-01", "--to", "gpu-02"}} {
		stdout, _, code := run(t, nil, append([]string{"topology", "--json", "--addr", addr}, args...)...)
		got := &waypostv1.GetTopologyResponse{}
		if err := protojson.Unmarshal([]byte(stdout), got); err != nil {
			t.Fatalf("%v in %s", err, stdout)
		}
		if !proto.Equal(got, load(f, file, &waypostv1.GetTopologyResponse{})) || code != ExitOK {
			t.Errorf("%s: exit %d, %v", file, code, got)
		}
	}
	stdout, _, _ := run(t, nil, "topology", "--json", "--addr", addr)
	if !strings.Contains(stdout, `"measuredBytesPerSec":null`) {
		t.Errorf("a bandwidth that nobody measured is not null: %s", stdout)
	}
	stdout, _, _ = run(t, nil, "__complete", "--addr", addr, "topology", "--from", "")
	if !strings.Contains(stdout, "gpu-02/vllm-8000/0\n") {
		t.Errorf("completion: %s", stdout)
	}
}

// Where the rate of reading from host memory comes from is shown: what is assumed,
// and the link that the driver tells of.
func TestHostTierText(t *testing.T) {
	for want, h := range map[string]*waypostv1.HostTierFacts{
		"reused, 131.1 kB per token at 18.0 GB/s (assumed; PCIe 5.0 x16 by NVML)": {KvBytesPerToken: proto.Float64(131072), LinkBytesPerSec: proto.Float64(18e9), LinkSource: proto.String("assumed"), Link: proto.String("PCIe 5.0 x16")},
		"not counted (hybrid model)":                  {KvBytesPerToken: proto.Float64(131072), LinkSource: proto.String("assumed"), Uncounted: proto.String("hybrid model")},
		"reused, ? per token at 50.0 GB/s (declared)": {LinkBytesPerSec: proto.Float64(5e10), LinkSource: proto.String("declared")},
	} {
		if got := hostTierText(h); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
