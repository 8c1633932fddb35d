package coordinator

import (
	"math"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	"waypost/coordinator/fleet"
	"waypost/coordinator/placement"
	"waypost/coordinator/transfers"
	waypostv1 "waypost/proto/waypost/v1"
)

// sawTransfer takes what became of a transfer that was asked for here, and tells
// the receiver's agent, which tells the other coordinators.
func (c *Coordinator) sawTransfer(now time.Time, seen *transfers.Seen) {
	if seen == nil {
		return
	}
	nowMs := c.transfers.Ms(now)
	c.learnTransfer(nowMs, nowMs, seen)
	host, index, ok := c.lanes.where(seen.Pair.To)
	if !ok {
		return
	}
	m := &waypostv1.ObservedTransfer{From: &seen.Pair.From, Confirmed: &seen.Confirmed, Others: proto.Uint32(uint32(seen.Others))}
	if seen.Bytes > 0 {
		m.Bytes, m.WireMs = &seen.Bytes, &seen.WireMs
	}
	frame := &waypostv1.TransferFrame{Coordinator: &c.process, Index: &index, Transfers: []*waypostv1.ObservedTransfer{m}}
	if !c.lanes.send(host, &waypostv1.ConnectResponse{Frame: &waypostv1.ConnectResponse_Transfers{Transfers: frame}}) {
		c.metrics.framesUnsent.Inc()
	}
}

func (c *Coordinator) learnTransfer(nowMs, atMs float64, seen *transfers.Seen) {
	c.transfers.Use(c.fleetFile.Load())
	if switched, off := c.transfers.Learn(nowMs, atMs, seen); switched {
		c.log.Warn("pulls of a pair were switched", "off", off, "from", seen.Pair.From, "to", seen.Pair.To)
	}
}

// heardSeries is how far a worker's series of transfers was taken in.
type heardSeries struct{ series, seq uint64 }

// Bounds of what an agent tells of a transfer.
const (
	mostTransferBytes  = 1e15
	mostTransferMs     = 3_600_000
	mostTransferOthers = 4096
	mostTransferName   = 768
)

// takeTransfers takes what a worker's agent tells of transfers to it: what other
// coordinators saw, and after a restart of this one all that is kept.
func (c *Coordinator) takeTransfers(now time.Time, id fleet.WorkerID, w *waypostv1.WorkerLoad) {
	to, ok := c.fleet.Endpoint(id)
	if !ok || len(w.GetTransfers()) == 0 {
		return
	}
	c.heardMu.Lock()
	defer c.heardMu.Unlock()
	at := c.heard[to.Name]
	if at.series != w.GetTransferSeries() {
		at = heardSeries{series: w.GetTransferSeries()}
	}
	nowMs := c.transfers.Ms(now)
	for _, m := range w.GetTransfers() {
		if m.GetSeq() <= at.seq {
			continue
		}
		at.seq = m.GetSeq()
		if m.GetCoordinator() == c.process {
			continue // it was learnt here when it was seen
		}
		if !wellFormedTransfer(m) {
			c.metrics.badFrames.WithLabelValues("transfers").Inc()
			continue
		}
		c.learnTransfer(nowMs, nowMs-m.GetAgeMs(), &transfers.Seen{
			Pair: placement.Pair{From: m.GetFrom(), To: to.Name}, Confirmed: m.GetConfirmed(), Bytes: m.GetBytes(), WireMs: m.GetWireMs(), Others: int(m.GetOthers()),
		})
	}
	if len(c.heard) >= maxHeardSeries {
		clear(c.heard)
	}
	c.heard[to.Name] = at
}

// maxHeardSeries bounds the workers whose series are known; beyond it, what was
// heard is heard again.
const maxHeardSeries = 65_536

func wellFormedTransfer(m *waypostv1.ObservedTransfer) bool {
	within := func(v, most float64) bool { return v >= 0 && v <= most }
	return len(m.GetFrom()) <= mostTransferName && strings.Count(m.GetFrom(), "/") == 2 && within(m.GetBytes(), mostTransferBytes) &&
		within(m.GetWireMs(), mostTransferMs) && within(m.GetAgeMs(), math.MaxInt64) && m.GetOthers() <= mostTransferOthers
}
