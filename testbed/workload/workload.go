package workload

// Prompt is a prompt whose token ids are made when they are wanted.
type Prompt interface {
	// Len is the number of tokens.
	Len() int
	// AppendTokens appends the token ids to dst. Two prompts that share a
	// prefix append equal ids for it.
	AppendTokens(dst []uint32) []uint32
}

// Request is one request of a workload.
type Request struct {
	// ArrivalMs is when it arrives, in ms from the start.
	ArrivalMs float64
	Prompt    Prompt
	// OutputTokens is the length of the answer, at least 1.
	OutputTokens int
	// Answer is the answer's OutputTokens ids where later prompts repeat them;
	// nil: nobody does, and any ids will do.
	Answer Prompt
	// Conversation is equal for the turns of one conversation; Turn counts them
	// from 0.
	Conversation uint64
	Turn         int
}

// TokenPrompt is a prompt held as its ids.
type TokenPrompt []uint32

// Len implements Prompt.
func (p TokenPrompt) Len() int { return len(p) }

// AppendTokens implements Prompt.
func (p TokenPrompt) AppendTokens(dst []uint32) []uint32 { return append(dst, p...) }

// BlockPrompt is a prompt made of named blocks of equal size, of which the last
// may be cut. A block's tokens depend on its name alone.
type BlockPrompt struct {
	// Blocks are the blocks' names in order, and BlockTokens their size.
	Blocks      []uint64
	BlockTokens int
	// Tokens is the length of the prompt, more than (len(Blocks)-1) blocks and
	// at most len(Blocks).
	Tokens int
	// FirstToken and TokenCount bound the ids used: [FirstToken,
	// FirstToken+TokenCount).
	FirstToken, TokenCount uint32
	// SiblingTokens, if not 0, lets all blocks that follow one block begin
	// alike: with a multiple of it that is fixed by the block they follow, from
	// 0 to less than BlockTokens. Prompts then part within blocks, as real ones
	// do.
	SiblingTokens int
}

// Len implements Prompt.
func (p *BlockPrompt) Len() int { return p.Tokens }

// AppendTokens implements Prompt.
func (p *BlockPrompt) AppendTokens(dst []uint32) []uint32 {
	left, before := p.Tokens, uint64(0)
	for i, name := range p.Blocks {
		n := min(left, p.BlockTokens)
		alike := 0
		if p.SiblingTokens > 0 && i > 0 {
			r := mix(mix(before) ^ siblings)
			alike = min(n, int(r%uint64(max(1, p.BlockTokens/p.SiblingTokens)))*p.SiblingTokens)
			dst = appendStream(dst, r, 0, alike, p.FirstToken, p.TokenCount)
		}
		dst = appendStream(dst, name, alike, n-alike, p.FirstToken, p.TokenCount)
		left -= n
		before = name
	}
	return dst
}

// siblings sets the names of what siblings have in common apart from others.
const siblings = 0x5bd1e9955bd1e995

// appendStream appends n token ids from the endless text of a name.
func appendStream(dst []uint32, name uint64, from, n int, first, count uint32) []uint32 {
	// One mixing per two tokens: the state walks by the golden ratio, so that
	// any token can be had without those before it.
	state := mix(name)
	i, end := from, from+n
	if i < end && i%2 == 1 {
		dst = append(dst, first+scale(uint32(mix(state+uint64(i-1)*golden)>>32), count))
		i++
	}
	for ; i < end; i += 2 {
		r := mix(state + uint64(i)*golden)
		dst = append(dst, first+scale(uint32(r), count))
		if i+1 < end {
			dst = append(dst, first+scale(uint32(r>>32), count))
		}
	}
	return dst
}

// Segment is a piece of a text: Tokens ids of the endless text of a name.
type Segment struct {
	Name   uint64
	Tokens int
}

// SegmentPrompt is a prompt put together of segments.
type SegmentPrompt struct {
	Segments []Segment
	// FirstToken and TokenCount bound the ids used: [FirstToken,
	// FirstToken+TokenCount).
	FirstToken, TokenCount uint32
}

// Len implements Prompt.
func (p *SegmentPrompt) Len() int {
	n := 0
	for _, s := range p.Segments {
		n += s.Tokens
	}
	return n
}

// AppendTokens implements Prompt.
func (p *SegmentPrompt) AppendTokens(dst []uint32) []uint32 {
	for _, s := range p.Segments {
		dst = appendStream(dst, s.Name, 0, s.Tokens, p.FirstToken, p.TokenCount)
	}
	return dst
}

// scale maps a random 32-bit number to [0, n).
func scale(r, n uint32) uint32 { return uint32(uint64(r) * uint64(n) >> 32) }

const golden = 0x9e3779b97f4a7c15

// mix is the finalizer of SplitMix64: a bijection that spreads its input.
func mix(x uint64) uint64 {
	x += golden
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
