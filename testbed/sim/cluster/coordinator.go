package cluster

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"time"

	"waypost/coordinator/fleet"
	"waypost/coordinator/placement"
	"waypost/gossip/ledger"
	"waypost/gossip/prefix"
	"waypost/testbed/sim/prompt"
	"waypost/testbed/sim/rules"
)

// coordinator is one coordinator.
type coordinator struct {
	cluster *Cluster
	process uint64
	// index finds workers by name: slots are the fleet's.
	index map[string]int
	fleet *fleet.Fleet
	keys  predicted

	decision   placement.Decision // reused
	candidates []placement.Candidate
}

// restart begins another life: what it knew is gone, its lanes are down.
func (k *coordinator) restart() error {
	k.process = k.cluster.processMark()
	k.index = map[string]int{}
	for w := range k.cluster.options.Workers {
		k.index[fleet.WorkerName(hostName(w), engineName, 0)] = w
	}
	k.keys = newPredicted(k.cluster.options.Workers)
	f, err := fleet.New(fleet.Options{Epoch: epoch, Process: k.process, Predicted: k.keys})
	k.fleet = f
	return err
}

// tick does what is due once a second.
func (k *coordinator) tick() {
	if k.cluster.stopped {
		return
	}
	now := k.cluster.clock.NowMs()
	k.fleet.Tick(at(now))
	k.look(now)
	k.cluster.clock.After(tickMs, k.tick)
}

// look renews the age of the view of all caches.
func (k *coordinator) look(nowMs float64) {
	age := time.Duration(k.cluster.options.EventMs * float64(time.Millisecond))
	for w, a := range k.cluster.agents {
		if a.lanes[k] == nil {
			continue
		}
		if id, process, ok := k.fleet.LookupWorker(fleet.WorkerName(hostName(w), engineName, 0)); ok {
			k.fleet.SetView(at(nowMs), id, process, placement.ViewLive, age)
		}
	}
}

// place decides and claims.
func (k *coordinator) place(nowMs float64, q rules.Query) int {
	now := at(nowMs)
	var sit placement.Situation
	var err error
	k.candidates, sit, err = k.candidatesAt(nowMs)
	if err != nil {
		k.cluster.fail(err)
		return 0
	}
	sit.PolicyAgeMs = 0
	p := q.Prompt
	deepest := 0
	for i := range k.candidates {
		c := &k.candidates[i]
		w := k.workerOf(c.Worker)
		view := k.cluster.caches[w].Depth(p, 0)
		depth := k.keys.depth(&k.cluster.caches[w], int(c.ID), p, view)
		c.MatchedTokens, c.Predicted = depth*prompt.BlockTokens, depth > view
		deepest = max(deepest, depth)
	}
	request := placement.Request{ID: strconv.Itoa(q.ID), PromptTokens: p.Tokens}
	if deepest > 0 {
		request.SharedKey = uint64(p.Blocks[deepest-1]) * 0x9e3779b97f4a7c15
	}
	if err := placement.Decide(&request, k.candidates, &k.cluster.options.Policy, sit, &k.decision); err != nil {
		k.cluster.fail(err)
		return 0
	}
	if k.decision.Chosen < 0 {
		k.cluster.fail(fmt.Errorf("request %d was refused: %s", q.ID, k.decision.Refusal.Reason))
		return 0
	}
	k.cluster.expected[q.ID] = k.decision.FirstTokenMs
	chosen := &k.candidates[k.decision.Chosen]
	k.claim(now, &request, q, chosen, &k.decision.Terms[k.decision.Chosen])
	return k.workerOf(chosen.Worker)
}

func (k *coordinator) candidatesAt(nowMs float64) ([]placement.Candidate, placement.Situation, error) {
	return k.fleet.Candidates(at(nowMs), fleet.Query{Pool: servedModel}, k.candidates[:0])
}

// claim puts a claim on the choice and tells agent and peers.
func (k *coordinator) claim(now time.Time, request *placement.Request, q rules.Query, c *placement.Candidate, t *placement.Terms) {
	made := ledger.Claim{
		EngineProcess: c.Process, PromptTokens: request.PromptTokens, UncachedTokens: t.UncachedTokens,
		OutputTokens: k.decision.OutputTokens, Sequences: 1,
	}
	if q.SizeFactor > 0 {
		made.UncachedTokens = min(max(int(math.Round(float64(made.UncachedTokens)*q.SizeFactor)), 1), made.PromptTokens)
	}
	for i := max(t.ReuseTokens, 0) / prompt.BlockTokens; i < len(q.Prompt.Blocks); i++ {
		made.Keys = append(made.Keys, KeyOf(q.Prompt.Blocks[i]))
		made.KeyDepths = append(made.KeyDepths, uint32(i+1)*prompt.BlockTokens)
	}
	_, _, _, err := k.fleet.Claim(now, fleet.NewClaim{
		Key: fleet.RequestKey{ID: request.ID}, Attempt: 1, Placement: request.ID, Worker: c.ID,
		Claim: made, ExpectedFirstMs: k.decision.FirstTokenMs,
	})
	k.cluster.fail(err)
	k.flush()
}

// flush sends what waits to be sent.
func (k *coordinator) flush() {
	c := k.cluster
	now := c.clock.NowMs()
	out := k.fleet.TakeOutgoing(at(now))
	for i := range out.Hosts {
		frames := &out.Hosts[i]
		a := c.agentOf(frames.Host)
		l := a.lanes[k]
		if l == nil || l.id != frames.Lane {
			continue
		}
		l.downMs = max(l.downMs, now+c.travelMs())
		c.clock.At(l.downMs, func() {
			if a.lanes[k] == l {
				a.take(frames)
			}
		})
	}
	if !c.options.SharePlacements {
		return
	}
	process := k.process
	for _, peer := range c.coordinators {
		if peer == k || len(out.Places) == 0 {
			continue
		}
		c.clock.After(c.travelMs()+c.rng.Float64()*c.options.PlaceMs, func() {
			for i := range out.Places {
				_, err := peer.fleet.Placed(at(c.clock.NowMs()), process, out.Places[i])
				c.fail(err)
			}
		})
	}
}

// agentOf is the agent of a host.
func (c *Cluster) agentOf(host string) *agent {
	for _, a := range c.agents {
		if hostName(a.worker) == host {
			return a
		}
	}
	return nil
}

// first and done take what a caller told, at its own time.
func (k *coordinator) first(id int, atMs float64) { k.mark(id, atMs, ledger.MarkFirst, 0) }

func (k *coordinator) done(id int, atMs float64, outputTokens int) {
	k.mark(id, atMs, ledger.MarkDone, outputTokens)
}

func (k *coordinator) mark(id int, atMs float64, what ledger.Mark, outputTokens int) {
	// A placement that its coordinator forgot, over a restart or because its
	// reservation ran out, is no fault.
	if _, err := k.fleet.Mark(at(atMs), strconv.Itoa(id), what, outputTokens); err != nil && !errors.Is(err, fleet.ErrUnknownPlacement) {
		k.cluster.fail(err)
	}
	k.flush()
}

// predicted are the prefix keys that claims will bring, per worker.
type predicted struct {
	counts []map[prefix.Key]int32
	claims []map[uint64][]prefix.Key
}

func newPredicted(workers int) predicted {
	p := predicted{make([]map[prefix.Key]int32, workers), make([]map[uint64][]prefix.Key, workers)}
	for w := range workers {
		p.counts[w], p.claims[w] = map[prefix.Key]int32{}, map[uint64][]prefix.Key{}
	}
	return p
}

var _ fleet.PredictedKeys = predicted{}

// AddPredicted implements fleet.PredictedKeys.
func (p predicted) AddPredicted(w fleet.WorkerID, claim, _ uint64, keys []prefix.Key, _ []uint32) {
	for _, key := range keys {
		p.counts[w][key]++
	}
	p.claims[w][claim] = keys
}

// RemovePredicted implements fleet.PredictedKeys.
func (p predicted) RemovePredicted(w fleet.WorkerID, claim uint64) {
	for _, key := range p.claims[w][claim] {
		if p.counts[w][key]--; p.counts[w][key] <= 0 {
			delete(p.counts[w], key)
		}
	}
	delete(p.claims[w], claim)
}

// Drop implements fleet.PredictedKeys.
func (p predicted) Drop(w fleet.WorkerID) {
	clear(p.counts[w])
	clear(p.claims[w])
}

// depth is the number of leading blocks of a prompt that a worker has or will
// have, at least from.
func (p predicted) depth(cache *prompt.Set, w int, of *prompt.Prompt, from int) int {
	for from < len(of.Blocks) && (p.counts[w][KeyOf(of.Blocks[from])] > 0 || cache.Has(of.Blocks[from])) {
		from++
	}
	return from
}
