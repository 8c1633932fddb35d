// Package emulator is an inference engine without a model: on the wire it
// behaves like vLLM in everything that Waypost reads, and its time passes by a
// model of step times.
//
// It serves the OpenAI API (completions and chat, streamed or not, with cached
// tokens in the usage), /tokenize, /v1/models, /health, /version, /metrics,
// /server_info, /kv_event_sources, resets and sleep; publishes cache events on
// ZeroMQ with replay; and runs any number of data-parallel ranks behind one
// port. The cache and the scheduler are package core, whose agreement with the
// real engine is tested on recorded traffic.
//
// Text is one token per byte. A chat is rendered as
//
//	<|im_start|>ROLE\nCONTENT<|im_end|>\n
//
// for each message, after a message of role "tools" with the compact JSON of
// the tools if there are any, and before "<|im_start|>assistant\n" if a
// generation prompt is wanted. Answers depend on the prompt's tokens, the
// sample's number and nothing else.
//
// With Options.Transfer an engine reads what a named peer holds, over a side
// channel of its own, as the offloading connector does.
//
// Faults are methods of Engine, and an HTTP path if Options.AdminPath is set.
package emulator
