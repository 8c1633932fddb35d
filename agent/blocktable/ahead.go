package blocktable

// aheadBlocks is for how many blocks memory is asked for at once. A table does
// not fit the caches that it shares with an inference server, and the places of
// a block in the indices are random: waiting for them, one after the other, was
// most of what an event took. Asked for together they take little more than one.
const aheadBlocks = 32

// ApplyAll mirrors events in order, as Apply would one by one. It takes less
// time: engines remove each block by an event of its own, and this looks ahead.
func (t *Table) ApplyAll(events []Event) {
	var hashes [aheadBlocks]uint64
	asked := 0 // before this event all removals were asked for
	for i := range events {
		if i == asked {
			n := 0
			for ; asked < len(events) && n < aheadBlocks && removesOne(&events[asked]); asked++ {
				hashes[n] = events[asked].Hashes[0]
				n++
			}
			t.askRemoved(hashes[:n])
			asked = max(asked, i+1)
		}
		t.Apply(&events[i])
	}
}

func removesOne(e *Event) bool { return e.Op == OpRemove && len(e.Hashes) == 1 }

// askRemoved asks for what the removal of blocks will need.
func (t *Table) askRemoved(hashes []uint64) {
	if len(hashes) < 2 {
		return // nothing to wait for at the same time
	}
	t.askNames(hashes)
	for _, h := range hashes {
		if id, _ := t.byHash.find(hashKey(h), 0); id != 0 {
			t.asked += uint64(t.nodes.at(id).flags)
		}
	}
}

// askNames asks for where blocks are found by hash.
func (t *Table) askNames(hashes []uint64) {
	x := &t.byHash
	for _, h := range hashes {
		t.asked += x.slots[x.home(hashKey(h))]
	}
}
