package profile

import (
	"crypto/sha256"
	"encoding/binary"

	"github.com/tinylib/msgp/msgp"
)

// SGLang's hash of a page: SHA-256 over the digest of the page before and the
// tokens, each as four bytes, little endian. A salted chain begins from a digest
// of the salt.
func sglHash(salted bool) hashPage {
	return func(prev *digest, salt string, tokens []uint32) digest {
		h := sha256.New()
		switch {
		case prev != nil:
			h.Write(prev[:])
		case salt != "" && salted:
			seed := sha256.Sum256([]byte("sglang-cache-salt-v1\x00" + salt))
			h.Write(seed[:])
		}
		b := make([]byte, 0, 4*len(tokens))
		for _, t := range tokens {
			b = binary.LittleEndian.AppendUint32(b, t)
		}
		h.Write(b)
		var d digest
		h.Sum(d[:0])
		return d
	}
}

// SGLayout is how SGLang lays out its events.
type SGLayout uint8

// The layouts, oldest first.
const (
	// SGArray6 has stores of six fields and batches of two, of May 2025.
	SGArray6 SGLayout = iota + 1
	// SGRanked adds the rank to the batch.
	SGRanked
	// SGMedium adds the medium to stores and removals.
	SGMedium
	// SGSalted adds a map with the salt behind the stores that have one; one
	// event tells of several pages.
	SGSalted
	// SGMap is maps with a type, without what is null.
	SGMap
)

// sglBatch encodes a batch of SGLang.
func sglBatch(layout SGLayout, events []event, seconds float64, rank int) []byte {
	n := uint32(3)
	if layout == SGArray6 {
		n = 2
	}
	b := msgp.AppendArrayHeader(nil, n)
	b = msgp.AppendFloat64(b, seconds)
	b = msgp.AppendArrayHeader(b, uint32(len(events)))
	for i := range events {
		if layout == SGMap {
			b = sglMap(b, &events[i])
		} else {
			b = sglArray(b, layout, &events[i])
		}
	}
	if n == 3 {
		b = msgp.AppendUint64(b, uint64(rank))
	}
	return b
}

func (o op) String() string {
	switch o {
	case opStored:
		return "BlockStored"
	case opRemoved:
		return "BlockRemoved"
	}
	return "AllBlocksCleared"
}

func appendSigned(b []byte, v int64) []byte {
	if v < 0 {
		return msgp.AppendInt64(b, v)
	}
	return msgp.AppendUint64(b, uint64(v))
}

func appendSignedHashes(b []byte, hashes []digest) []byte {
	b = msgp.AppendArrayHeader(b, uint32(len(hashes)))
	for _, h := range hashes {
		b = appendSigned(b, h.first64())
	}
	return b
}

func appendSignedParent(b []byte, parent *digest) []byte {
	if parent == nil {
		return msgp.AppendNil(b)
	}
	return appendSigned(b, parent.first64())
}

func appendTokens(b []byte, tokens []uint32) []byte {
	b = msgp.AppendArrayHeader(b, uint32(len(tokens)))
	for _, t := range tokens {
		b = msgp.AppendUint32(b, t)
	}
	return b
}

func sglArray(b []byte, layout SGLayout, e *event) []byte {
	n := uint32(1)
	switch {
	case e.op == opStored:
		n = 6
		if layout >= SGMedium {
			n = 7
		}
		if layout >= SGSalted && e.salt != "" {
			n = 8
		}
	case e.op == opRemoved:
		n = 2
		if layout >= SGMedium {
			n = 3
		}
	}
	b = msgp.AppendArrayHeader(b, n)
	b = msgp.AppendString(b, e.op.String())
	if e.op == opCleared {
		return b
	}
	b = appendSignedHashes(b, e.hashes)
	if e.op == opStored {
		b = appendSignedParent(b, e.parent)
		b = appendTokens(b, e.tokens)
		b = msgp.AppendInt(b, e.pageSize)
		b = msgp.AppendNil(b)
	}
	if layout >= SGMedium {
		b = msgp.AppendString(b, "GPU")
	}
	if n == 8 {
		b = msgp.AppendMapHeader(b, 1)
		b = msgp.AppendString(b, "cache_salt")
		b = msgp.AppendString(b, e.salt)
	}
	return b
}

func sglMap(b []byte, e *event) []byte {
	n := uint32(1)
	switch {
	case e.op == opStored && e.salt != "":
		n = 8
	case e.op == opStored:
		n = 7
	case e.op == opRemoved:
		n = 3
	}
	b = msgp.AppendMapHeader(b, n)
	key := func(name string) { b = msgp.AppendString(b, name) }
	key("type")
	key(e.op.String())
	if e.op == opCleared {
		return b
	}
	key("block_hashes")
	b = appendSignedHashes(b, e.hashes)
	if e.op == opStored {
		key("parent_block_hash")
		b = appendSignedParent(b, e.parent)
		key("token_ids")
		b = appendTokens(b, e.tokens)
		key("block_size")
		b = msgp.AppendInt(b, e.pageSize)
		key("lora_id")
		b = msgp.AppendNil(b)
	}
	key("medium")
	key("GPU")
	if n == 8 {
		key("cache_salt")
		key(e.salt)
	}
	return b
}
