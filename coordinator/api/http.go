package api

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"strconv"
	"strings"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	waypostv1 "waypost/proto/waypost/v1"
)

// jsonOut writes unset fields as null, so that unknown is seen.
var jsonOut = protojson.MarshalOptions{EmitUnpopulated: true}

// MarshalJSON returns a message as the API writes it.
func MarshalJSON(m proto.Message) ([]byte, error) { return jsonOut.Marshal(m) }

func (s *Server) routes() *http.ServeMux {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/place", s.httpPlace)
	mux.HandleFunc("POST /v1/place:batch", s.httpPlaceBatch)
	mux.HandleFunc("POST /v1/outcome", s.httpOutcome)
	mux.HandleFunc("POST /v1/placements/{idverb}", s.httpPlacementVerb)
	mux.HandleFunc("GET /v1/placements/{id}", s.httpGetPlacement)
	mux.HandleFunc("GET /v1/placements", s.httpListPlacements)
	mux.HandleFunc("GET /v1/placements:summary", s.httpSummary)
	mux.HandleFunc("GET /v1/watch", s.httpWatch)
	mux.HandleFunc("GET /v1/reuse", s.httpReuse)
	mux.HandleFunc("GET /v1/workers/{workerverb...}", s.httpExplainWorker)
	mux.HandleFunc("GET /v1/status", s.httpStatus)
	mux.HandleFunc("GET /v1/workers", s.httpWorkers)
	mux.HandleFunc("GET /v1/hosts", s.httpHosts)
	mux.HandleFunc("GET /v1/gpus", s.httpGPUs)
	mux.HandleFunc("POST /v1/gpus/{gpuverb...}", s.httpGPU)
	mux.HandleFunc("GET /v1/doctor", s.httpDoctor)
	mux.HandleFunc("GET /v1/members", s.httpMembers)
	mux.HandleFunc("GET /v1/coordinators", s.httpCoordinators)
	mux.HandleFunc("GET /v1/inspect", s.httpInspect)
	mux.HandleFunc("GET /v1/boundary", s.httpBoundary)
	mux.HandleFunc("GET /v1/topology", s.httpTopology)
	mux.HandleFunc("POST /v1/topology:probe", s.httpProbeLink)
	mux.HandleFunc("GET /v1/fleet", s.httpGetFleet)
	mux.HandleFunc("PUT /v1/fleet", s.httpPutFleet)
	mux.HandleFunc("POST /v1/targets/{targetverb...}", s.httpTarget)
	mux.HandleFunc("GET /healthz", s.httpHealthz)
	mux.HandleFunc("GET /readyz", s.httpReadyz)
	if s.opt.Metrics != nil {
		mux.Handle("GET /metrics", s.opt.Metrics)
	}
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		writeError(w, NotFound("path", fmt.Sprintf("%s %s is not a route of this API", r.Method, r.URL.Path)))
	})
	return mux
}

// guard keeps a web page from using a browser on this machine as its way to an
// API in clear, which has no other protection than being on loopback.
func (s *Server) guard(next http.Handler) http.Handler {
	if s.opt.Credentials != nil {
		return next
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		host := r.Host
		if h, _, err := net.SplitHostPort(host); err == nil {
			host = h
		}
		ip := net.ParseIP(strings.Trim(host, "[]"))
		if host != "localhost" && (ip == nil || !ip.IsLoopback()) {
			writeError(w, Denied(fmt.Sprintf("host %q: this API is in clear and for this machine only; ask for 127.0.0.1", r.Host)))
			return
		}
		if o := r.Header.Get("Origin"); o != "" && o != "http://"+r.Host {
			writeError(w, Denied(fmt.Sprintf("origin %q: pages of other origins may not use this API", o)))
			return
		}
		next.ServeHTTP(w, r)
	})
}

func writeMessage(w http.ResponseWriter, code int, m proto.Message) {
	b, err := jsonOut.Marshal(m)
	if err != nil {
		writeError(w, err)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	// The connection may be gone; there is nobody left to tell.
	_, _ = w.Write(append(b, '\n'))
}

// trustedLength is the room made for a body before any of it was read.
const trustedLength = 256 << 10

// body reads a request body within the limit.
func (s *Server) body(w http.ResponseWriter, r *http.Request) ([]byte, bool) {
	return s.bodyInto(new(bytes.Buffer), w, r)
}

// maxPooledBody bounds the memory that is kept of one body.
const maxPooledBody = 1 << 20

// bodyInto is body in memory of the caller's.
func (s *Server) bodyInto(b *bytes.Buffer, w http.ResponseWriter, r *http.Request) ([]byte, bool) {
	// A claimed length is believed up to a point: the rest must have come.
	b.Grow(int(min(max(r.ContentLength, 0), trustedLength)) + bytes.MinRead)
	_, err := b.ReadFrom(http.MaxBytesReader(w, r.Body, s.opt.BodyLimitBytes))
	if err == nil {
		return b.Bytes(), true
	}
	var tooLong *http.MaxBytesError
	if errors.As(err, &tooLong) {
		writeProblem(w, Problem{
			Type: problemType + "body-limit", Title: "body too large", Status: http.StatusRequestEntityTooLarge,
			Field: "body", Detail: fmt.Sprintf("the body is over %d bytes; raise [api] body_limit or send token ids as base64", s.opt.BodyLimitBytes),
		})
		return nil, false
	}
	writeError(w, BadField("body", err.Error()))
	return nil, false
}

// decode reads a JSON body into m.
func (s *Server) decode(w http.ResponseWriter, r *http.Request, m proto.Message) bool {
	b, ok := s.body(w, r)
	if !ok {
		return false
	}
	if err := protojson.Unmarshal(b, m); err != nil {
		writeError(w, badJSON(err))
		return false
	}
	return true
}

// placeRequest reads the body of a placement request.
func (s *Server) placeRequest(w http.ResponseWriter, r *http.Request) (*waypostv1.PlaceRequest, bool) {
	room, ok := s.bodies.Get().(*bytes.Buffer)
	if !ok {
		room = new(bytes.Buffer)
	}
	defer func() {
		if room.Reset(); room.Cap() <= maxPooledBody {
			s.bodies.Put(room)
		}
	}()
	b, ok := s.bodyInto(room, w, r)
	if !ok {
		return nil, false
	}
	rest, ids, err := liftTokens(b, &s.ids)
	if err != nil {
		writeError(w, err)
		return nil, false
	}
	rest, chat := liftText(rest)
	req := &waypostv1.PlaceRequest{}
	if err := protojson.Unmarshal(rest, req); err != nil {
		writeError(w, badJSON(err))
		return nil, false
	}
	if chat != "" {
		req.Input.BodyJson = &chat
	}
	if ids != nil {
		if req.Input == nil {
			req.Input = &waypostv1.Input{}
		}
		req.Input.TokenIds = ids
	}
	return req, true
}

func (s *Server) httpPlace(w http.ResponseWriter, r *http.Request) {
	req, ok := s.placeRequest(w, r)
	if !ok {
		return
	}
	resp, ok := call(s, w, r, waypostv1.PlacementService_Place_FullMethodName, req, s.opt.Placement.Place)
	s.ids.reuse(req)
	if !ok {
		return
	}
	if p := resp.GetPlacement(); p != nil {
		writeMessage(w, http.StatusOK, p)
		return
	}
	refused := resp.GetRefused()
	code := http.StatusTooManyRequests
	if refused.GetReason() == "none_eligible" {
		code = http.StatusServiceUnavailable
	}
	if refused.RetryAfterMs != nil {
		w.Header().Set("Retry-After", strconv.Itoa(int(math.Ceil(refused.GetRetryAfterMs()/1000))))
	}
	writeMessage(w, code, resp)
}

func (s *Server) httpPlaceBatch(w http.ResponseWriter, r *http.Request) {
	req := &waypostv1.PlaceBatchRequest{}
	if !s.decode(w, r, req) {
		return
	}
	if resp, ok := call(s, w, r, waypostv1.PlacementService_PlaceBatch_FullMethodName, req, s.opt.Placement.PlaceBatch); ok {
		writeMessage(w, http.StatusOK, resp)
	}
}

func (s *Server) httpOutcome(w http.ResponseWriter, r *http.Request) {
	req := &waypostv1.ReportOutcomeRequest{}
	if !s.decode(w, r, req) {
		return
	}
	if resp, ok := call(s, w, r, waypostv1.PlacementService_ReportOutcome_FullMethodName, req, s.opt.Placement.ReportOutcome); ok {
		writeMessage(w, http.StatusOK, resp)
	}
}

func (s *Server) httpPlacementVerb(w http.ResponseWriter, r *http.Request) {
	id, verb, _ := cutLast(r.PathValue("idverb"), ":")
	switch verb {
	case "renew":
		req := &waypostv1.RenewPlacementRequest{PlacementId: &id}
		if resp, ok := call(s, w, r, waypostv1.PlacementService_RenewPlacement_FullMethodName, req, s.opt.Placement.RenewPlacement); ok {
			writeMessage(w, http.StatusOK, resp)
		}
	case "release":
		req := &waypostv1.ReleasePlacementRequest{PlacementId: &id}
		if resp, ok := call(s, w, r, waypostv1.PlacementService_ReleasePlacement_FullMethodName, req, s.opt.Placement.ReleasePlacement); ok {
			writeMessage(w, http.StatusOK, resp)
		}
	case "learn":
		req := &waypostv1.LearnTokensRequest{}
		if !s.decode(w, r, req) {
			return
		}
		req.PlacementId = &id
		if resp, ok := call(s, w, r, waypostv1.PlacementService_LearnTokens_FullMethodName, req, s.opt.Placement.LearnTokens); ok {
			writeMessage(w, http.StatusOK, resp)
		}
	default:
		writeError(w, NotFound("path", fmt.Sprintf("unknown verb %q of a placement: use :renew, :release or :learn", verb)))
	}
}

func (s *Server) httpGetPlacement(w http.ResponseWriter, r *http.Request) {
	id := r.PathValue("id")
	req := &waypostv1.GetPlacementRequest{PlacementId: &id}
	if resp, ok := call(s, w, r, waypostv1.PlacementService_GetPlacement_FullMethodName, req, s.opt.Placement.GetPlacement); ok {
		writeMessage(w, http.StatusOK, resp)
	}
}

func (s *Server) httpListPlacements(w http.ResponseWriter, r *http.Request) {
	q := newQuery(r)
	req := &waypostv1.ListPlacementsRequest{
		RequestId: q.str("request_id"), Worker: q.str("worker"), ReuseClass: q.str("class"), Tenant: q.str("tenant"),
		SinceMs: q.ms("since"), Redirected: q.flag("redirected"), Mispredicted: q.flag("mispredicted"), Limit: q.count("limit"),
		Pool: q.str("pool"), Local: q.flag("local"),
	}
	answerQuery(s, w, r, q, waypostv1.PlacementService_ListPlacements_FullMethodName, req, s.opt.Placement.ListPlacements)
}

func (s *Server) httpStatus(w http.ResponseWriter, r *http.Request) {
	if resp, ok := call(s, w, r, waypostv1.OperatorService_GetStatus_FullMethodName, &waypostv1.GetStatusRequest{}, s.opt.Operator.GetStatus); ok {
		writeMessage(w, http.StatusOK, resp)
	}
}

// answerQuery runs a service call whose request was read from a query, if that
// held nothing else.
func answerQuery[Req any, Resp proto.Message](s *Server, w http.ResponseWriter, r *http.Request, q *query, method string, req Req,
	fn func(context.Context, Req) (Resp, error),
) {
	if !q.ok(w) {
		return
	}
	if resp, ok := call(s, w, r, method, req, fn); ok {
		writeMessage(w, http.StatusOK, resp)
	}
}

func (s *Server) httpWorkers(w http.ResponseWriter, r *http.Request) {
	q := newQuery(r)
	req := &waypostv1.ListWorkersRequest{Name: q.str("name"), Pool: q.str("pool"), Host: q.str("host"), State: q.str("state")}
	answerQuery(s, w, r, q, waypostv1.OperatorService_ListWorkers_FullMethodName, req, s.opt.Operator.ListWorkers)
}

func (s *Server) httpHosts(w http.ResponseWriter, r *http.Request) {
	q := newQuery(r)
	req := &waypostv1.ListHostsRequest{Name: q.str("name")}
	answerQuery(s, w, r, q, waypostv1.OperatorService_ListHosts_FullMethodName, req, s.opt.Operator.ListHosts)
}

func (s *Server) httpGPUs(w http.ResponseWriter, r *http.Request) {
	q := newQuery(r)
	req := &waypostv1.ListGpusRequest{Host: q.str("host")}
	answerQuery(s, w, r, q, waypostv1.OperatorService_ListGpus_FullMethodName, req, s.opt.Operator.ListGpus)
}

// httpGPU is POST /v1/gpus/HOST/INDEX:ack, or with a UUID for HOST/INDEX.
func (s *Server) httpGPU(w http.ResponseWriter, r *http.Request) {
	gpu, verb, _ := cutLast(r.PathValue("gpuverb"), ":")
	q := newQuery(r)
	req := &waypostv1.AckGpuRequest{Gpu: &gpu, Reason: q.str("reason"), DryRun: q.flag("dry_run")}
	if !q.ok(w) {
		return
	}
	if verb != "ack" {
		writeError(w, NotFound("path", fmt.Sprintf("unknown verb %q of a GPU: use :ack", verb)))
		return
	}
	given := &waypostv1.AckGpuRequest{}
	if r.ContentLength != 0 && !s.decode(w, r, given) {
		return
	}
	if given.Reason != nil {
		req.Reason = given.Reason
	}
	if given.DryRun != nil {
		req.DryRun = given.DryRun
	}
	if resp, ok := call(s, w, r, waypostv1.OperatorService_AckGpu_FullMethodName, req, s.opt.Operator.AckGpu); ok {
		writeMessage(w, http.StatusOK, resp)
	}
}

func (s *Server) httpDoctor(w http.ResponseWriter, r *http.Request) {
	q := newQuery(r)
	req := &waypostv1.DoctorRequest{Host: q.str("host"), Ports: q.flag("ports")}
	answerQuery(s, w, r, q, waypostv1.OperatorService_Doctor_FullMethodName, req, s.opt.Operator.Doctor)
}

func (s *Server) httpMembers(w http.ResponseWriter, r *http.Request) {
	q := newQuery(r)
	req := &waypostv1.ListMembersRequest{From: q.str("from")}
	answerQuery(s, w, r, q, waypostv1.OperatorService_ListMembers_FullMethodName, req, s.opt.Operator.ListMembers)
}

func (s *Server) httpCoordinators(w http.ResponseWriter, r *http.Request) {
	req := &waypostv1.ListCoordinatorsRequest{}
	if resp, ok := call(s, w, r, waypostv1.OperatorService_ListCoordinators_FullMethodName, req, s.opt.Operator.ListCoordinators); ok {
		writeMessage(w, http.StatusOK, resp)
	}
}

func (s *Server) httpInspect(w http.ResponseWriter, r *http.Request) {
	q := newQuery(r)
	req := &waypostv1.InspectWorkerRequest{Worker: q.str("worker"), Verify: q.flag("verify")}
	answerQuery(s, w, r, q, waypostv1.OperatorService_InspectWorker_FullMethodName, req, s.opt.Operator.InspectWorker)
}

func (s *Server) httpBoundary(w http.ResponseWriter, r *http.Request) {
	q := newQuery(r)
	req := &waypostv1.GetBoundaryRequest{Pool: q.str("pool")}
	answerQuery(s, w, r, q, waypostv1.OperatorService_GetBoundary_FullMethodName, req, s.opt.Operator.GetBoundary)
}

func (s *Server) httpTopology(w http.ResponseWriter, r *http.Request) {
	q := newQuery(r)
	req := &waypostv1.GetTopologyRequest{From: q.str("from"), To: q.str("to")}
	answerQuery(s, w, r, q, waypostv1.OperatorService_GetTopology_FullMethodName, req, s.opt.Operator.GetTopology)
}

func (s *Server) httpProbeLink(w http.ResponseWriter, r *http.Request) {
	req := &waypostv1.ProbeLinkRequest{}
	if !s.decode(w, r, req) {
		return
	}
	if resp, ok := call(s, w, r, waypostv1.OperatorService_ProbeLink_FullMethodName, req, s.opt.Operator.ProbeLink); ok {
		writeMessage(w, http.StatusOK, resp)
	}
}

func (s *Server) httpGetFleet(w http.ResponseWriter, r *http.Request) {
	if resp, ok := call(s, w, r, waypostv1.OperatorService_GetFleet_FullMethodName, &waypostv1.GetFleetRequest{}, s.opt.Operator.GetFleet); ok {
		writeMessage(w, http.StatusOK, resp)
	}
}

func (s *Server) httpPutFleet(w http.ResponseWriter, r *http.Request) {
	q := newQuery(r)
	req := &waypostv1.PutFleetRequest{BaseVersion: q.count("base"), DryRun: q.flag("dry_run"), Message: q.str("message"), RequestId: q.str("request_id")}
	if !q.ok(w) {
		return
	}
	b, ok := s.body(w, r)
	if !ok {
		return
	}
	req.Toml = proto.String(string(b))
	if resp, ok := call(s, w, r, waypostv1.OperatorService_PutFleet_FullMethodName, req, s.opt.Operator.PutFleet); ok {
		writeMessage(w, http.StatusOK, resp)
	}
}

func (s *Server) httpTarget(w http.ResponseWriter, r *http.Request) {
	target, verb, _ := cutLast(r.PathValue("targetverb"), ":")
	q := newQuery(r)
	reason, dryRun, id := q.str("reason"), q.flag("dry_run"), q.str("request_id")
	if !q.ok(w) {
		return
	}
	given := &waypostv1.CordonTargetRequest{}
	if r.ContentLength != 0 && !s.decode(w, r, given) {
		return
	}
	if given.Reason != nil {
		reason = given.Reason
	}
	if given.DryRun != nil {
		dryRun = given.DryRun
	}
	if given.RequestId != nil {
		id = given.RequestId
	}
	switch verb {
	case "cordon", "drain":
		req := &waypostv1.CordonTargetRequest{Selector: &target, Reason: reason, DryRun: dryRun, RequestId: id, Drain: given.Drain}
		if verb == "drain" {
			req.Drain = proto.Bool(true)
		}
		if resp, ok := call(s, w, r, waypostv1.OperatorService_CordonTarget_FullMethodName, req, s.opt.Operator.CordonTarget); ok {
			writeMessage(w, http.StatusOK, resp)
		}
	case "uncordon":
		req := &waypostv1.UncordonTargetRequest{Selector: &target, Reason: reason, DryRun: dryRun, RequestId: id}
		if resp, ok := call(s, w, r, waypostv1.OperatorService_UncordonTarget_FullMethodName, req, s.opt.Operator.UncordonTarget); ok {
			writeMessage(w, http.StatusOK, resp)
		}
	default:
		writeError(w, NotFound("path", fmt.Sprintf("unknown verb %q of a target: use :cordon, :uncordon or :drain", verb)))
	}
}

func (s *Server) httpHealthz(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	_, _ = io.WriteString(w, "ok\n")
}

func (s *Server) httpReadyz(w http.ResponseWriter, r *http.Request) {
	checks := s.opt.Ready()
	code, b := http.StatusOK, &strings.Builder{}
	for _, c := range checks {
		mark := "ok"
		if c.Problem != "" {
			mark, code = c.Problem, http.StatusServiceUnavailable
		}
		if r.URL.Query().Has("verbose") || c.Problem != "" {
			fmt.Fprintf(b, "%s: %s\n", c.Name, mark)
		}
	}
	if code == http.StatusOK {
		b.WriteString("ready\n")
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.WriteHeader(code)
	_, _ = io.WriteString(w, b.String())
}

// cutLast splits s at the last separator.
func cutLast(s, sep string) (before, after string, found bool) {
	i := strings.LastIndex(s, sep)
	if i < 0 {
		return s, "", false
	}
	return s[:i], s[i+len(sep):], true
}
