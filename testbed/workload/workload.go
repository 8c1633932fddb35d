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
}

// Len implements Prompt.
func (p *BlockPrompt) Len() int { return p.Tokens }

// AppendTokens implements Prompt.
func (p *BlockPrompt) AppendTokens(dst []uint32) []uint32 {
	left := p.Tokens
	for _, name := range p.Blocks {
		// One mixing per two tokens: the state walks by the golden ratio, so
		// that token i of a block can be had without those before it.
		n := min(left, p.BlockTokens)
		state := mix(name)
		for i := 0; i < n; i += 2 {
			r := mix(state + uint64(i)*golden)
			dst = append(dst, p.FirstToken+scale(uint32(r), p.TokenCount))
			if i+1 < n {
				dst = append(dst, p.FirstToken+scale(uint32(r>>32), p.TokenCount))
			}
		}
		left -= n
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
