// Package registry is the pure state machine of what operators want: the fleet
// file with its topology, pools, tenants and policy, cordons, the catalogue of
// coordinators, the feature level and an audit trail. Raft replicates its
// commands; equal commands in equal order give equal states on every
// coordinator, byte for byte.
//
// A State is an immutable value. Apply returns the next one and shares with it
// whatever did not change, so a reader keeps a State for as long as it likes
// without a lock.
//
// # What every coordinator must agree on
//
// Whether a command is accepted may depend on nothing but the State and the
// command: no clock, no random numbers, no map order. Who proposes a command
// stamps it with time, author and a request id; a command whose id was seen
// lately gets the first answer again, so an unknown outcome is retried with the
// same bytes. The text of a fleet file is checked in full by Encode, before it
// enters the log. Apply checks its size and base version only, because two
// versions of the program may judge the same text differently while a fleet is
// being upgraded, and one that refuses what the other takes would be lost for
// good. The typed Fleet is derived from the stored text; a coordinator that
// cannot read it says so (FleetProblem) and must not place.
//
// The limits that Apply enforces are part of this agreement: a change of one of
// them, and a new kind of command, take effect only from a higher feature level
// on. A kind that this version does not know is refused and changes nothing.
//
// The package uses one library, a TOML parser, which does no I/O.
package registry
