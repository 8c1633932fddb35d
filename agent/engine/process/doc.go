// Package process finds the process of this host that listens on a port and
// reads how it was started: what an engine does not tell over HTTP is often a
// flag of its command line. Everything is best effort: without the rights to
// look, nothing is known.
package process
