// Package enginefaults holds the agent's adapters against every fault of the
// emulator's library, and is "waypost testbed engine" and "waypost testbed
// faults".
package enginefaults
