// Package oneport serves several protocols on one TCP port.
//
// With TLS the protocol is the one agreed by ALPN: "h2" is gRPC, "http/1.1" is
// HTTP, "waypost-raft/1" is Raft. HTTP/1.1 is preferred when a client offers
// both, because browsers and curl do and gRPC clients never offer it. In clear,
// for loopback only, the first bytes tell: the HTTP/2 preface is gRPC, a method
// and a space are HTTP, [RaftPreface] is Raft.
//
// A connection that has not shown its protocol yet is undecided. Undecided
// connections have a deadline and a bound; beyond the bound the oldest is
// closed, so that a stranger who opens connections and says nothing cannot keep
// others out, as those decide within milliseconds. Whoever speaks none of the
// protocols is closed and counted.
package oneport
