// Package vllm reads vLLM engines: block events and their replay over ZeroMQ,
// counters, facts and tokenizer over HTTP. Releases differ in layouts, not in
// names, so everything is recognised by its shape.
package vllm
