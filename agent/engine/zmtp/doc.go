// Package zmtp is a client of ZMTP 3.0, the protocol of ZeroMQ on TCP, for
// what engines publish: a SUB socket that connects to a publisher or lets
// publishers connect to it, and a DEALER socket that asks for a replay. The
// only mechanism is NULL (no authentication, no encryption), because engines
// offer no other.
//
// # Receiving
//
// Recv pulls: it reads from the connection on the caller's goroutine, so a
// caller that stops calling it stops the peer by TCP back-pressure. Nothing
// is queued here beyond one read buffer of 64 KiB and one message. Call it in
// a loop of its own; a peer that sends heartbeats is answered only inside
// Recv.
//
//	for {
//		frames, err := sub.Recv(ctx)
//		var connected *zmtp.Connected
//		switch {
//		case err == nil:
//			handle(sub.Conn(), frames)
//		case errors.As(err, &connected):
//			resynchronise() // what was published before is not repeated
//		case zmtp.IsNotice(err):
//			log(err) // lost or failed; the socket goes on by itself
//		default:
//			return err // ctx ended or the socket was closed
//		}
//	}
//
// # Connections end
//
// A publisher keeps nothing for a subscriber that is away, so every change of
// connection is told to the caller: Recv returns *Connected, *Disconnected or
// *ConnectFailed once for each and goes on at the next call, after a back-off
// with jitter where it dials. A publisher also drops what it sends while the
// subscription is still on its way, so *Connected is no promise that the next
// number is the first one missed: compare sequence numbers with the replay.
//
// # Hostile peers
//
// Frames, messages, parts, commands and publishers are limited, lengths are
// believed only as far as bytes arrived, the handshake has a deadline, and a
// stranger on the port gives an error that says what it looks like.
package zmtp
