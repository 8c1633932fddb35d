//go:build linux && cgo && nvml

package nvml

import (
	"errors"
	"fmt"
	"time"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
)

// Built says whether this binary can load the driver library.
const Built = true

// librarySource loads the driver library from path; empty: as the loader finds
// it. One process can load one library once: its functions stay bound.
func librarySource(path string) Source { return &libraryFile{path: path} }

type libraryFile struct{ path string }

// Open initializes the library first of all: any other call before that ends
// the process.
func (f *libraryFile) Open(log *CallLog) (Session, error) {
	var options []gonvml.LibraryOption
	if f.path != "" {
		options = append(options, gonvml.WithLibraryPath(f.path))
	}
	s := &librarySession{lib: gonvml.New(options...), log: log, found: map[string]bool{}}
	log.Begin("nvmlInit", -1, time.Now())
	code := int(s.lib.Init())
	log.End(time.Now())
	if code != codeSuccess {
		return nil, &StatusError{initStatus(code, f.path)}
	}
	if err := s.list(); err != nil {
		return nil, err
	}
	s.register()
	return s, nil
}

type librarySession struct {
	lib     gonvml.Interface
	log     *CallLog
	found   map[string]bool // library functions looked up so far
	driver  Driver
	devices []*libraryDevice
	// What follows is for WaitXid only, once Open has returned.
	events    gonvml.EventSet
	eventsErr error
	byHandle  map[gonvml.Device]string
}

// libraryDevice is a GPU with what need not be read again.
type libraryDevice struct {
	handle gonvml.Device // nil: the driver gave none
	fixed  GPU
	links  []int
	wasOK  bool // it could be read once in this session
}

// has says whether the loaded library has the function name. Calling one that
// it lacks ends the process.
func (s *librarySession) has(name string) bool {
	has, known := s.found[name]
	if !known {
		has = s.lib.Extensions().LookupSymbol(name) == nil
		s.found[name] = has
	}
	return has
}

// call calls f, which uses one of the functions names as the binding chooses,
// if the library has one of them.
func (s *librarySession) call(gpu int, f func() gonvml.Return, names ...string) int {
	for _, name := range names {
		if s.has(name) {
			s.log.Begin(name, gpu, time.Now())
			code := f()
			s.log.End(time.Now())
			return int(code)
		}
	}
	return codeFunctionNotFound
}

// list finds the GPUs and reads what does not change.
func (s *librarySession) list() error {
	s.call(-1, func() (r gonvml.Return) {
		s.driver.DriverVersion, r = s.lib.SystemGetDriverVersion()
		return r
	}, "nvmlSystemGetDriverVersion")
	s.call(-1, func() (r gonvml.Return) {
		s.driver.LibraryVersion, r = s.lib.SystemGetNVMLVersion()
		return r
	}, "nvmlSystemGetNVMLVersion")
	var count int
	code := s.call(-1, func() (r gonvml.Return) {
		count, r = s.lib.DeviceGetCount()
		return r
	}, "nvmlDeviceGetCount_v2", "nvmlDeviceGetCount")
	if code != codeSuccess {
		return fmt.Errorf("NVML cannot list GPUs: %s", wordsOf(code))
	}
	s.byHandle = map[gonvml.Device]string{}
	for i := range min(count, maxGPUs) {
		d := s.open(i)
		s.devices = append(s.devices, d)
		if d.handle != nil {
			s.byHandle[d.handle] = d.fixed.UUID
		}
	}
	for _, d := range s.devices {
		if d.handle != nil {
			s.findPeers(d)
			s.findPaths(d)
		}
	}
	return nil
}

func (s *librarySession) open(i int) *libraryDevice {
	d := &libraryDevice{fixed: GPU{Index: i}}
	g := &d.fixed
	var handle gonvml.Device
	code := s.call(i, func() (r gonvml.Return) {
		handle, r = s.lib.DeviceGetHandleByIndex(i)
		return r
	}, "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetHandleByIndex")
	if code != codeSuccess {
		g.note("handle", code)
		return d
	}
	d.handle = handle
	text := func(field, name string, get func() (string, gonvml.Return)) string {
		var v string
		code := s.call(i, func() (r gonvml.Return) { v, r = get(); return r }, name)
		if code != codeSuccess {
			g.note(field, code)
			return ""
		}
		return cut(v)
	}
	g.UUID = text("uuid", "nvmlDeviceGetUUID", handle.GetUUID)
	g.Name = text("name", "nvmlDeviceGetName", handle.GetName)
	var pci gonvml.PciInfo
	code = s.call(i, func() (r gonvml.Return) { pci, r = handle.GetPciInfo(); return r },
		"nvmlDeviceGetPciInfo_v3", "nvmlDeviceGetPciInfo_v2", "nvmlDeviceGetPciInfo")
	if code == codeSuccess {
		g.PCIBusID = busID(&pci)
	} else {
		g.note("pciBusId", code)
	}
	g.SMClockMaxMHz = s.clock(d, g, "smClockMaxMHz", "nvmlDeviceGetMaxClockInfo", handle.GetMaxClockInfo)
	s.findHostLink(d)
	s.findLinks(d)
	return d
}

func busID(pci *gonvml.PciInfo) string {
	if id := cString(pci.BusId[:]); id != "" {
		return id
	}
	return cString(pci.BusIdLegacy[:])
}

func cString(b []int8) string {
	var s []byte
	for _, c := range b {
		if c == 0 {
			break
		}
		s = append(s, byte(c))
	}
	return string(s)
}

// findHostLink finds the link to the host. A link that has fewer lanes than it could
// have stays so, while its generation rises when it is used.
func (s *librarySession) findHostLink(d *libraryDevice) {
	var l PCIeLink
	code := s.call(d.fixed.Index, func() (r gonvml.Return) { l.Generation, r = d.handle.GetMaxPcieLinkGeneration(); return r },
		"nvmlDeviceGetMaxPcieLinkGeneration")
	if code == codeSuccess {
		code = s.call(d.fixed.Index, func() (r gonvml.Return) { l.Lanes, r = d.handle.GetCurrPcieLinkWidth(); return r },
			"nvmlDeviceGetCurrPcieLinkWidth")
	}
	switch {
	case code != codeSuccess:
		d.fixed.note("pcie", code)
	case l.Generation < 1 || l.Lanes < 1:
		d.fixed.miss("pcie", fmt.Sprintf("generation %d with %d lanes", l.Generation, l.Lanes))
	default:
		d.fixed.PCIe = &l
	}
}

// findLinks finds the NVLink links that the GPU has.
func (s *librarySession) findLinks(d *libraryDevice) {
	code := codeSuccess
	for link := range gonvml.NVLINK_MAX_LINKS {
		_, c := s.linkUp(d, link)
		if c == codeSuccess {
			d.links = append(d.links, link)
		} else if link == 0 {
			code = c
		}
	}
	if len(d.links) > 0 {
		d.fixed.NVLinkTotal = new(len(d.links))
	} else {
		d.fixed.note("nvlinkTotal", code)
	}
}

func (s *librarySession) linkUp(d *libraryDevice, link int) (bool, int) {
	var state gonvml.EnableState
	code := s.call(d.fixed.Index, func() (r gonvml.Return) {
		state, r = d.handle.GetNvLinkState(link)
		return r
	}, "nvmlDeviceGetNvLinkState")
	return state == gonvml.FEATURE_ENABLED, code
}

// findPeers finds what the links lead to.
func (s *librarySession) findPeers(d *libraryDevice) {
	counts := map[LinkPeer]int{}
	answered, last := false, codeSuccess
	for _, link := range d.links {
		var p LinkPeer
		var kind gonvml.IntNvLinkDeviceType
		code := s.call(d.fixed.Index, func() (r gonvml.Return) { kind, r = d.handle.GetNvLinkRemoteDeviceType(link); return r },
			"nvmlDeviceGetNvLinkRemoteDeviceType")
		if code == codeSuccess {
			p.Kind = peerKind(int(kind))
		}
		var pci gonvml.PciInfo
		last = s.call(d.fixed.Index, func() (r gonvml.Return) { pci, r = d.handle.GetNvLinkRemotePciInfo(link); return r },
			"nvmlDeviceGetNvLinkRemotePciInfo_v2", "nvmlDeviceGetNvLinkRemotePciInfo")
		if last == codeSuccess {
			p.PCIBusID = busID(&pci)
		}
		if code == codeSuccess || last == codeSuccess {
			answered = true
			counts[p]++
		}
	}
	if !answered && len(d.links) > 0 {
		d.fixed.note("nvlinkPeers", last)
	}
	d.fixed.NVLinkPeers = peersOf(counts)
}

// findPaths finds how near the other GPUs are.
func (s *librarySession) findPaths(d *libraryDevice) {
	last := codeSuccess
	for _, o := range s.devices {
		if o == d || o.handle == nil {
			continue
		}
		p := Path{To: o.fixed.Index}
		var status gonvml.GpuP2PStatus
		code := s.call(d.fixed.Index, func() (r gonvml.Return) {
			status, r = d.handle.GetP2PStatus(o.handle, gonvml.P2P_CAPS_INDEX_NVLINK)
			return r
		}, "nvmlDeviceGetP2PStatus")
		if code == codeSuccess && status != gonvml.P2P_STATUS_UNKNOWN {
			p.NVLink = new(status == gonvml.P2P_STATUS_OK)
		}
		var level gonvml.GpuTopologyLevel
		last = s.call(d.fixed.Index, func() (r gonvml.Return) { level, r = d.handle.GetTopologyCommonAncestor(o.handle); return r },
			"nvmlDeviceGetTopologyCommonAncestor")
		if last == codeSuccess {
			p.Ancestor = ancestorWord(int(level))
		}
		if p.NVLink != nil || p.Ancestor != "" {
			d.fixed.Paths = append(d.fixed.Paths, p)
		} else {
			d.fixed.note("paths", last)
		}
	}
}

// Read takes one reading.
func (s *librarySession) Read() *Snapshot {
	snapshot := &Snapshot{Driver: s.driver, GPUs: make([]GPU, 0, len(s.devices))}
	for _, d := range s.devices {
		g, rebuild := s.read(d)
		snapshot.GPUs = append(snapshot.GPUs, g)
		if rebuild != codeSuccess && d.wasOK {
			snapshot.Rebuild = cut(fmt.Sprintf("GPU %d: %s", g.Index, wordsOf(rebuild)))
		}
		d.wasOK = d.wasOK || rebuild == codeSuccess && d.handle != nil
	}
	return snapshot
}

// read reads one GPU. rebuild is the return code that made the library's
// handles useless, else a success.
func (s *librarySession) read(d *libraryDevice) (g GPU, rebuild int) {
	g = d.fixed
	g.Missing = nil
	for field, why := range d.fixed.Missing {
		g.miss(field, why)
	}
	if d.handle == nil {
		return g, codeSuccess
	}
	h, i := d.handle, d.fixed.Index
	get := func(f func() gonvml.Return, names ...string) int {
		code := s.call(i, f, names...)
		if needsRebuild(code) {
			rebuild = code
		}
		return code
	}
	s.readMemory(h, &g, get)
	var util gonvml.Utilization
	code := get(func() (r gonvml.Return) { util, r = h.GetUtilizationRates(); return r }, "nvmlDeviceGetUtilizationRates")
	g.UtilizationRatio = known(&g, "utilizationRatio", code, min(float64(util.Gpu)/100, 1))
	s.readTemperature(h, &g, get)
	g.SMClockMHz = s.clock(d, &g, "smClockMHz", "nvmlDeviceGetClockInfo", h.GetClockInfo)
	s.readThrottle(h, &g, get)
	var milliwatts uint32
	code = get(func() (r gonvml.Return) { milliwatts, r = h.GetPowerUsage(); return r }, "nvmlDeviceGetPowerUsage")
	g.PowerWatts = known(&g, "powerWatts", code, float64(milliwatts)/1000)
	s.readFaults(h, &g, get)
	var mig int
	code = get(func() (r gonvml.Return) { mig, _, r = h.GetMigMode(); return r }, "nvmlDeviceGetMigMode")
	g.MIG = known(&g, "mig", code, mig == gonvml.DEVICE_MIG_ENABLE)
	s.readLinks(d, &g)
	s.readFabric(h, &g, get)
	s.readProcesses(h, &g, get)
	if g.MIG != nil && *g.MIG {
		s.readInstances(h, &g, get)
	}
	if g.Lost {
		rebuild = codeGPUIsLost
	}
	return g, rebuild
}

// getter calls a library function by name for one GPU.
type getter func(f func() gonvml.Return, names ...string) int

func (s *librarySession) readMemory(h gonvml.Device, g *GPU, get getter) {
	var v2 gonvml.Memory_v2
	code := get(func() (r gonvml.Return) { v2, r = h.GetMemoryInfo_v2(); return r }, "nvmlDeviceGetMemoryInfo_v2")
	if code == codeSuccess {
		g.MemoryTotalBytes, g.MemoryUsedBytes = new(v2.Total), new(v2.Used)
		g.MemoryFreeBytes, g.MemoryReservedBytes = new(v2.Free), new(v2.Reserved)
		return
	}
	var v1 gonvml.Memory
	code = get(func() (r gonvml.Return) { v1, r = h.GetMemoryInfo(); return r }, "nvmlDeviceGetMemoryInfo")
	g.MemoryTotalBytes = known(g, "memory", code, v1.Total)
	g.MemoryUsedBytes = known(g, "memory", code, v1.Used)
	g.MemoryFreeBytes = known(g, "memory", code, v1.Free)
}

func (s *librarySession) readTemperature(h gonvml.Device, g *GPU, get getter) {
	var celsius float64
	code := get(func() gonvml.Return {
		t, r := h.GetTemperatureV().V1()
		celsius = float64(t.Temperature)
		return r
	}, "nvmlDeviceGetTemperatureV")
	if code != codeSuccess {
		code = get(func() gonvml.Return {
			t, r := h.GetTemperature(gonvml.TEMPERATURE_GPU)
			celsius = float64(t)
			return r
		}, "nvmlDeviceGetTemperature")
	}
	g.TemperatureCelsius = known(g, "temperatureCelsius", code, max(celsius, 0))
}

func (s *librarySession) clock(d *libraryDevice, g *GPU, field, name string,
	get func(gonvml.ClockType) (uint32, gonvml.Return),
) *float64 {
	var mhz uint32
	code := s.call(d.fixed.Index, func() (r gonvml.Return) { mhz, r = get(gonvml.CLOCK_SM); return r }, name)
	return known(g, field, code, float64(mhz))
}

func (s *librarySession) readThrottle(h gonvml.Device, g *GPU, get getter) {
	var mask uint64
	code := get(func() (r gonvml.Return) { mask, r = h.GetCurrentClocksEventReasons(); return r },
		"nvmlDeviceGetCurrentClocksEventReasons")
	if code == codeFunctionNotFound {
		// The name of the same function in drivers before 535.
		code = get(func() (r gonvml.Return) { mask, r = h.GetCurrentClocksThrottleReasons(); return r }, //nolint:staticcheck // see above
			"nvmlDeviceGetCurrentClocksThrottleReasons")
	}
	if words := known(g, "throttleReasons", code, throttleWords(mask)); words != nil {
		g.ThrottleReasons = *words
	}
}

func (s *librarySession) readFaults(h gonvml.Device, g *GPU, get getter) {
	count := func(field string, kind gonvml.MemoryErrorType) *uint64 {
		var n uint64
		code := get(func() (r gonvml.Return) { n, r = h.GetTotalEccErrors(kind, gonvml.VOLATILE_ECC); return r },
			"nvmlDeviceGetTotalEccErrors")
		return known(g, field, code, n)
	}
	g.ECCCorrected = count("eccCorrected", gonvml.MEMORY_ERROR_TYPE_CORRECTED)
	g.ECCUncorrected = count("eccUncorrected", gonvml.MEMORY_ERROR_TYPE_UNCORRECTED)
	var pending, failed bool
	code := get(func() (r gonvml.Return) { _, _, pending, failed, r = h.GetRemappedRows(); return r },
		"nvmlDeviceGetRemappedRows")
	g.RowRemapPending = known(g, "rowRemapPending", code, pending)
	g.RowRemapFailed = known(g, "rowRemapFailed", code, failed)
}

func (s *librarySession) readLinks(d *libraryDevice, g *GPU) {
	if len(d.links) == 0 {
		return
	}
	up := 0
	for _, link := range d.links {
		isUp, code := s.linkUp(d, link)
		if code != codeSuccess {
			g.note("nvlinkUp", code)
			return
		}
		if isUp {
			up++
		}
	}
	g.NVLinkUp = &up
}

func (s *librarySession) readFabric(h gonvml.Device, g *GPU, get getter) {
	var v2 gonvml.GpuFabricInfo_v2
	code := get(func() (r gonvml.Return) { v2, r = h.GetGpuFabricInfoV().V2(); return r }, "nvmlDeviceGetGpuFabricInfoV")
	if code == codeSuccess {
		g.setFabric(int(v2.State), int(v2.Status), v2.ClusterUuid, v2.CliqueId)
		if g.Fabric != nil {
			g.Fabric.DegradedBandwidth = degraded(v2.HealthMask)
		}
		return
	}
	if code != codeFunctionNotFound && code != codeArgumentVersion {
		g.note("fabric", code)
		return
	}
	var v1 gonvml.GpuFabricInfo
	code = get(func() (r gonvml.Return) { v1, r = h.GetGpuFabricInfoV().V1(); return r }, "nvmlDeviceGetGpuFabricInfo")
	if code != codeSuccess {
		g.note("fabric", code)
		return
	}
	g.setFabric(int(v1.State), int(v1.Status), v1.ClusterUuid, v1.CliqueId)
}

// readInstances reads the parts of a split GPU. They are listed anew each time,
// because they come and go while the driver is in use.
func (s *librarySession) readInstances(h gonvml.Device, g *GPU, get getter) {
	var most int
	code := get(func() (r gonvml.Return) { most, r = h.GetMaxMigDeviceCount(); return r }, "nvmlDeviceGetMaxMigDeviceCount")
	for i := range min(most, maxInstances) {
		var m gonvml.Device
		c := get(func() (r gonvml.Return) { m, r = h.GetMigDeviceHandleByIndex(i); return r }, "nvmlDeviceGetMigDeviceHandleByIndex")
		if c == codeNotFound || c == codeInvalidArgument {
			continue // indexes have holes
		}
		if c != codeSuccess {
			code = c
			continue
		}
		var part GPU
		text := func(field, name string, f func() (string, gonvml.Return)) (v string) {
			if c := get(func() (r gonvml.Return) { v, r = f(); return r }, name); c != codeSuccess {
				part.note(field, c)
				return ""
			}
			return cut(v)
		}
		instance := Instance{Index: i, UUID: text("uuid", "nvmlDeviceGetUUID", m.GetUUID), Name: text("name", "nvmlDeviceGetName", m.GetName)}
		s.readMemory(m, &part, get)
		s.readProcesses(m, &part, get)
		instance.MemoryTotalBytes, instance.MemoryUsedBytes, instance.MemoryFreeBytes = part.MemoryTotalBytes, part.MemoryUsedBytes, part.MemoryFreeBytes
		instance.Processes, instance.Missing = part.Processes, part.Missing
		if part.Processes != nil {
			g.Processes = mergeProcesses(g.Processes, part.Processes)
			delete(g.Missing, "processes")
		}
		g.Instances = append(g.Instances, instance)
	}
	if code != codeSuccess {
		g.miss("instances", "MIG: partial data: "+wordsOf(code))
	}
}

// readProcesses joins the programs that compute with those that do so through
// the multi-process service.
func (s *librarySession) readProcesses(h gonvml.Device, g *GPU, get getter) {
	var lists [][]Process
	list := func(name string, f func() ([]gonvml.ProcessInfo, gonvml.Return)) int {
		var infos []gonvml.ProcessInfo
		code := get(func() (r gonvml.Return) { infos, r = f(); return r }, name+"_v3", name+"_v2", name)
		processes := make([]Process, 0, len(infos))
		for _, p := range infos {
			processes = append(processes, Process{PID: p.Pid, MemoryBytes: processMemory(p.UsedGpuMemory)})
		}
		lists = append(lists, processes)
		return code
	}
	code := list("nvmlDeviceGetComputeRunningProcesses", h.GetComputeRunningProcesses)
	if code != codeSuccess {
		g.note("processes", code)
		return
	}
	list("nvmlDeviceGetMPSComputeRunningProcesses", h.GetMPSComputeRunningProcesses)
	g.Processes = mergeProcesses(lists...)
}

// register asks for Xid events of the GPUs that support them.
func (s *librarySession) register() {
	code := s.call(-1, func() (r gonvml.Return) { s.events, r = s.lib.EventSetCreate(); return r }, "nvmlEventSetCreate")
	if code != codeSuccess {
		s.eventsErr = errors.New(wordsOf(code))
		return
	}
	registered := 0
	for _, d := range s.devices {
		if d.handle == nil {
			continue
		}
		var types uint64
		code = s.call(d.fixed.Index, func() (r gonvml.Return) { types, r = d.handle.GetSupportedEventTypes(); return r },
			"nvmlDeviceGetSupportedEventTypes")
		if code == codeSuccess && types&gonvml.EventTypeXidCriticalError == 0 {
			code = codeNotSupported
		}
		if code == codeSuccess {
			code = s.call(d.fixed.Index, func() gonvml.Return {
				return d.handle.RegisterEvents(gonvml.EventTypeXidCriticalError, s.events)
			}, "nvmlDeviceRegisterEvents")
		}
		if code == codeSuccess {
			registered++
		} else {
			d.fixed.note("xids", code)
		}
	}
	if registered == 0 && len(s.devices) > 0 {
		s.eventsErr = errors.New(wordsOf(code))
	}
	if !s.has("nvmlEventSetWait_v2") && !s.has("nvmlEventSetWait") {
		s.eventsErr = errors.New(wordsOf(codeFunctionNotFound))
	}
}

// WaitXid waits for an event. It makes no entry in the log, which is about the
// calls of Read.
func (s *librarySession) WaitXid(timeout time.Duration) (event XidEvent, ok bool, err error) {
	if s.eventsErr != nil {
		time.Sleep(timeout)
		return XidEvent{}, false, s.eventsErr
	}
	e, r := s.events.Wait(uint32(timeout / time.Millisecond))
	switch int(r) {
	case codeSuccess:
	case codeTimeout:
		return XidEvent{}, false, nil
	default:
		return XidEvent{}, false, errors.New(wordsOf(int(r)))
	}
	if e.EventType != gonvml.EventTypeXidCriticalError {
		return XidEvent{}, false, nil
	}
	return XidEvent{UUID: s.byHandle[e.Device], Xid: uint32(min(e.EventData, 1<<32-1))}, true, nil
}
