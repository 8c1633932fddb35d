// Package llamacpp tests Waypost against a real llama.cpp server with a tiny
// random model. WAYPOST_LLAMA_SERVER names the program llama-server, which finds
// its libraries beside itself, and WAYPOST_LLAMA_MODEL the model that
// testdata/mkgguf.py makes.
package llamacpp
