package core

import (
	"crypto/sha256"
	"encoding/binary"
)

// Hash is the name of a block: SHA-256 over the parent's hash, the block's
// tokens and its extra keys.
type Hash [sha256.Size]byte

// Low64 is the integer form of the hash in events: the last eight bytes, big
// endian.
func (h Hash) Low64() uint64 { return binary.BigEndian.Uint64(h[len(h)-8:]) }

// Adapter is a LoRA adapter. Name and path enter the hash of every block.
type Adapter struct {
	// ID is the engine's number of the adapter, from 1.
	ID int
	// Name is the served name.
	Name string
	// Path is where the engine loaded it from.
	Path string
}

// defaultHashSeed is what vLLM hashes when no seed is configured, so that two
// lives of one engine, and two engines, agree.
const defaultHashSeed = "vllm-none-hash"

// The opcodes of Python's pickle protocol 5 that occur in a block's key. The
// engine hashes the pickle of (parent, tokens, extra keys).
const (
	opProto       = 0x80
	opFrame       = 0x95
	opShortBytes  = 'C'
	opShortString = 0x8c
	opString      = 'X'
	opInt8        = 'K'
	opInt16       = 'M'
	opInt32       = 'J'
	opMark        = '('
	opTuple       = 't'
	opTuple1      = 0x85
	opNone        = 'N'
	opMemoize     = 0x94
	opStop        = '.'
)

const pickleHeaderLen = 2 + 1 + 8

// hasher computes block hashes; it is not safe for concurrent use.
type hasher struct {
	root Hash
	buf  []byte
}

func newHasher(seed string) *hasher {
	if seed == "" {
		seed = defaultHashSeed
	}
	h := &hasher{}
	h.begin()
	h.putString(seed)
	h.root = h.end()
	return h
}

// block is the hash of one full block. salted says that the block is the first
// of a request with a cache salt.
func (h *hasher) block(parent Hash, tokens []uint32, adapter *Adapter, salt string) Hash {
	h.begin()
	h.buf = append(h.buf, opShortBytes, byte(len(parent)))
	h.buf = append(h.buf, parent[:]...)
	h.buf = append(h.buf, opMemoize)
	h.putTokens(tokens)
	extras := 0
	if adapter != nil {
		h.putString("lora")
		h.putString(adapter.Name)
		h.putString(adapter.Path)
		h.putTuple(3)
		extras++
	}
	if salt != "" {
		h.putString("cache_salt")
		h.putString(salt)
		h.putTuple(2)
		extras++
	}
	if extras == 0 {
		h.buf = append(h.buf, opNone)
	} else {
		h.putTuple(extras)
	}
	h.putTuple(3)
	return h.end()
}

func (h *hasher) begin() {
	h.buf = append(h.buf[:0], opProto, 5, opFrame, 0, 0, 0, 0, 0, 0, 0, 0)
}

func (h *hasher) end() Hash {
	h.buf = append(h.buf, opStop)
	binary.LittleEndian.PutUint64(h.buf[3:], uint64(len(h.buf)-pickleHeaderLen))
	return sha256.Sum256(h.buf)
}

// putTuple closes a tuple of 1 to 3 items.
func (h *hasher) putTuple(items int) {
	h.buf = append(h.buf, opTuple1+byte(items-1), opMemoize)
}

func (h *hasher) putTokens(tokens []uint32) {
	if len(tokens) > 3 {
		h.buf = append(h.buf, opMark)
	}
	for _, t := range tokens {
		switch {
		case t < 1<<8:
			h.buf = append(h.buf, opInt8, byte(t))
		case t < 1<<16:
			h.buf = binary.LittleEndian.AppendUint16(append(h.buf, opInt16), uint16(t))
		default:
			h.buf = binary.LittleEndian.AppendUint32(append(h.buf, opInt32), t)
		}
	}
	if len(tokens) > 3 {
		h.buf = append(h.buf, opTuple, opMemoize)
		return
	}
	h.putTuple(len(tokens))
}

func (h *hasher) putString(s string) {
	if len(s) < 256 {
		h.buf = append(h.buf, opShortString, byte(len(s)))
	} else {
		h.buf = binary.LittleEndian.AppendUint32(append(h.buf, opString), uint32(len(s)))
	}
	h.buf = append(h.buf, s...)
	h.buf = append(h.buf, opMemoize)
}
