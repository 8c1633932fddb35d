// Package queue estimates the waiting work and the pace of one worker at its
// agent: from the claims of all coordinators, and from evidence of what became
// of them.
//
// The claims size the queue, evidence drains it. Marks of the issuers, blocks
// that the engine stores under a claim's prefix keys, and counters that are
// sampled now and then say that a prefill runs, is over, or still waits; each
// fact applies at its own time, not when it arrives. The newest fact is the
// anchor: the worker's steps are replayed from it over the open claims up to
// the moment of a report, which tells when the last of them ends and how many
// tokens the last step that has not begun holds. Any kind of evidence may be
// missing. Without all of them the claims drain by time alone, and the report
// says so.
//
// Counters are used once the lag of what they say is learnt: how long it takes
// until a claim shows up in them. Of the claims that a reading must know, the
// newest as many as wait are waiting and the older ones were admitted; what
// waits beyond them is foreign and has the size of a mean claim. A worker's
// speed is learnt from the time that prefills take; see ledger.Speeds. What the
// engine does not tell stays unknown in the report; it is never taken as zero.
//
// Counters see a foreign prompt late or never. Stores that no claim explains
// show it at the end of each of its steps: what is open was not computed
// meanwhile, and a full step means that more of it follows.
//
// Of streams whose end nobody tells, the report has how many are expected to go
// on: an answer may end with every token, its mean length is known or learnt.
//
// The state follows from the facts and not from the order they came in: claims
// and marks that are lost, doubled, late or out of order do no harm, and
// nothing outlives its time.
//
// An Estimator belongs to one goroutine and takes the time from its caller.
package queue
