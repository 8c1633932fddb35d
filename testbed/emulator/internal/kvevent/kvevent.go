// Package kvevent encodes cache events as vLLM publishes them: a MessagePack
// array of time, events and rank, with each event a map (since 0.24) or a
// positional array (before).
package kvevent

import (
	"github.com/tinylib/msgp/msgp"

	"waypost/testbed/emulator/core"
)

// Form is the layout of an event.
type Form uint8

// The layouts.
const (
	// FormMap is the newest: maps with the key "type", absent optional fields.
	FormMap Form = iota
	// FormArray is the last positional layout, of 0.20 to 0.23: every field is
	// written, null included.
	FormArray
	// FormArray10 to FormArray6 are older positional layouts: of so many fields
	// of a store, FormUnranked that of the first release, whose batches have no
	// rank.
	FormArray10
	FormArray9
	FormArray8
	FormArray7
	FormArray6
	FormUnranked
)

// storedFields and removedFields are the numbers of fields by layout.
var (
	storedFields  = map[Form]uint32{FormArray: 12, FormArray10: 10, FormArray9: 9, FormArray8: 8, FormArray7: 7, FormArray6: 6, FormUnranked: 6}
	removedFields = map[Form]uint32{FormArray: 4, FormArray10: 4, FormArray9: 3, FormArray8: 3, FormArray7: 3, FormArray6: 2, FormUnranked: 2}
)

// Encoder says how events are written.
type Encoder struct {
	Form Form
	// Bytes sends 32-byte hashes instead of their low 64 bits.
	Bytes bool
	// BlockTokens is the block size the events claim.
	BlockTokens int
	// HideSalts leaves the salts of requests out.
	HideSalts bool
}

const (
	medium   = "GPU"
	specKind = "full_attention"
)

// Append appends one batch to dst. seconds is the publisher's wall clock.
func (e Encoder) Append(dst []byte, events []core.Event, seconds float64, rank int) []byte {
	elements := uint32(3)
	if e.Form == FormUnranked {
		elements = 2
	}
	dst = msgp.AppendArrayHeader(dst, elements)
	dst = msgp.AppendFloat64(dst, seconds)
	dst = msgp.AppendArrayHeader(dst, uint32(len(events)))
	for i := range events {
		if e.Form == FormMap {
			dst = e.appendMap(dst, &events[i])
		} else {
			dst = e.appendArray(dst, &events[i])
		}
	}
	if elements == 2 {
		return dst
	}
	return msgp.AppendUint64(dst, uint64(rank))
}

func (e Encoder) appendMap(dst []byte, v *core.Event) []byte {
	switch v.Op {
	case core.OpStored:
		fields := uint32(11)
		if v.SessionID != "" {
			fields++
		}
		dst = msgp.AppendMapHeader(dst, fields)
	case core.OpRemoved:
		dst = msgp.AppendMapHeader(dst, 4)
	default:
		dst = msgp.AppendMapHeader(dst, 1)
	}
	key := func(name string) { dst = msgp.AppendString(dst, name) }
	key("type")
	dst = msgp.AppendString(dst, v.Op.String())
	if v.Op == core.OpCleared {
		return dst
	}
	key("block_hashes")
	dst = e.appendHashes(dst, v.Hashes)
	if v.Op == core.OpStored {
		key("parent_block_hash")
		dst = e.appendParent(dst, v)
		key("token_ids")
		dst = appendTokens(dst, v.Tokens)
		key("block_size")
		dst = msgp.AppendUint64(dst, uint64(e.BlockTokens))
		key("lora_id")
		dst = appendAdapterID(dst, v.Adapter)
	}
	key("medium")
	dst = msgp.AppendString(dst, medium)
	if v.Op == core.OpStored {
		key("lora_name")
		dst = appendAdapterName(dst, v.Adapter)
		key("extra_keys")
		dst = e.appendExtraKeys(dst, v)
	}
	key("group_idx")
	dst = msgp.AppendUint64(dst, 0)
	if v.Op == core.OpStored {
		key("kv_cache_spec_kind")
		dst = msgp.AppendString(dst, specKind)
		if v.SessionID != "" {
			key("session_id")
			dst = msgp.AppendString(dst, v.SessionID)
		}
	}
	return dst
}

func (e Encoder) appendArray(dst []byte, v *core.Event) []byte {
	fields := uint32(1)
	switch v.Op {
	case core.OpStored:
		fields = storedFields[e.Form]
	case core.OpRemoved:
		fields = removedFields[e.Form]
	}
	dst = msgp.AppendArrayHeader(dst, fields)
	dst = msgp.AppendString(dst, v.Op.String())
	if v.Op == core.OpCleared {
		return dst
	}
	dst = e.appendHashes(dst, v.Hashes)
	if v.Op == core.OpRemoved {
		if fields > 2 {
			dst = msgp.AppendString(dst, medium)
		}
		if fields > 3 {
			dst = msgp.AppendUint64(dst, 0)
		}
		return dst
	}
	dst = e.appendParent(dst, v)
	dst = appendTokens(dst, v.Tokens)
	dst = msgp.AppendUint64(dst, uint64(e.BlockTokens))
	dst = appendAdapterID(dst, v.Adapter)
	for field := uint32(7); field <= fields; field++ {
		switch field {
		case 7:
			dst = msgp.AppendString(dst, medium)
		case 8:
			dst = appendAdapterName(dst, v.Adapter)
		case 9:
			dst = e.appendExtraKeys(dst, v)
		case 10:
			dst = msgp.AppendUint64(dst, 0)
		case 11:
			dst = msgp.AppendString(dst, specKind)
		default:
			dst = msgp.AppendNil(dst) // no window
		}
	}
	return dst
}

func (e Encoder) appendHashes(dst []byte, hashes []core.Hash) []byte {
	dst = msgp.AppendArrayHeader(dst, uint32(len(hashes)))
	for i := range hashes {
		dst = e.appendHash(dst, &hashes[i])
	}
	return dst
}

func (e Encoder) appendHash(dst []byte, h *core.Hash) []byte {
	if e.Bytes {
		return msgp.AppendBytes(dst, h[:])
	}
	return msgp.AppendUint64(dst, h.Low64())
}

func (e Encoder) appendParent(dst []byte, v *core.Event) []byte {
	if !v.HasParent {
		return msgp.AppendNil(dst)
	}
	return e.appendHash(dst, &v.Parent)
}

func appendTokens(dst []byte, tokens []uint32) []byte {
	dst = msgp.AppendArrayHeader(dst, uint32(len(tokens)))
	for _, t := range tokens {
		dst = msgp.AppendUint32(dst, t)
	}
	return dst
}

func appendAdapterID(dst []byte, a *core.Adapter) []byte {
	if a == nil {
		return msgp.AppendNil(dst)
	}
	return msgp.AppendUint64(dst, uint64(a.ID))
}

func appendAdapterName(dst []byte, a *core.Adapter) []byte {
	if a == nil {
		return msgp.AppendNil(dst)
	}
	return msgp.AppendString(dst, a.Name)
}

// appendExtraKeys writes one entry per block: null, or the adapter's name and,
// on the first block of the prompt, the salt.
func (e Encoder) appendExtraKeys(dst []byte, v *core.Event) []byte {
	dst = msgp.AppendArrayHeader(dst, uint32(len(v.Hashes)))
	for i := range v.Hashes {
		salted := v.Salt != "" && v.FirstBlock+i == 0 && !e.HideSalts
		n := uint32(0)
		if v.Adapter != nil {
			n++
		}
		if salted {
			n++
		}
		if n == 0 {
			dst = msgp.AppendNil(dst)
			continue
		}
		dst = msgp.AppendArrayHeader(dst, n)
		if v.Adapter != nil {
			dst = msgp.AppendString(dst, v.Adapter.Name)
		}
		if salted {
			dst = msgp.AppendString(dst, v.Salt)
		}
	}
	return dst
}
