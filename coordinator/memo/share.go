package memo

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/dchest/siphash"

	"waypost/gossip/prefix"
)

// Bounds of what coordinators tell each other.
const (
	// maxShares bounds the entries that wait, by rank; older ones are dropped.
	maxShares = 4096
	// maxEntryTokens bounds a prompt that is told.
	maxEntryTokens = 1 << 20
)

// Entry is a node as another coordinator may take it over. Chain values are
// masked under the memo's key, so that they do not leave the process in clear.
type Entry struct {
	Key    uint64
	Tokens uint32
	// Answer says what kind of answer ends it: 0 none, 1 as it was given, 2 without
	// its reasoning.
	Answer uint8
	// Values are the masked chain values at the checkpoints, then those at the
	// points behind the last one.
	Values []uint64
}

// shares are the keys of the nodes that wait to be told: those behind which
// paths part, and the ends of prompts.
type shares struct{ branched, ends []uint64 }

func (s *shares) clear() { s.branched, s.ends = nil, nil }

// queue has a node told.
func (m *Memo) queue(id int32) {
	n := &m.nodes[id]
	if n.queued || n.tokens == 0 {
		return
	}
	n.queued = true
	q := &m.shares.ends
	if n.branched {
		q = &m.shares.branched
	}
	*q = append(*q, n.key)
	if len(*q) > maxShares {
		m.unqueue((*q)[0])
		*q = (*q)[1:]
	}
}

// unqueue lets a node be queued again, if it is there still.
func (m *Memo) unqueue(key uint64) {
	if id := m.byKey[key]; id != 0 {
		m.nodes[id].queued = false
	}
}

// queueEnds has the ends of the prompt just learnt told: the deepest node, and
// the deepest one that a user message follows.
func (m *Memo) queueEnds(r *Request) {
	last := false
	for j := len(r.units) - 1; j >= 0; j-- {
		u := &r.units[j]
		id := m.byKey[keyOf(u, u.closed)]
		if u.nowhere || u.opaque || id == 0 || m.nodes[id].tokens == 0 || last && !u.closed {
			continue
		}
		m.queue(id)
		if last = true; u.closed {
			return
		}
	}
}

// Share takes what is to be told to other coordinators, up to a size: what has
// branches first; ends says whether the ends of prompts are told as well.
func (m *Memo) Share(key Key, maxBytes int, ends bool) (out []Entry) {
	for _, q := range []*[]uint64{&m.shares.branched, &m.shares.ends} {
		if q == &m.shares.ends && !ends {
			for _, k := range *q {
				m.unqueue(k)
			}
			*q = nil
			continue
		}
		n := 0
		for ; n < len(*q) && maxBytes > 0; n++ {
			id := m.byKey[(*q)[n]]
			if id == 0 {
				continue
			}
			m.nodes[id].queued = false
			e := m.entry(key, id)
			out = append(out, e)
			maxBytes -= 16 + 8*len(e.Values)
		}
		*q = (*q)[n:]
	}
	return out
}

// Snapshot is what a coordinator that joins is told: the nodes with branches,
// the latest used first, up to a size.
func (m *Memo) Snapshot(key Key, maxBytes int) (out []Entry) {
	for rec := m.records.newest; rec != 0 && maxBytes > 0; rec = m.records.all[rec].older {
		for id := m.records.all[rec].nodes; id != 0 && maxBytes > 0; id = m.nodes[id].succ {
			if n := &m.nodes[id]; n.branched && n.tokens > 0 {
				e := m.entry(key, id)
				out = append(out, e)
				maxBytes -= 16 + 8*len(e.Values)
			}
		}
	}
	return out
}

func (m *Memo) entry(key Key, id int32) Entry {
	n := &m.nodes[id]
	var p Prediction
	m.records.tell(n.record, int(n.tokens), &p)
	e := Entry{Key: n.key, Tokens: uint32(p.Tokens), Answer: answerWord(n.answer), Values: make([]uint64, 0, len(p.Chains)+chunkPoints)}
	whole := p.Tokens / prefix.ChunkTokens
	for _, c := range p.Chains[:whole] {
		e.Values = append(e.Values, key.mask(n.key, len(e.Values), uint64(c)))
	}
	if o := p.Tokens % prefix.ChunkTokens / pointTokens; o > 0 {
		for _, c := range p.pointsOf(whole)[:o] {
			e.Values = append(e.Values, key.mask(n.key, len(e.Values), uint64(c)))
		}
	}
	return e
}

func answerWord(k kind) uint8 {
	if k < generated {
		return 0
	}
	return uint8(k - generated + 1)
}

// mask hides a value, or shows it again.
func (k Key) mask(node uint64, i int, v uint64) uint64 {
	var b [13]byte
	b[0] = 'x'
	binary.LittleEndian.PutUint64(b[1:], node)
	binary.LittleEndian.PutUint32(b[9:], uint32(i))
	return v ^ siphash.Hash(k.k0, k.k1, b[:])
}

// ErrEntry reports an entry that cannot be taken over.
var ErrEntry = errors.New("memo entry")

// Take takes over an entry of another coordinator, of whose memo epoch it is
// told. A later epoch is begun here too; an entry of an earlier one is dropped.
// What is known here already stays.
func (m *Memo) Take(key Key, epoch uint32, e Entry) error {
	tokens := int(e.Tokens)
	whole, o := tokens/prefix.ChunkTokens, tokens%prefix.ChunkTokens/pointTokens
	if tokens == 0 || tokens > maxEntryTokens || tokens%pointTokens != 0 || len(e.Values) != whole+o || e.Answer > answerWord(trimmed) {
		return fmt.Errorf("%w: %d tokens with %d values, answer %d", ErrEntry, e.Tokens, len(e.Values), e.Answer)
	}
	if epoch > m.epoch {
		m.newEpoch(epoch)
	}
	if epoch < m.epoch || m.byKey[e.Key] != 0 {
		return nil
	}
	values := make([]prefix.Chain, len(e.Values))
	for i, v := range e.Values {
		values[i] = prefix.Chain(key.mask(e.Key, i, v))
	}
	rec := m.records.addValues(values[:whole], values[whole:])
	n := node{key: e.Key, record: rec, tokens: int32(tokens), branched: e.Answer == 0}
	if e.Answer > 0 {
		n.answer = generated + kind(e.Answer-1)
	}
	m.newNode(n)
	m.stats.Imported++
	m.makeRoom()
	return nil
}

// addValues keeps a prompt of which the chain values are known.
func (s *records) addValues(chains, tail []prefix.Chain) int32 {
	at := int32(0)
	for i, c := range chains {
		if known, ok := s.byValue[c]; ok && int(s.chunks[known].depth) == i+1 && s.chunks[known].parent == at {
			at = known
			continue
		}
		at = s.newChunk(c, at, int32(i+1))
	}
	if at != 0 {
		s.chunks[at].refs++
	}
	r := record{tokens: int32(len(chains)*prefix.ChunkTokens + len(tail)*pointTokens), tip: at}
	if len(tail) > 0 {
		r.tail = append(make([]prefix.Chain, 0, len(tail)), tail...)
	}
	return s.keep(r)
}
