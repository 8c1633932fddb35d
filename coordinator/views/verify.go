package views

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"waypost/coordinator/api"
	"waypost/coordinator/fleet"
	"waypost/coordinator/prefixindex"
	"waypost/gossip/summary"
	waypostv1 "waypost/proto/waypost/v1"
)

const (
	// verifyWithin is the longest that a verification may take. It is less than
	// commands wait, so that they hear why it failed.
	verifyWithin = 8 * time.Second
	// verifyAtOnce bounds the verifications that run together: each holds an
	// agent's whole set.
	verifyAtOnce = 4
	// verifyAsks is how often a verification asks the agent, where its stream
	// begins anew meanwhile, and verifyGap the least time between two asks.
	verifyAsks = 5
	verifyGap  = 200 * time.Millisecond
	// verifyFrames and verifyBytes bound the deltas kept while the snapshot is
	// on its way.
	verifyFrames = 1024
	verifyBytes  = 4 << 20
	// verifyPulls marks the ids of pulls whose answers belong to a verification
	// and not to the stream.
	verifyPulls = 1 << 31
	// namedExtra bounds the keys named that only the stream here has.
	namedExtra = 16
)

// verification compares what the index lists for a worker with the agent's own
// set. A decoder of its own takes the agent's snapshot and then the deltas that
// the stream's decoder takes, until both stand at the same frame: only then is
// a difference one, and not a change that came in between.
//
// The lock of its host guards it.
type verification struct {
	pull    uint32 // id of the pull under way
	asks    int
	asked   time.Time
	epoch   uint32 // of the stream here when that was asked; 0: not known
	decoder *summary.Decoder
	set     *plainSet
	whole   bool     // the snapshot is there
	deltas  [][]byte // that came before it was
	kept    int      // bytes of deltas
	bytes   int      // of the snapshot

	done   chan struct{} // closed when there is a result or an error
	result *waypostv1.StreamComparison
	err    error
}

// verifier counts verifications.
type verifier struct {
	asks    atomic.Uint32 // pulls sent, which have their number
	running atomic.Int32
}

// begin makes room for a verification; false: there is none.
func (v *verifier) begin() bool {
	if v.running.Add(1) <= verifyAtOnce {
		return true
	}
	v.end()
	return false
}

func (v *verifier) end() { v.running.Add(-1) }

// Verify asks the agent of a worker for its whole set and compares it with the
// index. Errors are those of the API.
func (vs *Views) Verify(ctx context.Context, w *fleet.WorkerInfo) (*waypostv1.StreamComparison, error) {
	comparison, err := vs.verify(ctx, w)
	vs.noteVerified(w, comparison, err)
	return comparison, err
}

// noteVerified counts a verification and tells of a difference.
func (vs *Views) noteVerified(w *fleet.WorkerInfo, r *waypostv1.StreamComparison, err error) {
	switch {
	case err != nil:
		vs.metrics.verified.WithLabelValues("failed").Inc()
	case r.GetMissing()+r.GetExtra()+r.GetExtents() > 0:
		vs.metrics.verified.WithLabelValues("differs").Inc()
		vs.log.Warn("the index differs from what the agent has", "event", "view_disagrees", "worker", w.Name,
			"equal", r.GetEqual(), "missing", r.GetMissing(), "extra", r.GetExtra(), "extents", r.GetExtents())
	default:
		vs.metrics.verified.WithLabelValues("equal").Inc()
	}
}

func (vs *Views) verify(ctx context.Context, w *fleet.WorkerInfo) (*waypostv1.StreamComparison, error) {
	wait := verifyWithin
	if end, ok := ctx.Deadline(); ok {
		// The caller shall hear what was missing, not that time ran out.
		wait = min(wait, time.Until(end)*9/10)
	}
	timeout := time.NewTimer(wait)
	defer timeout.Stop()
	if !vs.verifier.begin() {
		return nil, api.Unavailable(fmt.Sprintf("%d verifications run already; ask again when one is done", verifyAtOnce))
	}
	defer vs.verifier.end()

	hs := vs.host(w.Host)
	v, s, err := vs.beginVerify(hs, w)
	if err != nil {
		return nil, err
	}
	defer vs.endVerify(hs, v)
	select {
	case <-v.done:
	case <-s.Done():
		err = api.Unavailable(fmt.Sprintf("the lane of host %s went down during the verification; see: waypost members %s", w.Host, w.Host))
	case <-vs.stopped:
		err = api.Unavailable("this coordinator is stopping")
	case <-ctx.Done():
		err = status.FromContextError(ctx.Err()).Err()
	case <-timeout.C:
		err = status.Error(codes.DeadlineExceeded, vs.whyLate(hs, v, w, wait))
	}
	hs.mu.Lock()
	defer hs.mu.Unlock()
	switch {
	case v.result != nil:
		return v.result, nil
	case v.err != nil:
		return nil, v.err
	}
	return nil, err
}

// beginVerify sends the question.
func (vs *Views) beginVerify(hs *hostStreams, w *fleet.WorkerInfo) (*verification, Session, error) {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	if hs.session == nil {
		return nil, nil, noLane(w.Host)
	}
	index, st := hs.streamFor(w)
	switch {
	case st == nil:
		return nil, nil, api.Unavailable(fmt.Sprintf("the agent of %s has not told its prefix stream yet; ask again in a moment", w.Name))
	case st.verification != nil:
		return nil, nil, api.Conflict("verify", fmt.Sprintf("%s is being verified already; ask again when that is done", w.Name))
	}
	v := &verification{done: make(chan struct{})}
	st.verification = v
	vs.askAgain(hs.session, index, st)
	return v, hs.session, nil
}

func noLane(host string) error {
	return api.Unavailable(fmt.Sprintf("the agent of host %s has no lane to this coordinator nor to another, so nobody can ask it; see: waypost members %s", host, host))
}

// endVerify forgets a verification.
func (vs *Views) endVerify(hs *hostStreams, v *verification) {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	for _, st := range hs.streams {
		if st.verification == v {
			st.verification = nil
		}
	}
}

// streamFor returns the stream of a worker and its index; nil: there is none.
func (hs *hostStreams) streamFor(w *fleet.WorkerInfo) (index uint32, st *stream) {
	for index, st := range hs.streams {
		if st.worker == w.ID && st.process == w.Process {
			return index, st
		}
	}
	return 0, nil
}

// whyLate says what a verification waited for.
func (vs *Views) whyLate(hs *hostStreams, v *verification, w *fleet.WorkerInfo, wait time.Duration) string {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	if !v.whole {
		return fmt.Sprintf("the agent of host %s did not send its set within %s", w.Host, wait.Round(100*time.Millisecond))
	}
	return fmt.Sprintf("the agent of host %s sent its set, but the stream here did not come to the same frame within %s; see: waypost inspect stream %s", w.Host, wait.Round(100*time.Millisecond), w.Name)
}

// askAgain asks for a snapshot and begins from it.
func (vs *Views) askAgain(s Session, index uint32, st *stream) {
	v := st.verification
	if v.asks++; v.asks > verifyAsks {
		v.fail(api.Unavailable(fmt.Sprintf("the stream began anew %d times meanwhile; ask again", verifyAsks)))
		return
	}
	v.pull = verifyPulls | vs.verifier.asks.Add(1)
	v.asked, v.epoch = time.Now(), 0
	if epoch, _, ok := st.decoder.Have(); ok {
		v.epoch = epoch
	}
	v.set = &plainSet{}
	v.decoder = summary.NewDecoder(v.set)
	v.decoder.RequireKey(vs.prefixKey)
	v.whole, v.deltas, v.kept, v.bytes = false, nil, 0, 0
	p := &waypostv1.PrefixPull{PullId: proto.Uint32(v.pull), Index: &index, EngineProcess: &st.process, Reason: proto.String("verify")}
	if err := s.Send(&waypostv1.ConnectResponse{Frame: &waypostv1.ConnectResponse_Pull{Pull: p}}); err != nil {
		v.fail(api.Unavailable(fmt.Sprintf("host %s cannot be asked: %v", s.Host(), err)))
	}
}

// fail ends a verification without a result; nil: there is none.
func (v *verification) fail(err error) {
	if v != nil && v.result == nil && v.err == nil {
		v.err = err
		close(v.done)
	}
}

// isOpen says whether it is still to be decided.
func (v *verification) isOpen() bool { return v != nil && v.result == nil && v.err == nil }

// takeVerified takes a part of the agent's answer. It never touches the stream.
func (vs *Views) takeVerified(hs *hostStreams, s Session, p *waypostv1.PrefixFrames) {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	st := vs.streamOf(hs, s, p.GetIndex())
	if st == nil || !st.verification.isOpen() || st.verification.pull != p.GetPullId() {
		return
	}
	v := st.verification
	if st.process != p.GetEngineProcess() {
		v.fail(errRestarted)
		return
	}
	for _, frame := range p.GetFrames() {
		v.bytes += len(frame)
		switch result, err := v.decoder.Apply(frame); {
		case err != nil:
			v.fail(status.Errorf(codes.DataLoss, "the set that the agent sent cannot be read: %v", err))
			return
		case result == summary.DigestMismatch:
			v.fail(status.Error(codes.DataLoss, "the set that the agent sent does not have the digest it states"))
			return
		case result == summary.Gap:
			vs.askAgain(s, p.GetIndex(), st)
			return
		}
	}
	if !p.GetLast() {
		return
	}
	if _, _, ok := v.decoder.Have(); !ok {
		v.fail(api.Unavailable("the agent has no prefix stream of this worker yet; ask again in a moment"))
		return
	}
	v.whole = true
	for _, frame := range v.deltas {
		v.step(frame)
	}
	v.deltas, v.kept = nil, 0
	vs.settle(s, p.GetIndex(), st)
}

var errRestarted = api.Unavailable("the engine restarted during the verification; ask again")

// follow lets a verification see what the stream was told, or, with an empty
// frame, that it may have come further.
func (vs *Views) follow(hs *hostStreams, s Session, index uint32, process uint64, frame []byte) {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	st := vs.streamOf(hs, s, index)
	if st == nil || !st.verification.isOpen() || st.process != process {
		return
	}
	v := st.verification
	switch {
	case v.whole:
		v.step(frame)
		vs.settle(s, index, st)
	case len(frame) > 0:
		v.deltas = append(v.deltas, frame)
		if v.kept += len(frame); len(v.deltas) > verifyFrames || v.kept > verifyBytes {
			v.fail(api.Unavailable(fmt.Sprintf("the stream moves too fast: %d frames of %d bytes came before the agent's set did; ask again", len(v.deltas), v.kept)))
		}
	}
}

// step applies a delta after the snapshot. What does not fit shows in settle:
// the decoder does not come to the stream's frame.
func (v *verification) step(frame []byte) {
	if len(frame) > 0 {
		_, _ = v.decoder.Apply(frame)
	}
}

// settle compares, once both decoders stand at the same frame.
func (vs *Views) settle(s Session, index uint32, st *stream) {
	v := st.verification
	epoch, seq, ok := st.decoder.Have()
	ownEpoch, ownSeq, own := v.decoder.Have()
	switch {
	case own && !ok: // the stream waits for its resync
	case own && epoch != ownEpoch && epoch == v.epoch: // it has not come to the new one yet
	case own && epoch == ownEpoch && seq < ownSeq: // its frames are on their way
	case own && epoch == ownEpoch && seq == ownSeq:
		v.result = vs.compare(st, v)
		close(v.done)
	case time.Since(v.asked) >= verifyGap: // the stream went where no delta leads
		vs.askAgain(s, index, st)
	}
}

// compare compares the index with the verified set, key by key.
func (vs *Views) compare(st *stream, v *verification) *waypostv1.StreamComparison {
	c := vs.index.Compare(prefixindex.WorkerID(st.worker), v.set.listings())
	epoch, seq, _ := v.decoder.Have()
	out := &waypostv1.StreamComparison{
		Equal: proto.Uint32(uint32(c.Equal)), Missing: proto.Uint32(uint32(c.Missing)), Extra: proto.Uint32(uint32(c.Extra)), Extents: proto.Uint32(uint32(c.Extents)),
		SnapshotBytes: proto.Uint32(uint32(v.bytes)), Epoch: &epoch, Seq: proto.Float64(float64(seq)),
	}
	name := func(how string, key summary.IndexKey, depth uint32) {
		out.Keys = append(out.Keys, &waypostv1.DifferingKey{How: &how, Key: proto.String(fmt.Sprintf("%016x", uint64(key))), DepthTokens: &depth})
	}
	for _, k := range c.MissingKeys {
		name("missing", k.Key, k.DepthTokens)
	}
	for _, k := range v.set.without(st.decoder) {
		name("extra", k.Key, k.DepthTokens)
	}
	for _, k := range c.ExtentKeys {
		name("extent", k.Key, k.DepthTokens)
	}
	return out
}

// plainSet is what a worker's stream lists, in a map. It is a
// summary.IndexSink.
type plainSet struct{ keys map[plainKey]*plainHeld }

// plainKey names a listing, as the calls of a sink do.
type plainKey struct {
	key, checkpoint summary.IndexKey
	depth           uint32
}

type plainHeld struct {
	times  int
	extent summary.Extent
}

func (p *plainSet) add(k plainKey) {
	if p.keys == nil {
		p.keys = map[plainKey]*plainHeld{}
	}
	held := p.keys[k]
	if held == nil {
		held = &plainHeld{extent: summary.WholeExtent(k.depth)}
		p.keys[k] = held
	}
	held.times++
}

func (p *plainSet) remove(k plainKey) {
	held := p.keys[k]
	if held == nil {
		return
	}
	if held.times--; held.times == 0 {
		delete(p.keys, k)
	}
}

// Begin implements summary.IndexSink.
func (*plainSet) Begin() {}

// End implements summary.IndexSink.
func (*plainSet) End() {}

// AddCheckpoint implements summary.IndexSink.
func (p *plainSet) AddCheckpoint(key, parent summary.IndexKey, depthTokens uint32) {
	p.add(plainKey{key, parent, depthTokens})
}

// AddPoint implements summary.IndexSink.
func (p *plainSet) AddPoint(key, checkpoint summary.IndexKey, depthTokens uint32, _ bool) {
	p.add(plainKey{key, checkpoint, depthTokens})
}

// RemoveCheckpoint implements summary.IndexSink.
func (p *plainSet) RemoveCheckpoint(key, parent summary.IndexKey, depthTokens uint32) {
	p.remove(plainKey{key, parent, depthTokens})
}

// RemovePoint implements summary.IndexSink.
func (p *plainSet) RemovePoint(key, checkpoint summary.IndexKey, depthTokens uint32, _ bool) {
	p.remove(plainKey{key, checkpoint, depthTokens})
}

// SetBranch implements summary.IndexSink.
func (*plainSet) SetBranch(summary.IndexKey, summary.IndexKey, uint32) {}

// SetExtent implements summary.IndexSink.
func (p *plainSet) SetExtent(key, checkpoint summary.IndexKey, depthTokens uint32, e summary.Extent) {
	if held := p.keys[plainKey{key, checkpoint, depthTokens}]; held != nil {
		held.extent = e
	}
}

// Reset implements summary.IndexSink.
func (p *plainSet) Reset() { clear(p.keys) }

// listings lists the set, shallow prefixes first.
func (p *plainSet) listings() []prefixindex.Listing {
	order := slices.SortedFunc(maps.Keys(p.keys), func(a, b plainKey) int {
		if a.depth != b.depth {
			return int(a.depth) - int(b.depth)
		}
		return compareKeys(a.key, b.key)
	})
	out := make([]prefixindex.Listing, 0, len(order))
	for _, k := range order {
		held := p.keys[k]
		out = append(out, prefixindex.Listing{Key: k.key, Checkpoint: k.checkpoint, DepthTokens: k.depth, Times: held.times, Extent: held.extent})
	}
	return out
}

func compareKeys(a, b summary.IndexKey) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

// without names keys that a decoder holds and the set lacks.
func (p *plainSet) without(d *summary.Decoder) []summary.HeldKey {
	times := map[summary.HeldKey]int{}
	for k, held := range p.keys {
		times[summary.HeldKey{Key: k.key, DepthTokens: k.depth}] += held.times
	}
	var out []summary.HeldKey
	d.EachKey(func(k summary.HeldKey, _ summary.Extent, _ bool) {
		if times[k]--; times[k] < 0 && len(out) < namedExtra {
			out = append(out, k)
		}
	})
	return out
}
