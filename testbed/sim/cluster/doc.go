// Package cluster is Waypost in virtual time. Each worker has an agent with a
// queue.Estimator, each coordinator a fleet.Fleet and placement.Decide: what
// runs in production decides here as well. The package is the wiring between
// them: lanes, load reports, claims, marks and placements with their delays,
// and their faults.
//
// It knows of the engines what it is told: first tokens, ends, cache events
// and counters. Times are ms of virtual time.
package cluster
