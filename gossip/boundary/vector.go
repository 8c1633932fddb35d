package boundary

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"slices"

	"waypost/gossip/prefix"
)

// Token is the keyed hash of one token id; Masked: the token is one of a date.
type Token uint32

// Masked stands for a token that varies with the date. Two masked runs may have
// other lengths.
const Masked Token = 0

// Bounds of a vector.
const (
	MaxProbes      = 32
	MaxProbeTokens = 1024
	MaxTextBytes   = 128
	maxSets        = 8
)

// ErrVector is wrapped by every error of Validate.
var ErrVector = errors.New("bad boundary")

// Hasher hashes token ids under a cluster key, so that what leaves the host can
// be compared and not read.
type Hasher struct{ keyer *prefix.Keyer }

// NewHasher makes the hasher of a cluster key.
func NewHasher(key prefix.ClusterKey) Hasher {
	return Hasher{prefix.NewKeyer(key, prefix.Domain{Salt: "waypost boundary probe"})}
}

// KeyID names the cluster key: hashes under different keys cannot be compared.
func (h Hasher) KeyID() uint32 { return h.keyer.KeyID() }

// Hash hashes ids one by one, at most MaxProbeTokens of them.
func (h Hasher) Hash(ids []uint32) []Token {
	out := make([]Token, min(len(ids), MaxProbeTokens))
	for i := range out {
		if out[i] = Token(h.keyer.Key(prefix.Chain(ids[i]), 0)); out[i] == Masked {
			out[i] = 1
		}
	}
	return out
}

// Measurement is what an engine made of one probe.
type Measurement struct {
	Part   Part
	Number int
	// Run changes whenever the probe is measured.
	Run uint32
	// Tokens are the hashes of the token ids.
	Tokens []Token
}

// Vector is the boundary of one engine as it was measured or declared.
type Vector struct {
	// Sets are the probe sets that it holds, or will when all is measured.
	Sets []int
	// KeyID names the cluster key of the hashes.
	KeyID uint32
	// Declared is what an operator says of an engine that tells no token ids:
	// equal for engines that make the same of the same text. Empty: nothing.
	Declared string
	// Rule is how adapters and salts enter block names; empty: not seen yet.
	Rule string
	// Probes are the measured probes, by part and number.
	Probes []Measurement
}

// compareProbes orders the probes of a vector.
func compareProbes(a, b Measurement) int {
	return cmp.Or(cmp.Compare(a.Part.order(), b.Part.order()), cmp.Compare(a.Part, b.Part), cmp.Compare(a.Number, b.Number))
}

// Sort puts the probes in order, which comparing needs.
func (v *Vector) Sort() { slices.SortFunc(v.Probes, compareProbes) }

// Probe is the measurement of a probe; nil: it has none.
func (v *Vector) Probe(part Part, number int) *Measurement {
	for i := range v.Probes {
		if m := &v.Probes[i]; m.Part == part && m.Number == number {
			return m
		}
	}
	return nil
}

// DateDependent says that a rendering holds the date.
func (v *Vector) DateDependent() bool {
	return slices.ContainsFunc(v.Probes, func(m Measurement) bool { return slices.Contains(m.Tokens, Masked) })
}

// Validate names the first field that is out of bounds.
func (v *Vector) Validate() error {
	bad := func(field, format string, args ...any) error {
		return fmt.Errorf("%w: %s: %s", ErrVector, field, fmt.Sprintf(format, args...))
	}
	switch {
	case len(v.Sets) > maxSets:
		return bad("sets", "%d are more than %d", len(v.Sets), maxSets)
	case len(v.Declared) > MaxTextBytes:
		return bad("declared", "%d bytes are more than %d", len(v.Declared), MaxTextBytes)
	case len(v.Rule) > MaxTextBytes:
		return bad("rule", "%d bytes are more than %d", len(v.Rule), MaxTextBytes)
	case len(v.Probes) > MaxProbes:
		return bad("probes", "%d are more than %d", len(v.Probes), MaxProbes)
	}
	for i := range v.Probes {
		m := &v.Probes[i]
		switch field := fmt.Sprintf("probes[%d]", i); {
		case m.Part == "" || len(m.Part) > MaxTextBytes:
			return bad(field+".part", "%.40q: 1 to %d bytes", m.Part, MaxTextBytes)
		case m.Number < 1 || m.Number > 1<<16:
			return bad(field+".probe", "%d is not in 1 to %d", m.Number, 1<<16)
		case len(m.Tokens) > MaxProbeTokens:
			return bad(field+".tokens", "%d are more than %d", len(m.Tokens), MaxProbeTokens)
		case i > 0 && compareProbes(v.Probes[i-1], *m) >= 0:
			return bad(field, "%s, probe %d is there twice or out of order", m.Part, m.Number)
		}
	}
	return nil
}

// Fingerprint names the boundary in 16 hex digits, for lists; empty when
// nothing is known. Equal boundaries may have different ones while not all
// probes are measured, and where only one engine is known to write the date.
func (v *Vector) Fingerprint() string {
	if v.Declared != "" {
		return v.Declared
	}
	if len(v.Probes) == 0 {
		return ""
	}
	h := fnv.New64a()
	var b []byte
	for i := range v.Probes {
		m := &v.Probes[i]
		b = append(append(b[:0], m.Part...), 0, byte(m.Number), byte(m.Number>>8))
		for j, t := range m.Tokens {
			if t != Masked || j == 0 || m.Tokens[j-1] != Masked {
				b = binary.LittleEndian.AppendUint32(b, uint32(t))
			}
		}
		_, _ = h.Write(b) // a hash does not fail
	}
	return fmt.Sprintf("%016x", h.Sum64())
}

// leastDateTokens is the shortest run of tokens that is taken for a date. It is
// a line of the date text as well, of which a template may join the first token
// with what stands before it.
const leastDateTokens = 4

// MaskDates masks the runs of tokens that are a line of the hashed date text. It
// changes tokens and reports whether there was one. A tokenizer that does not
// give line ends a token of their own shows no lines.
func MaskDates(tokens, dates []Token) bool {
	if len(dates) == 0 {
		return false
	}
	var lines [][]Token
	end := dates[len(dates)-1]
	for from, i := 0, 0; i < len(dates); i++ {
		if dates[i] == end {
			lines, from = append(lines, dates[from:i]), i+1
		}
	}
	if len(lines) != dateDays*len(dateForms) {
		return false
	}
	found := false
	for i := 0; i < len(tokens); {
		n := longestDate(tokens[i:], lines)
		for range n {
			tokens[i] = Masked
			i++
		}
		if n == 0 {
			i++
		}
		found = found || n > 0
	}
	return found
}

// longestDate is how many tokens at the beginning of some are a date.
func longestDate(tokens []Token, lines [][]Token) (longest int) {
	for _, line := range lines {
		least := max(leastDateTokens, len(line)-1)
		for from := 0; from+least <= len(line); from++ {
			n := 0
			for n < len(tokens) && from+n < len(line) && tokens[n] == line[from+n] {
				n++
			}
			if n >= least {
				longest = max(longest, n)
			}
		}
	}
	return longest
}

// maxLearntMask bounds the tokens between two measurements of one engine life
// that are taken for a date.
const maxLearntMask = 24

// MaskChanged masks what differs between two measurements of the same probe in
// the same engine life with another day: only a date changes there. ok is false
// if more differs than a date has.
func MaskChanged(former, now []Token) (masked []Token, ok bool) {
	if Alike(former, now) {
		return slices.Clone(former), true
	}
	head := 0
	for head < len(former) && head < len(now) && former[head] == now[head] {
		head++
	}
	tail := 0
	for tail < len(former)-head && tail < len(now)-head && former[len(former)-1-tail] == now[len(now)-1-tail] {
		tail++
	}
	changed := len(now) - tail - head
	if changed > maxLearntMask || len(former)-tail-head > maxLearntMask {
		return nil, false
	}
	masked = slices.Clone(now)
	if changed == 0 { // the former had more: one place stands for it
		masked = slices.Insert(masked, head, Masked)
		changed = 1
	}
	for i := range changed {
		masked[head+i] = Masked
	}
	return masked, true
}
