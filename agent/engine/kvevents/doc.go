// Package kvevents reads KV cache events as engines publish them over ZeroMQ:
// msgpack batches, numbered by each publisher, with a replay of the latest.
//
// Decoder and Stream are pure. A decoder recognises every released layout by
// its shape, for engines differ in layouts from release to release. A Stream
// orders live and replayed batches of one publisher, finds gaps, restarts and
// losses, and says how much of the cache the events show. Reader is the shell
// around them: the sockets of one rank. What differs from engine to engine is
// in Dialect.
package kvevents
