// Package api serves the placement and operator API of a coordinator: gRPC and
// the same messages as JSON over HTTP, on one port. It knows who may ask what
// and how errors look; what the answers are, the services it is given know.
package api
