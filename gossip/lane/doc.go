// Package lane is the stream between a host and a coordinator: one long-lived
// gRPC stream per pair, over mutual TLS, dialled by the agent.
//
// A [Dialer] keeps one [Lane] to each coordinator it knows of. A LOAD is built
// at the moment of writing and never queued: while the last one has not reached
// the socket no other is built. Other frames pass a small bounded queue. A lane
// that cannot write for two seconds is closed, which the other side sees as
// silence; it comes back with a growing, jittered pause.
//
// A [Server] keeps one [Session] per host. Of the lanes of one agent process the
// first stays for as long as the process holds it open, so that two addresses of
// one coordinator do not take turns; one that only looks open from here yields to
// the next. A second live agent under the same host identity is a conflict: it is
// shown, and the first keeps serving.
//
// Freshness is by the receiver. Every frame carries the sender's monotonic
// clock; the excess of (receive − send) over its windowed minimum is lateness,
// and the lane adds it to the ages inside the frame before anyone reads them.
// Wall clocks decide nothing.
package lane
