// Package ledger is what agents and coordinators agree on about waiting work:
// the step model that prices an engine step, the fold that carries a worker's
// waiting time forward claim by claim, the fields of a load report, and the
// words for claims and marks.
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
