package memo

// Constants of trust.
const (
	// classRate is the weight of the newest observation of a class, classTrusted
	// the average from which it is used, classProof the successes that a class
	// needs first whose members are not believed from the start. Classes of answers
	// need more: what they add is small, and where a template lets the first
	// character of an answer change the token before it, one in twelve is wrong.
	// So do those of other tools: where these come first, all of it is wrong; and
	// those of ends, which add less than 16 tokens.
	classRate     = 1. / 12
	classTrusted  = .8
	answerTrusted = .97
	classProof    = 3
	// breakerRate is the weight of the newest prediction given, breakerOpens the
	// share of what is wrong that opens the breaker: the third in a row does. A
	// prediction of which half is wrong counts as wrong, one that is a little too
	// long by what is too much: with some vocabularies one answer in twelve is.
	// breakerCloses and breakerQuiet are what closes it: the share, and right
	// predictions in a row, that were not given.
	breakerRate   = 1. / 24
	breakerOpens  = .1
	breakerCloses = .02
	breakerQuiet  = 64
	// unprovenTokens is how long predictions may be for prompts that go on from the
	// end of another, before one was right: with the rule of three wrong ones alone,
	// three documents could be promised in vain where the template shows nothing but
	// the last message.
	unprovenTokens = 256
	// earlyTokens is how near the start a prediction must fail, epochFailures how
	// often in a row, for a new epoch.
	earlyTokens   = 64
	epochFailures = 2
)

// kind is what a class of nodes rests on.
type kind uint8

const (
	// same is a node met again in its state, cross one met open and used closed,
	// generated one made of an answer, trimmed one made of an answer without its
	// reasoning, retooled one met with other tools, untooled one met with tools and
	// without, ending one of a prompt's end, taken to go on as it is.
	same kind = iota
	cross
	generated
	trimmed
	retooled
	untooled
	ending
	kinds
)

// class is an index into trust.
type class int32

const classes = int(kinds) * 2 * int(roles) * 8

func bit(b bool) int {
	if b {
		return 1
	}
	return 0
}

// classOf is the class of a unit: by what is known of it, its state, who speaks,
// whether the running turn had reasoning up to it and an answer before it, and
// whether there are tools.
func (u *unit) classOf(k kind, closed, tools bool) class {
	return class((int(k)*2+bit(closed))*int(roles)+int(u.role))*8 + class(bit(u.reasoning)*4+bit(u.steps)*2+bit(tools))
}

func (c class) kind() kind { return kind(int(c) / (classes / int(kinds))) }

// trust is what was seen of each class.
type trust [classes]struct {
	successes uint32
	seen      bool
	average   float64
}

// note takes an observation in.
func (t *trust) note(c class, ok bool) {
	e := &t[c]
	if !e.seen {
		e.seen, e.average = true, 1
		if c.kind() != same {
			e.average = float64(bit(ok))
		}
	}
	x := 0.
	if ok {
		x = 1
		e.successes++
	}
	e.average += classRate * (x - e.average)
}

// trusts says whether nodes of a class are used.
func (t *trust) trusts(c class) bool {
	e := &t[c]
	if c.kind() != same && e.successes < classProof {
		return false
	}
	if c.kind() >= generated {
		return e.average >= answerTrusted
	}
	return !e.seen || e.average >= classTrusted
}

// breaker switches the predictions of a pool off.
type breaker struct {
	open  bool
	wrong float64 // moving share
	right int     // in a row
	opens uint64
}

func (b *breaker) note(common, given int) (changed bool) {
	x := 1.
	if 2*common >= given {
		x = 1 - float64(common)/float64(given)
	}
	if b.right++; common < given {
		b.right = 0
	}
	b.wrong += breakerRate * (x - b.wrong)
	switch {
	case !b.open && b.wrong > breakerOpens:
		b.open = true
		b.opens++
		return true
	case b.open && b.wrong < breakerCloses && b.right >= breakerQuiet:
		b.open = false
		return true
	}
	return false
}
