// Package profile emulates the engines besides vLLM on the wire: SGLang,
// TensorRT-LLM and llama.cpp's server, each with its own cache (a radix tree of
// runs of pages, a tree of blocks, slots with a host cache behind them), its
// events and its routes. What differs between versions is a switch in Options.
//
// The caches of SGLang and llama.cpp are tested on recordings of real ones: the
// same requests in the same order give the same cached tokens, hashes,
// removals and slot contents. TensorRT-LLM was never recorded: it is rebuilt
// from its documentation and checked against published hashes.
package profile
