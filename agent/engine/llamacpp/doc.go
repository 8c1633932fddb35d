// Package llamacpp reads one llama.cpp server (llama-server): its slots, its
// counters and its facts. The server publishes no KV events; what it keeps is
// followed by the requests that were placed on it, see the package slots, and
// checked against the lengths that /slots tells.
package llamacpp
