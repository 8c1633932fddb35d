// Package discover finds the inference engines that run on a host. It reads the
// process table only: command lines, owners, control groups and listening
// sockets, and of an engine the settings in its environment and in the file that
// its command line names. It opens no connection and needs no access to a
// container runtime; of keys it keeps that there is one. What it may not read
// makes it say so and match by command line and port instead.
package discover
