package prefixindex

import (
	"math"
	"math/rand/v2"
	"testing"

	"waypost/gossip/prefix"
	"waypost/gossip/summary"
)

// TestFalsePositiveRate: of texts that part from what a worker holds within a
// chunk, the index takes 2^-16 for each known point tried to go on to that point,
// and 2^-16 to go on to a checkpoint. Nothing else makes an answer too long.
func TestFalsePositiveRate(t *testing.T) {
	rng := rand.New(rand.NewPCG(8, 8))
	x := New(Options{Seed: 9})
	s := x.WorkerSink(1)
	random := func() prefix.Key { return prefix.Key(rng.Uint64() | 1) }

	// The worker holds one checkpoint, behind it 255 points and 64 checkpoints.
	first := random()
	root := summary.CheckpointKey(0, prefix.ChunkTokens, first)
	s.AddCheckpoint(root, 0, prefix.ChunkTokens)
	const points, next = 255, 64
	for i := range uint32(points) {
		depth := prefix.ChunkTokens + 2*(i+1)
		s.AddPoint(summary.PointKey(root, depth, random()), root, depth, false)
	}
	for range next {
		s.AddCheckpoint(summary.CheckpointKey(root, 2*prefix.ChunkTokens, random()), root, 2*prefix.ChunkTokens)
	}

	const trials = 40_000
	search := x.NewSearcher()
	var p prefix.Probe
	atPoint, beyond := 0, 0
	given := map[uint32]prefix.Key{}
	for range trials {
		for i := range uint32(points) {
			given[prefix.ChunkTokens+2*(i+1)] = random()
		}
		p.ResetKeys(3*prefix.ChunkTokens, []prefix.Key{first, random(), random()}, given)
		switch tokens := search.Search(&p)[0].Tokens; {
		case tokens > 2*prefix.ChunkTokens:
			t.Fatalf("%d tokens: a second checkpoint was taken for one behind it", tokens)
		case tokens == 2*prefix.ChunkTokens:
			beyond++
		case tokens > prefix.ChunkTokens:
			atPoint++
		}
	}
	near := func(what string, got int, rate float64) {
		want := rate * trials
		if dev := math.Sqrt(want); math.Abs(float64(got)-want) > 4*dev+1 {
			t.Errorf("%s: %d of %d, want about %.0f", what, got, trials, want)
		}
	}
	near("points", atPoint, 1-math.Pow(1-1.0/65536, points))
	near("checkpoints", beyond, next/65536.0)
}
