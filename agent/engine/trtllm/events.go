package trtllm

import (
	"bytes"
	"encoding/json"
	"errors"
	"slices"
	"strconv"

	"waypost/agent/blocktable"
	"waypost/agent/engine"
	"waypost/agent/engine/enginehttp"
	"waypost/agent/engine/kvevents"

	"github.com/zeebo/xxh3"
)

// handed is one event as the server hands it out.
type handed struct {
	ID     *uint64         `json:"event_id"`
	Data   json.RawMessage `json:"data"`
	Window *int64          `json:"window_size"`
	Rank   *int            `json:"attention_dp_rank"`
}

// errEvent means that an answer holds something that is no event.
var errEvent = errors.New("event without a number")

// head reads the number and the rank of an event.
func head(raw json.RawMessage) (seq uint64, rank int, err error) {
	var e handed
	if err := json.Unmarshal(raw, &e); err != nil || e.ID == nil {
		return 0, 0, errEvent
	}
	if e.Rank != nil {
		rank = *e.Rank
	}
	if rank < 0 || rank >= engine.MaxRanks {
		return 0, 0, errEvent
	}
	return *e.ID, rank, nil
}

// number is a hash: an integer of 64 bits, signed or not, or hexadecimal text.
type number uint64

// UnmarshalJSON reads either form without going through a float.
func (n *number) UnmarshalJSON(b []byte) error {
	if len(b) > 0 && b[0] == '"' {
		var text string
		if err := json.Unmarshal(b, &text); err != nil {
			return err
		}
		if len(text) < 8 {
			return strconv.ErrSyntax
		}
		*n = number(kvevents.TextHash([]byte(text)))
		return nil
	}
	if len(b) > 0 && b[0] == '-' {
		v, err := strconv.ParseInt(string(b), 10, 64)
		*n = number(v)
		return err
	}
	v, err := strconv.ParseUint(string(b), 10, 64)
	*n = number(v)
	return err
}

// block is one block of a stored event.
type block struct {
	Hash   number `json:"block_hash"`
	Tokens []struct {
		ID    int64 `json:"token_id"`
		Extra int64 `json:"token_extra_id"`
	} `json:"tokens"`
	Level int             `json:"cache_level"`
	Items json.RawMessage `json:"mm_keys"`
}

// change is the data of an event of any kind.
type change struct {
	Type   string            `json:"type"`
	Parent *number           `json:"parent_hash"`
	Blocks []json.RawMessage `json:"blocks"`
	Hash   *number           `json:"block_hash"`
	Hashes []number          `json:"block_hashes"`
	Level  *struct {
		Old int `json:"old_value"`
		New int `json:"new_value"`
	} `json:"cache_level"`
	Pools []int `json:"num_blocks_per_cache_level"`
}

// decoder decodes one event a batch, as the server hands them out. It is not
// safe for concurrent use.
type decoder struct {
	events []blocktable.Event
	hashes []uint64
	tokens []uint32
	marks  []uint64

	// window is the largest attention window of this life of the engine: only its
	// blocks make whole prefixes.
	window int64
	// blockTokens is the length of a block as it was told, longest that of the
	// longest seen in this life.
	blockTokens, longest int
}

func newDecoder() *decoder { return &decoder{} }

// SetBlockTokens implements kvevents.Sized.
func (d *decoder) SetBlockTokens(n int) { d.blockTokens = n }

// Omits implements kvevents.BatchDecoder: the events name neither.
func (d *decoder) Omits() (adapters, salts bool) { return true, true }

// Decode implements kvevents.BatchDecoder.
func (d *decoder) Decode(payload []byte) (kvevents.Batch, error) {
	d.events, d.hashes, d.tokens, d.marks = d.events[:0], d.hashes[:0], d.tokens[:0], d.marks[:0]
	b := kvevents.Batch{Rank: -1}
	if enginehttp.Widest(payload, maxMembers) != nil {
		b.Damaged, b.LostRemovals = 1, true
		return b, nil
	}
	var e handed
	if err := json.Unmarshal(payload, &e); err != nil {
		return b, kvevents.ErrNotBatch
	}
	var kind struct {
		Type string `json:"type"`
	}
	var c change
	if json.Unmarshal(e.Data, &kind) != nil || json.Unmarshal(e.Data, &c) != nil {
		b.Damaged, b.LostRemovals = 1, kind.Type != "stored" && kind.Type != "created"
		return b, nil
	}
	if e.ID != nil && *e.ID == 0 {
		d.window, d.longest = 0, 0 // the first event of a life
	}
	if e.Window != nil {
		if *e.Window < d.window {
			return b, nil
		}
		d.widen(*e.Window, c.Type == "created")
	}
	switch c.Type {
	case "created":
	case "stored":
		b.Damaged = d.stored(&c)
	case "removed":
		for _, h := range c.Hashes {
			d.hashes = append(d.hashes, uint64(h))
		}
		// The level is not told; a block is on one of them.
		for _, medium := range []blocktable.Medium{blocktable.MediumGPU, blocktable.MediumCPU} {
			d.events = append(d.events, blocktable.Event{Op: blocktable.OpRemove, Medium: medium, Hashes: d.hashes})
		}
	case "updated":
		if c.Hash == nil {
			b.Damaged, b.LostRemovals = 1, true
			break
		}
		d.moved(&c)
	default:
		b.Unknown = 1
	}
	b.Events = d.events
	return b, nil
}

// widen takes the window of an event. The events of its pools tell all windows at
// first; who missed them took what came of a smaller one for whole prefixes.
func (d *decoder) widen(window int64, created bool) {
	if d.window > 0 && window > d.window && !created {
		for _, medium := range []blocktable.Medium{blocktable.MediumGPU, blocktable.MediumCPU} {
			d.events = append(d.events, blocktable.Event{Op: blocktable.OpClear, Medium: medium})
		}
	}
	d.window = window
}

// moved tells of a block that went from one level to another. It is stored there
// before it is removed here, so that what is known of it stays.
func (d *decoder) moved(c *change) {
	if c.Level == nil || c.Level.Old == c.Level.New {
		return
	}
	d.hashes = append(d.hashes, uint64(*c.Hash))
	d.events = append(
		d.events,
		blocktable.Event{Op: blocktable.OpStore, Medium: mediumOf(c.Level.New), Hashes: d.hashes},
		blocktable.Event{Op: blocktable.OpRemove, Medium: mediumOf(c.Level.Old), Hashes: d.hashes},
	)
}

func mediumOf(level int) blocktable.Medium {
	switch level {
	case 0:
		return blocktable.MediumGPU
	case 1:
		return blocktable.MediumCPU
	}
	return blocktable.MediumExternal
}

// stored reads the blocks of a store, a chain, up to the first that is not
// whole or cannot be read: nothing behind it has a parent. It gives the number
// of those that cannot be read.
func (d *decoder) stored(c *change) (damaged int) {
	parent, has := uint64(0), c.Parent != nil
	if has {
		parent = uint64(*c.Parent)
	}
	for i, raw := range c.Blocks {
		var b block
		if json.Unmarshal(raw, &b) != nil || !d.take(&b) {
			return len(c.Blocks) - i
		}
		n := len(b.Tokens)
		d.longest = max(d.longest, n)
		if n < max(d.blockTokens, d.longest) {
			d.hashes, d.marks = d.hashes[:len(d.hashes)-1], d.marks[:len(d.marks)-1]
			return 0
		}
		at := len(d.hashes) - 1
		d.events = append(d.events, blocktable.Event{
			Op: blocktable.OpStore, Medium: mediumOf(b.Level), HasParent: has, Parent: parent, BlockTokens: int32(n),
			Hashes: d.hashes[at : at+1], Tokens: d.tokens[len(d.tokens)-n:], Marks: d.marks[at : at+1],
		})
		parent, has = uint64(b.Hash), true
	}
	return 0
}

// take adds a block's hash, tokens and mark.
func (d *decoder) take(b *block) bool {
	if len(b.Tokens) > engine.MaxBlockTokens {
		return false
	}
	start := len(d.tokens)
	d.tokens = slices.Grow(d.tokens, len(b.Tokens))
	var mark uint64
	for _, t := range b.Tokens {
		if t.ID < 0 || t.ID > 1<<32-1 {
			d.tokens = d.tokens[:start]
			return false
		}
		if t.Extra != 0 {
			mark = xxh3.HashSeed(strconv.AppendInt(nil, t.Extra, 10), mark) | 1
		}
		d.tokens = append(d.tokens, uint32(t.ID))
	}
	if items := bytes.TrimSpace(b.Items); len(items) > 0 && string(items) != "null" && string(items) != "[]" {
		mark = xxh3.HashSeed(items, mark) | 1
	}
	d.hashes, d.marks = append(d.hashes, uint64(b.Hash)), append(d.marks, mark)
	return true
}
