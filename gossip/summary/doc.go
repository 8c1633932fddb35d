// Package summary tells coordinators which prefixes an engine rank holds.
//
// An [Encoder] listens to the block table of one rank (see [Listener]) and
// yields one stream of frames, the same for all coordinators: deltas of prefix
// keys in consecutive order, a replay of the latest ones, and snapshots. A
// [Decoder] applies the stream of one rank to a [Sink], notices lost frames and
// disagreement, and swaps snapshots in without taking away what both sides
// still agree on.
//
// Named are all checkpoints (multiples of prefix.ChunkTokens) on unbroken
// prefixes, and between them the known ends: where prompts ended, where
// prefixes fork, and where they stop. FORMAT.md states the frames.
package summary
