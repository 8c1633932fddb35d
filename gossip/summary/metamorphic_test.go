package summary_test

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"strconv"
	"testing"
	"time"

	"waypost/gossip/prefix"
	"waypost/gossip/summary"
	"waypost/gossip/summary/summarytest"
)

// step is one step of a script: which it is and the seed of what it draws.
type step struct {
	kind uint8
	seed uint64
}

// Kinds of steps, with their share of 100.
const (
	stepWorld       = iota // the block table changes
	stepTick               // time passes, a frame is sent to both coordinators
	stepReceive            // one coordinator reads some frames
	stepSettle             // everything arrives, everybody must agree
	stepCoordinator        // a coordinator restarts
	stepAgent              // the agent restarts
	stepRotate             // the agent serves other cluster keys
)

var shares = []int{stepWorld: 52, stepTick: 22, stepReceive: 18, stepSettle: 4, stepCoordinator: 1, stepAgent: 1, stepRotate: 2}

func drawScript(seed uint64, n int) []step {
	rng := rand.New(rand.NewPCG(seed, 1))
	out := make([]step, n)
	for i := range out {
		draw := rng.IntN(100)
		for kind, share := range shares {
			if draw -= share; draw < 0 {
				out[i] = step{uint8(kind), rng.Uint64()}
				break
			}
		}
	}
	return append(out, step{kind: stepSettle})
}

// play runs a script and returns the first thing that must not be.
type play struct {
	a            *agent
	coordinators [2]*coordinator
	now          time.Time
	checked      int
}

func newPlay(seed uint64) *play {
	rng := rand.New(rand.NewPCG(seed, 2))
	sizes := []int{16, 16, 32, 48, 64, 272, 512, 528, 1056}
	size := sizes[rng.IntN(len(sizes))]
	p := &play{a: &agent{keys: []prefix.ClusterKey{keyA}}, now: start}
	if rng.IntN(2) == 0 {
		p.a.w = newEngineWorld(size)
	} else {
		f := summarytest.NewForest(size, domains...)
		f.Hybrid, f.Tiers = rng.IntN(3) == 0, rng.IntN(3) == 0
		p.a.w = forestWorld{f}
	}
	p.a.restart()
	p.coordinators = [2]*coordinator{{}, {}}
	p.coordinators[0].restart(keyA, keyB)
	p.coordinators[1].restart(keyB, keyA)
	return p
}

func (p *play) run(script []step) error {
	for i, s := range script {
		if err := p.step(s); err != nil {
			return fmt.Errorf("step %d: %w", i, err)
		}
	}
	return nil
}

func (p *play) step(s step) error {
	rng := rand.New(rand.NewPCG(s.seed, 3))
	switch s.kind {
	case stepWorld:
		p.a.w.step(rng)
	case stepTick:
		p.now = p.now.Add(time.Duration(rng.IntN(3000)) * time.Millisecond)
		for _, b := range p.a.deltas(p.now) {
			for _, c := range p.coordinators {
				c.send(rng, b)
			}
		}
	case stepReceive:
		c := p.coordinators[min(rng.IntN(3), 1)] // one is faster
		for n := rng.IntN(4); n > 0 && len(c.queue) > 0; n-- {
			b := c.queue[0]
			c.queue = c.queue[1:]
			got, err := p.take(c, b)
			if err != nil {
				return err
			}
			if got == summary.Gap && rng.IntN(2) == 0 {
				for _, b := range c.pull(p.a.e, rng.IntN(4) == 0) {
					c.send(rng, b)
				}
			}
		}
	case stepSettle:
		return p.settle()
	case stepCoordinator:
		i := rng.IntN(2)
		p.coordinators[i].restart([][]prefix.ClusterKey{{keyA, keyB}, {keyB, keyA}}[rng.IntN(2)]...)
	case stepAgent:
		p.a.restart()
	case stepRotate:
		p.a.keys = [][]prefix.ClusterKey{{keyA}, {keyA, keyB}, {keyB}, {keyB, keyA}}[rng.IntN(4)]
		return p.a.e.SetKeys(p.a.keys...)
	}
	return nil
}

// take applies a frame that may be older than a change of cluster keys.
func (p *play) take(c *coordinator, b []byte) (summary.Result, error) { return c.take(b) }

// settle lets time pass and everything arrive. Then both coordinators must hold
// what the agent told, key by key, and that must be what the blocks say.
func (p *play) settle() error {
	for _, c := range p.coordinators {
		for _, b := range c.queue {
			if _, err := p.take(c, b); err != nil {
				return err
			}
		}
		c.queue = nil
	}
	for range 4 {
		p.now = p.now.Add(6 * time.Second)
		for _, b := range p.a.deltas(p.now) {
			for _, c := range p.coordinators {
				if _, err := p.take(c, b); err != nil {
					return err
				}
			}
		}
		for _, c := range p.coordinators {
			for _, b := range c.pull(p.a.e, false) {
				if _, err := p.take(c, b); err != nil {
					return err
				}
			}
		}
	}
	if s := p.a.e.Stats(); s.Restarts > 0 {
		return fmt.Errorf("the encoder started over %d times on an honest table", s.Restarts)
	}
	p.checked++
	blocks := p.a.w.blocks()
	states := map[uint32]plainState{}
	for _, k := range p.a.keys {
		states[k.IDUint32()] = stateOf(blocks, k)
	}
	told := heldState{map[plainKey]int{}, map[plainKey]plainExtent{}}
	p.a.e.EachKey(func(k summary.HeldKey, x summary.Extent, branch bool) {
		pk := plainKey{uint64(k.Key), int(k.DepthTokens)}
		told.keys[pk]++
		if x != summary.WholeExtent(k.DepthTokens) {
			told.extents[pk] = plainExtent{int(x.UsableTokens), int(x.GPUTokens), int(x.HostTokens)}
		}
	})
	if err := states[p.a.keys[0].IDUint32()].check(told); err != nil {
		return fmt.Errorf("agent tells: %w", err)
	}
	for i, c := range p.coordinators {
		epoch, seq, ok := c.d.Have()
		if !ok || epoch != p.a.e.Epoch() || seq != p.a.e.Seq() {
			return fmt.Errorf("coordinator %d has epoch %d seq %d %v, the agent epoch %d seq %d", i, epoch, seq, ok, p.a.e.Epoch(), p.a.e.Seq())
		}
		if err := states[c.d.KeyID()].check(heldState{c.r.keys, c.r.extents}); err != nil {
			return fmt.Errorf("coordinator %d: %w", i, err)
		}
		if c.d.KeyID() == p.a.keys[0].IDUint32() && !maps.Equal(c.r.keys, told.keys) {
			return fmt.Errorf("coordinator %d holds %d keys, the agent tells %d", i, len(c.r.keys), len(told.keys))
		}
		if err := sameAsCopy(c); err != nil {
			return fmt.Errorf("coordinator %d: %w", i, err)
		}
	}
	return nil
}

// sameAsCopy starts another coordinator from this one's state.
func sameAsCopy(c *coordinator) error {
	frames, ok := c.d.Snapshot()
	if !ok {
		return errors.New("serves no copy")
	}
	copied := &coordinator{}
	copied.restart()
	for _, b := range frames {
		if _, err := copied.take(b); err != nil {
			return fmt.Errorf("copy: %w", err)
		}
	}
	if !maps.Equal(copied.r.keys, c.r.keys) || !maps.Equal(copied.r.extents, c.r.extents) {
		return errors.New("copy differs")
	}
	return nil
}

// shrink leaves out steps as long as the script still fails.
func shrink(seed uint64, script []step, fails func([]step) error) ([]step, error) {
	last := fails(script)
	for size := len(script) / 2; size > 0; size /= 2 {
		for at := 0; at+size <= len(script); {
			shorter := append(append([]step(nil), script[:at]...), script[at+size:]...)
			if err := fails(shorter); err != nil {
				script, last = shorter, err
			} else {
				at += size
			}
		}
	}
	return script, last
}

func failure(seed uint64) func([]step) error {
	return func(s []step) error { return newPlay(seed).run(s) }
}

// TestMetamorphic plays random scripts: 10,000 steps, or as many as
// WAYPOST_STEPS says; WAYPOST_SEED plays one script again.
func TestMetamorphic(t *testing.T) {
	const perScript = 250
	steps := 10_000
	if s := os.Getenv("WAYPOST_STEPS"); s != "" {
		n, err := strconv.Atoi(s)
		if err != nil {
			t.Fatal(err)
		}
		steps = n
	}
	first, last := uint64(1), uint64(steps/perScript)
	if s := os.Getenv("WAYPOST_SEED"); s != "" {
		n, err := strconv.ParseUint(s, 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		first, last = n, n
	}
	checked := 0
	for seed := first; seed <= last; seed++ {
		script := drawScript(seed, perScript)
		p := newPlay(seed)
		if err := p.run(script); err != nil {
			least, err := shrink(seed, script, failure(seed))
			t.Fatalf("seed %d (replay with WAYPOST_SEED=%d): %v\nshrunk to %d steps: %v", seed, seed, err, len(least), least)
		}
		checked += p.checked
	}
	t.Logf("%d scripts of %d steps, %d times compared key by key", last-first+1, perScript, checked)
}

// TestOracleNoticesASkippedTrim hides from the encoder what one step of an
// otherwise good script evicts: the comparison must fail.
func TestOracleNoticesASkippedTrim(t *testing.T) {
	const scripts = 40
	skipped := 0
	for seed := uint64(1); seed <= scripts; seed++ {
		p := newPlay(seed)
		hidden := 0
		for _, s := range drawScript(seed, 200) {
			if s.kind == stepAgent || s.kind == stepRotate {
				continue
			}
			if s.kind == stepWorld {
				if err := p.settle(); err != nil {
					t.Fatal(err)
				}
				p.a.skip = func(uint32) bool { hidden++; return true }
			}
			err := p.step(s)
			p.a.skip = nil
			if err != nil {
				t.Fatal(err)
			}
			if hidden == 0 {
				continue
			}
			skipped++
			if p.settle() == nil {
				t.Errorf("seed %d: %d hidden evictions went unnoticed", seed, hidden)
			}
			break
		}
	}
	if skipped < scripts*3/4 {
		t.Errorf("only %d of %d scripts evicted anything", skipped, scripts)
	}
}
