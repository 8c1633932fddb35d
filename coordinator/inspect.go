package coordinator

import (
	"context"
	"fmt"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"waypost/coordinator/api"
	"waypost/coordinator/fleet"
	"waypost/coordinator/prefixindex"
	waypostv1 "waypost/proto/waypost/v1"
)

// findWithin is how long other coordinators are asked which of them has a lane.
const findWithin = 2 * time.Second

// InspectWorker implements the operator service. A coordinator that does not
// know the worker, or is to verify it without a lane to its host, lets one
// answer that has a lane.
func (o *operators) InspectWorker(ctx context.Context, req *waypostv1.InspectWorkerRequest) (*waypostv1.InspectWorkerResponse, error) {
	c := o.c
	if req.GetWorker() == "" {
		return nil, api.BadField("worker", "must name a worker as host/engine/rank; see: waypost workers")
	}
	w, err := c.fleet.Worker(time.Now(), req.GetWorker())
	known := err == nil
	if !known || req.GetVerify() && c.lanes.session(w.Host) == nil {
		if conn := c.laneHolder(ctx, req.GetWorker()); conn != nil {
			resp, err := waypostv1.NewPeerServiceClient(conn).PeerInspect(ctx, &waypostv1.PeerInspectRequest{Inspect: req})
			return resp.GetInspect(), err
		}
	}
	return c.inspectHere(ctx, req)
}

// PeerInspect implements the peer service.
func (p *peers) PeerInspect(ctx context.Context, req *waypostv1.PeerInspectRequest) (*waypostv1.PeerInspectResponse, error) {
	resp, err := p.c.inspectHere(ctx, req.GetInspect())
	if err != nil {
		return nil, err
	}
	return &waypostv1.PeerInspectResponse{Inspect: resp}, nil
}

// laneHolder finds another coordinator with a lane to a worker's host; nil:
// there is none.
func (c *Coordinator) laneHolder(ctx context.Context, worker string) *grpc.ClientConn {
	ctx, cancel := context.WithTimeout(ctx, findWithin)
	defer cancel()
	found := make(chan *grpc.ClientConn, maxPeers)
	var asked sync.WaitGroup
	for _, m := range c.replica.State().Coordinators() {
		if m.Name == c.name {
			continue
		}
		conn, err := c.peer(m.ClusterAddress)
		if err != nil {
			break // more coordinators than may be asked
		}
		asked.Go(func() {
			resp, err := waypostv1.NewPeerServiceClient(conn).PeerInspect(ctx, &waypostv1.PeerInspectRequest{Inspect: &waypostv1.InspectWorkerRequest{Worker: &worker}})
			if err == nil && resp.GetInspect().GetLaneUp() {
				found <- conn
				cancel()
			}
		})
	}
	asked.Wait()
	select {
	case conn := <-found:
		return conn
	default:
		return nil
	}
}

// inspectHere answers from what this coordinator has.
func (c *Coordinator) inspectHere(ctx context.Context, req *waypostv1.InspectWorkerRequest) (*waypostv1.InspectWorkerResponse, error) {
	w, err := c.fleet.Worker(time.Now(), req.GetWorker())
	if err != nil {
		return nil, api.NotFound("worker", fmt.Sprintf("no worker %q; see: waypost workers", req.GetWorker()))
	}
	var comparison *waypostv1.StreamComparison
	if req.GetVerify() {
		comparison, err = c.views.Verify(ctx, &w)
		if err != nil {
			return nil, err
		}
	}
	out := c.inspect(&w)
	out.Comparison = comparison
	return out, nil
}

// inspect tells what is held of a worker's prefix stream.
func (c *Coordinator) inspect(w *fleet.WorkerInfo) *waypostv1.InspectWorkerResponse {
	stats := c.index.Stats()
	out := &waypostv1.InspectWorkerResponse{
		Worker: &w.Name, Incarnation: proto.String(markHex(w.Process)), View: c.workerProto(w, c.replica.State()).View, AgeMs: finite(w.ViewAgeMs),
		Coverage: &w.Facts.Coverage, Keys: proto.Uint32(uint32(c.index.WorkerKeys(prefixindex.WorkerID(w.ID)))), AnsweredBy: &c.name,
		IndexWorkers: proto.Uint32(uint32(stats.Workers)), IndexKeys: proto.Uint32(uint32(stats.Keys)), IndexBytes: proto.Float64(float64(stats.Bytes)),
	}
	out.LaneUp = proto.Bool(c.lanes.session(w.Host) != nil)
	st, ok := c.views.Stream(w)
	if !ok {
		return out
	}
	out.StreamBytes, out.PulledBytes = proto.Float64(float64(st.StreamBytes)), proto.Float64(float64(st.PulledBytes))
	out.Frames, out.Resyncs, out.LastResyncReason = st.Frames, st.Resyncs, &st.ResyncReason
	if !st.AskedAt.IsZero() {
		out.LastResyncMs = proto.Float64(ms(time.Since(st.AskedAt)))
	}
	if st.Coverage != "" {
		out.Coverage = &st.Coverage
	}
	if st.InPlace {
		out.Epoch, out.Seq = &st.Epoch, proto.Float64(float64(st.Seq))
	}
	if st.InPlace || st.Keys > 0 {
		out.Runs, out.StreamKeys = proto.Uint32(uint32(st.Runs)), proto.Uint32(uint32(st.Keys))
		out.DecoderBytes = proto.Float64(float64(st.DecoderBytes))
	}
	return out
}
