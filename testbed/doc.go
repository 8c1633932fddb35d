// Package testbed holds what proves Waypost: emulated engines, workloads, the
// simulator, benchmarks and real parts, each in a folder of its own. The tests
// of this package itself guard the structure of the whole repository.
package testbed
