package kvevents

import (
	"errors"
	"fmt"

	"waypost/agent/blocktable"

	"github.com/zeebo/xxh3"
)

// The bounds of one event batch. Events with the tokens or hashes beyond them
// count as damaged.
const (
	MaxBatchBytes  = 64 << 20
	maxBatchEvents = 1_000_000
	maxBatchTokens = 10_000_000
	maxBatchHashes = 4_000_000

	// keepItems bounds what a decoder keeps of an unusually large batch.
	keepItems = 1 << 20
	maxInt    = 1 << 30

	// maxNames bounds the adapters and salts that a decoder keeps, maxNameBytes
	// each of them: salts are the callers' own texts. Blocks of a longer one are
	// known, but are nobody's.
	maxNames     = 4096
	maxNameBytes = 1024
)

// The reasons for refusing a whole batch.
var (
	ErrBatchTooLarge = errors.New("event batch too large")
	ErrNotBatch      = errors.New("not an event batch")
)

// Batch is a decoded event batch, valid until the decoder's next call.
type Batch struct {
	// PublishedUnixSeconds is the publisher's wall clock, 0 if not told.
	PublishedUnixSeconds float64
	// Rank is the data-parallel rank the publisher gives itself, -1 if not told.
	Rank int
	// Events are the events that could be read, in order.
	Events []blocktable.Event
	// Unknown counts events of a kind that is not known.
	Unknown int
	// Damaged counts events that could not be read and were skipped.
	Damaged int
	// Clears counts clears that were left out because another stood before them.
	Clears int
	// LostRemovals says that a damaged event was or may have been a removal
	// or a clear, so that a mirror may claim too much from here on.
	LostRemovals bool
}

// Decoder decodes event batches of every released layout by their shape:
// batches are arrays or maps, events are arrays whose fields have places or
// maps whose fields have names, hashes are integers or bytes. It reuses its
// memory and is not safe for concurrent use.
type Decoder struct {
	events []blocktable.Event
	hashes []uint64
	tokens []uint32
	marks  []uint64
	names  map[string]string

	// tellsMedium says that the engine names GPU memory wherever its events have
	// a field for it; else none named is GPU memory.
	tellsMedium bool

	sawStore, sawAdapters, sawSalts bool
}

// NewDecoder makes a decoder.
func NewDecoder() *Decoder {
	return &Decoder{names: make(map[string]string)}
}

// TellsMedium says that the engine names the memory of a block, the GPU's too,
// wherever its layout has a field for it: a block without is of an unknown tier.
// Without that, one that is not named is GPU memory, as it is in layouts that
// have no field.
func (d *Decoder) TellsMedium() { d.tellsMedium = true }

// Omits says whether the stores seen so far had no field for the adapter's
// name, or none for salts: prompts that use them cannot be told from others.
func (d *Decoder) Omits() (adapters, salts bool) {
	return d.sawStore && !d.sawAdapters, d.sawStore && !d.sawSalts
}

// Decode reads one batch. Damage is contained to its event; only a payload
// that is no batch at all is an error.
func (d *Decoder) Decode(payload []byte) (Batch, error) {
	if len(payload) > MaxBatchBytes {
		return Batch{}, fmt.Errorf("%w: %d bytes, at most %d", ErrBatchTooLarge, len(payload), MaxBatchBytes)
	}
	d.recycle()
	b := Batch{Rank: -1}
	c := cursor{b: payload}
	found, err := false, error(nil)
	if n, ok := c.dict(); ok {
		found, err = d.batchMap(&c, n, &b)
	} else {
		c.i = 0
		n, ok := c.array()
		if !ok || n < 2 {
			return Batch{}, fmt.Errorf("%w: no array of at least two", ErrNotBatch)
		}
		found, err = d.batchArray(&c, n, &b)
	}
	if err == nil && !found {
		err = fmt.Errorf("%w: no list of events", ErrNotBatch)
	}
	if err != nil {
		return Batch{}, err
	}
	b.Events = d.events
	return b, nil
}

func (d *Decoder) recycle() {
	if cap(d.events) > keepItems/16 {
		d.events = nil
	}
	if cap(d.tokens) > 4*keepItems {
		d.tokens = nil
	}
	if cap(d.hashes) > keepItems {
		d.hashes, d.marks = nil, nil
	}
	d.events, d.hashes, d.tokens, d.marks = d.events[:0], d.hashes[:0], d.tokens[:0], d.marks[:0]
}

// batchArray reads [seconds, events, rank...].
func (d *Decoder) batchArray(c *cursor, n int, b *Batch) (found bool, err error) {
	if !d.batchTime(c, b) {
		return false, nil
	}
	if found, err = d.batchEvents(c, b); !found || err != nil || n < 3 {
		return found, err
	}
	d.batchRank(c, b)
	return true, nil
}

func (d *Decoder) batchMap(c *cursor, n int, b *Batch) (found bool, err error) {
	for range n {
		key, ok := c.text()
		if !ok {
			return found, nil
		}
		switch string(key) {
		case "ts":
			ok = d.batchTime(c, b)
		case "events":
			if found {
				return false, fmt.Errorf("%w: two lists of events", ErrNotBatch)
			}
			if found, err = d.batchEvents(c, b); !found || err != nil {
				return found, err
			}
		case "data_parallel_rank":
			ok = d.batchRank(c, b)
		default:
			ok = c.skip()
		}
		if !ok {
			return found, nil
		}
	}
	return found, nil
}

func (d *Decoder) batchTime(c *cursor, b *Batch) bool {
	start := c.i
	if v, ok := c.number(); ok {
		b.PublishedUnixSeconds = v
		return true
	}
	c.i = start
	return c.skip()
}

func (d *Decoder) batchRank(c *cursor, b *Batch) bool {
	start := c.i
	if v, negative, ok := c.integer(); ok && !negative && v < maxInt {
		b.Rank = int(v)
		return true
	}
	c.i = start
	return c.skip()
}

// batchEvents reads the list of events. A break in the msgpack itself ends it:
// what follows cannot be found any more.
func (d *Decoder) batchEvents(c *cursor, b *Batch) (found bool, err error) {
	n, ok := c.array()
	if !ok {
		return false, nil
	}
	if n > maxBatchEvents {
		return true, fmt.Errorf("%w: %d events, at most %d", ErrBatchTooLarge, n, maxBatchEvents)
	}
	for k := range n {
		start, hashes, tokens, marks := c.i, len(d.hashes), len(d.tokens), len(d.marks)
		got := d.event(c)
		if got == eventRead {
			if repeatedClear(d.events) {
				d.events = d.events[:len(d.events)-1]
				b.Clears++
			}
			continue
		}
		d.hashes, d.tokens, d.marks = d.hashes[:hashes], d.tokens[:tokens], d.marks[:marks]
		if got == eventUnknown {
			b.Unknown++
			continue
		}
		c.i = start
		tag := c.tag()
		c.i = start
		if !c.skip() {
			b.Damaged += n - k
			b.LostRemovals = true
			return true, nil
		}
		if op, known := opOf(tag); tag != nil && !known {
			b.Unknown++
		} else {
			b.Damaged++
			b.LostRemovals = b.LostRemovals || op != blocktable.OpStore
		}
	}
	return true, nil
}

// repeatedClear says that the last two events clear the same memory: the second
// changes nothing, and an engine may send a million of them.
func repeatedClear(events []blocktable.Event) bool {
	n := len(events)
	return n > 1 && events[n-1].Op == blocktable.OpClear && events[n-2].Op == blocktable.OpClear && events[n-1].Medium == events[n-2].Medium
}

// outcome is what became of one event.
type outcome uint8

const (
	eventRead outcome = iota
	eventUnknown
	eventDamaged
)

func opOf(tag []byte) (blocktable.Op, bool) {
	switch string(tag) {
	case "BlockStored":
		return blocktable.OpStore, true
	case "BlockRemoved":
		return blocktable.OpRemove, true
	case "AllBlocksCleared":
		return blocktable.OpClear, true
	}
	return blocktable.OpNone, false
}

// tag looks for the kind of the event at the cursor, nil if it has none.
func (c *cursor) tag() []byte {
	if n, ok := c.array(); ok && n > 0 {
		tag, _ := c.text()
		return tag
	}
	n, ok := c.dict()
	for range n {
		if !ok {
			return nil
		}
		var key []byte
		if key, ok = c.text(); ok && string(key) == "type" {
			tag, _ := c.text()
			return tag
		}
		ok = ok && c.skip()
	}
	return nil
}

// fields is one event while it is read.
type fields struct {
	e          blocktable.Event
	op         blocktable.Op
	unknown    bool // the tag is none of ours
	named      bool // a map: its fields have names
	hashes     bool // a list of hashes was there
	remote     bool
	strings    bool   // some tokens are texts
	nameless   uint64 // digest of names that are too long to keep; 0: none
	adapterID  []byte // raw lora_id if not null
	extra      []byte // raw extra_keys if not null
	items      []byte // raw mm_keys if not null
	hasMedium  bool   // there is a field for the memory
	toldMedium bool   // and it is not null
	hasAdapter bool   // there is a field for the adapter's name
	hasSalts   bool   // there is a field where a salt would be
}

func (d *Decoder) event(c *cursor) outcome {
	f := fields{}
	if n, ok := c.dict(); ok {
		f.named = true
		if !d.eventMap(c, n, &f) {
			return eventDamaged
		}
	} else if n, ok := c.array(); !ok || n == 0 || !d.eventArray(c, n, &f) {
		return eventDamaged
	}
	if f.unknown {
		return eventUnknown
	}
	if !d.finish(&f) {
		return eventDamaged
	}
	d.events = append(d.events, f.e)
	return eventRead
}

// The names of the fields of a stored event in the order of the array layout,
// after the tag; a removed event has the hashes, the medium and the group.
const (
	fieldNone = iota
	fieldType
	fieldHashes
	fieldParent
	fieldTokens
	fieldBlockTokens
	fieldAdapterID
	fieldMedium
	fieldAdapter
	fieldExtra
	fieldGroup
	fieldSpec
	fieldWindow
	fieldLocality
	fieldSalt
	fieldItems
	fieldSession
)

var (
	storedPlaces = [...]uint8{
		fieldHashes, fieldParent, fieldTokens, fieldBlockTokens, fieldAdapterID, fieldMedium,
		fieldAdapter, fieldExtra, fieldGroup, fieldSpec, fieldWindow,
	}
	removedPlaces = [...]uint8{fieldHashes, fieldMedium, fieldGroup}
	clearedPlaces = [...]uint8{fieldMedium}
)

func (d *Decoder) eventArray(c *cursor, n int, f *fields) bool {
	if !d.field(c, fieldType, f) {
		return false
	}
	var places []uint8
	switch f.op {
	case blocktable.OpStore:
		places = storedPlaces[:]
	case blocktable.OpRemove:
		places = removedPlaces[:]
	case blocktable.OpClear:
		places = clearedPlaces[:]
	}
	for k := range n - 1 {
		place := uint8(fieldNone)
		if k < len(places) {
			place = places[k]
		}
		if !d.field(c, place, f) {
			return false
		}
	}
	return true
}

func (d *Decoder) eventMap(c *cursor, n int, f *fields) bool {
	f.op = blocktable.OpNone
	for range n {
		key, ok := c.text()
		if !ok || !d.field(c, fieldOf(key), f) {
			return false
		}
	}
	return f.op != blocktable.OpNone || f.unknown
}

func fieldOf(key []byte) uint8 {
	switch string(key) {
	case "type":
		return fieldType
	case "block_hashes":
		return fieldHashes
	case "parent_block_hash":
		return fieldParent
	case "token_ids":
		return fieldTokens
	case "block_size":
		return fieldBlockTokens
	case "lora_id":
		return fieldAdapterID
	case "medium":
		return fieldMedium
	case "lora_name":
		return fieldAdapter
	case "extra_keys":
		return fieldExtra
	case "group_idx":
		return fieldGroup
	case "kv_cache_spec_kind":
		return fieldSpec
	case "kv_cache_spec_sliding_window":
		return fieldWindow
	case "locality":
		return fieldLocality
	case "cache_salt":
		return fieldSalt
	case "mm_keys":
		return fieldItems
	case "session_id":
		return fieldSession
	}
	return fieldNone
}

// field reads one field's value into f.
func (d *Decoder) field(c *cursor, field uint8, f *fields) (ok bool) {
	e := &f.e
	switch field {
	case fieldType:
		var tag []byte
		if tag, ok = c.text(); ok {
			f.op, ok = opOf(tag)
			f.unknown, ok = !ok, true
		}
	case fieldHashes:
		if c.null() {
			return true
		}
		e.Hashes, ok = d.readHashes(c)
		f.hashes = true
	case fieldParent:
		if c.null() {
			return true
		}
		e.Parent, ok = readHash(c)
		e.HasParent = true
	case fieldTokens:
		if c.null() {
			return true
		}
		e.Tokens, f.strings, ok = d.readTokens(c)
	case fieldBlockTokens:
		e.BlockTokens, ok = c.small(maxInt)
	case fieldGroup:
		e.Group, ok = c.small(maxInt)
	case fieldWindow:
		e.WindowTokens, ok = c.small(maxInt)
	case fieldAdapter:
		// SGLang has a map with the salt at this place of the array, and no
		// adapters.
		if n, isMap := c.dict(); isMap {
			return d.saltMap(c, n, f)
		}
		f.hasAdapter = true
		e.Adapter, ok = d.name(c, f)
	case fieldMedium:
		f.hasMedium = true
		if c.null() {
			return true
		}
		f.toldMedium = true
		e.Medium, ok = readMedium(c)
	case fieldSpec:
		e.Spec, ok = readSpec(c)
	case fieldLocality:
		var v string
		v, ok = d.name(c, f)
		f.remote = v == "REMOTE"
	case fieldAdapterID:
		f.adapterID, ok = c.raw()
	case fieldExtra:
		f.hasSalts = true
		f.extra, ok = c.raw()
	case fieldSalt:
		f.hasSalts = true
		e.Salt, ok = d.name(c, f)
	case fieldItems:
		f.items, ok = c.raw()
	case fieldSession:
		e.Session, ok = readSession(c)
	default:
		ok = c.skip()
	}
	return ok
}

// saltMap reads the n pairs of a map of what else belongs to a prompt.
func (d *Decoder) saltMap(c *cursor, n int, f *fields) bool {
	for range n {
		key, ok := c.text()
		if ok && string(key) == "cache_salt" {
			ok = d.field(c, fieldSalt, f)
		} else {
			ok = ok && c.skip()
		}
		if !ok {
			return false
		}
	}
	return true
}

// finish checks a known event and works out what depends on several fields.
func (d *Decoder) finish(f *fields) bool {
	e := &f.e
	e.Op = f.op
	if e.Op == blocktable.OpClear {
		*e = blocktable.Event{Op: e.Op, Medium: e.Medium}
		return true
	}
	if !f.hashes {
		return false
	}
	// Layouts with places got one for the memory later; those with names have one.
	if d.tellsMedium && !f.toldMedium && (f.hasMedium || f.named) {
		e.Medium = blocktable.MediumUnknown
	}
	if f.remote && e.Medium == blocktable.MediumGPU {
		e.Medium = blocktable.MediumExternal // another worker's memory
	}
	if e.Op == blocktable.OpRemove {
		return true
	}
	if len(e.Tokens) > 0 && len(e.Hashes) > 0 {
		d.sawStore = true
		d.sawAdapters = d.sawAdapters || f.hasAdapter
		// Events whose fields have names, and none for an adapter, are of a
		// layout that has the salt where there is one.
		d.sawSalts = d.sawSalts || f.hasSalts || f.named && !f.hasAdapter
	}
	if f.extra != nil && !d.readExtra(f.extra, e) {
		return false
	}
	switch {
	case f.items != nil:
		if !d.readItems(f.items, e) {
			return false
		}
	case f.strings:
		// Which blocks the texts belong to is not told.
		var mark uint64
		for _, t := range e.Tokens {
			mark = (mark ^ uint64(t)) * 1099511628211
		}
		d.markAll(e, mark)
	}
	if f.adapterID != nil && e.Adapter == "" {
		// The prompt uses an adapter that is not named.
		d.markAll(e, xxh3.Hash(f.adapterID))
	}
	if f.nameless != 0 {
		d.markAll(e, f.nameless)
	}
	return true
}
