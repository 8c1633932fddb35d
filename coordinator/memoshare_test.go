package coordinator

import (
	"strings"
	"testing"
	"time"

	waypostv1 "waypost/proto/waypost/v1"
)

// Entries that are refused take no pool's place.
func TestRefusedEntriesMakeNoPools(t *testing.T) {
	o := startOne(t)
	o.memos.take([]*waypostv1.MemoEntry{
		{Pool: new(strings.Repeat("x", maxNameLen+1)), Epoch: new(uint32(1)), Key: new(uint64(2)), Tokens: new(uint32(16)), Values: []uint64{1}},
		{Pool: new("p"), Epoch: new(uint32(1)), Key: new(uint64(2)), Tokens: new(uint32(16)), Answer: new(uint32(256)), Values: []uint64{1}},
	})
	if n := len(o.memos.all()); n != 0 {
		t.Errorf("%d pools are kept", n)
	}
}

// What waits for a peer that reads nothing is bounded, however long it lasts.
func TestMemoForASlowPeerIsBounded(t *testing.T) {
	o := startOne(t)
	l := &link{x: o.exchange, wake: make(chan struct{}, 1), up: true}
	e := &waypostv1.MemoEntry{Pool: new("p"), Values: make([]uint64, 1024)}
	now := time.Now()
	for i := range 10_000 {
		l.pushMemo(now.Add(time.Duration(i)*time.Second), []*waypostv1.MemoEntry{e})
	}
	if most := maxMemoWaiting / memoEntryBytes(e); len(l.memo) > most || len(l.memo) < most-1 {
		t.Errorf("%d entries wait, at most %d may", len(l.memo), most)
	}
	if got := len(l.takeMemo()); got == 0 {
		t.Error("nothing is handed over")
	}
	if l.pushMemo(now.Add(time.Hour*9), []*waypostv1.MemoEntry{e}); len(l.memo) != 1 {
		t.Errorf("%d entries wait after room was made", len(l.memo))
	}
}
