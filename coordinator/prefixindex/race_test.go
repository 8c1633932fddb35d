//go:build race

package prefixindex

// raceEnabled: the race detector makes sync.Pool forget on purpose.
const raceEnabled = true
