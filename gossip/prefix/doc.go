// Package prefix names prompt prefixes. It is what agents and coordinators must
// agree on, byte for byte: an agent computes keys from the token ids in its
// engine's events, a coordinator from the token ids of a request, and equal
// prefixes get equal keys whatever the engine's block size.
//
// Tokens are cut into chunks of [ChunkTokens]. A [Chain] value stands for the
// text up to a chunk border (a checkpoint) or up to a point inside a chunk; it
// depends on the token ids and on the [Mark]s of images and the like. A [Key] is
// what leaves the process: a keyed hash over the chain value, the depth and the
// [Domain] (served model, adapter, cache salt), so that observers without the
// [ClusterKey] learn nothing about content and one chain serves every domain.
// FORMAT.md states the format, and testdata/vectors.txt holds test vectors for
// other implementations.
package prefix
