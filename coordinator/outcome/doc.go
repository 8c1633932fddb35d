// Package outcome judges what became of a placement. Classify gives every
// outcome exactly one class; Worker learns from outcomes how far predictions
// about one worker can be believed: the error per term with its bias, trust in
// the cache view, when to ask for the view again, and a breaker for a worker
// that fails fast.
//
// Three sources tell what happened, in rank: a front door of ours that read
// the engine's answer, the caller's report, and what the worker's agent
// concludes from the blocks the engine stored. A higher source replaces a
// lower one.
//
// The package is pure: time is an argument and nothing is logged.
package outcome
