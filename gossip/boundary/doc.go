// Package boundary is what must agree for the same text to mean the same
// blocks: the hashing boundary of an engine as a vector of measured parts.
//
// An agent asks its engine for the token ids of fixed probes and publishes one
// keyed hash per token. A coordinator compares the vectors of a pool's workers
// part by part: raw text, completions, chat, and the rule by which adapters and
// salts enter. It finds the first probe and token that differ, has a difference
// measured again on both sides before it counts, and takes prefix credit only
// then. Nothing is unknown by default: what was not measured differs from
// nothing.
package boundary
