package coordinator

import (
	"testing"

	"waypost/coordinator/fleet"
	"waypost/gossip/prefix"
	waypostv1 "waypost/proto/waypost/v1"
)

// A request names the idle slot whose content it continues, once per report and
// only if nothing at the worker holds more.
func TestSlotThatAPromptContinuesIsNamed(t *testing.T) {
	told := func(slot, depth uint32, key uint64) *waypostv1.IdleSlot {
		return &waypostv1.IdleSlot{Slot: &slot, Depth: &depth, Key: &key}
	}
	prompt := func(depth int) (prefix.Key, bool) { return prefix.Key(1000 + depth), depth <= 800 }
	for _, c := range []struct {
		name  string
		reuse int
		told  []*waypostv1.IdleSlot
		want  int // -1: none
	}{
		{"it holds what is reused", 640, []*waypostv1.IdleSlot{told(2, 640, 1640)}, 2},
		{"the deepest of two", 640, []*waypostv1.IdleSlot{told(1, 630, 1630), told(3, 640, 1640)}, 3},
		{"another text", 640, []*waypostv1.IdleSlot{told(2, 640, 77)}, -1},
		{"something else holds more", 700, []*waypostv1.IdleSlot{told(2, 640, 1640)}, -1},
		{"it holds more than is expected", 320, []*waypostv1.IdleSlot{told(2, 640, 1640)}, -1},
		{"longer than the prompt", 1600, []*waypostv1.IdleSlot{told(2, 1600, 2600)}, -1},
		{"no slots", 640, nil, -1},
	} {
		var s idleSlots
		id := fleet.WorkerID(7)
		s.report(id, c.told)
		got := s.choose(id, c.reuse, prompt)
		if (got == nil) != (c.want < 0) || got != nil && int(*got) != c.want {
			t.Errorf("%s: %v, want %d", c.name, got, c.want)
		}
		if again := s.choose(id, c.reuse, prompt); got != nil && again != nil && *again == *got {
			t.Errorf("%s: one slot was given to two", c.name)
		}
		if s.choose(id+1, c.reuse, prompt) != nil {
			t.Errorf("%s: another worker's slot", c.name)
		}
	}
	ref := &waypostv1.WorkerRef{}
	if pinSlot(ref, nil); ref.BodyPatch != nil {
		t.Error("a patch for no slot")
	}
	if pinSlot(ref, new(uint32(3))); ref.GetBodyPatch().AsMap()["id_slot"] != 3.0 {
		t.Errorf("%v", ref.GetBodyPatch())
	}
}
