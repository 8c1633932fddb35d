package api

import (
	"fmt"
	"net/http"
	"slices"
	"strings"

	"google.golang.org/grpc"

	waypostv1 "waypost/proto/waypost/v1"
)

func (s *Server) httpSummary(w http.ResponseWriter, r *http.Request) {
	q := newQuery(r)
	req := &waypostv1.SummarizePlacementsRequest{SinceMs: q.ms("since"), Pool: q.str("pool")}
	answerQuery(s, w, r, q, waypostv1.PlacementService_SummarizePlacements_FullMethodName, req, s.opt.Placement.SummarizePlacements)
}

func (s *Server) httpReuse(w http.ResponseWriter, r *http.Request) {
	q := newQuery(r)
	req := &waypostv1.GetReuseRequest{SinceMs: q.ms("since"), Pool: q.str("pool")}
	answerQuery(s, w, r, q, waypostv1.OperatorService_GetReuse_FullMethodName, req, s.opt.Operator.GetReuse)
}

func (s *Server) httpExplainWorker(w http.ResponseWriter, r *http.Request) {
	worker, verb, _ := cutLast(r.PathValue("workerverb"), ":")
	q := newQuery(r)
	req := &waypostv1.ExplainWorkerRequest{Worker: &worker, SinceMs: q.ms("since")}
	if !q.ok(w) {
		return
	}
	if verb != "why" {
		writeError(w, NotFound("path", "a worker has the verb :why; use ?name= of /v1/workers for the worker itself"))
		return
	}
	if resp, ok := call(s, w, r, waypostv1.OperatorService_ExplainWorker_FullMethodName, req, s.opt.Operator.ExplainWorker); ok {
		writeMessage(w, http.StatusOK, resp)
	}
}

// watchPlacements is the kind of decisions and what became of them; it has
// filters of its own and is watched alone.
const watchPlacements = "placements"

// httpWatch streams what is of the kinds asked for, and what changes, until the
// client leaves: as JSON lines, or as server-sent events if the client accepts
// these.
func (s *Server) httpWatch(w http.ResponseWriter, r *http.Request) {
	q := newQuery(r)
	kinds := strings.Split(first(q.str("kinds")), ",")
	if slices.Equal(kinds, []string{watchPlacements}) {
		req := &waypostv1.WatchPlacementsRequest{
			Pool: q.str("pool"), Tenant: q.str("tenant"), Worker: q.str("worker"), Redirected: q.flag("redirected"), Mispredicted: q.flag("mispredicted"),
		}
		watch(s, w, r, q, waypostv1.PlacementService_WatchPlacements_FullMethodName, req, true, s.opt.Placement.WatchPlacements)
		return
	}
	if kinds[0] == "" {
		q.fail("kinds", "is missing: use "+watchPlacements+" alone, or some of workers, members, fleet, events")
	}
	if slices.Contains(kinds, watchPlacements) {
		q.fail("kinds", fmt.Sprintf("use kinds=%s alone; it has filters of its own", watchPlacements))
	}
	req := &waypostv1.WatchRequest{Kinds: kinds, After: q.str("after")}
	watch(s, w, r, q, waypostv1.OperatorService_Watch_FullMethodName, req, false, s.opt.Operator.Watch)
}

func first(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}

// watch serves a stream of a service as lines. With atOnce the head goes out at
// once, so that the client knows it is connected; else with the first line, so
// that what is refused is a plain error.
func watch[Req any, Res any](s *Server, w http.ResponseWriter, r *http.Request, q *query, method string, req *Req, atOnce bool, serve func(*Req, grpc.ServerStreamingServer[Res]) error) {
	if !q.ok(w) {
		return
	}
	if err := authorise(s.callerOfHTTP(r), method); err != nil {
		writeError(w, err)
		return
	}
	out := &lineStream[Res]{r: r, w: w, control: http.NewResponseController(w), events: strings.Contains(r.Header.Get("Accept"), eventStream)}
	if atOnce {
		if err := out.begin(); err != nil {
			return
		}
	}
	// Once it began, the client left or sees the end of the stream; there is
	// nothing to add.
	if err := serve(req, out); err != nil && !out.begun {
		writeError(w, err)
	}
}
