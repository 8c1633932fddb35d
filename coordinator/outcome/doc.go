// Package outcome judges what became of a placement. Classify gives every
// outcome exactly one class; Worker learns from outcomes when to ask for a
// worker's cache view again, and has a breaker for one that fails fast. How far
// predictions about a worker can be believed is learnt by its agent.
//
// Three sources tell what happened, in rank: a front door of ours that read
// the engine's answer, the caller's report, and what the worker's agent
// concludes from the blocks the engine stored. A higher source replaces a
// lower one.
//
// The package is pure: time is an argument and nothing is logged.
package outcome
