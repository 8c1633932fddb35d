// Package ledger is what agents and coordinators agree on about waiting work:
// claims and how they travel, the contiguous echo of what an agent took in, the
// step model that prices an engine step and what evidence teaches about it, the
// replay of a worker's steps, the fold that carries its waiting time forward
// claim by claim, and the fields of a load report.
//
// A claim is one placement as told to the chosen worker's agent and to other
// coordinators. Its identity is (coordinator process, worker, seq), seqs are
// dense. The agent takes claims in without a gap and echoes how far it came;
// what is above the echo counts on top of the report, what was lost is offered
// again from it. Ages stand in place of times between processes.
//
// The fold is the heart of it. A first-in-first-out engine that chunks
// prefills by a step budget is described by three numbers: F, when the
// prefill of the last known claim ends; K, how many tokens are in the last
// step that has not begun; and S, when that step begins. A new claim either
// joins the open step or starts behind F, so adding a claim costs a few
// additions and pricing a candidate costs no more, whatever the number of
// claims. The numbers equal a full replay of the list of claims; a property
// test shows it.
//
// All times are milliseconds on the caller's own monotonic clock. The package
// does no I/O, starts no goroutine and holds no clock. Values are plain;
// nothing here is safe for concurrent writing.
package ledger
