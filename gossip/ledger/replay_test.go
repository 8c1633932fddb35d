package ledger

// The reference: an engine that serves a list of claims first in, first out,
// one step after the other. It is written to be obvious, not fast.

type replayClaim struct {
	madeMs         float64
	reused, tokens int
}

type replayQueue struct {
	steps Steps
	// freeMs is when the step in flight ends.
	freeMs float64
	// open are claims behind it, in order; remaining tokens and their depth.
	open []replayClaim
}

// replayAtLoad starts as the load report says: the engine is busy until the
// open step begins, which holds openTokens.
func replayAtLoad(s Steps, builtMs, queueMs float64, openTokens int) *replayQueue {
	q := &replayQueue{steps: s, freeMs: builtMs + queueMs}
	if k := openTokens % s.budget; k > 0 && queueMs > 0 {
		// Its tokens carry no attention part: the report does not tell it.
		model := s.model
		q.freeMs -= model.PrefillMs(k) + s.decodeMs
		q.open = append(q.open, replayClaim{tokens: -k})
	}
	return q
}

// replayRun serves the claims to the end and returns when the last prefill
// ends. A step takes claims made until it begins.
func replayRun(q replayQueue, claims []replayClaim) (endMs float64) {
	free, open := q.freeMs, append([]replayClaim(nil), q.open...)
	end := free
	for len(open) > 0 || len(claims) > 0 {
		if len(open) == 0 && claims[0].madeMs > free {
			free = claims[0].madeMs
		}
		for len(claims) > 0 && claims[0].madeMs <= free {
			open = append(open, claims[0])
			claims = claims[1:]
		}
		left, tokens, attention := q.steps.budget, 0, 0.0
		for left > 0 && len(open) > 0 {
			c := &open[0]
			if c.tokens < 0 { // the report's own tokens
				tokens -= c.tokens
				left += c.tokens
				open = open[1:]
				continue
			}
			take := min(left, c.tokens)
			attention += q.steps.model.AttentionMs(c.reused, take)
			c.reused += take
			c.tokens -= take
			tokens += take
			left -= take
			if c.tokens == 0 {
				open = open[1:]
			}
		}
		free += q.steps.model.PrefillMs(tokens) + attention + q.steps.decodeMs
		end = free
	}
	return end
}
