package prefix

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/dchest/siphash"
)

// Key is the keyed name of a prefix: the only name of cached content that
// leaves the process that saw the tokens. It is never 0, so that 0 can mark an
// absent key: a hash that happens to be 0 becomes 1. A collision can cause a
// wrong prediction of reuse, never a wrong answer.
type Key uint64

// ClusterKey is the secret that keys prefix names. All agents and coordinators
// of a cluster share it. It never prints: formatting shows its [ClusterKey.ID].
type ClusterKey [16]byte

// ErrClusterKey reports text that is not a cluster key.
var ErrClusterKey = errors.New("prefix key must be 32 hex digits")

// ParseClusterKey reads a key written as 32 hex digits, with or without white
// space around it. The error wraps [ErrClusterKey] and never quotes the input.
func ParseClusterKey(b []byte) (ClusterKey, error) {
	b = bytes.TrimSpace(b)
	var k ClusterKey
	if len(b) != hex.EncodedLen(len(k)) {
		return ClusterKey{}, fmt.Errorf("%w: got %d characters", ErrClusterKey, len(b))
	}
	if _, err := hex.Decode(k[:], b); err != nil {
		return ClusterKey{}, fmt.Errorf("%w: got another character", ErrClusterKey)
	}
	return k, nil
}

// ParseClusterKeys reads the keys of a key file: one, or during a rotation two,
// each on a line of its own, the primary first. Empty lines do not count. The
// error wraps [ErrClusterKey] and never quotes the input.
func ParseClusterKeys(b []byte) ([]ClusterKey, error) {
	var keys []ClusterKey
	for i, line := range bytes.Split(b, []byte("\n")) {
		if len(bytes.TrimSpace(line)) == 0 {
			continue
		}
		k, err := ParseClusterKey(line)
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", i+1, err)
		}
		if slices.Contains(keys, k) {
			return nil, fmt.Errorf("line %d: %w: the same key twice", i+1, ErrClusterKey)
		}
		keys = append(keys, k)
	}
	if len(keys) == 0 || len(keys) > 2 {
		return nil, fmt.Errorf("%w: the file holds %d keys, want one, or two during a rotation", ErrClusterKey, len(keys))
	}
	return keys, nil
}

// ID names the key without disclosing it: the first 4 bytes of the SHA-256 of
// its 16 bytes, as 8 hex digits.
func (k ClusterKey) ID() string {
	id := k.idBytes()
	return hex.EncodeToString(id[:])
}

// IDUint32 is the ID as it stands in frames: its 4 bytes read little-endian.
func (k ClusterKey) IDUint32() uint32 {
	id := k.idBytes()
	return binary.LittleEndian.Uint32(id[:])
}

func (k ClusterKey) idBytes() [4]byte {
	sum := sha256.Sum256(k[:])
	return [4]byte(sum[:4])
}

// String shows the ID, so that a logged key discloses nothing.
func (k ClusterKey) String() string { return "prefix-key:" + k.ID() }

// GoString is String.
func (k ClusterKey) GoString() string { return k.String() }

// MarshalText is String, for encoders that look for it.
func (k ClusterKey) MarshalText() ([]byte, error) { return []byte(k.String()), nil }

// Domain is what must agree, beside the tokens, for cached blocks to be shared.
type Domain struct {
	// Model is the served model: the first id of the engine's list.
	Model string
	// Adapter is the name of the LoRA adapter; empty: none.
	Adapter string
	// Salt is the cache salt of the request; empty: none.
	Salt string
}

// Append appends the domain as it enters the keyed hash: model, adapter and
// salt, each after its length in bytes as a little-endian 32-bit integer.
func (d Domain) Append(dst []byte) []byte {
	for _, s := range [...]string{d.Model, d.Adapter, d.Salt} {
		dst = binary.LittleEndian.AppendUint32(dst, uint32(len(s)))
		dst = append(dst, s...)
	}
	return dst
}

const (
	// headBytes is the length of what stands before the domain: chain, depth.
	headBytes = 12
	// stackBytes is the longest message hashed from the stack.
	stackBytes = 256
)

// longMessages lends buffers to keys whose domain does not fit the stack.
var longMessages = sync.Pool{New: func() any { return new([]byte) }}

// Keyer makes keys of one cluster key and one domain. It is immutable and safe
// for concurrent use.
type Keyer struct {
	k0, k1 uint64
	domain []byte
	id     uint32
}

// NewKeyer prepares a cluster key and a domain.
func NewKeyer(k ClusterKey, d Domain) *Keyer {
	return &Keyer{
		k0:     binary.LittleEndian.Uint64(k[:8]),
		k1:     binary.LittleEndian.Uint64(k[8:]),
		domain: d.Append(nil),
		id:     k.IDUint32(),
	}
}

// KeyID is the id of the cluster key, as [ClusterKey.IDUint32] tells it.
func (k *Keyer) KeyID() uint32 { return k.id }

// Key names the prefix of depthTokens tokens whose chain value is c: SipHash-2-4
// under the cluster key over the chain value (64-bit little-endian), the depth
// (32-bit little-endian) and the domain; 0 becomes 1. It does not allocate.
func (k *Keyer) Key(c Chain, depthTokens uint32) Key {
	var stack [stackBytes]byte
	if headBytes+len(k.domain) <= len(stack) {
		return k.hash(stack[:headBytes+len(k.domain)], c, depthTokens)
	}
	buf := longMessages.Get().(*[]byte)
	defer longMessages.Put(buf)
	if need := headBytes + len(k.domain); cap(*buf) < need {
		*buf = make([]byte, need)
	}
	return k.hash((*buf)[:headBytes+len(k.domain)], c, depthTokens)
}

// hash fills msg, which has the right length, and hashes it.
func (k *Keyer) hash(msg []byte, c Chain, depthTokens uint32) Key {
	binary.LittleEndian.PutUint64(msg, uint64(c))
	binary.LittleEndian.PutUint32(msg[8:], depthTokens)
	copy(msg[headBytes:], k.domain)
	return nonZero(siphash.Hash(k.k0, k.k1, msg))
}

// nonZero maps the one hash that is not a key to a neighbour.
func nonZero(h uint64) Key {
	if h == 0 {
		return 1
	}
	return Key(h)
}
