package memo

import (
	"math"

	"waypost/gossip/prefix"
)

const (
	// endTokens is what the end of a prompt may have that its continuation has
	// not: what asks the model for an answer.
	endTokens = 16
	// preambleTokens is what a template may put in front by itself; maxScale
	// bounds how far the bounds of tokens are raised.
	preambleTokens = 256
	maxScale       = 8
)

// Learnt is what a prompt told.
type Learnt struct {
	// Tokens of the prompt that a prompt learnt before has in common with it, as
	// far as can be told.
	KnownTokens int
	// Judged says that a prediction was compared, OverTokens how much of it was
	// wrong.
	Judged     bool
	OverTokens int
	// NewEpoch says that the memo began anew, BreakerChanged that the breaker
	// opened or closed.
	NewEpoch, BreakerChanged bool
}

// Learn takes the token ids that a request's prompt became. given is the
// prediction made for it; nil: none. The ids are not kept.
func (m *Memo) Learn(r *Request, ids []uint32, given *Prediction) (out Learnt) {
	if len(ids) == 0 {
		return out
	}
	m.tape.reset(ids)
	return m.learn(r, given)
}

// LearnStored takes the chain values of a request's prompt at each
// prefix.PointTokens tokens instead, as far as an engine's events show it: its
// last tokens may be missing, fewer than the engine keeps together. What is
// known of its continuations is the less.
func (m *Memo) LearnStored(r *Request, values []prefix.Chain, given *Prediction) Learnt {
	if len(values) == 0 {
		return Learnt{}
	}
	m.tape.told(values)
	// What was given beyond the values cannot be judged.
	if given != nil && given.Tokens > m.tape.tokens {
		given = nil
	}
	return m.learn(r, given)
}

func (m *Memo) learn(r *Request, given *Prediction) (out Learnt) {
	clear(m.lcp)
	if given != nil && given.Tokens > 0 && given.epoch == m.epoch {
		m.judge(given, &out)
	}
	m.stats.Learnt++
	m.stats.PromptTokens += uint64(m.tape.tokens)
	if r.epoch != m.epoch {
		return out
	}
	if !out.Judged && m.lacksText(r) {
		// What a template leaves out of one prompt it shows in another: a
		// prediction would have been wrong.
		out.BreakerChanged = m.breaker.note(0, 1)
	}
	m.raise(r, float64(m.tape.tokens))
	out.KnownTokens = m.records.known(&m.tape)
	rec := m.records.add(&m.tape, m.tape.tokens)
	sure := int32(0)
	for j := range r.units {
		if r.units[j].opaque {
			break
		}
		if !r.units[j].nowhere {
			var known int
			if j == r.plainAt && j > 0 {
				sure = max(sure, m.learnPlain(r, rec))
			}
			known, sure = m.learnUnit(r, j, rec, sure)
			out.KnownTokens = max(out.KnownTokens, known)
		}
	}
	m.stats.KnownTokens += uint64(out.KnownTokens)
	if m.records.all[rec].nodes == 0 {
		m.records.drop(rec)
		return out
	}
	m.queueEnds(r)
	m.makeRoom()
	return out
}

// judge compares a prediction with what came.
func (m *Memo) judge(given *Prediction, out *Learnt) {
	out.Judged = true
	want, known := given.end()
	got, long := m.tape.at(given.Tokens)
	right := known && long && want == got
	common := given.Tokens
	if !right {
		common = min(common-1, m.tape.common(given.Chains, given.pointsOf))
	}
	if !given.Withheld {
		out.OverTokens = given.Tokens - common
		m.stats.GivenTokens += uint64(given.Tokens)
		m.stats.CoveredTokens += uint64(common)
		m.stats.OverTokens += uint64(out.OverTokens)
		m.stats.Wrong += uint64(bit(!right))
	}
	out.BreakerChanged = m.breaker.note(common, given.Tokens)
	m.goesOn = m.goesOn || right && given.goesOn
	if right || common >= earlyTokens {
		m.early = 0
		return
	}
	if m.early++; m.early >= epochFailures && !m.breaker.open {
		m.newEpoch(m.epoch + 1)
		out.NewEpoch = true
	}
}

// lacksText says that a prompt has by far not the words of the messages that any
// template shows which appends: no tokenizer has less than a token for a word.
func (m *Memo) lacksText(r *Request) bool {
	return m.tape.ids != nil && !r.cut && m.tape.tokens < r.shown/2
}

// raise lifts the bounds when a prompt has more tokens than they allow.
func (m *Memo) raise(r *Request, tokens float64) {
	if r.Opaque() {
		return
	}
	if whole := r.units[0].behind; whole > 0 {
		m.scale = min(max(m.scale, (tokens-preambleTokens)/whole), maxScale)
	}
}

// common is what a record has in common with the prompt being learnt.
func (m *Memo) common(rec int32) int {
	n, ok := m.lcp[rec]
	if !ok {
		n = m.records.common(rec, &m.tape)
		m.lcp[rec] = n
	}
	return n
}

// learnUnit updates the nodes of one unit. before is what prompts are sure to
// share that begin with the units before it, and so those that begin with this
// one, too. It returns what the records there had in common with the prompt, and
// what prompts with this unit are sure to share.
func (m *Memo) learnUnit(r *Request, j int, rec, before int32) (known int, sure int32) {
	u := &r.units[j]
	n := float64(m.tape.tokens)
	fromEnd := n - endTokens - u.behind*m.scale
	if r.Opaque() {
		fromEnd = 0
	}
	next := follower{}
	if j+1 < len(r.units) {
		next = followedBy(r.units[j+1].hash, &r.units[j+1])
	}
	if open := m.byKey[keyOf(u, false)]; open != 0 {
		known = m.common(m.nodes[open].record)
		m.noteEnd(r, u, open, known, next)
		switch o := &m.nodes[open]; {
		case m.ends(known, o):
		case o.answer != same:
			c := u.classOf(o.answer, u.closed, r.tools)
			if next.path != 0 {
				m.note(c, known, int(o.tokens))
			}
			if known >= int(o.tokens) && m.trust.trusts(c) {
				before = max(before, o.tokens)
			}
			// With it goes its sibling: the client has shown which it sends.
			m.dropRecord(o.record)
		case u.closed:
			shut, c := m.byKey[keyOf(u, true)], u.classOf(cross, true, r.tools)
			if shut == 0 {
				m.note(c, known, int(o.tokens))
			}
			if known >= int(o.tokens) && m.trust.trusts(c) {
				before = max(before, o.tokens)
			}
			if known >= int(o.tokens) && (shut == 0 || m.nodes[shut].record == o.record) {
				// The new prompt stands for it as well, and the old one can go.
				o.next, o.tokens = next, m.hold(rec, o.tokens)
				m.move(open, rec)
			}
		}
	}
	id := m.byKey[keyOf(u, u.closed)]
	if id == 0 {
		if sure = m.place(rec, u.inner, min(fromEnd, n)); sure < before {
			sure = m.place(rec, false, float64(before))
		}
		m.newNode(node{key: keyOf(u, u.closed), next: next, record: rec, tokens: sure})
		return known, sure
	}
	nd := &m.nodes[id]
	common := m.common(nd.record)
	known = max(known, common)
	if m.ends(common, nd) {
		return known, before
	}
	c := u.classOf(same, u.closed, r.tools)
	m.note(c, common, int(nd.tokens))
	l := float64(common)
	switch {
	case common < int(nd.tokens):
		m.stats.Disagreements++
		nd.tokens = floor(l)
	case nd.next.path != 0 && next.path != 0 && nd.next.path != next.path:
		nd.tokens = floor(min(l, max(float64(nd.tokens), fromEnd, l-m.alike(nd.next, next, &r.units[j+1]))))
		m.records.keepPoints(rec, &m.tape, common, !m.breaker.open)
		if !nd.branched {
			// What waits as the end of a prompt goes before those now.
			nd.branched, nd.queued = true, false
		}
		m.queue(id)
	default:
		nd.tokens = max(nd.tokens, m.place(rec, u.inner && !nd.branched, min(l, fromEnd)))
	}
	nd.tokens = max(nd.tokens, min(before, floor(l)))
	nd.next, nd.tokens = next, m.hold(rec, nd.tokens)
	m.move(id, rec)
	if m.trust.trusts(c) {
		return known, nd.tokens
	}
	return known, before
}

// learnPlain updates what is known of the leading system messages whatever the
// tools. It returns what prompts with them are sure to share; 0: that is not
// known.
func (m *Memo) learnPlain(r *Request, rec int32) (sure int32) {
	sure = m.learnTools(r, &r.plain, untooled, rec)
	if r.toolsMark != 0 {
		sure = max(sure, m.learnTools(r, &r.someTools, retooled, rec))
	}
	return sure
}

// learnTools updates one node that stands for any tools, or for any but none.
func (m *Memo) learnTools(r *Request, u *unit, k kind, rec int32) (sure int32) {
	n := float64(m.tape.tokens)
	fromEnd := n - endTokens - u.behind*m.scale
	if r.Opaque() {
		fromEnd = 0
	}
	next := &r.units[r.plainAt+1]
	path := followedBy(r.nextHash, next)
	id := m.byKey[keyOf(u, u.closed)]
	if id == 0 {
		tokens := m.place(rec, false, min(fromEnd, n))
		m.newNode(node{key: keyOf(u, u.closed), next: path, record: rec, tokens: tokens, tools: r.toolsMark})
		return 0
	}
	nd := &m.nodes[id]
	common := m.common(nd.record)
	if m.ends(common, nd) {
		return 0
	}
	c := u.classOf(k, u.closed, r.tools)
	if met := nd.tools != r.toolsMark && (k == retooled || nd.tools == 0 || r.toolsMark == 0); met && nd.tokens >= earlyTokens {
		m.trust.note(c, common >= int(nd.tokens))
	}
	l := float64(common)
	switch {
	case common < int(nd.tokens):
		nd.tokens = floor(l)
	case nd.next.path != path.path:
		// The tools may be between.
		behind := m.alike(nd.next, path, next) + r.toolBound*m.scale
		nd.tokens = floor(min(l, max(float64(nd.tokens), fromEnd, l-behind)))
		m.records.keepPoints(rec, &m.tape, common, !m.breaker.open)
	default:
		nd.tokens = max(nd.tokens, m.place(rec, false, min(l, fromEnd)))
	}
	nd.next, nd.tools, nd.tokens = path, r.toolsMark, m.hold(rec, nd.tokens)
	m.move(id, rec)
	if m.trust.trusts(c) {
		return nd.tokens
	}
	return 0
}

// ends says that a prompt of which the end was not told agrees with a node as
// far as it goes, which is less than the node knows: it says nothing of it.
func (m *Memo) ends(common int, n *node) bool {
	return m.tape.ids == nil && common == m.tape.tokens && common < int(n.tokens)
}

// place rounds a bound down to what a record holds: a point, or for a unit
// within a message, behind which paths seldom part, a checkpoint. Points are what
// costs most memory.
func (m *Memo) place(rec int32, coarse bool, tokens float64) int32 {
	n := floor(tokens)
	if coarse {
		return n / prefix.ChunkTokens * prefix.ChunkTokens
	}
	return m.hold(rec, n)
}

// hold keeps what a record needs to be told up to a depth, and says how deep that
// is: while the breaker is open only checkpoints and ends are kept, which suffice
// to compare.
func (m *Memo) hold(rec, tokens int32) int32 {
	o := tokens % prefix.ChunkTokens
	if o == 0 || m.records.keepPoints(rec, &m.tape, int(tokens), !m.breaker.open) {
		return tokens
	}
	return tokens - o
}

// note counts for or against a class. What fails at the start of the prompt is
// another epoch's, or not causal, which others judge.
func (m *Memo) note(c class, common, expected int) {
	if ok := common >= expected; ok || common >= earlyTokens {
		m.trust.note(c, ok)
	}
}

// noteEnd counts whether a prompt went on from the end of another as that was.
func (m *Memo) noteEnd(r *Request, u *unit, open int32, known int, next follower) {
	whole := m.wholeEnd(open)
	if whole == 0 || next.path == 0 || known < earlyTokens || m.ends(known, &m.nodes[open]) || u.closed && m.byKey[keyOf(u, true)] != 0 {
		return
	}
	m.trust.note(u.classOf(ending, u.closed, r.tools), known >= int(whole))
}

// follower is what follows a unit: the path as far as the next one, and how that
// one starts. Paths that are taken for one by chance teach a little less.
type follower struct{ path, start uint16 }

// followedBy names what follows, by a hash of the path; never the zero follower.
func followedBy(hash uint64, next *unit) follower {
	return follower{uint16(max(hash>>48, 1)), next.start}
}

// alike is how many tokens two paths may have in common behind where they part,
// of which one goes on with a unit.
func (m *Memo) alike(a, b follower, next *unit) float64 {
	switch {
	case a.start != 0 && b.start != 0 && a.start != b.start:
		return (messageTokens + startBytes) * m.scale
	case next.opaque:
		return math.Inf(1)
	}
	return next.tokens * m.scale
}

// Answer takes the ids of a prompt and of the answer to it, and the message as
// the client will send it back, as JSON. Two nodes stand for it if it has
// reasoning: clients send that back or not. Whether they are believed is decided
// by what comes of them.
func (m *Memo) Answer(r *Request, ids []uint32, message []byte) error {
	if !r.chat || r.epoch != m.epoch || r.Opaque() || len(r.units) >= maxUnits || m.breaker.open {
		return nil
	}
	var rd Reader
	s := scanner{b: message}
	if err := rd.message(&s); err != nil {
		return err
	}
	if s.next() != 0 {
		return s.fail("something follows the message")
	}
	m.tape.reset(ids)
	rec := m.records.add(&m.tape, len(ids))
	m.answerNode(r, &rd, rec, len(ids), generated)
	if rd.messages[0].reasoning {
		cut, err := withoutReasoning(message)
		if err != nil {
			return err
		}
		var bare Reader
		if err := bare.message(&scanner{b: cut}); err != nil {
			return err
		}
		m.answerNode(r, &bare, rec, len(ids), trimmed)
	}
	if m.records.all[rec].nodes == 0 {
		m.records.drop(rec)
		return nil
	}
	m.makeRoom()
	return nil
}

// answerNode hangs a node for a message on the record of a prompt and answer.
func (m *Memo) answerNode(r *Request, rd *Reader, rec int32, ids int, as kind) {
	q := Request{key: r.key, chat: true, units: r.units[len(r.units)-1:]}
	q.units = append(make([]unit, 0, len(rd.buf)/piece+2), q.units...)
	rd.append(&q, &rd.messages[0])
	u := &q.units[len(q.units)-1]
	if m.byKey[keyOf(u, false)] != 0 || m.byKey[keyOf(u, true)] != 0 {
		return
	}
	tokens := floor(float64(ids - 1))
	m.queue(m.newNode(node{key: keyOf(u, false), record: rec, tokens: m.hold(rec, tokens), answer: as}))
}

// withoutReasoning is a message without the fields of reasoning.
func withoutReasoning(message []byte) ([]byte, error) {
	s := scanner{b: message}
	out := []byte{'{'}
	err := s.members(func(key []byte) (err error) {
		before := len(out)
		if before > 1 {
			out = append(out, ',')
		}
		out = append(append(out, key...), ':')
		out, err = s.value(out)
		if name := string(key); name == `"reasoning"` || name == `"reasoning_content"` {
			out = out[:before]
		}
		return err
	})
	return append(out, '}'), err
}
