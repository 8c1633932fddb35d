package api

import (
	"fmt"
	"net/http"
	"strings"

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

// watchPlacements is the kind of event that can be watched: decisions and what
// became of them.
const watchPlacements = "placements"

// httpWatch streams events of the kinds asked for until the client leaves: as
// JSON lines, or as server-sent events if the client accepts these.
func (s *Server) httpWatch(w http.ResponseWriter, r *http.Request) {
	q := newQuery(r)
	kinds := q.str("kinds")
	req := &waypostv1.WatchPlacementsRequest{
		Pool: q.str("pool"), Tenant: q.str("tenant"), Worker: q.str("worker"), Redirected: q.flag("redirected"), Mispredicted: q.flag("mispredicted"),
	}
	if !q.ok(w) {
		return
	}
	if err := authorise(s.callerOfHTTP(r), waypostv1.PlacementService_WatchPlacements_FullMethodName); err != nil {
		writeError(w, err)
		return
	}
	if kinds == nil || *kinds != watchPlacements {
		writeError(w, BadField("kinds", fmt.Sprintf("use kinds=%s; nothing else can be watched", watchPlacements)))
		return
	}
	out := &lineStream{r: r, w: w, control: http.NewResponseController(w), events: strings.Contains(r.Header.Get("Accept"), eventStream)}
	if err := out.begin(); err != nil {
		return
	}
	// The client left, or sees the end of the stream; there is nothing to add.
	_ = s.opt.Placement.WatchPlacements(req, out)
}
