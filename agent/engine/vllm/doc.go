// Package vllm reads vLLM engines: block events and their replay over ZeroMQ,
// counters, facts and tokenizer over HTTP. Releases differ in layouts, not in
// names, so everything is recognised by its shape.
//
// What a connector of the release keeps in host memory is credited where its events
// tell of both ends there, see readsHostTier. For hybrid models they do not tell
// enough: a prefix is reused only with the last blocks of each window, and which of
// those are in host memory no event says. Nothing there is credited then, and
// workers NAME says so.
package vllm
