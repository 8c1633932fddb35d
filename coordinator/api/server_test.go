package api

import (
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	waypostv1 "waypost/proto/waypost/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fakes answer with what they were asked, so that a test sees the way in and
// the way out.
type fakePlacement struct {
	waypostv1.UnimplementedPlacementServiceServer
	place func(context.Context, *waypostv1.PlaceRequest) (*waypostv1.PlaceResponse, error)
}

func (f fakePlacement) Place(ctx context.Context, r *waypostv1.PlaceRequest) (*waypostv1.PlaceResponse, error) {
	return f.place(ctx, r)
}

func (fakePlacement) GetPlacement(_ context.Context, r *waypostv1.GetPlacementRequest) (*waypostv1.GetPlacementResponse, error) {
	return nil, NotFound("placement_id", "no placement "+r.GetPlacementId())
}

func (fakePlacement) RenewPlacement(_ context.Context, r *waypostv1.RenewPlacementRequest) (*waypostv1.RenewPlacementResponse, error) {
	return &waypostv1.RenewPlacementResponse{ReservationTtlMs: proto.Float64(float64(len(r.GetPlacementId())))}, nil
}

func (fakePlacement) ListPlacements(_ context.Context, r *waypostv1.ListPlacementsRequest) (*waypostv1.ListPlacementsResponse, error) {
	return &waypostv1.ListPlacementsResponse{Records: []*waypostv1.PlacementRecord{{Tenant: r.Tenant, AgeMs: r.SinceMs}}}, nil
}

func (fakePlacement) SummarizePlacements(_ context.Context, r *waypostv1.SummarizePlacementsRequest) (*waypostv1.SummarizePlacementsResponse, error) {
	return &waypostv1.SummarizePlacementsResponse{Pools: []*waypostv1.DecisionSummary{{Pool: r.Pool, Placed: proto.Uint32(uint32(r.GetSinceMs()))}}}, nil
}

type fakeOperator struct {
	waypostv1.UnimplementedOperatorServiceServer
}

func (fakeOperator) ListWorkers(_ context.Context, r *waypostv1.ListWorkersRequest) (*waypostv1.ListWorkersResponse, error) {
	return &waypostv1.ListWorkersResponse{Workers: []*waypostv1.Worker{{Name: proto.String("gpu-01/vllm-8000/0"), Pool: r.Pool}}}, nil
}

func (fakeOperator) GetReuse(_ context.Context, r *waypostv1.GetReuseRequest) (*waypostv1.GetReuseResponse, error) {
	return &waypostv1.GetReuseResponse{Pools: []*waypostv1.PoolReuse{{Pool: r.Pool, Requests: proto.Uint32(uint32(r.GetSinceMs()))}}}, nil
}

func (fakeOperator) ExplainWorker(_ context.Context, r *waypostv1.ExplainWorkerRequest) (*waypostv1.ExplainWorkerResponse, error) {
	return &waypostv1.ExplainWorkerResponse{Worker: &waypostv1.Worker{Name: r.Worker}, Considered: proto.Uint32(uint32(r.GetSinceMs()))}, nil
}

func (fakeOperator) CordonTarget(ctx context.Context, r *waypostv1.CordonTargetRequest) (*waypostv1.CordonTargetResponse, error) {
	return &waypostv1.CordonTargetResponse{Cordon: &waypostv1.Cordon{Selector: r.Selector, Reason: r.Reason, By: proto.String(CallerOf(ctx).Name)}}, nil
}

func (fakeOperator) PutFleet(_ context.Context, r *waypostv1.PutFleetRequest) (*waypostv1.PutFleetResponse, error) {
	return nil, Conflict("base_version", "fleet.toml was made from version 5, the fleet is at 7; run: waypost fleet diff")
}

type served struct {
	url  string
	conn *grpc.ClientConn
}

func serve(t *testing.T, role Role, place func(context.Context, *waypostv1.PlaceRequest) (*waypostv1.PlaceResponse, error)) served {
	t.Helper()
	return serveWith(t, role, fakePlacement{place: place})
}

func serveWith(t *testing.T, role Role, placement waypostv1.PlacementServiceServer) served {
	t.Helper()
	opt := DefaultOptions()
	opt.Placement, opt.Operator = placement, fakeOperator{}
	opt.Clear = Caller{Name: "tester", Role: role}
	opt.BodyLimitBytes = 64 << 10
	s, err := New(opt)
	if err != nil {
		t.Fatal(err)
	}
	listen := func() net.Listener {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	g, h := listen(), listen()
	done := make(chan error, 1)
	go func() { done <- s.Serve(g, h) }()
	conn, err := grpc.NewClient("passthrough:///"+g.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		http.DefaultClient.CloseIdleConnections()
		_ = conn.Close()
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := s.Stop(ctx); err != nil {
			t.Error(err)
		}
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return served{"http://" + h.Addr().String(), conn}
}

func (s served) do(t *testing.T, method, path, body string) (int, string, http.Header) {
	t.Helper()
	req, err := http.NewRequest(method, s.url+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	return resp.StatusCode, strings.TrimSpace(string(b)), resp.Header
}

// compact removes the random spaces protojson puts in.
func compact(t *testing.T, s string) string {
	t.Helper()
	var v any
	if err := json.Unmarshal([]byte(s), &v); err != nil {
		t.Fatalf("%q is not JSON: %v", s, err)
	}
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestPlaceOverHTTP(t *testing.T) {
	var got *waypostv1.PlaceRequest
	s := serve(t, RolePlacer, func(_ context.Context, r *waypostv1.PlaceRequest) (*waypostv1.PlaceResponse, error) {
		got = proto.CloneOf(r) // its ids are its own only until the call ends
		return &waypostv1.PlaceResponse{Answer: &waypostv1.PlaceResponse_Placement{Placement: &waypostv1.Placement{
			PlacementId: proto.String("pl_c1_x"), Expected: &waypostv1.Expected{FirstTokenMs: proto.Float64(0)},
		}}}, nil
	})
	code, body, _ := s.do(t, "POST", "/v1/place", `{"pool":"p","input":{"tokenIds":[3,2,1]},"deadlineMs":5000}`)
	if code != 200 || len(got.GetInput().GetTokenIds()) != 3 || got.GetDeadlineMs() != 5000 || !got.GetReserve() || got.GetAttempt() != 1 {
		t.Fatalf("code %d, request %v", code, got)
	}
	b := compact(t, body)
	for _, want := range []string{`"placementId":"pl_c1_x"`, `"reuseTokens":null`, `"firstTokenMs":0`, `"pull":null`} {
		if !strings.Contains(b, want) {
			t.Errorf("answer %s lacks %s", b, want)
		}
	}
}

func TestRefusalOverHTTP(t *testing.T) {
	for reason, want := range map[string]int{"all_over_limit": 429, "none_eligible": 503} {
		s := serve(t, RolePlacer, func(context.Context, *waypostv1.PlaceRequest) (*waypostv1.PlaceResponse, error) {
			return &waypostv1.PlaceResponse{Answer: &waypostv1.PlaceResponse_Refused{Refused: &waypostv1.Refusal{
				Reason: proto.String(reason), RetryAfterMs: proto.Float64(850),
			}}}, nil
		})
		code, body, head := s.do(t, "POST", "/v1/place", `{"input":{"tokenIds":[1]}}`)
		if code != want || head.Get("Retry-After") != "1" || !strings.Contains(compact(t, body), `"reason":"`+reason+`"`) {
			t.Errorf("%s: %d %v %s", reason, code, head, body)
		}
	}
}

func TestBadRequestsNameTheField(t *testing.T) {
	s := serve(t, RoleAdmin, nil)
	for _, c := range []struct {
		method, path, body string
		status             int
		field, detail      string
	}{
		{"POST", "/v1/place", `{"input":{"tokenIds":[-4]}}`, 400, "input.token_ids[0]", "-4 is not a token id"},
		{"POST", "/v1/place", `{"inputs":{}}`, 400, "body", `unknown field "inputs"`},
		{"POST", "/v1/place", `{"input":`, 400, "body", "unexpected"},
		{"POST", "/v1/place", strings.Repeat(" ", 70<<10), 413, "body", "over 65536 bytes"},
		{"GET", "/v1/workers?pol=x", "", 400, "pol", "unknown parameter; known are [host name pool state]"},
		{"GET", "/v1/placements?since=soon", "", 400, "since", `"soon" is not a duration`},
		{"GET", "/v1/placements?limit=-1", "", 400, "limit", "not a number"},
		{"GET", "/v1/placements/pl_c1_z", "", 404, "placement_id", "no placement pl_c1_z"},
		{"POST", "/v1/placements/pl_c1_z:eat", "", 404, "path", `unknown verb "eat"`},
		{"POST", "/v1/targets/gpu-02:eat", "", 404, "path", "use :cordon, :uncordon or :drain"},
		{"PUT", "/v1/fleet?base=5", "version = 1", 409, "base_version", "the fleet is at 7"},
		{"GET", "/v1/nothing", "", 404, "path", "not a route"},
		{"DELETE", "/v1/workers", "", 404, "path", "not a route"},
	} {
		code, body, head := s.do(t, c.method, c.path, c.body)
		var p Problem
		if err := json.Unmarshal([]byte(body), &p); err != nil {
			t.Fatalf("%s %s: %d %q", c.method, c.path, code, body)
		}
		if code != c.status || p.Status != c.status || p.Field != c.field || !strings.Contains(p.Detail, c.detail) || head.Get("Content-Type") != "application/problem+json" {
			t.Errorf("%s %s: got %d %+v", c.method, c.path, code, p)
		}
	}
}

func TestTargetsHoldSlashes(t *testing.T) {
	s := serve(t, RoleOperator, nil)
	code, body, _ := s.do(t, "POST", "/v1/targets/gpu-02/vllm-8000/0:cordon?reason=fan", "")
	if b := compact(t, body); code != 200 || !strings.Contains(b, `"selector":"gpu-02/vllm-8000/0"`) || !strings.Contains(b, `"by":"tester"`) {
		t.Errorf("%d %s", code, b)
	}
	code, body, _ = s.do(t, "POST", "/v1/placements/pl_c1_abc:renew", "")
	if code != 200 || !strings.Contains(compact(t, body), `"reservationTtlMs":9`) {
		t.Errorf("%d %s", code, body)
	}
	code, body, _ = s.do(t, "GET", "/v1/placements?tenant=team-a&since=10m", "")
	if b := compact(t, body); code != 200 || !strings.Contains(b, `"ageMs":600000`) || !strings.Contains(b, `"tenant":"team-a"`) {
		t.Errorf("%d %s", code, b)
	}
}

// TestRoles walks every method of both services: what is not listed needs the
// highest role.
func TestRoles(t *testing.T) {
	ctx := t.Context()
	asks := []struct {
		need Role
		call func(*grpc.ClientConn) error
	}{
		{RoleViewer, func(c *grpc.ClientConn) error {
			_, err := waypostv1.NewOperatorServiceClient(c).ListWorkers(ctx, &waypostv1.ListWorkersRequest{})
			return err
		}},
		{RolePlacer, func(c *grpc.ClientConn) error {
			_, err := waypostv1.NewPlacementServiceClient(c).Place(ctx, &waypostv1.PlaceRequest{})
			return err
		}},
		{RoleOperator, func(c *grpc.ClientConn) error {
			_, err := waypostv1.NewOperatorServiceClient(c).CordonTarget(ctx, &waypostv1.CordonTargetRequest{})
			return err
		}},
		{RoleAdmin, func(c *grpc.ClientConn) error {
			_, err := waypostv1.NewOperatorServiceClient(c).PutFleet(ctx, &waypostv1.PutFleetRequest{})
			if status.Code(err) == codes.Aborted {
				return nil
			}
			return err
		}},
	}
	for role := RoleNone; role <= RoleAdmin; role++ {
		s := serve(t, role, func(context.Context, *waypostv1.PlaceRequest) (*waypostv1.PlaceResponse, error) {
			return &waypostv1.PlaceResponse{}, nil
		})
		for _, a := range asks {
			want := codes.OK
			if role < a.need {
				want = codes.PermissionDenied
			}
			if role == RoleNone {
				want = codes.Unauthenticated
			}
			if got := status.Code(a.call(s.conn)); got != want {
				t.Errorf("role %s, need %s: %v, want %v", role, a.need, got, want)
			}
		}
		wantHTTP := 200
		if role == RoleNone {
			wantHTTP = 401
		}
		if code, _, _ := s.do(t, "GET", "/v1/workers", ""); code != wantHTTP {
			t.Errorf("role %s: HTTP %d, want %d", role, code, wantHTTP)
		}
	}
	for _, d := range []grpc.ServiceDesc{waypostv1.PlacementService_ServiceDesc, waypostv1.OperatorService_ServiceDesc} {
		for _, m := range d.Methods {
			if _, ok := needs["/"+d.ServiceName+"/"+m.MethodName]; !ok {
				t.Errorf("%s/%s has no role: decide who may call it", d.ServiceName, m.MethodName)
			}
		}
	}
}

func TestHealth(t *testing.T) {
	s := serve(t, RoleNone, nil)
	for _, p := range []string{"/healthz", "/readyz"} {
		if code, body, _ := s.do(t, "GET", p, ""); code != 200 {
			t.Errorf("%s: %d %s", p, code, body)
		}
	}
}
