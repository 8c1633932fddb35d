package fleet

import (
	"fmt"
	"testing"
	"time"

	"waypost/coordinator/placement"
	"waypost/gossip/ledger"
	"waypost/gossip/prefix"
)

var epoch = time.Unix(2_000_000, 0)

const ownProcess = 0xc0

// at is a moment ms after the epoch.
func at(ms float64) time.Time { return epoch.Add(time.Duration(ms * float64(time.Millisecond))) }

func ptr[T any](v T) *T { return &v }

// fataler is a *testing.T, a *testing.B or a *rapid.T.
type fataler interface {
	Helper()
	Fatalf(string, ...any)
}

func newFleet(t fataler, change ...func(*Options)) *Fleet {
	t.Helper()
	options := Options{Epoch: epoch, Process: ownProcess}
	for _, c := range change {
		c(&options)
	}
	f, err := New(options)
	if err != nil {
		t.Fatalf("New: %v", err)
	}
	return f
}

// flat is a step model with 1 ms per prompt token and nothing else.
var flat = ledger.StepModel{P1MsPerToken: 1}

// facts of engine i of a host, life 1.
func facts(i int) Facts {
	return Facts{
		Index: uint32(i), Engine: fmt.Sprintf("vllm-%d", 8000+i), Ranks: 1, Kind: "vllm",
		EngineProcess: uint64(1000 + i), Model: "m", URL: "http://10.0.0.1:8000",
		BlockTokens: 16, PoolBlocks: 10_000, MaxModelTokens: 1 << 20, MaxRunning: 256, StepTokens: 2048,
		GPUUUIDs: []string{fmt.Sprintf("GPU-%08d", i)}, StepModel: &flat,
	}
}

func hello(host string, engines int) Hello {
	h := Hello{Host: host, AgentProcess: 0xa, Session: 1}
	for i := range engines {
		h.Workers = append(h.Workers, facts(i))
	}
	return h
}

// idle is a report of an idle worker that knows everything.
func idle(process uint64) ledger.Load {
	return ledger.Load{
		EngineProcess: process, State: ledger.StateReady, AgeMs: ptr(0.0), CountersAgeMs: ptr(0.0),
		QueueMs: ptr(0.0), OpenTokens: ptr(uint32(0)), Decoding: ptr(uint32(0)), ContextTokens: ptr(0.0),
		Live: ptr(uint32(0)), HeldBlocks: ptr(0.0), MeanOutputTokens: ptr(100.0),
	}
}

// rig drives one fleet of hosts with one engine each.
type rig struct {
	t     fataler
	f     *Fleet
	lanes map[string]Lane
	seq   uint64
}

func newRig(t fataler, hosts int, change ...func(*Options)) *rig {
	t.Helper()
	r := &rig{t: t, f: newFleet(t, change...), lanes: map[string]Lane{}}
	for i := range hosts {
		r.open(0, hello(fmt.Sprintf("gpu-%02d", i), 1))
	}
	return r
}

func (r *rig) open(ms float64, h Hello) Changes {
	r.t.Helper()
	lane, changes, err := r.f.OpenLane(at(ms), h)
	if err != nil {
		r.t.Fatalf("OpenLane(%s): %v", h.Host, err)
	}
	r.lanes[h.Host] = lane
	return changes
}

// load sends one worker's load, index 0.
func (r *rig) load(ms float64, host string, l ledger.Load, change ...func(*Report)) Changes {
	r.t.Helper()
	r.seq++
	report := Report{AgentProcess: 0xa, LoadSeq: r.seq, Workers: []WorkerLoad{{Index: 0, Load: l}}}
	for _, c := range change {
		c(&report)
	}
	changes, err := r.f.Load(at(ms), host, r.lanes[host], report)
	if err != nil {
		r.t.Fatalf("Load(%s): %v", host, err)
	}
	return changes
}

func (r *rig) loadAll(ms float64) {
	r.t.Helper()
	for host := range r.lanes {
		r.load(ms, host, idle(1000))
	}
}

func (r *rig) snapshot(name string) *placement.Worker {
	r.t.Helper()
	info, err := r.f.Worker(at(0), name)
	if err != nil {
		r.t.Fatalf("%v", err)
	}
	return info.Snapshot
}

func (r *rig) state(ms float64, name string) string {
	r.t.Helper()
	info, err := r.f.Worker(at(ms), name)
	if err != nil {
		r.t.Fatalf("%v", err)
	}
	return info.State
}

// claim claims tokens on a worker.
func (r *rig) claim(ms float64, id string, worker string, tokens int, change ...func(*NewClaim)) OpenClaim {
	r.t.Helper()
	w, process, ok := r.f.LookupWorker(worker)
	if !ok {
		r.t.Fatalf("no worker %s", worker)
	}
	n := NewClaim{
		Key: RequestKey{Tenant: "t", ID: id}, Attempt: 1, Placement: "pl_" + id, Worker: w,
		Claim: ledger.Claim{EngineProcess: process, PromptTokens: tokens, UncachedTokens: tokens, OutputTokens: 10},
	}
	for _, c := range change {
		c(&n)
	}
	c, stored, _, err := r.f.Claim(at(ms), n)
	if err != nil || stored {
		r.t.Fatalf("Claim(%s): stored %v, %v", id, stored, err)
	}
	return c
}

// place decides and claims as a coordinator does.
func (r *rig) place(ms float64, id string, tokens int) string {
	r.t.Helper()
	candidates, sit, err := r.f.Candidates(at(ms), Query{}, nil)
	if err != nil {
		r.t.Fatalf("Candidates: %v", err)
	}
	sit.PolicyAgeMs = 0
	policy := placement.DefaultPolicy()
	var d placement.Decision
	req := placement.Request{ID: id, PromptTokens: tokens, OutputTokensExpected: 10}
	if err := placement.Decide(&req, candidates, &policy, sit, &d); err != nil {
		r.t.Fatalf("Decide: %v", err)
	}
	if d.Chosen < 0 {
		return ""
	}
	r.claim(ms, id, candidates[d.Chosen].Name, d.Terms[d.Chosen].UncachedTokens)
	return candidates[d.Chosen].Name
}

// keyBook is a PredictedKeys that remembers.
type keyBook struct {
	t    fataler
	held map[WorkerID]map[uint64][]prefix.Key
	// drops are the workers whose cache was given up, in order.
	drops []WorkerID
}

func newKeyBook(t fataler) *keyBook {
	return &keyBook{t: t, held: map[WorkerID]map[uint64][]prefix.Key{}}
}

func (b *keyBook) AddPredicted(w WorkerID, claim, _ uint64, keys []prefix.Key, _ []uint32) {
	if b.held[w] == nil {
		b.held[w] = map[uint64][]prefix.Key{}
	}
	if _, twice := b.held[w][claim]; twice {
		b.t.Fatalf("claim %d added twice", claim)
	}
	b.held[w][claim] = keys
}

func (b *keyBook) RemovePredicted(w WorkerID, claim uint64) {
	if _, there := b.held[w][claim]; !there {
		b.t.Fatalf("claim %d of worker %d removed but not there", claim, w)
	}
	delete(b.held[w], claim)
}

func (b *keyBook) Drop(w WorkerID) {
	delete(b.held, w)
	b.drops = append(b.drops, w)
}

func (b *keyBook) count() (n int) {
	for _, claims := range b.held {
		n += len(claims)
	}
	return n
}

var (
	_ fataler = (*testing.T)(nil)
	_ fataler = (*testing.B)(nil)
)

// remove forgets a host as if it had been away for long.
func (r *rig) remove(ms float64, host string) (changes Changes) {
	r.f.mu.Lock()
	defer r.f.mu.Unlock()
	r.f.removeHost(r.f.hosts[host], ms, &changes)
	return changes
}
