package explain

import (
	"slices"
	"time"

	"waypost/coordinator/outcome"
	"waypost/coordinator/placement"
)

// Joined is what became of an outcome.
type Joined struct {
	// Entry is the entry with its outcome; nil: it is not here.
	Entry *Entry
	// News says that this outcome was taken: it is the entry's first, or from
	// a higher source than the former. Former is what the entry said before.
	News   bool
	Former outcome.Class
}

// Join adds an outcome to its entry and gives it a class. A second outcome
// changes nothing, unless a higher source tells it. Evidence is completed from
// the entry: expectation, view and what the outcome says was reused. The class
// is provisional while later evidence could change it, until Settle.
func (s *Store) Join(placementID string, o outcome.Outcome, evidence outcome.Evidence) (Joined, error) {
	if err := o.Validate(); err != nil {
		return Joined{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	n := s.byID[placementID]
	switch {
	case n == nil, n.Worker == "": // a refused request has no outcome
		s.counts.Missed++
		return Joined{}, nil
	case n.Outcome != nil && n.Outcome.Source >= o.Source:
		s.counts.Repeated++
		return Joined{Entry: n.Entry, Former: n.Class}, nil
	}
	s.counts.Joined++
	former := n.Class
	next := *n.Entry
	next.Outcome = &o
	s.classify(n, &next, evidence, false)
	return Joined{Entry: n.Entry, News: true, Former: former}, nil
}

// Settle gives the final class by the evidence that came meanwhile. It returns
// nil for an entry that is not here or has no provisional class.
func (s *Store) Settle(placementID string, evidence outcome.Evidence) *Entry {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := s.byID[placementID]
	if n == nil || n.Outcome == nil || !n.Provisional {
		return nil
	}
	next := *n.Entry
	s.classify(n, &next, evidence, true)
	return n.Entry
}

// classify replaces an entry by next with its class.
func (s *Store) classify(n *stored, next *Entry, evidence outcome.Evidence, final bool) {
	evidence.ExpectedTokens, evidence.ActualTokens = next.ExpectedTokens, next.Outcome.CachedTokens
	evidence.View, evidence.ViewAgeMs = next.View, next.ViewAgeMs
	next.Class = outcome.Classify(evidence)
	next.Provisional = !final && !evidence.Conclusive()
	n.Entry = next
	s.options.Journal.put(next, journalOutcome)
	s.tell(EventOutcome, next)
}

// Reuse sums outcomes up.
type Reuse struct {
	// Placements counts entries that named a worker, Outcomes those with an
	// outcome, Reported those whose outcome tells what was reused.
	Placements, Outcomes, Reported int
	// ByClass counts entries with an outcome per class.
	ByClass map[outcome.Class]int
	// PromptTokens, ExpectedTokens, ActualTokens and ReachableTokens sum over
	// the reported; an unknown expectation counts as none. ShortTokens were
	// expected and not found, MissTokens neither:
	// PromptTokens = ActualTokens + ShortTokens + MissTokens.
	PromptTokens, ExpectedTokens, ActualTokens, ReachableTokens float64
	ShortTokens, MissTokens                                     float64
	// LostTokens sums reachable tokens that were passed over, by why.
	LostTokens map[LostTo]float64
	// Workers are the sums per chosen worker.
	Workers map[string]WorkerReuse
}

// WorkerReuse sums the reported outcomes of one worker.
type WorkerReuse struct {
	Reported                                   int
	PromptTokens, ExpectedTokens, ActualTokens float64
}

// Reuse sums up the entries that match, per pool. Limit is not heeded.
func (s *Store) Reuse(f Filter) map[string]*Reuse {
	sums := map[string]*Reuse{}
	s.each(f, func(e *Entry) bool {
		if e.Worker == "" {
			return true
		}
		sum := sums[e.Pool]
		if sum == nil {
			sum = &Reuse{ByClass: map[outcome.Class]int{}, LostTokens: map[LostTo]float64{}, Workers: map[string]WorkerReuse{}}
			sums[e.Pool] = sum
		}
		sum.add(e)
		return true
	})
	return sums
}

func (r *Reuse) add(e *Entry) {
	r.Placements++
	if e.Outcome == nil {
		return
	}
	r.Outcomes++
	r.ByClass[e.Class]++
	if e.Outcome.CachedTokens < 0 {
		return
	}
	r.Reported++
	prompt, actual := float64(e.PromptTokens), float64(min(e.Outcome.CachedTokens, e.PromptTokens))
	expected := float64(min(max(e.ExpectedTokens, 0), e.PromptTokens))
	// What the chosen worker really held was reachable too.
	reachable := max(actual, float64(max(e.ReachableTokens, 0)))
	r.PromptTokens, r.ExpectedTokens, r.ActualTokens = r.PromptTokens+prompt, r.ExpectedTokens+expected, r.ActualTokens+actual
	r.ReachableTokens += reachable
	r.ShortTokens += max(expected-actual, 0)
	r.MissTokens += prompt - max(expected, actual)
	if e.LostTo != "" {
		r.LostTokens[e.LostTo] += reachable - actual
	}
	w := r.Workers[e.Worker]
	w.Reported++
	w.PromptTokens, w.ExpectedTokens, w.ActualTokens = w.PromptTokens+prompt, w.ExpectedTokens+expected, w.ActualTokens+actual
	r.Workers[e.Worker] = w
}

// Summary counts decisions.
type Summary struct {
	// Placed counts decisions that named a worker, Redirected those of them
	// that passed over the worker with most reuse, Reported those with an
	// outcome, Mispredicted those whose outcome differed.
	Placed, Redirected, Reported, Mispredicted int
	// Terms counts them by deciding term, Marks by what was not normal.
	Terms, Marks map[string]int
	// Refused counts decisions that named nobody, by reason.
	Refused map[string]int
}

// Summary counts the entries that match, per pool. Limit is not heeded.
func (s *Store) Summary(f Filter) map[string]*Summary {
	sums := map[string]*Summary{}
	s.each(f, func(e *Entry) bool {
		sum := sums[e.Pool]
		if sum == nil {
			sum = &Summary{Terms: map[string]int{}, Marks: map[string]int{}, Refused: map[string]int{}}
			sums[e.Pool] = sum
		}
		if e.Worker == "" {
			sum.Refused[string(e.Refused)]++
			return true
		}
		sum.Placed++
		sum.Terms[e.DecidingTerm]++
		for _, m := range e.Marks.Words() {
			sum.Marks[m]++
		}
		if e.Redirected {
			sum.Redirected++
		}
		if e.Outcome != nil {
			sum.Reported++
		}
		if e.Class.Mispredicted() {
			sum.Mispredicted++
		}
		return true
	})
	return sums
}

// Part is how one worker fared in recorded decisions.
type Part struct {
	// Considered counts the decisions in which it was a candidate, Chosen
	// those that chose it, EvenShare sums one over the number of candidates of
	// those that chose anybody.
	Considered, Chosen int
	EvenShare          float64
	// LostBy counts those it lost by the cause, Excluded those in which it
	// could not be chosen by why.
	LostBy, Excluded map[string]int
}

// Causes of Part for candidates that a record does not list.
const (
	// LostNotPriced: a lower bound of its price was above all that could win,
	// or its price was above those that the record keeps.
	LostNotPriced = "not_priced"
	// ExcludedSeveral: the record says only that candidates like it were
	// excluded, for several reasons.
	ExcludedSeveral = "several"
	// LostRefused: it could be chosen, but for a budget or a tenant's share nobody
	// was.
	LostRefused = "refused"
)

// maxParts bounds the decisions that one question takes again.
const maxParts = 5_000

// Part counts how a worker fared in the full entries that match, deciding
// again the newest ones. A record lists only candidates that mattered: one of the
// filter's pool that does not list the worker had it as a candidate too, if it
// was made when the worker was known. Worker and Limit of the filter are not
// heeded.
func (s *Store) Part(worker string, known time.Time, f Filter) Part {
	out := Part{LostBy: map[string]int{}, Excluded: map[string]int{}}
	pool := f.Pool
	f.Worker, f.Pool = "", ""
	var records []*Entry
	s.each(f, func(e *Entry) bool {
		if e.Full {
			records = append(records, e)
		}
		return len(records) < maxParts
	})
	// Deciding again takes its time; the store is not held meanwhile.
	var d placement.Decision
	for _, e := range records {
		at := listedAt(e, worker)
		took := at >= 0 || pool != "" && e.Pool == pool && !e.MadeAt.Before(known) && e.Record.Survey.Candidates > len(e.Record.Candidates)
		if !took || e.Record.Redecide(&d) != nil {
			continue
		}
		out.Considered++
		if d.Chosen >= 0 {
			out.EvenShare += 1 / float64(max(d.Survey.Candidates, 1))
		}
		switch {
		case at < 0:
			lost, excluded := unlisted(&e.Record.Survey, &d)
			if lost {
				out.LostBy[LostNotPriced]++
			} else {
				out.Excluded[excluded]++
			}
		case at == d.Chosen:
			out.Chosen++
		case !d.Terms[at].Placeable:
			out.Excluded[d.Terms[at].Reason.String()]++
		case d.Chosen < 0:
			out.LostBy[LostRefused]++
		default:
			out.LostBy[d.LostBy(at)]++
		}
	}
	return out
}

func listedAt(e *Entry, worker string) int {
	return slices.IndexFunc(e.Record.Candidates, func(c placement.Candidate) bool { return c.Name == worker })
}

// Lists reports whether the record of an entry lists a worker.
func Lists(e *Entry, worker string) bool { return listedAt(e, worker) >= 0 }

// NewestFull is the newest entry of a pool with its inputs; nil: none. It must
// not be changed.
func (s *Store) NewestFull(pool string) (newest *Entry) {
	s.each(Filter{Pool: pool}, func(e *Entry) bool {
		if e.Full {
			newest = e
		}
		return newest == nil
	})
	return newest
}

// unlisted says why a record does not list a candidate: its price, or what
// excluded it if no placeable candidate is missing.
func unlisted(all *placement.Survey, d *placement.Decision) (lost bool, excluded string) {
	missing, placeable := all.Reasons, all.Placeable
	for i := range d.Terms {
		missing[d.Terms[i].Reason]--
		if d.Terms[i].Placeable {
			placeable--
		}
	}
	if placeable > 0 {
		return true, ""
	}
	for reason, n := range missing {
		switch {
		case n <= 0 || placement.Reason(reason) == placement.ReasonNone:
		case excluded != "":
			return false, ExcludedSeveral
		default:
			excluded = placement.Reason(reason).String()
		}
	}
	return false, excluded
}
