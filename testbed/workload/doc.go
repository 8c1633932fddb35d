// Package workload makes request sequences for testbeds: arrivals, prompts as
// token ids with their real sharing, and answer lengths.
//
// Prompts are expanded only when asked for, so that a trace of a million
// requests fits into memory. The same options and seed give the same sequence.
package workload
