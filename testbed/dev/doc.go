// Package dev runs the whole system on loopback in one process: emulated
// engines, an agent for each, one or three coordinators with real Raft, real
// gossip and real sockets, and a conversation workload from a real trace. A
// second, equal set of engines takes the same arrivals by round robin, so that
// the difference can be seen and not only claimed.
package dev
