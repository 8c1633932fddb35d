// Package transfers is what a coordinator knows of moving saved KV between workers:
// the ways that the fleet file gives, the transfers that were asked for and share
// them, what those that ended tell of a link's bandwidth, and the pairs that are
// switched off because engines did not do what they were asked. It is pure: times
// are given, and what is seen is told to others by its caller.
package transfers
