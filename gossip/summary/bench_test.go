package summary_test

import (
	"runtime"
	"testing"
	"time"

	"waypost/agent/blocktable"
	"waypost/gossip/summary"
)

// BenchmarkConversation prints what the stream costs on the Mooncake
// conversation trace: the whole one if it is at hand, else the sample.
func BenchmarkConversation(b *testing.B) {
	reqs, name, workers := conversationTrace(b)
	for b.Loop() {
		f := measureStreams(b, reqs, workers, func(w int) summary.Options { return summary.Options{Key: keyA, Epoch: uint32(w + 1)} })
		per := f.seconds * float64(workers)
		b.Logf("%s: %d requests on %d workers, %.0f s measured: %.0f blocks/s stored, %.1f frames/s, %.0f runs of %.0f blocks; per worker and second %.2f EXT, %.2f FORK, %.2f TRIM, %.2f DEL; %d compactions",
			name, len(reqs), workers, f.seconds, f.storedPerSec, f.framesPerSec, f.runs, f.blocksPerRun,
			float64(f.ops.Extends)/per, float64(f.ops.Forks)/per, float64(f.ops.Trims)/per, float64(f.ops.Deletes)/per, f.ops.Compactions)
		b.ReportMetric(f.bytesPerSec, "B/s")
		b.ReportMetric(f.snapshotBits, "bits/block")
		b.ReportMetric(f.replayBytes, "B/replay10s")
		b.ReportMetric(f.decoderBytes, "decoderB/block")
	}
}

// BenchmarkAgent replays what one engine of the conversation trace announced:
// the cost per block stored or removed of the block table alone, and with an
// encoder that listens and yields a frame a second.
func BenchmarkAgent(b *testing.B) {
	reqs, name, workers := conversationTrace(b)
	t := recordTape(reqs, workers)
	for _, encoded := range []bool{false, true} {
		b.Run(map[bool]string{false: "table", true: "table+encoder"}[encoded], func(b *testing.B) {
			b.ReportAllocs()
			blocks := 0
			for b.Loop() {
				table := blocktable.New(blocktable.Options{Model: "m", MaxBlocks: simBlocks, ExpectBlocks: simBlocks})
				e := summary.NewEncoder(summary.Options{Key: keyA, Epoch: 1, Blocks: table})
				if encoded {
					table.Listen(e)
				}
				next := time.Second
				for i := range t.events {
					for ; encoded && t.at[i] >= next; next += time.Second {
						e.Delta(start.Add(next))
					}
					table.Apply(&t.events[i])
				}
				blocks += t.blocks
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(blocks), "ns/blockEvent")
			b.Logf("%s: %d block events in %d engine events", name, t.blocks, len(t.events))
		})
	}
}

// recordFrames encodes a tape: the stream of one worker from its first frame,
// and the snapshot of its end.
func recordFrames(t *tape) (frames, snapshot [][]byte, s summary.Stats) {
	table := blocktable.New(blocktable.Options{Model: "m", MaxBlocks: simBlocks, ExpectBlocks: simBlocks})
	e := summary.NewEncoder(summary.Options{Key: keyA, Epoch: 1, Blocks: table})
	table.Listen(e)
	frames = e.Snapshot()
	next := time.Second
	for i := range t.events {
		for ; t.at[i] >= next; next += time.Second {
			if b := e.Delta(start.Add(next)); b != nil {
				frames = append(frames, b)
			}
		}
		table.Apply(&t.events[i])
	}
	return frames, e.Snapshot(), e.Stats()
}

// BenchmarkDecoder applies a worker's stream from its beginning, to a sink that
// keeps nothing.
func BenchmarkDecoder(b *testing.B) {
	reqs, _, workers := conversationTrace(b)
	t := recordTape(reqs, workers)
	frames, snapshot, s := recordFrames(t)
	ops := s.Extends + s.Forks + s.Trims + s.Deletes
	b.Run("deltas", func(b *testing.B) {
		b.ReportAllocs()
		sink := &discard{}
		for b.Loop() {
			mustApply(b, summary.NewDecoder(sink), frames)
		}
		sec := b.Elapsed().Seconds() / float64(b.N)
		b.ReportMetric(float64(ops)/sec/1e6, "Mops/s")
		b.ReportMetric(float64(len(frames))/sec/1e3, "kframes/s")
		b.ReportMetric(float64(t.blocks)/sec/1e6, "MblockEvents/s")
	})
	b.Run("snapshot", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			mustApply(b, summary.NewDecoder(&discard{}), snapshot)
		}
	})
	b.Run("heap", func(b *testing.B) {
		const copies = 1000
		decoders := make([]*summary.Decoder, copies)
		for b.Loop() {
			var before, after runtime.MemStats
			runtime.GC()
			runtime.ReadMemStats(&before)
			for i := range decoders {
				decoders[i] = summary.NewDecoder(&discard{})
				mustApply(b, decoders[i], frames[:1+len(frames)*(1+i%4)/4-1])
			}
			runtime.GC()
			runtime.ReadMemStats(&after)
			b.ReportMetric(float64(after.HeapAlloc-before.HeapAlloc)/copies/simBlocks, "B/block")
			clear(decoders)
		}
	})
}
