package agent

import (
	"encoding/json"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	waypostv1 "waypost/proto/waypost/v1"
)

// Transfers are told once per lane, oldest first and in parts; the newest are
// kept, over a restart too; what no coordinator can have seen is refused whole.
func TestTransferLog(t *testing.T) {
	r := testRank(nil)
	now := time.Now()
	frame := func(change func(*waypostv1.ObservedTransfer)) *waypostv1.TransferFrame {
		m := &waypostv1.ObservedTransfer{From: proto.String("gpu-02/v/0"), Confirmed: proto.Bool(true), Bytes: proto.Float64(1e9), WireMs: proto.Float64(80)}
		change(m)
		return &waypostv1.TransferFrame{Coordinator: proto.Uint64(0xc1), Transfers: []*waypostv1.ObservedTransfer{m}}
	}
	const seen = keptTransfers + 10
	for i := range seen {
		if err := r.takeTransfers(frame(func(m *waypostv1.ObservedTransfer) { m.Others = proto.Uint32(uint32(i)) }), now); err != nil {
			t.Fatal(err)
		}
	}
	told := func(r *rank, after uint64) (list []*waypostv1.ObservedTransfer, series uint64) {
		for {
			part, s, next := r.transfersAfter(after, now.Add(time.Second))
			if len(part) == 0 {
				return list, s
			}
			if len(part) > transfersPerReport {
				t.Fatalf("%d in one report", len(part))
			}
			list, series, after = append(list, part...), s, next
		}
	}
	list, series := told(r, 0)
	for i, m := range list {
		if want := uint64(seen - keptTransfers + i + 1); m.GetSeq() != want || m.GetOthers() != uint32(want-1) || m.GetCoordinator() != 0xc1 || m.GetAgeMs() < 1000 {
			t.Fatalf("the %d-th told is %v, want seq %d", i, m, want)
		}
	}
	if len(list) != keptTransfers || series == 0 {
		t.Errorf("%d kept, series %d", len(list), series)
	}
	if list, _ := told(r, seen-3); len(list) != 3 {
		t.Errorf("%d told after all but three", len(list))
	}

	b, err := json.Marshal(r.transferLog().export(r.ms(now)))
	if err != nil {
		t.Fatal(err)
	}
	again := testRank(nil)
	again.restoreTransfers = func() (l transferLog) {
		if err := json.Unmarshal(b, &l); err != nil {
			t.Fatal(err)
		}
		return l
	}
	if list, s := told(again, 0); len(list) != keptTransfers || s != series {
		t.Errorf("%d of series %x after a restart, want %d of %x", len(list), s, keptTransfers, series)
	}
	tampered := testRank(nil)
	tampered.restoreTransfers = func() (l transferLog) {
		if err := json.Unmarshal([]byte(strings.Replace(string(b), `"wireMs":80`, `"wireMs":-1`, 1)), &l); err != nil {
			t.Fatal(err)
		}
		return l
	}
	if list, _ := told(tampered, 0); len(list) != 0 || tampered.faults["learnt_refused"] != 1 {
		t.Errorf("%d told of a file that cannot be right", len(list))
	}

	for field, change := range map[string]func(*waypostv1.ObservedTransfer){
		"from":    func(m *waypostv1.ObservedTransfer) { m.From = proto.String("gpu-02") },
		"bytes":   func(m *waypostv1.ObservedTransfer) { m.Bytes = proto.Float64(math.NaN()) },
		"wire_ms": func(m *waypostv1.ObservedTransfer) { m.WireMs = proto.Float64(math.Inf(1)) },
		"others":  func(m *waypostv1.ObservedTransfer) { m.Others = proto.Uint32(math.MaxUint32) },
	} {
		if err := r.takeTransfers(frame(change), now); err == nil || !strings.Contains(err.Error(), "transfers[0]: "+field) {
			t.Errorf("%s: %v", field, err)
		}
	}
	if err := r.takeTransfers(&waypostv1.TransferFrame{Transfers: make([]*waypostv1.ObservedTransfer, transfersPerFrame+1)}, now); err == nil || !strings.Contains(err.Error(), fmt.Sprint(transfersPerFrame)) {
		t.Errorf("too many: %v", err)
	}
	if list, _ := told(r, seen); len(list) != 0 {
		t.Errorf("%d of what was refused are told", len(list))
	}
}
