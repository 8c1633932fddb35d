package bench

import (
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"

	"waypost/agent/blocktable"
	"waypost/testbed/workload"
)

// The workload that the peer's index was measured with: chains of 1,000 blocks,
// of which the first 300 come from one of 16 prefixes. Its harness is in
// testbed/peers.
const (
	chainsWorkload = "chains"
	chainBlocks    = 1000
	sharedBlocks   = 300
	sharedPrefixes = 16
	blocksPerEvent = 128
	probedChains   = 512
	sharedName     = 0x5000_0000 // sets names of shared blocks apart
)

// chainHolders are the numbers of workers that hold the probe chains in full.
var chainHolders = []int{1, 64, 256, 1000}

// splitMix spreads a number; the peer's harness draws with the same function.
func splitMix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// workerChain is the text of chain c of a worker.
func workerChain(worker, c uint64) []workload.Segment {
	out := make([]workload.Segment, chainBlocks)
	shared := splitMix(worker*977+c) % sharedPrefixes
	for i := range out {
		name := splitMix(splitMix(worker<<32|c) ^ uint64(i))
		if i < sharedBlocks {
			name = splitMix(sharedName + shared*1_000_003 + uint64(i))
		}
		out[i] = workload.Segment{Name: name, Tokens: blockTokens}
	}
	return out
}

// probeChain is the text of a chain that several workers hold.
func probeChain(id uint64) []workload.Segment {
	out := make([]workload.Segment, chainBlocks)
	for i := range out {
		out[i] = workload.Segment{Name: splitMix(0xabcdef00_0000 ^ id<<20 ^ uint64(i)), Tokens: blockTokens}
	}
	return out
}

func chainPrompt(s []workload.Segment) workload.Prompt {
	return &workload.SegmentPrompt{Segments: s, FirstToken: workload.SyntheticFirst, TokenCount: workload.SyntheticCount}
}

// chainLives fills a fleet with chains.
func chainLives(o fleetOptions, full func(worker int, hashes []uint64)) []life {
	lives := make([]life, o.workers)
	var next atomic.Int64
	var wg sync.WaitGroup
	var mu sync.Mutex
	for range runtime.GOMAXPROCS(0) {
		wg.Go(func() {
			for w := int(next.Add(1)) - 1; w < o.workers; w = int(next.Add(1)) - 1 {
				l, names := fillWithChains(o, w)
				lives[w] = l
				if full != nil {
					mu.Lock()
					full(w, names)
					mu.Unlock()
				}
			}
		})
	}
	wg.Wait()
	return lives
}

func fillWithChains(o fleetOptions, worker int) (life, []uint64) {
	a := newAgent(o.blocks+chainBlocks*len(chainHolders), uint32(worker+1))
	seen := map[uint64]bool{}
	var names []uint64
	add := func(p workload.Prompt) {
		tokens := p.AppendTokens(nil)
		hashes := appendBlockHashes(nil, tokens)
		for from := 0; from < len(hashes); from += blocksPerEvent {
			to := min(from+blocksPerEvent, len(hashes))
			e := blocktable.Event{
				Op: blocktable.OpStore, Spec: blocktable.SpecFull, BlockTokens: blockTokens, HasParent: from > 0,
				Hashes: hashes[from:to], Tokens: tokens[from*blockTokens : to*blockTokens],
			}
			if from > 0 {
				e.Parent = hashes[from-1]
			}
			a.table.Apply(&e)
		}
		for _, h := range hashes {
			if !seen[h] {
				seen[h] = true
				names = append(names, h)
			}
		}
	}
	for c := range o.blocks / chainBlocks {
		add(chainPrompt(workerChain(uint64(worker), uint64(c))))
	}
	for id, n := range chainHolders {
		if worker < n && n <= o.workers {
			add(chainPrompt(probeChain(uint64(id + 1))))
		}
	}
	a.encoder.Delta(virtual(0))
	l := life{snapshot: a.encoder.Snapshot(), blocks: a.table.Len(), last: a.table.Len(), keys: a.encoder.Keys(), filledKeys: a.encoder.Keys()}
	return l, names
}

// chainQueries are chains that some worker holds, as the peer's harness draws
// them.
func chainQueries(o fleetOptions) []workload.Prompt {
	var out []workload.Prompt
	workers, chains := uint64(o.workers), uint64(o.blocks/chainBlocks)
	for i := range uint64(probedChains) {
		out = append(out, chainPrompt(workerChain(splitMix(i)%workers, splitMix(i+7)%chains)))
	}
	return out
}

// Case is one more lookup of an index.
type Case struct {
	Name    string
	Lookup  quantiles
	Holders float64
}

// lookupCases looks up the chains that are held in full by some workers.
func (b *indexBench) lookupCases() {
	for id, n := range chainHolders {
		if n > b.opt.workers {
			continue
		}
		q := newQuery(chainPrompt(probeChain(uint64(id + 1))))
		q.probe.ResetTokens(q.tokens, benchKeyer())
		found := b.lookup(&q.probe)
		b.out.Cases = append(b.out.Cases, Case{
			Name: fmt.Sprintf("chain held in full by %d", n), Holders: float64(found),
			Lookup: bestOf(b.opt.window, func(int) { b.lookup(&q.probe) }),
		})
	}
}
