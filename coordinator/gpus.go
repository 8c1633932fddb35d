package coordinator

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	"waypost/coordinator/api"
	"waypost/coordinator/fleet"
	"waypost/coordinator/registry"
	"waypost/gossip/doctor"
	waypostv1 "waypost/proto/waypost/v1"
)

// ackWithin bounds the wait for a host's answer to an acknowledgement.
const ackWithin = 3 * time.Second

// gpuPolicyProto is the fleet's policy on GPUs as hosts are told it.
func gpuPolicyProto(file *registry.Fleet) *waypostv1.GpuPolicy {
	p := &file.Policy.GPU
	return &waypostv1.GpuPolicy{Exclude: p.Exclude.Value, Price: p.Price.Value, Ignore: p.Ignore.Value}
}

// takeHost keeps what a host says of itself and tells what is new about its GPUs.
func (h *lanes) takeHost(hl *hostLane, host string, r *waypostv1.HostReport) {
	former := hl.takeReport(r, time.Now())
	if former == nil {
		return // what was before this coordinator knew the host is no news
	}
	if state := r.GetGpuState(); state != former.GetGpuState() && strings.HasPrefix(state, "NVML blocked") && !strings.HasPrefix(former.GetGpuState(), "NVML blocked") {
		h.c.log.Warn("NVML does not answer", "event", "nvml_blocked", "host", host, "state", state)
	}
	before := map[string]*waypostv1.Gpu{}
	for _, g := range former.GetGpus() {
		before[g.GetUuid()] = g
	}
	for _, g := range r.GetGpus() {
		if was := before[g.GetUuid()]; was != nil && g.GetUuid() != "" {
			h.gpuNews(host, was, g)
		}
	}
}

// gpuNews tells of new errors of a GPU and of changes in its verdict.
func (h *lanes) gpuNews(host string, was, now *waypostv1.Gpu) {
	name := fmt.Sprintf("%s/%d", host, now.GetIndex())
	action, reasons, _ := strings.Cut(now.GetVerdict(), ":")
	counts := map[uint32]float64{}
	for _, x := range was.GetXids() {
		counts[x.GetXid()] = x.GetCount()
	}
	told := false
	for _, x := range now.GetXids() {
		if x.GetCount() > counts[x.GetXid()] && !x.GetAcknowledged() {
			told = true
			h.c.log.Warn("GPU reported an error", "event", "gpu_fault", "host", host, "gpu", name, "xid", x.GetXid(), "class", x.GetClass(),
				"means", x.GetMeans(), "action", action, "workers", strings.Join(now.GetEngines(), " "))
		}
	}
	switch {
	case was.GetVerdict() == now.GetVerdict():
	case action == "ok":
		h.c.log.Info("GPU works again", "event", "gpu_cleared", "host", host, "gpu", name, "was", was.GetVerdict())
	case !told:
		h.c.log.Warn("GPU fault", "event", "gpu_fault", "host", host, "gpu", name, "action", action, "reasons", reasons, "workers", strings.Join(now.GetEngines(), " "))
	}
}

// ListGpus implements the operator service.
func (o *operators) ListGpus(_ context.Context, req *waypostv1.ListGpusRequest) (*waypostv1.ListGpusResponse, error) {
	out := &waypostv1.ListGpusResponse{}
	now := time.Now()
	for _, h := range o.c.fleet.Hosts(now) {
		if req.Host != nil && req.GetHost() != h.Name {
			continue
		}
		hl := o.c.lanes.host(h.Name)
		hl.mu.Lock()
		r, at := hl.report, hl.reportAt
		hl.mu.Unlock()
		state, silent := "not reported yet", false
		if r != nil {
			state = r.GetGpuState()
			if silent = !h.LaneUp || now.Sub(at) > gpuReportLate; silent {
				state = fmt.Sprintf("its agent was last heard of its GPUs %s ago; what may have changed is not known; see: waypost members %s", now.Sub(at).Round(time.Second), h.Name)
			}
		}
		if state != "ok" {
			out.Without = append(out.Without, &waypostv1.GpuHost{Host: &h.Name, GpuState: &state})
		}
		for _, g := range r.GetGpus() {
			if silent {
				g = lastKnown(g, ms(now.Sub(at)))
			}
			name := fmt.Sprintf("%s/%d", h.Name, g.GetIndex())
			out.Gpus = append(out.Gpus, &waypostv1.HostGpu{
				Name: &name, Host: &h.Name, Gpu: g, Workers: append(workersOn(h.Name, h.Workers, g.GetEngines()), o.c.fleet.GroupWorkers(uuidsOf(g)...)...), AgeMs: proto.Float64(ms(now.Sub(at))),
			})
		}
	}
	slices.SortStableFunc(out.Gpus, func(a, b *waypostv1.HostGpu) int {
		return cmp.Or(cmp.Compare(a.GetHost(), b.GetHost()), cmp.Compare(a.GetGpu().GetIndex(), b.GetGpu().GetIndex()))
	})
	return out, nil
}

// checkGPUs tells of GPUs and drivers that are not well, as far as no worker is
// told to be excluded for it: what a GPU that nobody uses has will meet the next
// engine, and the engine that died of it is gone.
func (c *Coordinator) checkGPUs(p *problems, hosts []fleet.HostInfo, workers []fleet.WorkerInfo, now time.Time) {
	excluded := map[string]bool{}
	for i := range workers {
		excluded[workers[i].Name] = strings.HasPrefix(workers[i].State, "excluded")
	}
	for i := range hosts {
		h := &hosts[i]
		hl := c.lanes.host(h.Name)
		hl.mu.Lock()
		r, at := hl.report, hl.reportAt
		hl.mu.Unlock()
		if r == nil || !h.LaneUp || now.Sub(at) > gpuReportLate {
			continue // that it is silent is told
		}
		for _, k := range r.GetChecks() {
			if k.GetCheck() == "nvml-driver" {
				p.check(k.GetState() != doctor.Problem, "warning", h.Name, "GPUs: "+k.GetWhat(), nil, "engines that run are kept", "waypost doctor --host "+h.Name)
			}
		}
		for _, g := range r.GetGpus() {
			action, reasons, _ := strings.Cut(g.GetVerdict(), ":")
			name, next := fmt.Sprintf("%s/%d", h.Name, g.GetIndex()), "waypost gpus "+h.Name
			told := slices.ContainsFunc(workersOn(h.Name, h.Workers, g.GetEngines()), func(w string) bool { return excluded[h.Name+"/"+w] })
			p.check(action != "exclude" || told, "error", name, "GPU excluded: "+reasons, nil, "workers on it get no placements", next)
			p.check(action != "price", "warning", name, "GPU priced: "+reasons, nil, "workers on it are placed by their measured speed", next)
		}
	}
}

// gpuReportLate is how old what an agent says of its GPUs may be: it does so every
// ten seconds.
const gpuReportLate = 45 * time.Second

// lastKnown is what is still true of a GPU whose host was last heard ageMs ago:
// what cannot change, its errors, and what they led to. That it was well says
// nothing.
func lastKnown(g *waypostv1.Gpu, ageMs float64) *waypostv1.Gpu {
	out := &waypostv1.Gpu{
		Index: g.Index, Uuid: g.Uuid, Model: g.Model, PciBusId: g.PciBusId, MemoryTotalBytes: g.MemoryTotalBytes, SmClockMaxMhz: g.SmClockMaxMhz,
		NvlinkTotal: g.NvlinkTotal, NumaNode: g.NumaNode, Nics: g.Nics, Engines: g.Engines, Missing: map[string]string{"values": "its host is silent"},
	}
	if g.GetVerdict() != "ok" {
		out.Verdict = g.Verdict
	}
	for _, x := range g.GetXids() {
		x = proto.CloneOf(x)
		if x.AgeMs != nil {
			x.AgeMs = proto.Float64(x.GetAgeMs() + ageMs)
		}
		out.Xids = append(out.Xids, x)
	}
	return out
}

// workersOn are the workers of some engines of a host, without the host's name.
func workersOn(host string, workers, engines []string) []string {
	var out []string
	for _, w := range workers {
		local := strings.TrimPrefix(w, host+"/")
		engine, _, _ := strings.Cut(local, "/")
		if slices.Contains(engines, engine) {
			out = append(out, local)
		}
	}
	return out
}

// AckGpu implements the operator service. The host itself keeps what was
// acknowledged, so it works without a leader.
func (o *operators) AckGpu(ctx context.Context, req *waypostv1.AckGpuRequest) (*waypostv1.AckGpuResponse, error) {
	c := o.c
	if strings.TrimSpace(req.GetReason()) == "" {
		return nil, api.BadField("reason", "must say why: the next person asks")
	}
	host, index, uuid, err := c.findGPU(req.GetGpu())
	if err != nil {
		return nil, err
	}
	s := c.lanes.session(host)
	if s == nil {
		return nil, api.Unavailable(fmt.Sprintf("host %s has no lane to this coordinator, and it alone knows its GPU's errors; when it is back, ask again. A reboot of it clears them as well; see: waypost members %s", host, host))
	}
	by := cmp.Or(api.CallerOf(ctx).Name, "unknown")
	ack := &waypostv1.AckGpu{Index: index, Reason: req.Reason, By: &by, DryRun: req.DryRun}
	if uuid != "" {
		ack.Uuid = &uuid
	}
	reply, err := c.acks.ask(ctx, s, ackWithin, func(id uint32) *waypostv1.ConnectResponse {
		ack.AskId = &id
		return &waypostv1.ConnectResponse{Frame: &waypostv1.ConnectResponse_AckGpu{AckGpu: ack}}
	})
	switch {
	case err != nil:
		return nil, api.Unavailable(fmt.Sprintf("host %s did not answer: %v; an acknowledgement may be given twice", host, err))
	case reply.GetError() != "":
		return nil, api.NotFound("gpu", reply.GetError())
	}
	out := &waypostv1.AckGpuResponse{Gpu: req.Gpu, Uuid: reply.Uuid, Xids: reply.GetXids(), Verdict: reply.Verdict}
	if !req.GetDryRun() {
		c.log.Info("GPU errors acknowledged", "event", "gpu_acked", "host", host, "gpu", req.GetGpu(), "xids", fmt.Sprint(reply.GetXids()), "by", by, "reason", req.GetReason())
	}
	return out, nil
}

// findGPU finds the host of a GPU that is named HOST/INDEX or by its UUID.
func (c *Coordinator) findGPU(name string) (host string, index *uint32, uuid string, err error) {
	hosts := c.fleet.Hosts(time.Now())
	if at, number, ok := strings.Cut(name, "/"); ok {
		n, err := strconv.ParseUint(number, 10, 16)
		if err != nil {
			return "", nil, "", api.BadField("gpu", fmt.Sprintf("%q: after the host comes the GPU's index, gpu-02/1 for example", name))
		}
		for _, h := range hosts {
			if h.Name == at {
				return at, proto.Uint32(uint32(n)), "", nil
			}
		}
		return "", nil, "", api.NotFound("gpu", fmt.Sprintf("no host %q; see: waypost gpus", at))
	}
	for _, h := range hosts {
		hl := c.lanes.host(h.Name)
		hl.mu.Lock()
		gpus := hl.report.GetGpus()
		hl.mu.Unlock()
		for _, g := range gpus {
			if name != "" && strings.EqualFold(g.GetUuid(), name) {
				return h.Name, nil, g.GetUuid(), nil
			}
		}
	}
	return "", nil, "", api.NotFound("gpu", fmt.Sprintf("no GPU %q: name it HOST/INDEX or by its UUID; see: waypost gpus", name))
}
