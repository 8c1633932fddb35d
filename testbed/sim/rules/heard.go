package rules

import "waypost/testbed/sim/prompt"

// Heard is a view of caches by their events, as late as those are told.
type Heard []prompt.Set

// NewHeard makes a view of empty caches.
func NewHeard(workers int) Heard { return make(Heard, workers) }

// Depth implements CacheView.
func (h Heard) Depth(worker int, p *prompt.Prompt) int { return h[worker].Depth(p, 0) }

// Stored tells that a block entered a worker's cache.
func (h Heard) Stored(worker int, name uint32) { h[worker].Add(name) }

// Removed tells that a block left it.
func (h Heard) Removed(worker int, name uint32) { h[worker].Remove(name) }
