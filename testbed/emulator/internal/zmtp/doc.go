// Package zmtp is the server side of ZeroMQ's wire protocol (ZMTP 3.0 and 3.1,
// NULL mechanism, TCP) as far as an engine's event publisher needs it: a PUB
// socket that listens or connects, and a ROUTER socket that answers requests.
package zmtp
