// Package replay runs a recorded event stream of an engine and the requests
// recorded beside it through the parts that production uses: decoder, stream,
// block table, prefix stream and index. For each request it tells how many
// tokens Waypost would have expected the engine to reuse, and how many it did.
//
// It is a tool for those whose hits look wrong, and Waypost's own test of truth.
package replay
