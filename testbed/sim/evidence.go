package sim

import (
	"waypost/agent/queue"
	"waypost/testbed/sim/cluster"
	"waypost/testbed/sim/prompt"
	"waypost/testbed/sim/truth"
)

// storeMs is how late an agent hears of what its engine stored.
const storeMs = 5

// storesOf are the runs of blocks stored, as an agent hears of them.
func storesOf(events []truth.CacheEvent) []queue.Store {
	var stores []queue.Store
	depth := int32(-1) // of the block before
	for _, e := range events {
		if e.Removed {
			continue
		}
		if e.Depth != depth+1 || len(stores) == 0 {
			stores = append(stores, queue.Store{})
		}
		depth = e.Depth
		s := &stores[len(stores)-1]
		s.Points = append(s.Points, queue.Point{Key: cluster.KeyOf(e.Name), DepthTokens: int(e.Depth) * prompt.BlockTokens})
	}
	return stores
}

// countersOf are an engine's metrics as its agent reads them.
func countersOf(c truth.Counters) *cluster.Counters {
	return &cluster.Counters{
		Running: c.Running, Waiting: c.Waiting, HeldBlocks: c.HeldBlocks,
		PromptTokens: float64(c.PromptTokens), ComputedTokens: float64(c.ComputedTokens),
		Generated: float64(c.Generated), FirstTokens: float64(c.FirstTokens), Finished: float64(c.Finished),
	}
}
