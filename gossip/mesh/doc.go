// Package mesh is the gossip membership of a fleet: who exists, where, in which
// role, since when, and one small sketch per member. It runs on memberlist with
// a keyring; a process is a member.
//
// # Member list
//
// The list is our own. memberlist's callbacks run under its lock, so they copy
// what they are told into a bounded queue that one goroutine takes in; when the
// queue overflows the list is read whole. memberlist tells of joins, updates and
// deaths, but neither of suspicion nor whether a death was a leave. Both are in
// the state that it sends to a peer it joins, and only there. So the mesh joins
// itself at intervals, over a connection that ends in memory, and reads that
// state in the merge callback, which then refuses the merge: the library's own
// answer, by its public interface, with no effect on it. Suspicion shows within
// a second (a few seconds in fleets of a thousand).
//
// # What the mesh is for
//
// It is a hint: it finds coordinators and shows people who is there. The key
// proves that a sender belongs to the fleet, not which member it is, so nothing
// that decides placements is taken from it. It works with no coordinator alive,
// and it keeps trying to be whole: peers are remembered in a file and tried for
// ever, with growing pauses while alone and every few minutes otherwise, because
// two halves that took each other for dead never meet again by themselves.
//
// # Link probes
//
// The way to another member can be measured through the same port, once per word
// that a coordinator gave both ends. It carries zeros in clear and is never begun
// by the mesh itself.
//
// # Bounds
//
// Members, addresses refused, queues, sketches and inbound streams are bounded,
// as are the bytes that streams may hold before they have shown a key. Messages
// of the library are logged at most once a minute per kind.
package mesh
