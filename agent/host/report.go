package host

import (
	"time"

	"waypost/nvml"
	waypostv1 "waypost/proto/waypost/v1"
)

// maxReportedXids is how many Xid numbers a report holds per GPU.
const maxReportedXids = 16

// Report is facts and GPUs as they are sent. A nil facts is a host that was not
// read yet.
func Report(facts *Facts, gpus *nvml.View, policy *nvml.Policy) *waypostv1.HostReport {
	r := &waypostv1.HostReport{GpuState: &gpus.Status.Text, Gpus: GPUs(gpus, policy), DriverVersion: text(gpus.Driver.DriverVersion), KernelLogState: text(gpus.KernelLogState)}
	if facts != nil {
		r.Facts = facts.Proto()
	}
	return r
}

// Proto is the facts as they are sent: what is unknown is not set.
func (f *Facts) Proto() *waypostv1.HostFacts {
	p := &waypostv1.HostFacts{
		Cpus:                 convert[uint32](f.CPUs),
		Load_1M:              f.Load1M,
		MemoryTotalBytes:     convert[float64](f.MemoryTotalBytes),
		MemoryAvailableBytes: convert[float64](f.MemoryAvailableBytes),
		DiskFreeBytes:        convert[float64](f.DiskFreeBytes),
	}
	if f.Uptime != nil {
		p.UptimeSec = new(f.Uptime.Seconds())
	}
	for i := range f.Interfaces {
		n := &f.Interfaces[i]
		p.Interfaces = append(p.Interfaces, &waypostv1.NetworkInterface{
			Name: &n.Name, Addresses: n.Addresses, BitsPerSec: n.BitsPerSec, MtuBytes: convert[uint32](n.MTUBytes), NumaNode: convert[uint32](n.NUMANode),
		})
	}
	return p
}

type number interface {
	~int | ~uint32 | ~uint64 | ~float64
}

// convert changes the type of a number and keeps unknown unknown.
func convert[To, From number](v *From) *To {
	if v == nil {
		return nil
	}
	return new(To(*v))
}

// GPUs are the GPUs as they are sent, each with the policy's verdict.
func GPUs(view *nvml.View, policy *nvml.Policy) []*waypostv1.Gpu {
	out := make([]*waypostv1.Gpu, 0, len(view.Devices))
	for i := range view.Devices {
		d := &view.Devices[i]
		g := gpu(d, policy.Judge(view.Status.Code, view.XidState, d))
		for k := range view.Devices {
			if k == i {
				continue
			}
			g.Ways = append(g.Ways, &waypostv1.GpuWay{To: new(uint32(view.Devices[k].Index)), Way: new(nvml.WayBetween(d, &view.Devices[k]).String())})
		}
		out = append(out, g)
	}
	return out
}

func gpu(d *nvml.Device, verdict nvml.Verdict) *waypostv1.Gpu {
	g := &waypostv1.Gpu{
		Index:              new(uint32(d.Index)),
		Uuid:               text(d.UUID),
		Model:              text(d.Name),
		PciBusId:           text(d.PCIBusID),
		MemoryTotalBytes:   convert[float64](d.MemoryTotalBytes),
		MemoryUsedBytes:    convert[float64](d.MemoryUsedBytes),
		MemoryFreeBytes:    convert[float64](d.MemoryFreeBytes),
		Utilization:        d.UtilizationRatio,
		TemperatureCelsius: d.TemperatureCelsius,
		SmClockMhz:         d.SMClockMHz,
		SmClockMaxMhz:      d.SMClockMaxMHz,
		ThrottleReasons:    d.ThrottleReasons,
		EccUncorrected:     convert[float64](d.ECCUncorrected),
		EccCorrected:       convert[float64](d.ECCCorrected),
		NvlinkUp:           convert[uint32](d.NVLinkUp),
		NvlinkTotal:        convert[uint32](d.NVLinkTotal),
		PowerWatts:         d.PowerWatts,
		Verdict:            new(verdict.String()),
		Mig:                d.MIG,
		Notes:              verdict.Notes,
		Missing:            d.Missing,
	}
	if f := d.Fabric; f != nil {
		word := f.State
		switch {
		case f.Up():
			word = "up"
		case f.Failure != "":
			word = "failed: " + f.Failure
		}
		g.Fabric = &word
	}
	for i := range d.Instances {
		p := &d.Instances[i]
		g.Instances = append(g.Instances, &waypostv1.GpuInstance{
			Index: new(uint32(p.Index)), Uuid: text(p.UUID), Model: text(p.Name),
			MemoryTotalBytes: convert[float64](p.MemoryTotalBytes), MemoryUsedBytes: convert[float64](p.MemoryUsedBytes),
		})
	}
	for _, x := range d.Xids[max(0, len(d.Xids)-maxReportedXids):] {
		class, means := nvml.DescribeXid(x.Xid)
		g.Xids = append(g.Xids, &waypostv1.XidEvent{
			Xid: new(x.Xid), AgeMs: new(float64(x.Age) / float64(time.Millisecond)),
			Class: new(string(class)), Means: text(means), Count: new(float64(x.Count)), Acknowledged: new(x.Acknowledged),
		})
	}
	for _, p := range d.Processes {
		g.Processes = append(g.Processes, &waypostv1.GpuProcess{
			Pid: new(p.PID), MemoryBytes: convert[float64](p.MemoryBytes),
		})
	}
	return g
}

// text is a string, unset when unknown.
func text(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}
