// Package enginetest is what tests of adapters share: an HTTP server that ends
// and comes back, event publishers on real sockets, and a sink that mirrors what
// it is told, as an agent does.
package enginetest
