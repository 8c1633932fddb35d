package coordinator

import (
	"strings"
	"testing"

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
