package lane

import (
	"google.golang.org/protobuf/proto"

	"waypost/gossip/ledger"
	"waypost/gossip/prefix"
	waypostv1 "waypost/proto/waypost/v1"
)

// frameBytes is the size at which a frame of claims or placements is split: far
// below what a lane carries, so that one burst does not hold up what follows.
const frameBytes = 1 << 20

// ClaimFramesOf turns a frame of claims for the worker with an index into its
// wire form: as many frames as its size asks for, each continuing the former.
func ClaimFramesOf(index uint32, f *ledger.ClaimFrame) []*waypostv1.ClaimFrame {
	var out []*waypostv1.ClaimFrame
	prev := f.Prev
	for from := 0; from < len(f.Offers); {
		frame := &waypostv1.ClaimFrame{Coordinator: &f.Coordinator, AgentProcess: &f.Agent, Index: &index, Prev: proto.Uint64(prev)}
		if f.PointsKeyID != "" {
			frame.PointsKeyId = &f.PointsKeyID
		}
		for size := 0; from < len(f.Offers) && size < frameBytes; from++ {
			c := claimOf(&f.Offers[from])
			size += proto.Size(c)
			frame.Claims = append(frame.Claims, c)
			prev = c.GetSeq()
		}
		out = append(out, frame)
	}
	return out
}

// ClaimsOf turns the wire form of a frame of claims back. Check it with
// Validate before use.
func ClaimsOf(f *waypostv1.ClaimFrame) ledger.ClaimFrame {
	out := ledger.ClaimFrame{Coordinator: f.GetCoordinator(), Agent: f.GetAgentProcess(), Prev: f.GetPrev(), PointsKeyID: f.GetPointsKeyId()}
	if n := len(f.GetClaims()); n > 0 {
		out.Offers = make([]ledger.Offer, 0, n)
	}
	for _, c := range f.GetClaims() {
		out.Offers = append(out.Offers, offerOf(c))
	}
	return out
}

// claimOf is the wire form of a claim.
func claimOf(o *ledger.Offer) *waypostv1.Claim {
	c := &waypostv1.Claim{
		Seq: &o.Seq, EngineProcess: &o.EngineProcess, AgeMs: &o.AgeMs, PromptTokens: proto.Uint32(uint32(o.PromptTokens)),
		UncachedTokens: proto.Uint32(uint32(o.UncachedTokens)), OutputTokens: &o.OutputTokens, N: proto.Uint32(uint32(max(o.Sequences, 1))), KeyDepths: o.KeyDepths,
	}
	if o.AfterKey != 0 {
		c.AfterKey = &o.AfterKey
	}
	for _, k := range o.Keys {
		c.Keys = append(c.Keys, uint64(k))
	}
	c.Slot = o.Slot
	if o.Session != "" {
		c.Session = &o.Session
	}
	for _, k := range o.Points {
		c.Points = append(c.Points, uint64(k))
	}
	return c
}

func offerOf(c *waypostv1.Claim) ledger.Offer {
	o := ledger.Offer{AgeMs: c.GetAgeMs(), Claim: ledger.Claim{
		Seq: c.GetSeq(), EngineProcess: c.GetEngineProcess(), PromptTokens: int(c.GetPromptTokens()), UncachedTokens: int(c.GetUncachedTokens()),
		OutputTokens: c.GetOutputTokens(), Sequences: int(c.GetN()), KeyDepths: c.GetKeyDepths(), AfterKey: c.GetAfterKey(),
	}}
	for _, k := range c.GetKeys() {
		o.Keys = append(o.Keys, prefix.Key(k))
	}
	if c.Slot != nil {
		o.Slot = new(c.GetSlot())
	}
	o.Session = c.GetSession()
	for _, k := range c.GetPoints() {
		o.Points = append(o.Points, prefix.Key(k))
	}
	return o
}

// MarkFramesOf turns a frame of marks for the worker with an index into its wire
// form: as many frames as the size of what was learnt asks for, the last one with
// the marks.
func MarkFramesOf(index uint32, f *ledger.MarkFrame) (frames []*waypostv1.MarkFrame) {
	frame := func() *waypostv1.MarkFrame {
		out := &waypostv1.MarkFrame{Coordinator: &f.Coordinator, Index: &index}
		if f.PointsKeyID != "" {
			out.PointsKeyId = &f.PointsKeyID
		}
		frames = append(frames, out)
		return out
	}
	out, size := frame(), 0
	for i := range f.Learnt {
		l := &f.Learnt[i]
		learnt := &waypostv1.LearntPrompt{Seq: &l.Seq, PromptTokens: proto.Uint32(uint32(l.PromptTokens))}
		for _, k := range l.Points {
			learnt.Points = append(learnt.Points, uint64(k))
		}
		if size += proto.Size(learnt); size > frameBytes && len(out.Learnt) > 0 {
			out, size = frame(), proto.Size(learnt)
		}
		out.Learnt = append(out.Learnt, learnt)
	}
	for i := range f.Marks {
		m := &f.Marks[i]
		mark := &waypostv1.Mark{Seq: &m.Seq, What: proto.String(string(m.What)), AgeMs: &m.AgeMs}
		if m.OutputTokens > 0 {
			mark.OutputTokens = proto.Uint32(uint32(m.OutputTokens))
		}
		if m.CachedTokens != nil {
			mark.CachedTokens = proto.Uint32(uint32(*m.CachedTokens))
		}
		out.Marks = append(out.Marks, mark)
	}
	return frames
}

// MarksOf turns the wire form of a frame of marks back. Check it with Validate
// before use.
func MarksOf(f *waypostv1.MarkFrame) ledger.MarkFrame {
	out := ledger.MarkFrame{Coordinator: f.GetCoordinator(), PointsKeyID: f.GetPointsKeyId()}
	for _, l := range f.GetLearnt() {
		learnt := ledger.LearntPrompt{Seq: l.GetSeq(), PromptTokens: int(l.GetPromptTokens())}
		for _, k := range l.GetPoints() {
			learnt.Points = append(learnt.Points, prefix.Key(k))
		}
		out.Learnt = append(out.Learnt, learnt)
	}
	for _, m := range f.GetMarks() {
		mark := ledger.Marked{Seq: m.GetSeq(), What: ledger.Mark(m.GetWhat()), AgeMs: m.GetAgeMs(), OutputTokens: int(m.GetOutputTokens())}
		if m.CachedTokens != nil {
			mark.CachedTokens = new(int(m.GetCachedTokens()))
		}
		out.Marks = append(out.Marks, mark)
	}
	return out
}

// PlaceFrameOf turns a placement into its wire form.
func PlaceFrameOf(p *ledger.Placed) *waypostv1.PlaceFrame {
	return &waypostv1.PlaceFrame{
		Worker: &p.Worker, Claim: claimOf(&p.Offer), Tenant: &p.Tenant, RequestId: &p.RequestID, Attempt: &p.Attempt, PlacementId: &p.Placement,
	}
}

// PlacedOf turns the wire form of a placement back. Check it with Validate
// before use.
func PlacedOf(f *waypostv1.PlaceFrame) ledger.Placed {
	return ledger.Placed{
		Worker: f.GetWorker(), Tenant: f.GetTenant(), RequestID: f.GetRequestId(), Attempt: f.GetAttempt(), Placement: f.GetPlacementId(),
		Offer: offerOf(f.GetClaim()),
	}
}
