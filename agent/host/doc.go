// Package host reads what the operating system says of a GPU host: CPUs, load,
// memory, disk, network interfaces, uptime and boot id, and which engine a
// process on a GPU belongs to.
//
// A [Collector] reads from given roots of /proc and /sys, so that tests read
// fixtures. Each fact is read by itself: one that cannot be read is unknown
// (nil), never zero, and does not keep the others from being read.
package host
