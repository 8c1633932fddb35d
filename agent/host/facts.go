package host

import "time"

// Facts is what the operating system says of a host. Nil and empty are unknown.
type Facts struct {
	// CPUs is the number of logical CPUs that are online.
	CPUs *int
	// Load1M is the load average over one minute.
	Load1M *float64
	// MemoryTotalBytes and MemoryAvailableBytes are of main memory; available
	// is what a new program may take without swapping.
	MemoryTotalBytes     *uint64
	MemoryAvailableBytes *uint64
	// DiskFreeBytes is what an ordinary user may still write to the file
	// system of the configured path.
	DiskFreeBytes *uint64
	// Uptime is the time since boot.
	Uptime *time.Duration
	// BootID is another one after each boot.
	BootID string
	// Interfaces are those that are up and have an address another host can
	// reach, by name; nil: unknown.
	Interfaces []Interface
	// Missing tells per unknown fact why it is unknown.
	Missing map[string]string
}

// Interface is one network interface.
type Interface struct {
	Name string
	// Addresses are in CIDR form, without loopback and link-local ones.
	Addresses []string
	// BitsPerSec is the line rate; nil: unknown, as for virtual interfaces.
	BitsPerSec *float64
	// MTUBytes is the maximum transmission unit.
	MTUBytes *int
	// NUMANode is the node it hangs on; nil: unknown, as in many virtual machines.
	NUMANode *int
}
