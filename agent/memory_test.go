package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"waypost/agent/blocktable"
	"waypost/agent/engine"
	"waypost/gossip/prefix"
)

// What all that is kept of an engine's block takes is what the bound of the mirrors
// counts with: its tokens, its place, its history and its stream.
func TestMemoryOfAMirror(t *testing.T) {
	const pool, promptBlocks, blockTokens = 32768, 110, 16
	heap := func() int {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return int(m.HeapAlloc)
	}
	before := heap()
	r := newRank(0, "vllm", "vllm-1", "here", 0, []prefix.ClusterKey{{5}}, 1<<17)
	f := testFacts
	f.BlockTokens, f.PoolBlocks = blockTokens, pool
	r.setFacts(f)
	rng := rand.New(rand.NewPCG(1, 2))
	now := time.Now()
	tokens, held := make([]uint32, promptBlocks*blockTokens), [][]uint64{}
	for prompt := range uint64(2 * pool / promptBlocks) {
		var b engine.Batch
		if len(held) == pool/promptBlocks {
			for i := promptBlocks - 1; i >= 0; i-- { // the tail goes first
				b.Events = append(b.Events, blocktable.Event{Op: blocktable.OpRemove, Hashes: held[0][i : i+1]})
			}
			held = held[1:]
		}
		hashes := make([]uint64, promptBlocks)
		for i := range hashes {
			hashes[i] = (prompt*promptBlocks + uint64(i) + 1) * 0x9e3779b97f4a7c15
		}
		for i := range tokens {
			tokens[i] = rng.Uint32N(152_000)
		}
		held = append(held, hashes)
		b.Received = now
		b.Events = append(b.Events, blocktable.Event{Op: blocktable.OpStore, Spec: blocktable.SpecFull, BlockTokens: blockTokens, Hashes: hashes, Tokens: tokens})
		if whole, _ := r.apply(b); !whole {
			t.Fatal("more copies than the pool holds")
		}
		now = now.Add(100 * time.Millisecond)
		if prompt%10 == 9 {
			r.tick(now)
		}
	}
	held, tokens = nil, nil
	after := heap()
	blocks := r.report(now).cachedBlocks
	if blocks < pool*9/10 {
		t.Fatalf("%d blocks of %d are mirrored", blocks, pool)
	}
	each := float64(after-before) / float64(blocks)
	t.Logf("%.1f bytes a block of %d tokens", each, blockTokens)
	if each > mirrorBlockBytes {
		t.Errorf("%.1f bytes a block, the bound counts %d", each, mirrorBlockBytes)
	}
	runtime.KeepAlive(r)
}

// Memory is handed back again and again, whether or not it worked, until the daemon
// ends.
func TestMemoryIsHandedBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, end := context.WithCancel(t.Context())
		times := 0
		done := make(chan struct{})
		go func() {
			defer close(done)
			tidy(ctx, slog.New(slog.DiscardHandler), func() error { times++; return errors.New("not on this system") })
		}()
		time.Sleep(3*tidyEvery + time.Second)
		end()
		<-done
		if times != 3 {
			t.Errorf("%d times in %v", times, 3*tidyEvery)
		}
	})
	// Both kinds of pages go.
	fileKiB := func() (n int) {
		status, err := os.ReadFile("/proc/self/status")
		if err != nil {
			t.Skip("this system does not tell what is mapped")
		}
		_, rest, _ := strings.Cut(string(status), "RssFile:")
		if _, err := fmt.Sscan(rest, &n); err != nil {
			t.Skip("this system does not tell how much of a file is mapped")
		}
		return n
	}
	heap := func() int { // that the system has not got back
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int(m.HeapSys - m.HeapReleased)
	}
	garbage := make([]byte, 64<<20)
	for i := 0; i < len(garbage); i += 4096 {
		garbage[i] = 1
	}
	runtime.KeepAlive(garbage)
	garbage = nil
	heapBefore, fileBefore := heap(), fileKiB()
	if err := handBack(); err != nil {
		t.Error(err)
	}
	if heapAfter, fileAfter := heap(), fileKiB(); heapAfter > heapBefore-32<<20 || fileAfter >= fileBefore {
		t.Errorf("%d bytes of the heap and %d KiB of files are held, before %d and %d", heapAfter, fileAfter, heapBefore, fileBefore)
	}
}
