package memo

// Weights of the upper bound of the tokens of a text: tokens per byte by its
// kind, measured over seven tokenizers, and what a message has around its text.
const (
	letterTokens   = .36
	spaceTokens    = .30
	otherTokens    = 1.
	nonASCIITokens = .75
	messageTokens  = 12.
)

// bound counts the tokens that a text has at most, as bytes come.
type bound struct {
	tokens float64
	run    float64 // letters of the word so far, in tokens
	lower  bool
	words  int
}

// add counts text that stands for itself: the canonical form's escapes count as
// the characters they stand for.
func (b *bound) add(canonical []byte) {
	for i := 0; i < len(canonical); i++ {
		c := canonical[i]
		switch {
		case c >= 'a' && c <= 'z':
			b.run += letterTokens
			b.lower = true
		case c >= 'A' && c <= 'Z':
			if b.lower { // camel case and base64 break here
				b.word()
			}
			b.run += letterTokens
		case c == ' ':
			b.word()
			b.tokens += spaceTokens
		case c >= 0x80:
			b.word()
			b.tokens += nonASCIITokens
		case c == '\\' && i+1 < len(canonical):
			b.word()
			b.tokens += otherTokens
			i++
		default:
			b.word()
			b.tokens += otherTokens
		}
	}
}

// word ends a run of letters: it has a token at least.
func (b *bound) word() {
	if b.run > 0 {
		b.tokens += max(1, b.run)
		b.words++
	}
	b.run, b.lower = 0, false
}

// total ends the text.
func (b *bound) total() float64 {
	b.word()
	return b.tokens
}
