package coordinator

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"waypost/coordinator/api"
	"waypost/coordinator/fleet"
	"waypost/coordinator/placement"
	"waypost/coordinator/registry"
	"waypost/gossip/mesh"
	waypostv1 "waypost/proto/waypost/v1"
)

// confirmWithin is how long a change of intent waits for other coordinators to
// confirm that it is in force.
const confirmWithin = 2 * time.Second

// operators serves the operator API.
type operators struct {
	waypostv1.UnimplementedOperatorServiceServer
	c *Coordinator
}

// ListWorkers implements the operator service.
func (o *operators) ListWorkers(_ context.Context, req *waypostv1.ListWorkersRequest) (*waypostv1.ListWorkersResponse, error) {
	out := &waypostv1.ListWorkersResponse{}
	now := time.Now()
	state := o.c.replica.State()
	for _, w := range o.c.fleet.Workers(now) {
		if (req.Name != nil && req.GetName() != w.Name) || (req.Pool != nil && req.GetPool() != w.Pool) ||
			(req.Host != nil && req.GetHost() != w.Host) {
			continue
		}
		if m := o.c.workerProto(&w, state); strings.HasPrefix(m.GetState(), req.GetState()) {
			out.Workers = append(out.Workers, m)
		}
	}
	return out, nil
}

func (c *Coordinator) workerProto(w *fleet.WorkerInfo, state *registry.State) *waypostv1.Worker {
	f := &w.Facts
	out := &waypostv1.Worker{
		Name: &w.Name, Pool: &w.Pool, State: &w.State, WaitMs: finite(w.WaitMs), Running: counted(w.Running), Waiting: counted(w.Waiting),
		KvUsedRatio: finite(w.KVUsedRatio), CachedTokens: finite(w.CachedBlocks * float64(f.BlockTokens)), View: proto.String(c.viewWord(w)), Trust: finite(w.Trust),
		PrefillTokensPerSec: finite(w.PrefillTokensPerSec), StepMs: finite(w.StepMs), Share: c.shares.of(w.Pool, w.Name), UpdatedMs: finite(w.UpdatedMs),
		Url: &f.URL, Incarnation: proto.String(markHex(w.Process)), Boundary: proto.String(boundaryName(f)), Model: &f.Model, GpuUuids: f.GPUUUIDs,
		Engine: &f.Kind, EngineVersion: &f.EngineVersion, Headers: f.Headers, BlockTokens: positive(f.BlockTokens), PoolBlocks: positive(f.PoolBlocks),
		Capabilities: f.Capabilities,
		QueueBasis:   proto.String(string(w.QueueBasis)), Live: counted(w.Live), OpenClaims: proto.Uint32(uint32(w.OpenClaims)),
		PendingClaims: counted(w.PendingClaims), InFlight: counted(math.Ceil(w.InFlight)), SpeedSource: proto.String(string(w.SpeedSource)), Role: &f.Role, Transfer: transferProto(f.Transfer), HostTier: hostTierProto(f.HostTier),
	}
	out.Group = groupProto(w, c.fleet.Ms(time.Now()))
	out.Learnt = c.judges.learnt(time.Now(), w.Name, w.Process)
	if f.BlockTokens == 0 {
		out.CachedTokens = nil
	}
	if strings.HasPrefix(w.State, "lost") {
		// What was last read of it says nothing about now.
		out.WaitMs, out.Running, out.Waiting, out.KvUsedRatio, out.StepMs, out.CachedTokens, out.Live = nil, nil, nil, nil, nil, nil, nil
		out.View = proto.String("blind")
	}
	if f.Ranks > 1 {
		out.Rank = proto.Uint32(uint32(f.Rank))
	}
	if f.Coverage != "full" && f.CoverageHint != "" {
		out.ViewHint = &f.CoverageHint
	}
	cs := cordonsOn(state, w.Name, f.Model, f.GPUUUIDs, w.Members)
	if w.Wish.ID != "" && !slices.ContainsFunc(cs, func(k registry.Cordon) bool { return k.Drain }) {
		cs = append([]registry.Cordon{wishDrain(w.WishHost, w.Wish)}, cs...)
	}
	if len(cs) > 0 {
		out.Cordon = cordonProto(cs[0])
		out.State = proto.String(c.shownState(w, cs, time.Now()))
	}
	return out
}

// viewWord is the view of a worker's cache as people see it.
func (c *Coordinator) viewWord(w *fleet.WorkerInfo) string { return c.shownView(w.ID, w.View).String() }

// shownView is the view of a worker's cache as screens, answers and records name
// it: of an engine that shows nothing, what was placed there may be retained.
func (c *Coordinator) shownView(id fleet.WorkerID, kind placement.ViewKind) placement.ViewKind {
	if kind == placement.ViewBlind && c.views.Retains(id) {
		return placement.ViewInferred
	}
	return kind
}

// positive is nil for a count that is not known.
func positive(n int) *uint32 {
	if n <= 0 {
		return nil
	}
	return proto.Uint32(uint32(n))
}

func cordonProto(c registry.Cordon) *waypostv1.Cordon {
	out := &waypostv1.Cordon{Selector: &c.Selector, By: &c.By, Reason: &c.Reason, Drain: &c.Drain}
	if c.AtMs != 0 {
		out.At = proto.String(c.At().Format(time.RFC3339))
	}
	return out
}

// ListHosts implements the operator service.
func (o *operators) ListHosts(_ context.Context, req *waypostv1.ListHostsRequest) (*waypostv1.ListHostsResponse, error) {
	out := &waypostv1.ListHostsResponse{}
	file := o.c.fleetFile.Load()
	for _, h := range o.c.fleet.Hosts(time.Now()) {
		if req.Name != nil && req.GetName() != h.Name {
			continue
		}
		place := file.HostPlace(h.Name)
		m := &waypostv1.Host{
			Name: &h.Name, Zone: &place.Zone, Rack: &place.Rack, AgentVersion: &h.Version, LaneUp: &h.LaneUp, UpdatedMs: finite(h.UpdatedMs),
			Workers: h.Workers, GpuState: proto.String("not reported yet"),
		}
		hl := o.c.lanes.host(h.Name)
		hl.mu.Lock()
		if r := hl.report; r != nil {
			m.Facts, m.Gpus, m.GpuState = r.GetFacts(), r.GetGpus(), r.GpuState
		}
		hl.mu.Unlock()
		out.Hosts = append(out.Hosts, m)
	}
	return out, nil
}

// ListMembers implements the operator service.
func (o *operators) ListMembers(ctx context.Context, req *waypostv1.ListMembersRequest) (*waypostv1.ListMembersResponse, error) {
	c := o.c
	if from := req.GetFrom(); from != "" && from != c.name {
		conn, err := c.peerByName(from)
		if err != nil {
			return nil, api.NotFound("from", err.Error())
		}
		resp, err := waypostv1.NewPeerServiceClient(conn).PeerMembers(ctx, &waypostv1.PeerMembersRequest{})
		return resp.GetMembers(), err
	}
	return c.members(), nil
}

// members is the mesh as this coordinator sees it.
func (c *Coordinator) members() *waypostv1.ListMembersResponse {
	out := &waypostv1.ListMembersResponse{AnsweredBy: &c.name}
	hosts := map[string]bool{}
	lanesUp := 0
	for _, s := range c.laneServer.Sessions() {
		hosts[s.Host()] = true
		lanesUp++
	}
	leader := c.leaderName()
	for _, m := range c.mesh.Members() {
		pb := m.Proto(time.Now())
		switch {
		case m.Name == c.name:
			pb.Lane = proto.String(fmt.Sprintf("%d lanes", lanesUp))
		case m.Meta.Role == mesh.RoleAgent && hosts[m.Name]:
			pb.Lane = proto.String("lane up")
		case m.Meta.Role == mesh.RoleAgent:
			pb.Lane = proto.String("no lane")
		}
		if m.Name == leader {
			pb.Note = proto.String("leader")
		}
		out.Members = append(out.Members, pb)
	}
	return out
}

// ListCoordinators implements the operator service.
func (o *operators) ListCoordinators(context.Context, *waypostv1.ListCoordinatorsRequest) (*waypostv1.ListCoordinatorsResponse, error) {
	c := o.c
	out := &waypostv1.ListCoordinatorsResponse{}
	for _, m := range c.replica.Members() {
		pb := &waypostv1.Coordinator{Name: &m.Name, Number: positive(int(m.Number)), ClusterAddress: &m.ClusterAddress, ApiAddress: &m.APIAddress, Role: &m.Role}
		if m.Self {
			pb.AppliedIndex = proto.Float64(float64(c.replica.AppliedIndex()))
			pb.LastContactMs = finite(c.policyAgeMs())
		}
		out.Coordinators = append(out.Coordinators, pb)
	}
	return out, nil
}

// GetFleet implements the operator service.
func (o *operators) GetFleet(context.Context, *waypostv1.GetFleetRequest) (*waypostv1.GetFleetResponse, error) {
	return o.c.fleetProto(), nil
}

// fleetProto is the fleet file in force.
func (c *Coordinator) fleetProto() *waypostv1.GetFleetResponse {
	f := c.replica.State().FleetFile()
	out := &waypostv1.GetFleetResponse{Version: &f.Version, Toml: &f.TOML, AppliedBy: &f.By, Message: &f.Message}
	if f.Version > 0 {
		out.AppliedAt = proto.String(f.At().Format(time.RFC3339))
	}
	return out
}

// PutFleet implements the operator service.
func (o *operators) PutFleet(ctx context.Context, req *waypostv1.PutFleetRequest) (*waypostv1.PutFleetResponse, error) {
	c := o.c
	if len(req.GetToml()) > registry.MaxFleetBytes {
		return nil, api.BadField("toml", fmt.Sprintf("%d bytes are more than %d", len(req.GetToml()), registry.MaxFleetBytes))
	}
	next, err := registry.ParseFleet("fleet.toml", req.GetToml())
	if err != nil {
		return nil, api.BadField("toml", err.Error())
	}
	state := c.replica.State()
	now := state.FleetFile().Version
	out := &waypostv1.PutFleetResponse{Version: &now, Changes: registry.Diff(state.Fleet(), next), Coordinators: proto.Uint32(uint32(len(state.Coordinators())))}
	if req.GetBaseVersion() != now {
		return nil, api.Conflict("base_version", fmt.Sprintf("fleet.toml was made from version %d, the fleet is at %d; run: waypost fleet diff", req.GetBaseVersion(), now))
	}
	if req.GetDryRun() {
		if out.Effect, err = c.effectOf(time.Now(), next); err != nil {
			return nil, api.BadField("toml", err.Error())
		}
		return out, nil
	}
	result, index, err := c.propose(ctx, req.GetRequestId(), registry.PutFleet{TOML: req.GetToml(), BaseVersion: req.GetBaseVersion(), Message: req.GetMessage()})
	if err != nil {
		return nil, err
	}
	applied, _ := c.confirm(ctx, index)
	out.Version, out.AppliedOn = &result.FleetVersion, proto.Uint32(uint32(len(applied)))
	return out, nil
}

// CordonTarget implements the operator service.
func (o *operators) CordonTarget(ctx context.Context, req *waypostv1.CordonTargetRequest) (*waypostv1.CordonTargetResponse, error) {
	c := o.c
	if _, err := registry.ParseSelector(req.GetSelector()); err != nil {
		return nil, api.BadField("selector", err.Error())
	}
	if strings.TrimSpace(req.GetReason()) == "" {
		return nil, api.BadField("reason", "must say why: the next person asks")
	}
	out := &waypostv1.CordonTargetResponse{Workers: c.whereIs(req.GetSelector())}
	if req.GetDryRun() {
		return out, nil
	}
	body := registry.SetCordon{Selector: req.GetSelector(), Reason: req.GetReason(), Drain: req.GetDrain()}
	if w, err := c.fleet.Worker(time.Now(), firstOf(out.GetWorkers())); err == nil && strings.Contains(req.GetSelector(), "/") {
		body.GPUUUIDs, body.Model = w.Facts.GPUUUIDs, w.Facts.Model
	}
	result, index, err := c.propose(ctx, req.GetRequestId(), body)
	if err != nil {
		return nil, err
	}
	if result.Cordon != nil {
		out.Cordon = cordonProto(*result.Cordon)
	}
	out.AppliedOn, out.PendingOn = c.confirm(ctx, index)
	return out, nil
}

func firstOf(list []string) string {
	if len(list) == 0 {
		return ""
	}
	return list[0]
}

// UncordonTarget implements the operator service.
func (o *operators) UncordonTarget(ctx context.Context, req *waypostv1.UncordonTargetRequest) (*waypostv1.UncordonTargetResponse, error) {
	c := o.c
	out := &waypostv1.UncordonTargetResponse{Workers: c.whereIs(req.GetSelector()), Removed: proto.Bool(false)}
	if req.GetDryRun() {
		for _, k := range c.replica.State().Cordons() {
			*out.Removed = out.GetRemoved() || k.Selector == req.GetSelector()
		}
		return out, nil
	}
	result, index, err := c.propose(ctx, req.GetRequestId(), registry.RemoveCordon{Selector: req.GetSelector(), Reason: req.GetReason()})
	if err != nil {
		return nil, err
	}
	out.Removed = &result.Removed
	out.AppliedOn, out.PendingOn = c.confirm(ctx, index)
	return out, nil
}

// propose makes a change of intent on the leader, wherever it is.
func (c *Coordinator) propose(ctx context.Context, requestID string, body registry.Body) (registry.Result, uint64, error) {
	if requestID == "" {
		requestID = c.name + "-" + randomName(16)
	}
	by := api.CallerOf(ctx).Name
	if by == "" {
		by = "unknown"
	}
	cmd, err := registry.Encode(registry.Stamp{RequestID: requestID, At: time.Now(), By: by, Via: c.name}, body)
	if err != nil {
		return registry.Result{}, 0, writeError(err)
	}
	applied, err := c.replica.Propose(ctx, cmd)
	if err != nil {
		return applied.Result, applied.Index, writeError(err)
	}
	return applied.Result, applied.Index, writeError(applied.Result.Err())
}

// writeError turns what the registry or Raft refuses into the API's errors.
func writeError(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, registry.ErrConflict):
		return api.Conflict("base_version", err.Error())
	case errors.Is(err, registry.ErrRefused), errors.Is(err, registry.ErrRequestReused):
		return api.Conflict("request_id", err.Error())
	case errors.Is(err, registry.ErrInvalid):
		return api.BadField("request", err.Error())
	case errors.Is(err, context.DeadlineExceeded):
		return status.Error(codes.DeadlineExceeded, "the change was handed in but nobody confirmed it in time; ask again with the same request id")
	}
	if _, ok := status.FromError(err); ok {
		return err
	}
	return api.Unavailable(err.Error())
}

// confirm asks every coordinator to have applied a log index, for a bounded
// time. It returns who has and who did not say so.
func (c *Coordinator) confirm(ctx context.Context, index uint64) (applied, pending []string) {
	ctx, cancel := context.WithTimeout(ctx, confirmWithin)
	defer cancel()
	members := c.replica.State().Coordinators()
	oks := make([]bool, len(members))
	var wg sync.WaitGroup
	for i, m := range members {
		wg.Go(func() {
			if m.Name == c.name {
				oks[i] = c.replica.WaitApplied(ctx, index) == nil
				return
			}
			conn, err := c.peer(m.ClusterAddress)
			if err != nil {
				return
			}
			r, err := waypostv1.NewPeerServiceClient(conn).WaitApplied(ctx, &waypostv1.WaitAppliedRequest{Index: &index, TimeoutMs: proto.Float64(ms(confirmWithin))})
			oks[i] = err == nil && r.GetAppliedIndex() >= index
		})
	}
	wg.Wait()
	for i, m := range members {
		if oks[i] {
			applied = append(applied, m.Name)
		} else {
			pending = append(pending, m.Name)
		}
	}
	return applied, pending
}
