// Package procnet reads the kernel's tables of listening TCP sockets, as the file
// system of processes shows them. Who holds a socket is told by its inode.
package procnet
