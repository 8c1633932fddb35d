package fleet

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"waypost/coordinator/placement"
)

// Query asks for the candidates of one request.
type Query struct {
	// Pool is the pool's name; it may be empty while there is one pool.
	Pool string
	// CallerZone is where the caller stands; empty: unknown.
	CallerZone string
}

// Candidates appends the workers of a pool to dst, by slot, and tells what
// surrounds the decision; PolicyAgeMs is left to the caller. No match is set:
// MatchedTokens is 0. With room in dst it does not allocate, but for the first
// query from a zone after the fleet changed.
func (f *Fleet) Candidates(now time.Time, q Query, dst []placement.Candidate) ([]placement.Candidate, placement.Situation, error) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	sit := placement.Situation{NowMs: f.Ms(now), ArrivalsPerMs: math.NaN(), MeanOutputTokens: math.NaN(), PolicyAgeMs: math.NaN()}
	p, err := f.pool(q.Pool)
	if err != nil {
		return dst, sit, err
	}
	ways := f.ways[q.CallerZone]
	if ways == nil && f.intent.Way != nil {
		ways = f.waysFrom(q.CallerZone)
		// The lock was given up in between; the pool may have changed.
		if p, err = f.pool(q.Pool); err != nil {
			return dst, sit, err
		}
	}
	output, known := 0.0, 0
	for _, id := range p.workers {
		c := placement.Candidate{Worker: f.slots[id].snapshot, DistanceMs: math.NaN()}
		if int(id) < len(ways) {
			c.DistanceMs, c.SurchargeMs = ways[id].RoundTripMs, ways[id].SurchargeMs
		}
		if mean := c.Worker.MeanOutputTokens; mean >= 1 {
			output += mean
			known++
		}
		dst = append(dst, c)
	}
	if n := len(p.workers); n > 0 {
		sit.ArrivalsPerMs = p.arrivals.value(sit.NowMs) / float64(n)
	}
	sit.MeanOutputTokens = p.output.get()
	if known > 0 {
		sit.MeanOutputTokens = output / float64(known)
	}
	return dst, sit, nil
}

// waysFrom builds the ways from a zone; the read lock is held before and
// after.
func (f *Fleet) waysFrom(zone string) []Way {
	f.mu.RUnlock()
	f.mu.Lock()
	ways := f.ways[zone]
	if ways == nil {
		ways = f.buildWays(zone)
	}
	f.mu.Unlock()
	f.mu.RLock()
	return ways
}

// maxNamedPools bounds the names in an error.
const maxNamedPools = 20

// pool is the pool of a name, or the only one.
func (f *Fleet) pool(name string) (*pool, error) {
	if p := f.pools[name]; p != nil {
		return p, nil
	}
	if name == "" && len(f.pools) == 1 {
		for _, p := range f.pools {
			return p, nil
		}
	}
	names := slices.Sorted(maps.Keys(f.pools))
	list := strings.Join(names[:min(len(names), maxNamedPools)], ", ")
	if len(names) == 0 {
		list = "none yet"
	}
	if name == "" {
		return nil, fmt.Errorf("%w: name one of: %s", ErrUnknownPool, list)
	}
	return nil, fmt.Errorf("%w: %q; the pools are: %s", ErrUnknownPool, name, list)
}

// PoolName resolves the name of a pool as Candidates does: an empty name is
// the only pool's.
func (f *Fleet) PoolName(name string) (string, error) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	if _, err := f.pool(name); err != nil {
		return "", err
	}
	if name == "" {
		for only := range f.pools {
			return only, nil
		}
	}
	return name, nil
}
