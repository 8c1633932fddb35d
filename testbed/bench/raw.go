package bench

import (
	"github.com/tinylib/msgp/msgp"

	"waypost/agent/blocktable"
)

// rawEvents builds what vLLM publishes for the same changes: event batches in
// MessagePack's map form with hashes of 8 bytes, one batch per engine step.
type rawEvents struct {
	buf    []byte
	hashes int // hashes and parents in them
}

// wideHashBytes is how much longer a hash of 32 bytes is than one of 8.
const wideHashBytes = 34 - 9

// size is the bytes of a tape's batches with hashes of 8 and of 32 bytes.
func (r *rawEvents) size(t *tape) (narrow, wide int) {
	r.hashes = 0
	for i, from := 0, 0; i < len(t.batches); i++ {
		r.appendBatch(t.events[from:t.batches[i]])
		from = t.batches[i]
		narrow += len(r.buf)
	}
	return narrow, narrow + r.hashes*wideHashBytes
}

// appendBatch encodes [seconds, events, rank].
func (r *rawEvents) appendBatch(events []blocktable.Event) {
	b := msgp.AppendArrayHeader(r.buf[:0], 3)
	b = msgp.AppendFloat64(b, 1.7e9)
	b = msgp.AppendArrayHeader(b, uint32(len(events)))
	for i := range events {
		e := &events[i]
		r.hashes += len(e.Hashes)
		if e.Op == blocktable.OpStore {
			if e.HasParent {
				r.hashes++
			}
			b = appendStored(b, e)
		} else {
			b = appendRemoved(b, e)
		}
	}
	r.buf = msgp.AppendInt(b, 0)
}

func appendStored(b []byte, e *blocktable.Event) []byte {
	b = msgp.AppendMapHeader(b, 11)
	b = msgp.AppendString(msgp.AppendString(b, "type"), "BlockStored")
	b = appendHashes(b, e.Hashes)
	b = msgp.AppendString(b, "parent_block_hash")
	if e.HasParent {
		b = msgp.AppendUint64(b, e.Parent)
	} else {
		b = msgp.AppendNil(b)
	}
	b = msgp.AppendArrayHeader(msgp.AppendString(b, "token_ids"), uint32(len(e.Tokens)))
	for _, t := range e.Tokens {
		b = msgp.AppendUint32(b, t)
	}
	b = msgp.AppendInt(msgp.AppendString(b, "block_size"), int(e.BlockTokens))
	b = msgp.AppendNil(msgp.AppendString(b, "lora_id"))
	b = msgp.AppendString(msgp.AppendString(b, "medium"), "GPU")
	b = msgp.AppendNil(msgp.AppendString(b, "lora_name"))
	b = msgp.AppendArrayHeader(msgp.AppendString(b, "extra_keys"), uint32(len(e.Hashes)))
	for range e.Hashes {
		b = msgp.AppendNil(b)
	}
	b = msgp.AppendInt(msgp.AppendString(b, "group_idx"), 0)
	return msgp.AppendString(msgp.AppendString(b, "kv_cache_spec_kind"), "full_attention")
}

func appendRemoved(b []byte, e *blocktable.Event) []byte {
	b = msgp.AppendMapHeader(b, 4)
	b = msgp.AppendString(msgp.AppendString(b, "type"), "BlockRemoved")
	b = appendHashes(b, e.Hashes)
	b = msgp.AppendString(msgp.AppendString(b, "medium"), "GPU")
	return msgp.AppendInt(msgp.AppendString(b, "group_idx"), 0)
}

func appendHashes(b []byte, hashes []uint64) []byte {
	b = msgp.AppendArrayHeader(msgp.AppendString(b, "block_hashes"), uint32(len(hashes)))
	for _, h := range hashes {
		b = msgp.AppendUint64(b, h)
	}
	return b
}
