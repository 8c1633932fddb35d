package coordinator

import (
	"encoding/binary"
	"fmt"
	"math"
	"strconv"
	"sync"

	"waypost/coordinator/api"
	"waypost/coordinator/placement"
	"waypost/gossip/ledger"
	"waypost/gossip/prefix"
	"waypost/gossip/summary"
	waypostv1 "waypost/proto/waypost/v1"
)

// bytesPerToken estimates the length of a prompt that only text is known of.
const bytesPerToken = 4

// prompt is a request's prompt as the index can look it up.
type prompt struct {
	// tokens is the length; estimated says that it is a guess from text. sure is
	// how much of it has keys.
	tokens, sure int
	estimated    bool
	// text says that it is given as text, of which the memo may know.
	text bool
	// source says where it comes from, in the API's words.
	source string
	// probe gives its prefix keys; keyed is false when there are none.
	probe prefix.Probe
	keyed bool
}

// maxKeyers bounds the prepared keys of domains.
const maxKeyers = 4096

// keyers prepares the keys of domains once.
type keyers struct {
	mu  sync.Mutex
	key prefix.ClusterKey
	by  map[prefix.Domain]*prefix.Keyer
}

func (k *keyers) of(d prefix.Domain) *prefix.Keyer {
	k.mu.Lock()
	defer k.mu.Unlock()
	if kr, ok := k.by[d]; ok {
		return kr
	}
	if len(k.by) >= maxKeyers || k.by == nil {
		k.by = map[prefix.Domain]*prefix.Keyer{}
	}
	kr := prefix.NewKeyer(k.key, d)
	k.by[d] = kr
	return kr
}

var errNoPrompt = api.BadField("input", "the prompt is missing or empty: give one of tokenIds, prompt, messages or prefixKeys")

// read takes a request's prompt in; what is text, the memo is asked about.
func (p *prompt) read(in *waypostv1.Input, keyer *prefix.Keyer, keyID string, tokens []uint32) ([]uint32, error) {
	p.tokens, p.sure, p.estimated, p.source, p.keyed, p.text = 0, 0, false, "unknown", false, false
	if in == nil {
		return tokens, errNoPrompt
	}
	forms := 0
	for _, given := range []bool{
		len(in.GetMessages()) > 0, in.Prompt != nil, len(in.GetTokenIds()) > 0, len(in.GetTokenIdsLe()) > 0, in.GetPrefixKeys() != nil, in.GetBodyJson() != "",
	} {
		if given {
			forms++
		}
	}
	if forms == 0 {
		return tokens, errNoPrompt
	}
	if forms > 1 {
		return tokens, api.BadField("input", "the prompt is given in more than one form; give one of tokenIds, prompt, messages or prefixKeys")
	}
	if len(in.GetTools()) > 0 && len(in.GetMessages()) == 0 {
		return tokens, api.BadField("input.tools", "tools go with messages")
	}
	switch {
	case len(in.GetTokenIds()) > 0:
		return tokens, p.ofTokens("input.token_ids", in.GetTokenIds(), keyer)
	case len(in.GetTokenIdsLe()) > 0:
		raw := in.GetTokenIdsLe()
		if len(raw)%4 != 0 {
			return tokens, api.BadField("input.token_ids_le", fmt.Sprintf("%d bytes are not a whole number of 4-byte token ids", len(raw)))
		}
		tokens = tokens[:0]
		for i := 0; i < len(raw); i += 4 {
			tokens = append(tokens, binary.LittleEndian.Uint32(raw[i:]))
		}
		return tokens, p.ofTokens("input.token_ids_le", tokens, keyer)
	case in.GetPrefixKeys() != nil:
		return tokens, p.ofKeys(in.GetPrefixKeys(), keyID)
	}
	// Text stays in memory for the call.
	p.text = true
	return tokens, nil
}

func (p *prompt) ofTokens(field string, tokens []uint32, keyer *prefix.Keyer) error {
	if len(tokens) > placement.MaxPromptTokens {
		return api.BadField(field, fmt.Sprintf("%d tokens are more than %d", len(tokens), placement.MaxPromptTokens))
	}
	p.tokens, p.sure, p.source, p.keyed = len(tokens), len(tokens), "tokens", true
	p.probe.ResetTokens(tokens, keyer)
	return nil
}

// maxKeys bounds the prefix keys of one request.
const maxKeys = 1 << 16

func (p *prompt) ofKeys(k *waypostv1.PrefixKeys, keyID string) error {
	n := k.GetPromptTokens()
	if n == 0 || n > placement.MaxPromptTokens {
		return api.BadField("input.prefix_keys.prompt_tokens", fmt.Sprintf("%d is not a length from 1 to %d", n, placement.MaxPromptTokens))
	}
	p.tokens, p.sure, p.source = int(n), int(n), "keys"
	if len(k.GetCheckpoints()) == 0 && len(k.GetPoints()) == 0 {
		p.keyed = true
		p.probe.ResetKeys(int(n), nil, nil)
		return nil
	}
	if k.GetKeyId() != keyID {
		return api.BadField("input.prefix_keys.key_id", fmt.Sprintf("keys were made with cluster key %q, in use is %s", k.GetKeyId(), keyID))
	}
	if len(k.GetCheckpoints())+len(k.GetPoints()) > maxKeys {
		return api.BadField("input.prefix_keys", fmt.Sprintf("more than %d keys", maxKeys))
	}
	if len(k.GetCheckpoints()) > int(n)/prefix.ChunkTokens {
		return api.BadField("input.prefix_keys.checkpoints", fmt.Sprintf("%d checkpoints are more than a prompt of %d tokens has", len(k.GetCheckpoints()), n))
	}
	checkpoints := make([]prefix.Key, 0, len(k.GetCheckpoints()))
	for i, s := range k.GetCheckpoints() {
		key, err := parseKey(s)
		if err != nil {
			return api.BadField(fmt.Sprintf("input.prefix_keys.checkpoints[%d]", i), err.Error())
		}
		checkpoints = append(checkpoints, key)
	}
	points := make(map[uint32]prefix.Key, len(k.GetPoints()))
	for i, pt := range k.GetPoints() {
		key, err := parseKey(pt.GetKey())
		if err != nil {
			return api.BadField(fmt.Sprintf("input.prefix_keys.points[%d].key", i), err.Error())
		}
		if pt.GetOffset() == 0 || pt.GetOffset() > n {
			return api.BadField(fmt.Sprintf("input.prefix_keys.points[%d].offset", i), fmt.Sprintf("%d is outside the prompt of %d tokens", pt.GetOffset(), n))
		}
		points[pt.GetOffset()] = key
	}
	p.keyed = true
	p.probe.ResetKeys(int(n), checkpoints, points)
	return nil
}

func parseKey(s string) (prefix.Key, error) {
	v, err := strconv.ParseUint(s, 16, 64)
	if err != nil || len(s) != 16 {
		return 0, fmt.Errorf("%.40q is not a key of 16 hex digits", s)
	}
	return prefix.Key(v), nil
}

// newPart appends the keys and depths of what a request adds to a worker's
// cache beyond what it holds: the first new block, checkpoints and the tip, the
// last whole block; ascending, each once. The first block tells the worker's
// agent that the prefill began, the tip that it ended.
func (p *prompt) newPart(heldTokens, blockTokens int, keys []prefix.Key, depths []uint32) ([]prefix.Key, []uint32) {
	if !p.keyed {
		return keys, depths
	}
	add := func(k prefix.Key, ok bool, depth int) {
		if ok && (len(depths) == 0 || int(depths[len(depths)-1]) < depth) {
			keys, depths = append(keys, k), append(depths, uint32(depth))
		}
	}
	first, tip := 0, p.sure
	if blockTokens > 0 {
		first, tip = (heldTokens/blockTokens+1)*blockTokens, p.sure/blockTokens*blockTokens
	}
	begin := func(next int) {
		if first > 0 && first <= next {
			k, ok := p.probe.At(first)
			add(k, ok, first)
			first = 0
		}
	}
	for j := heldTokens/prefix.ChunkTokens + 1; j*prefix.ChunkTokens <= tip; j++ {
		begin(j * prefix.ChunkTokens)
		k, ok := p.probe.Checkpoint(j)
		add(k, ok, j*prefix.ChunkTokens)
	}
	begin(tip)
	if tip > heldTokens && tip%prefix.ChunkTokens != 0 {
		k, ok := p.probe.At(tip)
		add(k, ok, tip)
	}
	return keys, depths
}

// claimPoints are the keys of the whole prompt at each ledger.PointTokens tokens,
// up to the first that is not known.
func (p *prompt) claimPoints() []prefix.Key {
	if !p.keyed {
		return nil
	}
	points := make([]prefix.Key, 0, p.tokens/ledger.PointTokens)
	for depth := ledger.PointTokens; depth <= p.tokens; depth += ledger.PointTokens {
		k, ok := p.probe.At(depth)
		if !ok {
			break
		}
		points = append(points, k)
	}
	return points
}

// after is the index key of the last checkpoint that a worker holds of the
// prompt, on which the new part hangs; 0: none.
func (p *prompt) after(heldTokens int) (key summary.IndexKey) {
	if !p.keyed {
		return 0
	}
	for j := 1; j <= heldTokens/prefix.ChunkTokens; j++ {
		k, ok := p.probe.Checkpoint(j)
		if !ok {
			return 0
		}
		key = summary.CheckpointKey(key, uint32(j*prefix.ChunkTokens), k)
	}
	return key
}

// deepestKey names the deepest prefix of the prompt that any worker holds.
func (p *prompt) deepestKey(tokens int) uint64 {
	if !p.keyed || tokens <= 0 || tokens > p.sure {
		return 0
	}
	k, ok := p.probe.At(tokens)
	if !ok {
		return 0
	}
	return uint64(k)
}

// budget reads an optional budget in ms.
func budget(field string, v *float64) (float64, error) {
	if v == nil {
		return 0, nil
	}
	if !(*v > 0) || math.IsInf(*v, 0) {
		return 0, api.BadField(field, fmt.Sprintf("%v is not a time above 0 ms; leave it out for no budget", *v))
	}
	return *v, nil
}
