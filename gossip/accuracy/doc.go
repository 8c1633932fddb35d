// Package accuracy is how right predictions about one worker were: the trust in
// what its cache is believed to hold, a constant bias of its engine, and the
// error of each term of the price. Coordinators observe, the worker's agent
// folds what all of them saw and reports it back, so that all agree and a
// restart forgets nothing.
//
// The package is pure: time is an argument in ms on any monotonic clock.
package accuracy
