// Package prefixindex tells which workers hold how much of a prompt.
//
// # What is kept
//
// One table maps index keys (see gossip/summary) to sets of workers: what
// streams list, and what open claims predict. An entry is one word of 8 bytes as
// long as one worker holds the key, which is the rule; sets of two stand in a
// second word, larger ones in lists or bitmaps. The entry of a checkpoint also
// tells at which offsets after it known points lie. Two small tables beside it
// have the exceptions: who is listed by predictions only, and whose match may
// end elsewhere or lies in host memory or on disk (extents).
//
// What a worker's stream lists is counted, so that two of its own keys that
// collide are two. Predictions are counted apart and live exactly as long as
// their claim; for a worker whose stream tells nothing (see [Index.Retain]) they
// stay, least recently used last, as long as they fit its cache.
//
// # Search
//
// Whoever holds a checkpoint holds those before it. A [Searcher] reads the first
// and the last checkpoint of the prompt and bisects between those whose sets
// differ; who is not in a set is not looked for in later ones. Where workers
// leave the prompt, known points of that chunk are tried: all of them where the
// last workers leave, the two most listed (hints) elsewhere.
//
// A match is never longer than what the worker's stream lists, or claims
// predict, but for collisions of fingerprints: 2^-16 for each known point tried
// that belongs to another text (2^-24 before the first checkpoint), which adds
// less than a chunk; 2^-16 for each other continuation at the first checkpoint
// beyond (2^-32 at the first of all); 2^-40 for any two keys. It is shorter where
// the prompt leaves what a worker holds between its known points, or, without
// [Searcher.Exact], at a point that is no hint: in both cases by less than a
// chunk. A guess at that rest is told apart (LikelyTokens).
//
// # Concurrency
//
// Changes are made one at a time under a lock; searches take none. A search
// reads each entry as it was at one moment, by the sequence lock of its segment
// of the table, and starts again where it could have seen two halves; one that is
// disturbed time and again takes the lock after all. The calls
// of a frame are applied in batches, so a large snapshot delays other changes
// little, and searches not at all. They are put into an order in which a search
// beside them finds no less than it would both before and after the frame. What a
// frame lists that clears the cache is shown at once when it is whole.
//
// A worker that is dropped, or whose cache is cleared, gets a new number in the
// sets at once; the old one is taken out of them little by little, with later
// changes.
package prefixindex
