//go:build race

package cluster

// slowdown is how many times slower everything is under the race detector: a
// leader that hears its followers late must not lose them for it.
const slowdown = 5
