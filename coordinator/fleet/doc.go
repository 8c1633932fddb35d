// Package fleet is a coordinator's merged view of all workers and its ledger
// of claims: who exists, what was last reported and how old that is, which
// engine process is meant, what operators want of it, and which placements,
// made here or told by peers, are not yet in a report.
//
// Freshness is the receiver's: reports carry the sender's monotonic time, a
// lane keeps the windowed minimum of (receive − send), and what exceeds it is
// lateness. A report or claim that names an engine process which is over is
// fenced. A host whose lane is lost is away: its workers stay, at an age that
// grows, until it comes back or has been away for a day; a worker that its agent
// no longer lists is kept for ten minutes.
//
// Each worker has a dense slot and an immutable snapshot (placement.Worker)
// that is replaced as a whole whenever anything about it changes, so that
// taking candidates is a copy of pointers and a decision record needs no
// other copy. Claims are folded into the snapshot's waiting work the moment
// they are made: the own choices count at once, those of peers when they tell.
//
// A claim counts on top of a worker's report while the report's echo does not
// cover it, and no longer than 300 ms into reports that never will: the lane of
// its coordinator is broken then. Claims are offered to the worker's agent from
// its echo, after it has spoken first on a lane, and again when one is missing;
// marks and placements are sent once. Of two coordinators that placed the same
// attempt of a request the one with the smaller process mark keeps it.
//
// The package is a state machine: it takes the time as an argument, starts no
// goroutine and does no I/O. All methods are safe for concurrent use.
package fleet
