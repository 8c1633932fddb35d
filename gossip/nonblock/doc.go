// Package nonblock reads and writes TCP connections without telling the Go
// scheduler of each system call.
//
// A socket in non-blocking mode never keeps a thread: the call returns at once,
// with EAGAIN if there is nothing to do. The runtime does not know that and takes
// every read and write for a call that may block. Where the process was idle
// before, it wakes its monitor thread with the first one, which then looks every
// 20 µs for a thread that is stuck: a process that wakes some hundred times a
// second for small messages wakes a thousand times a second more for the monitor,
// which cost an agent a fifth of its processor time. Calls made by a [Conn] are
// raw, so that the monitor sleeps on.
//
// A [Coalescer] goes on from there: while many connections have many messages, it
// reads all of them on the ticks of one timer.
//
// Elsewhere than on Linux connections stay as they are.
package nonblock
