// Package views keeps what a coordinator knows of each worker's cache. A stream
// of prefix frames feeds the index; what is missing of it is pulled, from other
// coordinators first and then from the worker's agent; what predictions belie is
// read anew, and what an operator doubts is compared with the agent's own set.
// While a lane is down, sketches from the mesh stand in. The fleet is told how
// good and how old each view is.
package views
