package coordinator

import (
	"sync"

	"google.golang.org/protobuf/types/known/structpb"

	"waypost/coordinator/fleet"
	"waypost/gossip/ledger"
	"waypost/gossip/prefix"
	waypostv1 "waypost/proto/waypost/v1"
)

// maxIdleSlots bounds the slots taken from one report.
const maxIdleSlots = 64

// idleSlots are the slots that workers reported idle, by the latest report.
type idleSlots struct {
	mu sync.Mutex
	by map[fleet.WorkerID][]ledger.IdleSlot
}

// report takes in what a worker reports.
func (s *idleSlots) report(id fleet.WorkerID, told []*waypostv1.IdleSlot) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(told) == 0 {
		delete(s.by, id)
		return
	}
	if s.by == nil {
		s.by = map[fleet.WorkerID][]ledger.IdleSlot{}
	}
	list := s.by[id][:0]
	for _, t := range told[:min(len(told), maxIdleSlots)] {
		list = append(list, ledger.IdleSlot{Slot: t.GetSlot(), DepthTokens: t.GetDepth(), Key: prefix.Key(t.GetKey())})
	}
	s.by[id] = list
}

// choose is the idle slot whose content a prompt continues, if nothing else at
// the worker holds more of it; nil: the engine's choice is as good. reuseTokens
// is what the placement expects to be reused. The slot is given to one request
// per report.
func (s *idleSlots) choose(id fleet.WorkerID, reuseTokens int, keyAt func(depthTokens int) (prefix.Key, bool)) *uint32 {
	s.mu.Lock()
	defer s.mu.Unlock()
	best := -1
	list := s.by[id]
	for i, slot := range list {
		depth := int(slot.DepthTokens)
		if depth == 0 || depth > reuseTokens || reuseTokens-depth >= ledger.PointTokens || best >= 0 && slot.DepthTokens <= list[best].DepthTokens {
			continue
		}
		if key, ok := keyAt(depth); ok && key == slot.Key {
			best = i
		}
	}
	if best < 0 {
		return nil
	}
	chosen := list[best].Slot
	list[best].DepthTokens = 0
	return &chosen
}

// pinSlot makes a request name its slot.
func pinSlot(ref *waypostv1.WorkerRef, slot *uint32) {
	if slot == nil {
		return
	}
	patchBody(ref, "id_slot", structpb.NewNumberValue(float64(*slot)))
}

// patchBody sets a field of the request at a worker.
func patchBody(ref *waypostv1.WorkerRef, field string, value *structpb.Value) {
	if ref.BodyPatch == nil {
		ref.BodyPatch = &structpb.Struct{Fields: map[string]*structpb.Value{}}
	}
	ref.BodyPatch.GetFields()[field] = value
}
