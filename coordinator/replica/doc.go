// Package replica keeps the registry equal on all coordinators: Raft around the
// pure state machine, with its log and snapshots on disk, its network, the
// membership of the cluster, and the way a change of intent takes to the leader.
//
// # Who votes
//
// The catalogue in the registry says which coordinators belong to the cluster;
// the leader makes the Raft configuration follow it, one step at a time. A new
// coordinator becomes a non-voter first. The number of voters is 1, 3 or 5 and
// never even on purpose: two voters would stop taking changes when either of
// them fails, one does so only when it fails itself. Non-voters that wish to
// vote are promoted in pairs, as soon as two of them have the whole log and
// answer; so the second coordinator of a fleet waits for the third. If the
// number becomes even, because a voter was removed or the second of a pair fell
// back, the leader promotes one more if one is ready, else makes one a
// non-voter. It never removes a coordinator that merely does not answer: that is
// the operator's to say.
//
// # What is durable
//
// A change is in the logs of a majority of voters before it is answered. Each
// coordinator also notes how far it has applied the log and starts from there,
// so that one that restarts without a leader in reach still has every cordon it
// had. A coordinator whose disk hangs stops speaking as the leader, so that
// another one takes over; a full disk refuses changes and does not end the
// process.
package replica
