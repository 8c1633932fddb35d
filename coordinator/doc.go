// Package coordinator is the service that answers placements: Raft holds what
// operators want, lanes bring what agents see, and the pure packages below
// decide. Its root is wiring only.
package coordinator
