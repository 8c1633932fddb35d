// Package slots is a pure replay of what a llama.cpp server keeps of the
// requests it is given: one token sequence per slot and, in host memory, whole
// sequences that slots have given up.
//
// The server publishes no events and never shows token ids, but what it keeps
// follows from its published rules and the requests in their order. The replay
// is told each request as prefix keys at every [ledger.PointTokens] tokens of its
// prompt, and its end; it tells a listener the prefixes that a new request
// could reuse, as blocks of [ledger.PointTokens] tokens whose chain values are the
// prefix keys themselves.
//
// A longest common prefix alone promises too much. What counts:
//
//   - a request goes to the idle slot that shares most of it, if that is more
//     than a tenth of its prompt, else to the least recently used one (of
//     those never used the last); what a busy slot holds is nobody's;
//   - a slot that would lose more than half of what it holds gives it to the
//     host cache first, and takes from there what fits the request better, in
//     the share kept and in the share found, if at least a quarter of it is
//     kept; what is taken is in the cache no more;
//   - the host cache lets go of what was given to it first; what continues an
//     entry replaces it, what an entry holds already is not given;
//   - a new request makes the server copy what idle slots hold to the host
//     cache and, when the slots share one KV buffer, empty them; a request that
//     names an empty slot takes nothing from the cache.
//
// What is told comes late, in another order than the server's, or never. The
// server's own page of its slots puts that right: the length of a prompt and of
// what a slot holds, and the name of its latest request, tell which of the known
// sequences is where. What nobody told of has a length only; it takes room, in a
// slot and in the host cache, and is never promised.
//
// Where requests come at once, what is promised is asked for after others that are
// still on their way: then only what they leave is shown, and nothing if there are
// more than slots and no host cache. An end and a beginning
// that are told in one order may have been in the other: what may be gone by that
// is shown no more until the server's word says that it is there.
//
// Without a host cache what a request overwrites is lost, and what it overwrites may
// depend on tokens between two points, or on which of two requests ended first. What
// it may be is shown no more until the server's page tells, or what the request
// reused. Where requests come at a fast pace, neither are as many of the slots least
// recently used as requests may be on their way.
//
// How much the host cache holds is not told over HTTP. Where it is not known from
// elsewhere it is learnt from reuse that was missing or not expected; where it
// is, from reuse that is missing again and again. Of generated tokens only the
// number is known, so a prefix ends with the prompt. A Replay is not safe for
// concurrent use.
package slots
