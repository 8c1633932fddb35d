// Package summary tells coordinators which prefixes an engine rank holds.
//
// An [Encoder] listens to the block table of one rank (see [Listener]) and
// yields one stream of frames, the same for all coordinators: the changes of a
// tree of runs in consecutive order, a replay of the latest frames, and
// snapshots. A [Decoder] applies the stream of one rank to an [IndexSink],
// notices lost frames and disagreement, and swaps snapshots in without taking
// away what both sides still agree on.
//
// A stream starts with a snapshot. Then the agent calls Encoder.Delta each
// second until it returns nil and sends every frame to every coordinator; a
// coordinator whose Decoder reports [Gap] or [DigestMismatch] asks for
// Encoder.Replay from what Decoder.Have says, or for Encoder.Snapshot.
//
// Named are all checkpoints (multiples of prefix.ChunkTokens) on unbroken
// prefixes, and between them the known ends: where prompts and answers ended,
// where prefixes fork, and where they stop. FORMAT.md states the frames, and
// testdata/index_vectors.txt has test vectors of index keys.
//
// [Sketch] is the little that the mesh spreads about a host while no lane is up,
// and [Agree] checks what two sides say of themselves in their hello.
package summary
