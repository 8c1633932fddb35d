// Package cluster runs the real parts of Waypost on loopback in one process:
// emulated engines, an agent for each, coordinators with real Raft, gossip and
// sockets. Tests and `waypost dev` share it.
package cluster
