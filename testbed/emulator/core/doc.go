// Package core is the inside of an emulated inference engine: a KV block pool
// with prefix caching and a scheduler that works in steps, with the semantics
// of vLLM's v1 engine (seen on 0.32.0) for one attention group.
//
// It has no goroutines, no clock and no I/O. The caller adds requests, calls
// Schedule, lets the step's duration pass on whatever clock it keeps, and
// calls Finish, which returns the generated tokens and the cache events that
// the engine would publish. The same inputs give the same outputs.
//
// What it keeps exactly, because consumers of the events depend on it:
//
//   - only full blocks are cached, at the moment the step is scheduled, and the
//     last generated token never is: floor((prompt+generated-1)/block) blocks;
//   - a hit covers whole blocks and at most floor((n-1)/block)*block tokens, so
//     a prompt of exactly k blocks computes and announces block k again, as a
//     second physical copy;
//   - free blocks are reused by time of release, inside one request the tail
//     first, and a block keeps its hash until it is taken for something else;
//   - one removal per physical copy, before the stores of the same request;
//   - a reset is announced with the next step.
package core
