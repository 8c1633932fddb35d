package coordinator

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	"waypost/coordinator/api"
	"waypost/coordinator/fleet"
	"waypost/coordinator/placement"
	"waypost/coordinator/registry"
	waypostv1 "waypost/proto/waypost/v1"
)

// Bounds of a topology: places whose ways are looked at, and workers of one end
// that prices are told for.
const (
	maxPlaces     = 256
	maxPriceEnds  = 8
	maxPairsTold  = 256
	bytesPerMsSec = 1000.
)

// pricedTokens are the lengths that prices are told for.
var pricedTokens = [...]int{1024, 8192, 65_536}

// GetTopology implements the operator service.
func (o *operators) GetTopology(_ context.Context, req *waypostv1.GetTopologyRequest) (*waypostv1.GetTopologyResponse, error) {
	c, now := o.c, time.Now()
	if (req.GetFrom() == "") != (req.GetTo() == "") {
		field := "to"
		if req.GetFrom() == "" {
			field = "from"
		}
		return nil, api.BadField(field, "from and to go together: name a host, engine or worker for each")
	}
	file := c.fleetFile.Load()
	c.transfers.use(file)
	hosts, workers := c.fleet.Hosts(now), c.fleet.Snapshots()
	out := &waypostv1.GetTopologyResponse{AnsweredBy: &c.name, PolicyVersion: proto.Uint32(c.replica.State().FleetFile().Version)}
	places := map[registry.Place]int{}
	crowded := ""
	for i := range hosts {
		h := &hosts[i]
		place := file.HostPlace(h.Name)
		if len(h.Workers) > 1 {
			crowded = h.Name
		}
		anywhere := place
		anywhere.Host = ""
		if len(places) < maxPlaces {
			places[anywhere]++
		}
		m := &waypostv1.TopologyHost{Name: &h.Name, Zone: &place.Zone, Rack: &place.Rack, Source: proto.String(string(place.Source))}
		hl := c.lanes.host(h.Name)
		hl.mu.Lock()
		notes := slices.DeleteFunc([]string{waysNote(hl.report), numaNote(hl.report)}, func(s string) bool { return s == "" })
		m.Numa = proto.String(strings.Join(notes, "; "))
		hl.mu.Unlock()
		for _, w := range workers {
			if hostOf(w.Name) == h.Name && w.Transfer != nil && w.Transfer.Connector != "" {
				m.Pulls = append(m.Pulls, w.Name)
			}
		}
		out.Hosts = append(out.Hosts, m)
	}
	slices.SortFunc(out.Hosts, func(a, b *waypostv1.TopologyHost) int {
		return cmp.Or(cmp.Compare(a.GetZone(), b.GetZone()), cmp.Compare(a.GetRack(), b.GetRack()), cmp.Compare(a.GetName(), b.GetName()))
	})
	paths := pathsBetween(file, places)
	if crowded != "" {
		paths = append(paths, file.Link(crowded, crowded))
	}
	c.transfers.describe(c.transfers.ms(now), paths, out)
	if req.GetFrom() != "" {
		if err := c.priceTransfers(now, req, workers, file, out); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// pathsBetween are the declared links, in the order of the file, and what is
// assumed between the places of hosts.
func pathsBetween(file *registry.Fleet, places map[registry.Place]int) []registry.Path {
	var out []registry.Path
	for i := range file.Links {
		l := &file.Links[i]
		out = append(out, registry.Path{
			Name: l.String(), Source: registry.Declared, BandwidthBytesPerSec: l.BandwidthBytesPerSec, Latency: l.Latency,
			Transfer: l.Transfer, PlaceSurcharge: l.PlaceSurcharge,
		})
	}
	assumed := map[string]registry.Path{}
	for a, n := range places {
		for b := range places {
			if a == b && n < 2 {
				continue
			}
			if p := file.PathBetween(a, b); p.Source != registry.Declared {
				assumed[p.Name] = p
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(assumed)) {
		out = append(out, assumed[name])
	}
	return out
}

// describe adds links, with what was measured on them, and the pairs of which
// anything is known.
func (t *transfers) describe(nowMs float64, paths []registry.Path, out *waypostv1.GetTopologyResponse) {
	t.mu.Lock()
	defer t.mu.Unlock()
	told := map[string]bool{}
	for i := range paths {
		p := &paths[i]
		if told[p.Name] {
			continue
		}
		told[p.Name] = true
		out.Links = append(out.Links, t.link(nowMs, p))
	}
	pairs := map[placement.Pair]*waypostv1.TransferPair{}
	at := func(p placement.Pair) *waypostv1.TransferPair {
		if pairs[p] == nil {
			pairs[p] = &waypostv1.TransferPair{From: &p.From, To: &p.To, Unconfirmed: proto.Uint32(0), Off: proto.Bool(false)}
		}
		return pairs[p]
	}
	for p, s := range t.rates.Pairs(nowMs) {
		m := at(p)
		m.MeasuredBytesPerSec, m.MeasuredPulls, m.MeasuredAgeMs = seenProto(s, nowMs)
	}
	for p, d := range t.book.Doubted(nowMs) {
		m := at(p)
		m.Unconfirmed, m.Off = proto.Uint32(uint32(d.Misses)), proto.Bool(d.OffForMs > 0)
		if d.OffForMs > 0 {
			m.OffForMs = &d.OffForMs
		}
	}
	out.Pairs = slices.SortedFunc(maps.Values(pairs), func(a, b *waypostv1.TransferPair) int {
		switch {
		case a.GetOff() != b.GetOff() && a.GetOff():
			return -1
		case a.GetOff() != b.GetOff():
			return 1
		}
		return cmp.Or(cmp.Compare(a.GetFrom(), b.GetFrom()), cmp.Compare(a.GetTo(), b.GetTo()))
	})
	out.Pairs = out.Pairs[:min(len(out.Pairs), maxPairsTold)]
}

// link puts a link into the API's words, with what was measured on it. t.mu is
// held.
func (t *transfers) link(nowMs float64, p *registry.Path) *waypostv1.TopologyLink {
	link := &waypostv1.TopologyLink{
		Name: &p.Name, StatedBytesPerSec: proto.Float64(float64(p.BandwidthBytesPerSec.Value)), LatencyMs: proto.Float64(ms(p.Latency.Value)),
		LatencySource: proto.String(string(p.Latency.Source)), Transfer: proto.String(string(p.Transfer.Value)),
		SurchargeMs: proto.Float64(ms(p.PlaceSurcharge.Value)), UnderWay: proto.Uint32(uint32(t.book.UnderWay(nowMs, p.Name))),
	}
	path := t.rates.Measured(nowMs, placement.Pair{}, pathOf(*p))
	link.BytesPerSec, link.BandwidthSource = proto.Float64(path.BytesPerMs*bytesPerMsSec), proto.String(path.Figure.String())
	if s, ok := t.rates.OfLink(nowMs, p.Name); ok {
		link.MeasuredBytesPerSec, link.MeasuredPulls, link.MeasuredAgeMs = seenProto(s, nowMs)
	}
	return link
}

// check adds the pairs of workers that nothing is pulled between any more.
func (t *transfers) check(p *problems, now time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	doubted := t.book.Doubted(t.ms(now))
	pairs := slices.SortedFunc(maps.Keys(doubted), func(a, b placement.Pair) int {
		return cmp.Or(cmp.Compare(a.From, b.From), cmp.Compare(a.To, b.To))
	})
	for _, pair := range pairs {
		d := doubted[pair]
		p.check(d.OffForMs == 0, "warning", pair.From+" → "+pair.To, fmt.Sprintf("%d transfers of saved KV in a row were not confirmed by what the engine reused", d.Misses),
			nil, "not reckoned with for "+(time.Duration(d.OffForMs)*time.Millisecond).Round(time.Second).String(), "waypost topology --from "+pair.From+" --to "+pair.To)
	}
}

func seenProto(s placement.SeenRate, nowMs float64) (bytesPerSec *float64, pulls *uint32, ageMs *float64) {
	return proto.Float64(s.BytesPerMs * bytesPerMsSec), proto.Uint32(uint32(s.Transfers)), proto.Float64(max(0, nowMs-s.AtMs))
}

// priceTransfers adds the prices of moving saved KV between what two selectors
// name.
func (c *Coordinator) priceTransfers(now time.Time, req *waypostv1.GetTopologyRequest, workers []*placement.Worker, file *registry.Fleet, out *waypostv1.GetTopologyResponse) error {
	from, to := selected(workers, req.GetFrom()), selected(workers, req.GetTo())
	for _, end := range []struct {
		field, name string
		found       int
	}{{"from", req.GetFrom(), len(from)}, {"to", req.GetTo(), len(to)}} {
		if end.found == 0 {
			return api.NotFound(end.field, fmt.Sprintf("no worker of %.80q is here; see: waypost workers", end.name))
		}
	}
	policy := c.policy.Load()
	nowMs := c.transfers.ms(now)
	for _, f := range from {
		for _, t := range to {
			if f != t {
				out.Prices = append(out.Prices, c.priceTransfer(nowMs, policy, f, t, c.poolOf(now, t, file)))
			}
		}
	}
	if len(out.Prices) == 0 {
		return api.BadField("to", "is the worker it would come from; name another one")
	}
	return nil
}

// poolOf is the fleet file's pool of a worker; nil: the file names none.
func (c *Coordinator) poolOf(now time.Time, w *placement.Worker, file *registry.Fleet) *registry.Pool {
	var info fleet.WorkerInfo
	info, err := c.fleet.Worker(now, w.Name)
	if err != nil {
		return nil
	}
	pool, _ := file.Pool(info.Pool)
	return pool
}

func (c *Coordinator) priceTransfer(nowMs float64, policy *placement.Policy, from, to *placement.Worker, pool *registry.Pool) *waypostv1.TransferPrice {
	stay := registry.StayInNone
	out := &waypostv1.TransferPrice{From: &from.Name, To: &to.Name}
	if pool != nil {
		stay = pool.StayIn.Value
		if limit, ok := pool.MaxTransfer.Get(); ok {
			out.MaxTransferMs = proto.Float64(ms(limit))
		}
	}
	path := c.transfers.path(nowMs, from, to, stay)
	out.Link, out.BytesPerSec, out.BandwidthSource, out.LatencyMs = &path.Link, proto.Float64(path.BytesPerMs*bytesPerMsSec), proto.String(path.Figure.String()), &path.LatencyMs
	if from.Transfer != nil && from.Transfer.BytesPerToken > 0 {
		out.KvBytesPerToken = &from.Transfer.BytesPerToken
	}
	for _, n := range pricedTokens {
		price, note := placement.PriceTransfer(policy, from, to, &path, n)
		out.Reason = proto.String(note.String())
		out.Costs = append(out.Costs, &waypostv1.TransferCost{Tokens: proto.Uint32(uint32(n)), TransferMs: finite(price.TransferMs), ComputeMs: finite(price.ComputeMs)})
	}
	return out
}

// selected are the workers that a host, engine or worker name stands for.
func selected(workers []*placement.Worker, name string) (out []*placement.Worker) {
	for _, w := range workers {
		if (w.Name == name || strings.HasPrefix(w.Name, name+"/")) && len(out) < maxPriceEnds {
			out = append(out, w)
		}
	}
	return out
}

// waysNote says how the GPUs of a host reach each other, as far as is known. What
// is unknown is left out: it is no sign of a fast link.
func waysNote(r *waypostv1.HostReport) string {
	var order []string
	pairs, all := map[string][]string{}, 0
	for _, g := range r.GetGpus() {
		for _, way := range g.GetWays() {
			if way.GetTo() <= g.GetIndex() {
				continue
			}
			all++
			if way.GetWay() == "unknown" {
				continue
			}
			if pairs[way.GetWay()] == nil {
				order = append(order, way.GetWay())
			}
			pairs[way.GetWay()] = append(pairs[way.GetWay()], fmt.Sprintf("%d-%d", g.GetIndex(), way.GetTo()))
		}
	}
	var parts []string
	for _, way := range order {
		between := strings.Join(pairs[way], " ")
		if len(pairs[way]) == all {
			between = "all"
		} else if n := len(pairs[way]); n > maxNotedPairs {
			between = fmt.Sprintf("%d of %d pairs", n, all)
		}
		parts = append(parts, way+" between "+between)
	}
	if len(parts) == 0 {
		return ""
	}
	return "GPUs: " + strings.Join(parts, ", ")
}

// maxNotedPairs is how many pairs of GPUs a note names one by one.
const maxNotedPairs = 8

// numaNote says where GPUs and network cards hang within a host. No price rests
// on it: what pairs of workers reach is measured, and a node that is not known
// is not taken for a near one.
func numaNote(r *waypostv1.HostReport) string {
	var known, unknown []string
	add := func(what string, node *uint32) {
		if node == nil {
			unknown = append(unknown, what)
		} else {
			known = append(known, fmt.Sprintf("%s %d", what, *node))
		}
	}
	for _, g := range r.GetGpus() {
		add(fmt.Sprintf("GPU %d", g.GetIndex()), g.NumaNode)
	}
	if len(known)+len(unknown) == 0 {
		return ""
	}
	for _, i := range r.GetFacts().GetInterfaces() {
		add(i.GetName(), i.NumaNode)
	}
	switch {
	case len(known) == 0:
		return "NUMA nodes unknown"
	case len(unknown) == 0:
		return "NUMA nodes: " + strings.Join(known, ", ")
	}
	return "NUMA nodes: " + strings.Join(known, ", ") + "; unknown: " + strings.Join(unknown, ", ")
}
