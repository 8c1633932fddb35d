// Package sglang reads SGLang engines: events and their replay over ZeroMQ,
// load, facts and tokenizer over HTTP.
//
// SGLang tells the blocks of an answer when the request ends, and perhaps some
// milliseconds after the answer; its events never name an adapter; and its
// health route generates a token, so what tells of load tells of life too.
package sglang
