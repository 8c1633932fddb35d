// Package discover finds the inference engines that run on a host. It reads the
// process table only: command lines, owners, control groups and listening
// sockets. It opens no connection, reads no environment and needs no access to a
// container runtime. What it may not read makes it say so and match by command
// line and port instead.
package discover
