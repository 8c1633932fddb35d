package agent

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"google.golang.org/protobuf/proto"

	"waypost/agent/engine/process"
	"waypost/agent/host"
	"waypost/gossip/lane"
	"waypost/nvml"
	waypostv1 "waypost/proto/waypost/v1"
)

// gpuReader is what the agent needs of the NVML client.
type gpuReader interface {
	Run(ctx context.Context) error
	Changed() <-chan struct{}
	View() nvml.View
	Acknowledge(uuid string) bool
}

// gpuTruth is what the agent makes of the host's GPUs: which engine uses which,
// by what policy they are judged, and what was said of them.
type gpuTruth struct {
	listeners *process.Listeners
	parents   host.Parents
	// judged gets a value when GPUs are to be judged anew.
	judged chan struct{}

	mu     sync.Mutex // guards what follows
	policy *nvml.Policy
	// uses are the GPUs of each engine by UUID, as seen last.
	uses map[string][]string
	// links are the links to the host's memory of each engine's GPUs, the least of
	// them; missing: unknown.
	links map[string]nvml.PCIeLink
	// held is what the processes of an engine hold, bytes; missing: unknown.
	held map[string]uint64
	// complete says that all processes on GPUs were told and all engines found:
	// an engine that is not in uses then uses none.
	complete bool
	owners   map[uint32]string // engine by process on a GPU
	// foreign is by GPU what processes of no engine hold; missing: unknown.
	foreign map[string]uint64
	// told are the verdicts as they were logged, by UUID.
	told map[string]nvml.Verdict
}

func newGPUTruth(proc string) *gpuTruth {
	return &gpuTruth{
		listeners: process.NewListeners(proc), parents: host.ProcParents(proc), policy: nvml.DefaultPolicy(),
		judged: make(chan struct{}, 1), uses: map[string][]string{}, told: map[string]nvml.Verdict{},
	}
}

// setPolicy takes the fleet's policy over. One that this version cannot read
// leaves the former in force.
func (g *gpuTruth) setPolicy(p *waypostv1.GpuPolicy) error {
	if p == nil {
		return nil // a coordinator that does not say
	}
	policy, err := nvml.ParsePolicy(p.GetExclude(), p.GetPrice(), p.GetIgnore())
	if err != nil {
		return err
	}
	g.mu.Lock()
	g.policy = policy
	g.mu.Unlock()
	select {
	case g.judged <- struct{}{}:
	default:
	}
	return nil
}

// policyNow is the policy in force.
func (g *gpuTruth) policyNow() *nvml.Policy {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.policy
}

// engineProcesses finds the processes that listen at engines' addresses, with the
// engine of each; all says that every engine of this host was found.
func (g *gpuTruth) engineProcesses(urls map[string]string) (engines map[int]string, all bool) {
	engines, all = map[int]string{}, true
	for name, target := range urls {
		at, ok := process.Local(target)
		if !ok {
			all = false
			continue
		}
		pids, err := g.listeners.PIDs(at)
		all = all && err == nil && len(pids) > 0
		for _, pid := range pids {
			engines[pid] = name
		}
	}
	return engines, all
}

// look finds out anew which engine uses which GPU: those that listen, and
// processes that listen nowhere, with the engine or share of each. It says whether
// the GPUs of an engine, or their links to the host, have changed.
func (g *gpuTruth) look(view *nvml.View, urls map[string]string, carried map[int]string) (changed bool) {
	engines, all := g.engineProcesses(urls)
	maps.Copy(engines, carried)
	m := host.MapGPUs(slices.Sorted(maps.Keys(engines)), view.Devices, g.parents)
	uses, held, unheld := map[string][]string{}, map[string]uint64{}, map[string]bool{}
	for pid, name := range engines {
		uses[name] = append(uses[name], m.UUIDs[pid]...)
		if bytes, ok := m.MemoryBytes[pid]; ok {
			held[name] += bytes
		} else if len(m.UUIDs[pid]) > 0 {
			unheld[name] = true
		}
	}
	for name := range unheld {
		delete(held, name)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	names := slices.Sorted(maps.Keys(urls))
	for _, name := range carried {
		if !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	for _, name := range names {
		uses[name] = g.keepUses(name, uses[name], slices.Contains(slices.Collect(maps.Values(engines)), name), view)
		if len(uses[name]) == 0 {
			delete(uses, name)
			all = false // its processes may be any of those on GPUs
		}
	}
	links := map[string]nvml.PCIeLink{}
	for name, uuids := range uses {
		if l, ok := hostLink(view, uuids); ok {
			links[name] = l
		}
	}
	changed = !maps.EqualFunc(uses, g.uses, slices.Equal) || !maps.Equal(links, g.links)
	g.links = links
	g.uses, g.held, g.complete = uses, held, all && m.Complete
	g.owners, g.foreign = map[uint32]string{}, map[string]uint64{}
	for pid, engine := range m.Owner {
		g.owners[pid] = engines[engine]
	}
	for i := range view.Devices {
		if bytes, ok := foreignBytes(&view.Devices[i], m.Foreign, all); ok {
			g.foreign[view.Devices[i].UUID] = bytes
		}
	}
	return changed
}

// keepUses adds GPUs and instances whose processes are not told now to what an
// engine uses: a GPU that fell off the bus tells none, and is still the engine's. An
// engine that is not found keeps all.
func (g *gpuTruth) keepUses(name string, uses []string, found bool, view *nvml.View) []string {
	for _, uuid := range g.uses[name] {
		if !slices.Contains(uses, uuid) && (!found || untold(view, uuid)) {
			uses = append(uses, uuid)
		}
	}
	slices.Sort(uses)
	return slices.Compact(uses)
}

// untold says of a GPU or an instance that it is known and its processes are not.
func untold(view *nvml.View, uuid string) bool {
	for i := range view.Devices {
		d := &view.Devices[i]
		if d.UUID == uuid {
			return d.Processes == nil
		}
		if j := slices.IndexFunc(d.Instances, func(p nvml.Instance) bool { return p.UUID == uuid }); j >= 0 {
			return d.Instances[j].Processes == nil
		}
	}
	return false
}

// foreignBytes is what processes of no engine hold on a GPU. While an engine's
// processes are not found, what holds memory may be its.
func foreignBytes(d *nvml.Device, foreign map[string][]nvml.Process, all bool) (sum uint64, known bool) {
	if d.Processes == nil || !all && len(foreign[d.UUID]) > 0 {
		return 0, false
	}
	for _, p := range foreign[d.UUID] {
		if p.MemoryBytes == nil {
			return 0, false
		}
		sum += *p.MemoryBytes
	}
	return sum, true
}

// gpusOf are the GPUs of an engine by UUID; nil: unknown or none.
func (g *gpuTruth) gpusOf(engine string) []string {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.Clone(g.uses[engine])
}

// hostLink is the least of the links of some GPUs, or instances, to the memory of
// their host; false: that of one is not known. Of those whose rate is not known
// none is taken for the least while another's is.
func hostLink(view *nvml.View, uuids []string) (least nvml.PCIeLink, ok bool) {
	var leastRate float64
	rated := false // least has a rate
	for _, uuid := range uuids {
		i := slices.IndexFunc(view.Devices, func(d nvml.Device) bool { return d.IsOneOf([]string{uuid}) })
		if i < 0 {
			return nvml.PCIeLink{}, false
		}
		l, known := view.Devices[i].HostLink()
		if !known {
			return nvml.PCIeLink{}, false
		}
		rate, hasRate := l.BytesPerSec()
		if !ok || hasRate && (!rated || rate < leastRate) {
			least, leastRate, rated, ok = l, rate, hasRate, true
		}
	}
	return least, ok
}

// linkOf is the least link of an engine's GPUs to the memory of their host; nil:
// unknown.
func (g *gpuTruth) linkOf(engine string) *nvml.PCIeLink {
	g.mu.Lock()
	defer g.mu.Unlock()
	if l, ok := g.links[engine]; ok {
		return &l
	}
	return nil
}

// judge is the verdict on an engine's GPUs; empty: unknown, or it uses none. An
// engine that is alone on its host and whose GPUs are not known has all of them:
// it is no other one's fault that is put on it.
func (g *gpuTruth) judge(view *nvml.View, engine string, alone bool) string {
	g.mu.Lock()
	uuids, policy, complete := g.uses[engine], g.policy, g.complete
	g.mu.Unlock()
	if len(uuids) == 0 {
		if !alone || complete || len(view.Devices) == 0 {
			return ""
		}
		for i := range view.Devices {
			uuids = append(uuids, view.Devices[i].UUID)
		}
	}
	verdict := view.Judge(policy, uuids)
	return verdict.String()
}

// urls are the engines of this host by name.
func (a *Agent) urls() map[string]string {
	out := map[string]string{}
	for _, w := range a.watching() {
		out[w.target.Name] = w.target.URL
	}
	return out
}

// gpuVerdicts returns the verdict on the GPUs of engines as they are now.
func (a *Agent) gpuVerdicts() func(engine string) string {
	reader := a.gpus.client()
	if reader == nil {
		return func(string) string { return "" }
	}
	v := reader.View()
	names := map[string]bool{}
	for _, name := range a.carried() {
		names[name] = true
	}
	for _, w := range a.watching() {
		names[w.target.Name] = true
	}
	alone := len(names) == 1
	known := map[string]string{}
	return func(engine string) string {
		verdict, ok := known[engine]
		if !ok {
			verdict = a.truth.judge(&v, engine, alone)
			known[engine] = verdict
		}
		return verdict
	}
}

// hostReport is what is told of the host and its GPUs.
func (a *Agent) hostReport() *waypostv1.HostReport {
	facts, _, _ := a.host.Facts()
	reader := a.gpus.client()
	if reader == nil {
		r := host.Report(&facts, &nvml.View{}, nvml.DefaultPolicy())
		r.GpuState = proto.String("GPU facts are switched off: gpu.enabled = \"off\"")
		return r
	}
	view := reader.View()
	g := a.truth
	r := host.Report(&facts, &view, g.policyNow())
	for _, m := range r.GetGpus() {
		a.addPlace(m, facts.Interfaces)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	headroom := a.kvNotes()
	for i, m := range r.GetGpus() {
		for _, p := range m.GetProcesses() {
			if engine := g.owners[p.GetPid()]; engine != "" {
				p.Engine = &engine
			}
		}
		if bytes, ok := g.foreign[m.GetUuid()]; ok {
			m.ForeignMemoryBytes = proto.Float64(float64(bytes))
		}
		for _, engine := range slices.Sorted(maps.Keys(g.uses)) {
			if view.Devices[i].IsOneOf(g.uses[engine]) {
				m.Engines = append(m.Engines, engine)
				m.Notes = append(m.Notes, headroom[engine]...)
			}
		}
	}
	return r
}

// addPlace adds where a GPU hangs in the host and how near its network cards are.
// It reads the kernel's tree of devices, so no lock is held that a load report
// waits for.
func (a *Agent) addPlace(m *waypostv1.Gpu, interfaces []host.Interface) {
	if node := a.host.NUMANodeOf(m.GetPciBusId()); node != nil {
		m.NumaNode = proto.Uint32(uint32(*node))
	}
	for i := range interfaces {
		if distance := a.host.NICDistance(m.GetPciBusId(), interfaces[i].Name); distance != "" {
			m.Nics = append(m.Nics, &waypostv1.NicDistance{Interface: &interfaces[i].Name, Distance: &distance})
		}
	}
}

// kvTolerance is how much more KV an engine may claim than its processes hold:
// counters of driver and engine round differently.
const kvTolerance = 1.02

// kvNotes say by engine what of its claims about KV memory does not fit to what
// its processes hold. The lock of the truth is held.
func (a *Agent) kvNotes() map[string][]string {
	out := map[string][]string{}
	for _, w := range a.watching() {
		claimed := 0.0
		for _, r := range w.all() {
			id := r.identity()
			perToken := cmp.Or(w.config.KVBytes, id.facts.Transfer.BytesPerToken)
			if !id.known || perToken == 0 || id.facts.PoolBlocks <= 0 || id.facts.BlockTokens <= 0 {
				claimed = 0
				break
			}
			claimed += perToken * float64(id.facts.PoolBlocks) * float64(id.facts.BlockTokens)
		}
		if note := kvNote(w.target.Name, claimed, a.truth.held); note != "" {
			out[w.target.Name] = append(out[w.target.Name], note)
		}
	}
	return out
}

func kvNote(engine string, claimedBytes float64, held map[string]uint64) string {
	bytes, ok := held[engine]
	if !ok || claimedBytes <= float64(bytes)*kvTolerance {
		return ""
	}
	return fmt.Sprintf("kv_headroom: %s says its KV takes %.1f GiB, its processes hold %.1f GiB", engine, claimedBytes/(1<<30), float64(bytes)/(1<<30))
}

// tellVerdicts logs what has changed in the verdicts on GPUs.
func (a *Agent) tellVerdicts(view *nvml.View) {
	g := a.truth
	g.mu.Lock()
	defer g.mu.Unlock()
	for i := range view.Devices {
		d := &view.Devices[i]
		now, was := g.policy.Judge(view.Status.Code, view.XidState, d), g.told[d.UUID]
		g.told[d.UUID] = now
		if now.String() == was.String() {
			continue
		}
		name := fmt.Sprintf("%s/%d", a.name, d.Index)
		if now.Action == nvml.ActionOK {
			a.log.Info("GPU works again", "event", "gpu_cleared", "gpu", name, "uuid", d.UUID, "was", was.String())
			continue
		}
		a.log.Warn("GPU fault", "event", "gpu_fault", "gpu", name, "uuid", d.UUID, "action", now.Action.String(), "reasons", strings.Join(now.Reasons, ","))
	}
}

// takeAck acknowledges the errors of a GPU for an operator.
func (a *Agent) takeAck(l *lane.Lane, ack *waypostv1.AckGpu) {
	reply := a.acknowledge(ack)
	reply.AskId = ack.AskId
	if err := l.Send(&waypostv1.ConnectRequest{Frame: &waypostv1.ConnectRequest_AckGpu{AckGpu: reply}}); err != nil {
		a.log.Debug("answer to an acknowledgement not sent", "error", err)
	}
}

// acknowledge does what an operator asks about a GPU.
func (a *Agent) acknowledge(ack *waypostv1.AckGpu) *waypostv1.AckGpuReply {
	refuse := func(format string, args ...any) *waypostv1.AckGpuReply {
		return &waypostv1.AckGpuReply{Error: proto.String(fmt.Sprintf(format, args...))}
	}
	reader := a.gpus.client()
	if reader == nil {
		return refuse("GPU facts are switched off on %s: gpu.enabled = \"off\"", a.name)
	}
	find := func() (nvml.View, *nvml.Device) {
		v := reader.View()
		for i := range v.Devices {
			d := &v.Devices[i]
			if ack.Index != nil && ack.GetIndex() == uint32(d.Index) || ack.Index == nil && ack.GetUuid() == d.UUID {
				return v, d
			}
		}
		return v, nil
	}
	v, d := find()
	if d == nil {
		return refuse("no such GPU was seen on %s (%s); see: waypost gpus %s", a.name, v.Status.Text, a.name)
	}
	reply := &waypostv1.AckGpuReply{Uuid: &d.UUID}
	for _, x := range d.Xids {
		if !x.Acknowledged {
			reply.Xids = append(reply.Xids, x.Xid)
		}
	}
	if ack.GetDryRun() {
		for i := range d.Xids {
			d.Xids[i].Acknowledged = true
		}
	} else {
		reader.Acknowledge(d.UUID)
		a.log.Info("GPU errors acknowledged", "event", "gpu_acked", "gpu", fmt.Sprintf("%s/%d", a.name, d.Index), "uuid", d.UUID,
			"xids", fmt.Sprint(reply.GetXids()), "by", ack.GetBy(), "reason", ack.GetReason())
		if v, d = find(); d == nil {
			return reply
		}
	}
	verdict := a.truth.policyNow().Judge(v.Status.Code, v.XidState, d)
	reply.Verdict = proto.String(verdict.String())
	return reply
}
