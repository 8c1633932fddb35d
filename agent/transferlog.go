package agent

import (
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	"waypost/gossip/lane"
	waypostv1 "waypost/proto/waypost/v1"
)

// Bounds of what is kept of transfers to one worker: enough for the rate of
// links to be measured again from nothing, by 20 transfers of a dozen pairs.
const (
	keptTransfers      = 256
	transfersPerFrame  = 64
	transfersPerReport = 32
	maxTransferBytes   = 1e15
	maxTransferMs      = 3_600_000
	maxTransferOthers  = 4096
	maxWorkerName      = 768
)

// transferLog is what became of the newest transfers to one worker. The
// receiver's agent has the word on them: all coordinators hear the same, and one
// that starts hears all.
type transferLog struct {
	Series uint64           `json:"series"`
	Seq    uint64           `json:"seq"`
	List   []loggedTransfer `json:"list"`
}

type loggedTransfer struct {
	From        string  `json:"from"`
	Coordinator uint64  `json:"coordinator"`
	Seq         uint64  `json:"seq"`
	Confirmed   bool    `json:"confirmed"`
	Bytes       float64 `json:"bytes"`
	WireMs      float64 `json:"wireMs"`
	Others      uint32  `json:"others"`
	// AgeMs is the age when it was kept; atMs when that was.
	AgeMs float64 `json:"ageMs"`
	atMs  float64
}

// add takes a transfer.
func (l *transferLog) add(nowMs float64, t loggedTransfer) {
	if l.Series == 0 {
		l.Series = rand.Uint64() | 1
	}
	l.Seq++
	t.Seq, t.AgeMs, t.atMs = l.Seq, 0, nowMs
	if len(l.List) >= keptTransfers {
		l.List = append(l.List[:0], l.List[len(l.List)-keptTransfers+1:]...)
	}
	l.List = append(l.List, t)
}

// after are the oldest transfers after a seq, and the seq after them.
func (l *transferLog) after(nowMs float64, seq uint64) (out []*waypostv1.ObservedTransfer, next uint64) {
	for i := range l.List {
		t := &l.List[i]
		if t.Seq <= seq || len(out) >= transfersPerReport {
			continue
		}
		m := &waypostv1.ObservedTransfer{From: &t.From, Confirmed: &t.Confirmed, Others: &t.Others, Seq: &t.Seq, Coordinator: &t.Coordinator, AgeMs: proto.Float64(t.AgeMs + max(0, nowMs-t.atMs))}
		if t.Bytes > 0 && t.WireMs > 0 {
			m.Bytes, m.WireMs = &t.Bytes, &t.WireMs
		}
		out, seq = append(out, m), t.Seq
	}
	return out, seq
}

// export is the log with the ages of now.
func (l *transferLog) export(nowMs float64) transferLog {
	out := transferLog{Series: l.Series, Seq: l.Seq, List: append([]loggedTransfer(nil), l.List...)}
	for i := range out.List {
		// A file that is written each minute must not change each minute for
		// ages alone.
		out.List[i].AgeMs += math.Floor(max(0, nowMs-out.List[i].atMs)/600_000) * 600_000
	}
	return out
}

// validate refuses what no agent wrote.
func (l *transferLog) validate() error {
	if len(l.List) > keptTransfers {
		return fmt.Errorf("transfers: %d are more than %d", len(l.List), keptTransfers)
	}
	last := uint64(0)
	for i := range l.List {
		t := &l.List[i]
		if err := t.validate(); err != nil {
			return fmt.Errorf("transfers[%d]: %w", i, err)
		}
		if t.Seq <= last || t.Seq > l.Seq || !(t.AgeMs >= 0 && t.AgeMs < math.MaxInt64) {
			return fmt.Errorf("transfers[%d]: seq %d or age %v ms cannot be", i, t.Seq, t.AgeMs)
		}
		last = t.Seq
	}
	return nil
}

func (t *loggedTransfer) validate() error {
	switch {
	case len(t.From) > maxWorkerName || strings.Count(t.From, "/") != 2:
		return fmt.Errorf("from: %.80q is no worker", t.From)
	case !(t.Bytes >= 0 && t.Bytes <= maxTransferBytes):
		return fmt.Errorf("bytes: %v is not in 0 to %g", t.Bytes, maxTransferBytes)
	case !(t.WireMs >= 0 && t.WireMs <= maxTransferMs):
		return fmt.Errorf("wire_ms: %v is not in 0 to %d", t.WireMs, maxTransferMs)
	case t.Others > maxTransferOthers:
		return fmt.Errorf("others: %d are more than %d", t.Others, maxTransferOthers)
	}
	return nil
}

// takeTransfers takes what a coordinator saw of transfers to this worker; a frame
// that holds one beyond its bounds is refused whole.
func (r *rank) takeTransfers(f *waypostv1.TransferFrame, now time.Time) error {
	if n := len(f.GetTransfers()); n > transfersPerFrame {
		return fmt.Errorf("transfers: %d are more than %d", n, transfersPerFrame)
	}
	var list []loggedTransfer
	for i, m := range f.GetTransfers() {
		t := loggedTransfer{From: m.GetFrom(), Coordinator: f.GetCoordinator(), Confirmed: m.GetConfirmed(), Bytes: m.GetBytes(), WireMs: m.GetWireMs(), Others: m.GetOthers()}
		if err := t.validate(); err != nil {
			return fmt.Errorf("transfers[%d]: %w", i, err)
		}
		list = append(list, t)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, t := range list {
		r.transferLog().add(r.ms(now), t)
	}
	return nil
}

// transferLog is the worker's log, with what a former agent kept of it. The lock
// is held.
func (r *rank) transferLog() *transferLog {
	if r.transfers == nil {
		r.transfers = &transferLog{}
		if r.restoreTransfers != nil {
			kept := r.restoreTransfers()
			if err := kept.validate(); err != nil {
				r.faults["learnt_refused"]++
			} else {
				*r.transfers = kept
				for i := range r.transfers.List {
					r.transfers.List[i].atMs = r.ms(time.Now())
				}
			}
		}
	}
	return r.transfers
}

// transfersAfter are the transfers after a seq, and the series they are of.
func (r *rank) transfersAfter(seq uint64, now time.Time) (list []*waypostv1.ObservedTransfer, series, next uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	log := r.transferLog()
	list, next = log.after(r.ms(now), seq)
	return list, log.Series, next
}

// takeTransfers hands transfers to the worker that received them, and tells all
// coordinators at once.
func (h *lanes) takeTransfers(l *lane.Lane, f *waypostv1.TransferFrame) {
	h.hand(l, "transfers", f.GetIndex(), f.GetCoordinator(), func(r *rank) (bool, error) {
		err := r.takeTransfers(f, time.Now())
		return err == nil, err
	})
}

// addTransfers puts what a lane has yet to hear of transfers on a report.
func (h *lanes) addTransfers(l *lane.Lane, r *rank, w *waypostv1.WorkerLoad, now time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	told := h.toldAccuracy[l]
	if told == nil {
		return // the lane is down
	}
	at := told[r.index]
	list, series, next := r.transfersAfter(at.transfers, now)
	if len(list) > 0 {
		w.Transfers, w.TransferSeries = list, &series
	}
	at.transfers = next
	told[r.index] = at
}
