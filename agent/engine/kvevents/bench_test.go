package kvevents

import (
	"math/rand/v2"
	"testing"

	"waypost/agent/blocktable"

	"github.com/tinylib/msgp/msgp"
)

const (
	benchBlock  = 16 // tokens
	benchPrompt = 32 // blocks
)

// evictionStream is a cyclic stream of batches in the newest map layout: each
// stores a prompt and removes the oldest one's blocks, tail first, one event
// each, as the engine does. It can be played round and round.
func evictionStream(blocks int) (payloads [][]byte, blockEvents int) {
	prompts := blocks/benchPrompt + 64
	rng := rand.New(rand.NewPCG(1, 2))
	hashes := make([]uint64, prompts*benchPrompt)
	for i := range hashes {
		hashes[i] = rng.Uint64()
	}
	for i := range prompts {
		old := (i + 64) % prompts * benchPrompt
		b := msgp.AppendFloat64(msgp.AppendArrayHeader(nil, 3), 1754000000.5)
		b = msgp.AppendArrayHeader(b, benchPrompt+1)
		for k := benchPrompt - 1; k >= 0; k-- {
			b = appendRemoved(b, hashes[old+k])
		}
		b = appendStored(b, hashes[i*benchPrompt:(i+1)*benchPrompt], rng)
		payloads = append(payloads, msgp.AppendInt(b, 0))
	}
	return payloads, 2 * benchPrompt
}

func appendRemoved(b []byte, hash uint64) []byte {
	b = msgp.AppendString(msgp.AppendString(msgp.AppendMapHeader(b, 4), "type"), "BlockRemoved")
	b = msgp.AppendUint64(msgp.AppendArrayHeader(msgp.AppendString(b, "block_hashes"), 1), hash)
	b = msgp.AppendString(msgp.AppendString(b, "medium"), "GPU")
	return msgp.AppendInt(msgp.AppendString(b, "group_idx"), 0)
}

func appendStored(b []byte, hashes []uint64, rng *rand.Rand) []byte {
	b = msgp.AppendString(msgp.AppendString(msgp.AppendMapHeader(b, 11), "type"), "BlockStored")
	b = msgp.AppendArrayHeader(msgp.AppendString(b, "block_hashes"), uint32(len(hashes)))
	for _, h := range hashes {
		b = msgp.AppendUint64(b, h)
	}
	b = msgp.AppendNil(msgp.AppendString(b, "parent_block_hash"))
	b = msgp.AppendArrayHeader(msgp.AppendString(b, "token_ids"), uint32(len(hashes)*benchBlock))
	for range len(hashes) * benchBlock {
		b = msgp.AppendUint(b, uint(rng.Uint32N(150_000)))
	}
	b = msgp.AppendInt(msgp.AppendString(b, "block_size"), benchBlock)
	b = msgp.AppendNil(msgp.AppendString(b, "lora_id"))
	b = msgp.AppendString(msgp.AppendString(b, "medium"), "GPU")
	b = msgp.AppendNil(msgp.AppendString(b, "lora_name"))
	b = msgp.AppendArrayHeader(msgp.AppendString(b, "extra_keys"), uint32(len(hashes)))
	for range hashes {
		b = msgp.AppendNil(b)
	}
	b = msgp.AppendInt(msgp.AppendString(b, "group_idx"), 0)
	return msgp.AppendString(msgp.AppendString(b, "kv_cache_spec_kind"), "full_attention")
}

func BenchmarkDecode(b *testing.B) {
	payloads, perBatch := evictionStream(32768)
	d := NewDecoder()
	b.ReportAllocs()
	i := 0
	for b.Loop() {
		if _, err := d.Decode(payloads[i%len(payloads)]); err != nil {
			b.Fatal(err)
		}
		i++
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*perBatch), "ns/blockEvent")
}

func BenchmarkDecodeAndApply(b *testing.B) {
	for _, c := range []struct {
		name   string
		blocks int
	}{{"blocks=4k", 4096}, {"blocks=32k", 32768}, {"blocks=128k", 131072}} {
		b.Run(c.name, func(b *testing.B) {
			payloads, perBatch := evictionStream(c.blocks)
			d := NewDecoder()
			table := blocktable.New(blocktable.Options{MaxBlocks: 2 * c.blocks, ExpectBlocks: c.blocks + 2048})
			play := func(i int) {
				batch, err := d.Decode(payloads[i%len(payloads)])
				if err != nil || batch.Damaged > 0 {
					b.Fatal(err, batch.Damaged)
				}
				for k := range batch.Events {
					table.Apply(&batch.Events[k])
				}
			}
			i := 0
			for ; i < 2*len(payloads); i++ {
				play(i)
			}
			b.ReportAllocs()
			for b.Loop() {
				play(i)
				i++
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*perBatch), "ns/blockEvent")
			if table.Len() != c.blocks || table.Attached() != c.blocks {
				b.Fatalf("%d blocks resident, %d attached, want %d", table.Len(), table.Attached(), c.blocks)
			}
		})
	}
}
