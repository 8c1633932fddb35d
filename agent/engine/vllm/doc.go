// Package vllm reads vLLM engines: block events and their replay over ZeroMQ,
// counters, facts and tokenizer over HTTP.
//
// Decoder, Stream and the metrics scanner are pure; Adapter is the shell around
// them. Everything is recognised by its shape: releases differ in layouts, not
// in names.
package vllm
