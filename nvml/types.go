package nvml

import "time"

// StateCode names a state of the GPU facts of a host.
type StateCode string

// The states. Only StateOK comes with current values.
const (
	// StateOK says that values are current.
	StateOK StateCode = "ok"
	// StateStarting says that the child has not answered yet.
	StateStarting StateCode = "starting"
	// StateNotBuilt says that the binary cannot load the driver library.
	StateNotBuilt StateCode = "not_built"
	// StateNoLibrary says that the driver library is not installed.
	StateNoLibrary StateCode = "no_library"
	// StateDriverNotLoaded says that the kernel driver is not loaded.
	StateDriverNotLoaded StateCode = "driver_not_loaded"
	// StateVersionMismatch says that library and kernel driver differ, as
	// after an upgrade without a restart.
	StateVersionMismatch StateCode = "version_mismatch"
	// StateNoPermission says that the user may not open the driver.
	StateNoPermission StateCode = "no_permission"
	// StateNoGPUs says that the driver works and lists no GPU.
	StateNoGPUs StateCode = "no_gpus"
	// StateFailed says that the driver failed in another way, or that the
	// child could not be started.
	StateFailed StateCode = "failed"
	// StateBlocked says that a driver call does not return, or that the child
	// is silent.
	StateBlocked StateCode = "nvml_blocked"
	// StateCrashed says that the child ended by itself.
	StateCrashed StateCode = "crashed"
	// StateStale says that the last values are too old to be used.
	StateStale StateCode = "stale"
)

// Status is a state with the sentence an operator reads.
type Status struct {
	Code StateCode `json:"code"`
	// Text is "ok", or why there are no GPU facts.
	Text string `json:"text"`
}

// Driver identifies the driver of a host. An empty version is unknown.
type Driver struct {
	// DriverVersion is the kernel driver's version.
	DriverVersion string `json:"driverVersion,omitempty"`
	// LibraryVersion is the version of the driver library.
	LibraryVersion string `json:"libraryVersion,omitempty"`
}

// Snapshot is one reading of all GPUs of a host.
type Snapshot struct {
	Driver Driver `json:"driver"`
	// TookMs is how long the reading took, ms.
	TookMs float64 `json:"tookMs"`
	// XidState is "ok" when Xid events arrive, or why they do not.
	XidState string `json:"xidState"`
	// GPUs are the GPUs by index.
	GPUs []GPU `json:"gpus"`
	// Calls are the driver calls made since the snapshot before, by name.
	Calls []CallTime `json:"calls,omitempty"`
	// Rebuild says why the library must be loaded anew; empty: it need not.
	Rebuild string `json:"rebuild,omitempty"`
}

// GPU is one GPU as the driver sees it. Nil and empty are unknown; Missing
// says why.
type GPU struct {
	Index    int    `json:"index"`
	UUID     string `json:"uuid,omitempty"`
	Name     string `json:"name,omitempty"`
	PCIBusID string `json:"pciBusId,omitempty"`
	// Lost says that the driver has lost the GPU: it fell off the bus or is
	// not listed any more.
	Lost bool `json:"lost,omitempty"`
	// ResetRequired says that the driver works with the GPU only after a reset.
	ResetRequired bool `json:"resetRequired,omitempty"`
	// MIG says whether the GPU is split into instances.
	MIG *bool `json:"mig,omitempty"`
	// Instances are those that the GPU is split into, by index; nil: it is not,
	// or that is unknown.
	Instances []Instance `json:"instances,omitempty"`

	MemoryTotalBytes *uint64 `json:"memoryTotalBytes,omitempty"`
	// MemoryUsedBytes is what processes hold. Drivers without the second
	// version of the query count the reserved bytes in.
	MemoryUsedBytes *uint64 `json:"memoryUsedBytes,omitempty"`
	MemoryFreeBytes *uint64 `json:"memoryFreeBytes,omitempty"`
	// MemoryReservedBytes is what the driver keeps for itself.
	MemoryReservedBytes *uint64 `json:"memoryReservedBytes,omitempty"`
	// UtilizationRatio is the share of time a kernel ran, 0 to 1.
	UtilizationRatio *float64 `json:"utilizationRatio,omitempty"`
	// TemperatureCelsius is the core temperature.
	TemperatureCelsius *float64 `json:"temperatureCelsius,omitempty"`
	SMClockMHz         *float64 `json:"smClockMHz,omitempty"`
	SMClockMaxMHz      *float64 `json:"smClockMaxMHz,omitempty"`
	// ThrottleReasons says why clocks are held down, in words; nil: unknown,
	// empty: they are not.
	ThrottleReasons []string `json:"throttleReasons"`
	PowerWatts      *float64 `json:"powerWatts,omitempty"`
	// ECCCorrected and ECCUncorrected count since the driver was loaded.
	ECCCorrected   *uint64 `json:"eccCorrected,omitempty"`
	ECCUncorrected *uint64 `json:"eccUncorrected,omitempty"`
	// RowRemapPending says that a memory row is replaced at the next reset.
	RowRemapPending *bool `json:"rowRemapPending,omitempty"`
	// RowRemapFailed says that a bad memory row could not be replaced.
	RowRemapFailed *bool `json:"rowRemapFailed,omitempty"`
	NVLinkUp       *int  `json:"nvlinkUp,omitempty"`
	NVLinkTotal    *int  `json:"nvlinkTotal,omitempty"`
	// PCIe is the link to the host; nil: unknown.
	PCIe *PCIeLink `json:"pcie,omitempty"`
	// NVLinkPeers are what the links lead to; nil: unknown.
	NVLinkPeers []LinkPeer `json:"nvlinkPeers,omitempty"`
	// Fabric is the state of the switches between GPUs; nil: there are none, or
	// that is unknown.
	Fabric *Fabric `json:"fabric,omitempty"`
	// Paths are the ways to the other GPUs of the host, by index; nil: unknown.
	Paths []Path `json:"paths,omitempty"`
	// Processes are those that hold memory, by pid, those on instances among
	// them; nil: unknown.
	Processes []Process `json:"processes"`
	// Missing tells per unknown field why it is unknown.
	Missing map[string]string `json:"missing,omitempty"`
}

// Process is one process on a GPU.
type Process struct {
	// PID is the process id in the host's namespace.
	PID uint32 `json:"pid"`
	// MemoryBytes is the GPU memory it holds; nil: unknown.
	MemoryBytes *uint64 `json:"memoryBytes,omitempty"`
}

// Instance is one part of a GPU that is split by MIG. How busy an instance is
// no driver tells: it has no such field.
type Instance struct {
	Index int    `json:"index"`
	UUID  string `json:"uuid,omitempty"`
	// Name is its product and profile, "NVIDIA H100 80GB HBM3 MIG 1g.10gb".
	Name string `json:"name,omitempty"`
	// MemoryTotalBytes is the instance's own, not the GPU's.
	MemoryTotalBytes *uint64 `json:"memoryTotalBytes,omitempty"`
	MemoryUsedBytes  *uint64 `json:"memoryUsedBytes,omitempty"`
	MemoryFreeBytes  *uint64 `json:"memoryFreeBytes,omitempty"`
	// Processes are those that hold its memory; nil: unknown.
	Processes []Process `json:"processes"`
	// Missing tells per unknown field why it is unknown.
	Missing map[string]string `json:"missing,omitempty"`
}

// What a link leads to.
const (
	PeerGPU    = "gpu"
	PeerSwitch = "switch"
	PeerCPU    = "cpu"
)

// LinkPeer is a device at the other end of NVLink links.
type LinkPeer struct {
	// Kind is gpu, switch or cpu; empty: unknown.
	Kind     string `json:"kind,omitempty"`
	PCIBusID string `json:"pciBusId,omitempty"`
	// Links is how many links lead there.
	Links int `json:"links"`
}

// The states of a Fabric.
const (
	FabricNotStarted = "not_started"
	FabricInProgress = "in_progress"
	FabricCompleted  = "completed"
)

// Fabric is how far a GPU has joined the switches between GPUs. Links may be
// active while it has not: they carry nothing then.
type Fabric struct {
	// State is not_started, in_progress or completed.
	State string `json:"state"`
	// Failure says in words what went wrong; empty: nothing.
	Failure string `json:"failure,omitempty"`
	// ClusterUUID and Clique tell GPUs that share a fabric over hosts; empty and
	// nil: unknown. Drivers were seen to report them wrongly.
	ClusterUUID string  `json:"clusterUuid,omitempty"`
	Clique      *uint32 `json:"clique,omitempty"`
	// DegradedBandwidth says that part of the links is out; nil: unknown.
	DegradedBandwidth *bool `json:"degradedBandwidth,omitempty"`
}

// Up says whether the fabric carries data.
func (f *Fabric) Up() bool { return f.State == FabricCompleted && f.Failure == "" }

// The nearest common ancestors of two GPUs on PCIe, from near to far.
const (
	AncestorBoard      = "board"
	AncestorSwitch     = "switch"
	AncestorSwitches   = "switches"
	AncestorHostBridge = "host_bridge"
	AncestorNUMANode   = "numa_node"
	AncestorSystem     = "system"
)

// Path is the way from one GPU to another of the host.
type Path struct {
	// To is the other GPU's index.
	To int `json:"to"`
	// NVLink says whether memory can be reached over NVLink; nil: unknown.
	NVLink *bool `json:"nvlink,omitempty"`
	// Ancestor is the nearest common ancestor on PCIe; empty: unknown.
	Ancestor string `json:"ancestor,omitempty"`
}

// PCIeLink is a link to the host: the highest generation that the GPU and its slot
// can do, which it lowers while it is idle, and its lanes.
type PCIeLink struct {
	Generation int `json:"generation"`
	Lanes      int `json:"lanes"`
}

// XidEvent is one GPU error as the driver reports it.
type XidEvent struct {
	// UUID names the GPU; empty: the driver did not say which.
	UUID string `json:"uuid,omitempty"`
	// Xid is the error's number.
	Xid uint32 `json:"xid"`
}

// Busy tells of a driver call that has not returned yet, or of none.
type Busy struct {
	// Call is the library function; empty: none is under way.
	Call string `json:"call,omitempty"`
	// GPU is the index the call is about; nil: none.
	GPU *int `json:"gpu,omitempty"`
	// ForMs is how long it has lasted, ms.
	ForMs float64 `json:"forMs"`
}

// CallTime sums up the calls of one library function.
type CallTime struct {
	Call  string `json:"call"`
	Count uint64 `json:"count"`
	// SumMs is the time all of them took together, ms.
	SumMs float64 `json:"sumMs"`
}

// View is what is known of a host's GPUs at one moment.
type View struct {
	Status Status
	// Since is how long the host has been in this state.
	Since time.Duration
	// Age is the age of the values; nil: there never were any.
	Age *time.Duration
	// Driver is the driver as last seen.
	Driver Driver
	// XidState is "ok" when Xid errors arrive, from the driver library or the
	// kernel's log, or why the library tells none.
	XidState string
	// KernelLogState is "ok" when Xid errors in the kernel's log are read, or why
	// they are not.
	KernelLogState string
	// Devices are the GPUs ever seen in this life of the agent, by index.
	// Unless Status is StateOK only what cannot change is set in them.
	Devices []Device
}

// Device is a GPU with what was seen of it over time.
type Device struct {
	GPU
	// Xids are the errors seen, the newest last, one entry per number.
	Xids []XidSeen
	// LinksExpected is how many NVLink links should be up: the most ever seen
	// here, or on its equals of this host while some are up here; nil: unknown.
	LinksExpected *int
	// FrozenFor is how long all readings have stood still, beyond what a
	// working GPU does; 0: they move. The values are then unknown.
	FrozenFor time.Duration
}

// XidSeen sums up the events of one Xid number on one GPU.
type XidSeen struct {
	Xid   uint32
	Count uint64
	// Age is the time since the newest of them.
	Age time.Duration
	// Acknowledged says that an operator has dealt with it since.
	Acknowledged bool
}
