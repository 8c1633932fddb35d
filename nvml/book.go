package nvml

import (
	"slices"
	"time"
)

// maxXidNumbers bounds the Xid numbers remembered per GPU.
const maxXidNumbers = 64

// book is what was seen of a host's GPUs since the agent started. It outlives
// the children that see it. It is pure: times come from the caller, and the
// zero value is ready.
type book struct {
	snapshot *Snapshot
	at       time.Time        // when snapshot arrived
	devices  map[string]*seen // by UUID, at most maxGPUs
	early    []XidEvent       // events before any GPU was known, at most maxXidNumbers
	earlyLog []earlyLogXid    // of the kernel's log, of devices not known yet, at most maxXidNumbers
	restored map[string][]xidRecord
	changed  bool // what is kept over a restart differs from when it was taken
}

type earlyLogXid struct {
	logXid
	at time.Time
}

// seen is one GPU over time.
type seen struct {
	gpu      GPU // the newest reading
	linksMax int // most links ever up; 0: none or unknown
	xids     []xidRecord
	readings readings
	movedAt  time.Time // when readings last changed
	listed   bool      // in the newest snapshot
}

type xidRecord struct {
	xid   uint32
	count uint64
	at    time.Time
	acked bool
	// logAt is the time of an event that the kernel's log told and the library
	// has not yet; zero: there is none.
	logAt time.Time
}

// sameXid is how far apart library and kernel's log may tell of one error.
const sameXid = 5 * time.Second

// readings are what a working GPU never repeats for long: above all the power
// draw, which is given in thousandths of a watt.
type readings struct {
	powerWatts, celsius, clockMHz, utilization float64
	memoryUsed                                 uint64
	known                                      bool
}

func readingsOf(g *GPU) readings {
	return readings{
		powerWatts: zeroIfNil(g.PowerWatts), celsius: zeroIfNil(g.TemperatureCelsius),
		clockMHz: zeroIfNil(g.SMClockMHz), utilization: zeroIfNil(g.UtilizationRatio),
		memoryUsed: zeroIfNil(g.MemoryUsedBytes),
		// Without the power draw an idle GPU may well stand still.
		known: g.PowerWatts != nil,
	}
}

// zeroIfNil serves comparison only; whether a value is known is kept beside it.
func zeroIfNil[T any](p *T) (zero T) {
	if p == nil {
		return zero
	}
	return *p
}

// takeSnapshot takes a reading in that arrived now.
func (b *book) takeSnapshot(s *Snapshot, now time.Time) {
	b.snapshot, b.at = s, now
	if b.devices == nil {
		b.devices = map[string]*seen{}
	}
	for _, d := range b.devices {
		d.listed = false
	}
	for i := range s.GPUs {
		b.nameByIndex(&s.GPUs[i])
		b.takeGPU(&s.GPUs[i], now)
	}
	for _, e := range b.early {
		b.takeXid(e, now)
	}
	if len(b.devices) > 0 {
		b.early = nil
	}
	early := b.earlyLog
	b.earlyLog = nil
	for _, e := range early {
		b.takeLogXid(e.logXid, e.at)
	}
}

// nameByIndex gives a GPU that the driver cannot name any more the UUID of the
// one that was at its index, if that one is not listed elsewhere.
func (b *book) nameByIndex(g *GPU) {
	if g.UUID != "" {
		return
	}
	for uuid, d := range b.devices {
		elsewhere := slices.ContainsFunc(b.snapshot.GPUs, func(o GPU) bool { return o.UUID == uuid })
		if d.gpu.Index == g.Index && !elsewhere {
			g.UUID = uuid
			return
		}
	}
}

func (b *book) takeGPU(g *GPU, now time.Time) {
	if g.UUID == "" {
		return
	}
	d := b.devices[g.UUID]
	if d == nil {
		if len(b.devices) >= maxGPUs {
			return
		}
		d = &seen{movedAt: now, xids: b.restored[g.UUID]}
		delete(b.restored, g.UUID)
		b.devices[g.UUID] = d
	}
	old := d.gpu
	d.gpu, d.listed = *g, true
	d.gpu.keepFixed(&old)
	if g.NVLinkUp != nil {
		d.linksMax = max(d.linksMax, *g.NVLinkUp)
	}
	if r := readingsOf(g); r != d.readings || !r.known {
		d.readings, d.movedAt = r, now
	}
}

// keepFixed fills what cannot change and is unknown now from an older reading.
func (g *GPU) keepFixed(old *GPU) {
	if g.Name == "" {
		g.Name = old.Name
	}
	if g.PCIBusID == "" {
		g.PCIBusID = old.PCIBusID
	}
	if g.MemoryTotalBytes == nil {
		g.MemoryTotalBytes = old.MemoryTotalBytes
	}
	if g.SMClockMaxMHz == nil {
		g.SMClockMaxMHz = old.SMClockMaxMHz
	}
	if g.NVLinkTotal == nil {
		g.NVLinkTotal = old.NVLinkTotal
	}
	if g.PCIe == nil {
		g.PCIe = old.PCIe
	}
	if g.Paths == nil {
		g.Paths = old.Paths
	}
	g.keepInstances(old)
}

// keepInstances fills instances that cannot be listed now from an older reading:
// an engine on one is still on this GPU. What the driver lists whole is believed,
// because instances come and go while it works.
func (g *GPU) keepInstances(old *GPU) {
	why, partial := g.Missing["instances"]
	if g.MIG != nil && !partial {
		return
	}
	if !partial {
		why = "the instances cannot be listed"
	}
	for i := range old.Instances {
		o := &old.Instances[i]
		listed := slices.ContainsFunc(g.Instances, func(n Instance) bool { return n.UUID == o.UUID || n.Index == o.Index })
		if listed || len(g.Instances) >= maxInstances {
			continue
		}
		g.Instances = append(g.Instances, Instance{
			Index: o.Index, UUID: o.UUID, Name: o.Name, MemoryTotalBytes: o.MemoryTotalBytes, Missing: map[string]string{"values": why},
		})
	}
	slices.SortFunc(g.Instances, func(a, b Instance) int { return a.Index - b.Index })
}

// fixedOnly is g without what changes, each field missing for the given reason.
func (g *GPU) fixedOnly(why string) GPU {
	f := GPU{Index: g.Index, UUID: g.UUID, Lost: g.Lost, Missing: map[string]string{"values": why}}
	f.keepFixed(g)
	return f
}

// takeXid takes an event in that arrived now. One that names no known GPU is
// put down to all of them, because any may be the broken one. Events are kept per
// number, so that a flood of one cannot push out another.
func (b *book) takeXid(e XidEvent, now time.Time) {
	b.changed = true
	if d := b.devices[e.UUID]; d != nil {
		d.takeXid(e.Xid, now)
		return
	}
	if len(b.devices) == 0 && len(b.early) < maxXidNumbers {
		b.early = append(b.early, e)
	}
	for _, d := range b.devices {
		d.takeXid(e.Xid, now)
	}
}

func (d *seen) takeXid(xid uint32, now time.Time) {
	record := xidRecord{xid: xid}
	if i := slices.IndexFunc(d.xids, func(r xidRecord) bool { return r.xid == xid }); i >= 0 {
		if log := d.xids[i].logAt; !log.IsZero() && now.Sub(log).Abs() <= sameXid {
			d.xids[i].logAt = time.Time{}
			return // the kernel's log told it before
		}
		record.count = d.xids[i].count
		d.xids = slices.Delete(d.xids, i, i+1)
	} else if len(d.xids) >= maxXidNumbers {
		d.xids = slices.Delete(d.xids, 0, 1)
	}
	record.count++
	record.at = now
	d.xids = append(d.xids, record)
}

// takeLogXid takes in an error that the kernel logged at some time; false: it is
// known. The log is read from its beginning at each start, so what is not newer
// than what is known of a number is the same: two errors of one number within
// sameXid count once.
func (b *book) takeLogXid(x logXid, at time.Time) (isNew bool) {
	for _, d := range b.devices {
		if !samePCI(d.gpu.PCIBusID, x.pciBusID) {
			continue
		}
		i := slices.IndexFunc(d.xids, func(r xidRecord) bool { return r.xid == x.xid })
		if i >= 0 && at.Sub(d.xids[i].at) <= sameXid {
			return false
		}
		if i >= 0 {
			d.xids[i].logAt = time.Time{}
		}
		d.takeXid(x.xid, at)
		d.xids[len(d.xids)-1].logAt = at
		slices.SortStableFunc(d.xids, func(a, b xidRecord) int { return a.at.Compare(b.at) })
		b.changed = true
		return true
	}
	if len(b.earlyLog) < maxXidNumbers {
		b.earlyLog = append(b.earlyLog, earlyLogXid{x, at})
	}
	return false
}

// acknowledge marks the events of a GPU so far as dealt with; false: no such GPU.
func (b *book) acknowledge(uuid string) bool {
	d := b.devices[uuid]
	if d == nil {
		return false
	}
	for i := range d.xids {
		d.xids[i].acked = true
	}
	b.changed = true
	return true
}

// view lists the GPUs as they are known at now. current says whether the
// newest values may be shown; if not, why says so.
func (b *book) view(now time.Time, current bool, why string, frozenAfter time.Duration) []Device {
	devices := make([]Device, 0, len(b.devices))
	for _, d := range b.devices {
		v := Device{GPU: d.gpu, LinksExpected: b.linksExpected(d)}
		for _, x := range d.xids {
			v.Xids = append(v.Xids, XidSeen{Xid: x.xid, Count: x.count, Age: now.Sub(x.at), Acknowledged: x.acked})
		}
		still := now.Sub(d.movedAt)
		switch {
		case !current:
			v.GPU = d.gpu.fixedOnly(why)
		case !d.listed:
			v.GPU = d.gpu.fixedOnly("the driver does not list it any more")
			v.Lost = true
		case still >= frozenAfter:
			v.GPU = d.gpu.fixedOnly("readings stand still")
			v.FrozenFor = still
		}
		devices = append(devices, v)
	}
	slices.SortFunc(devices, func(a, b Device) int {
		if a.Index != b.Index {
			return a.Index - b.Index
		}
		if a.UUID < b.UUID {
			return -1
		}
		return 1
	})
	return devices
}

// linksExpected is how many links of d should be up. GPUs without a bridge have
// links that are never up, so the number of links says nothing; what was up
// here before does, and what is up on the same product beside it, unless no
// link is up here at all.
func (b *book) linksExpected(d *seen) *int {
	expected := d.linksMax
	if d.gpu.NVLinkUp != nil && *d.gpu.NVLinkUp > 0 {
		for _, o := range b.devices {
			if o.gpu.Name == d.gpu.Name {
				expected = max(expected, o.linksMax)
			}
		}
	}
	if expected == 0 {
		return nil
	}
	return &expected
}
