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
	p, ways, err := f.poolAndWays(q)
	if err != nil {
		return dst, sit, err
	}
	for _, id := range p.workers {
		c := placement.Candidate{Worker: f.slots[id].snapshot, DistanceMs: math.NaN()}
		if int(id) < len(ways.list) {
			way := &ways.list[id]
			c.DistanceMs, c.SurchargeMs, c.Outside = way.RoundTripMs, way.SurchargeMs, way.Outside
		}
		dst = append(dst, c)
	}
	return dst, p.situation(sit), nil
}

// situation adds what the pool knows.
func (p *pool) situation(sit placement.Situation) placement.Situation {
	if n := len(p.workers); n > 0 {
		sit.ArrivalsPerMs = p.arrivals.value(sit.NowMs) / float64(n)
	}
	if sit.MeanOutputTokens = p.board.MeanOutputTokens(); math.IsNaN(sit.MeanOutputTokens) {
		sit.MeanOutputTokens = p.output.get()
	}
	return sit
}

// poolAndWays are the pool a query names and the ways to its workers; the read
// lock is held before and after.
func (f *Fleet) poolAndWays(q Query) (*pool, zoneWays, error) {
	p, err := f.pool(q.Pool)
	if err != nil {
		return nil, zoneWays{}, err
	}
	ways := f.ways[q.CallerZone]
	if ways.list == nil && f.intent.Way != nil {
		ways = f.waysFrom(q.CallerZone)
		// The lock was given up in between; the pool may have changed.
		if p, err = f.pool(q.Pool); err != nil {
			return nil, zoneWays{}, err
		}
	}
	return p, ways, nil
}

// Ask is one request to choose for. One that is used again spares memory.
type Ask struct {
	Query
	Request *placement.Request
	Policy  *placement.Policy
	// PolicyAgeMs and PolicyVersion are as in placement.Situation.
	PolicyAgeMs   float64
	PolicyVersion uint32
	// Matches and MatchUnknown are as in placement.Query.
	Matches      placement.Matches
	MatchUnknown bool
	// Path is the way of saved KV from one worker to another; nil: nothing is
	// pulled. Sending counts the transfers that a worker is sending. They are
	// called under the fleet's lock and must not call the fleet.
	Path              func(from, to *placement.Worker) placement.Path
	Sending           func(*placement.Worker) int
	FastestBytesPerMs float64
	// Whole prices every worker.
	Whole bool

	query placement.Query // memory, used again
}

// Decide chooses a worker of a pool. The candidates that were priced overwrite
// dst; the situation is what the decision saw.
func (f *Fleet) Decide(now time.Time, ask *Ask, dst []placement.Candidate, d *placement.Decision) ([]placement.Candidate, placement.Situation, error) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	sit := placement.Situation{NowMs: f.Ms(now), ArrivalsPerMs: math.NaN(), PolicyAgeMs: ask.PolicyAgeMs, PolicyVersion: ask.PolicyVersion}
	p, ways, err := f.poolAndWays(ask.Query)
	if err != nil {
		return dst[:0], sit, err
	}
	sit = p.situation(sit)
	q := &ask.query
	*q = placement.Query{Matches: ask.Matches, MatchUnknown: ask.MatchUnknown, Ways: ways.list, WaysOpen: ways.open, WaysAlike: ways.alike, FastestBytesPerMs: ask.FastestBytesPerMs, Whole: ask.Whole}
	q.Way = ask.Path
	if ask.Path != nil && !ask.MatchUnknown {
		sit.Sources = p.board.AppendSources(nil, ask.Request, &ask.Matches, ask.Sending)
		q.Paths = func(to *placement.Worker, paths []placement.Path) []placement.Path {
			for i := range sit.Sources {
				paths = append(paths, ask.Path(sit.Sources[i].Worker, to))
			}
			return paths
		}
	}
	dst, err = p.board.Decide(ask.Request, ask.Policy, sit, q, dst, d)
	return dst, sit, err
}

// waysFrom builds the ways from a zone; the read lock is held before and
// after.
func (f *Fleet) waysFrom(zone string) zoneWays {
	f.mu.RUnlock()
	f.mu.Lock()
	ways := f.ways[zone]
	if ways.list == nil {
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
