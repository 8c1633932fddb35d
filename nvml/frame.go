package nvml

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"strings"
)

// A frame is a length (4 bytes, big endian) and a message as JSON.
const (
	// protocolVersion changes with every change of the messages' meaning; the
	// child may be another build than its parent.
	protocolVersion = 1
	maxFrameBytes   = 1 << 20
	maxGPUs         = 64
	maxProcesses    = 512
	maxMissing      = 64
	maxTextBytes    = 512
	maxIndex        = 4096
	maxLinks        = 256
	// Beyond what exists, so that a later driver is not taken for broken.
	maxPCIeGeneration, maxPCIeLanes = 64, 64
	maxInstances                    = 16
	// maxThrottleReasons is the number of bits in the library's mask.
	maxThrottleReasons = 64
)

// ErrFrame says that what the child sent is not a message of this protocol.
var ErrFrame = errors.New("bad frame from the NVML child")

// message is what a child says; exactly one of the pointers is set.
type message struct {
	Version  int       `json:"v"`
	Status   *Status   `json:"status,omitempty"`
	Snapshot *Snapshot `json:"snapshot,omitempty"`
	Xid      *XidEvent `json:"xid,omitempty"`
	Busy     *Busy     `json:"busy,omitempty"`
}

// appendFrame appends m as a frame.
func appendFrame(dst []byte, m *message) ([]byte, error) {
	m.Version = protocolVersion
	body, err := json.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("encode message: %w", err)
	}
	if len(body) > maxFrameBytes {
		return nil, fmt.Errorf("message of %d bytes is over the limit of %d", len(body), maxFrameBytes)
	}
	dst = binary.BigEndian.AppendUint32(dst, uint32(len(body)))
	return append(dst, body...), nil
}

// readMessage reads the next message; io.EOF at a clean end. Memory is taken
// as bytes arrive, never for a length only claimed.
func readMessage(r io.Reader) (*message, error) {
	var head [4]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return nil, err
	}
	length := binary.BigEndian.Uint32(head[:])
	if length == 0 || length > maxFrameBytes {
		return nil, fmt.Errorf("%w: length %d, allowed is 1 to %d", ErrFrame, length, maxFrameBytes)
	}
	body, err := io.ReadAll(io.LimitReader(r, int64(length)))
	if err != nil {
		return nil, err
	}
	if len(body) < int(length) {
		return nil, io.ErrUnexpectedEOF
	}
	return decodeMessage(body)
}

// decodeMessage decodes and checks a frame's body.
func decodeMessage(body []byte) (*message, error) {
	var m message
	if err := json.Unmarshal(body, &m); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrFrame, err)
	}
	if m.Version != protocolVersion {
		return nil, fmt.Errorf("%w: protocol version %d, this agent speaks %d; install both from one version",
			ErrFrame, m.Version, protocolVersion)
	}
	if err := m.check(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrFrame, err)
	}
	return &m, nil
}

func (m *message) check() error {
	set := 0
	var err error
	if m.Status != nil {
		set, err = set+1, errors.Join(err, m.Status.check())
	}
	if m.Snapshot != nil {
		set, err = set+1, errors.Join(err, m.Snapshot.check())
	}
	if m.Xid != nil {
		set, err = set+1, errors.Join(err, checkText("xid.uuid", m.Xid.UUID))
	}
	if m.Busy != nil {
		set, err = set+1, errors.Join(err, m.Busy.check())
	}
	if set != 1 {
		return fmt.Errorf("%d messages in a frame, want 1", set)
	}
	return err
}

// reportable are the states a child may say of its host.
var reportable = map[StateCode]bool{
	StateNotBuilt: true, StateNoLibrary: true, StateDriverNotLoaded: true,
	StateVersionMismatch: true, StateNoPermission: true, StateNoGPUs: true, StateFailed: true,
}

func (s *Status) check() error {
	if !reportable[s.Code] {
		return fmt.Errorf("status.code %q is no state a child may report", s.Code)
	}
	return checkText("status.text", s.Text)
}

func (b *Busy) check() error {
	if b.GPU != nil {
		if err := checkRange("busy.gpu", float64(*b.GPU), maxIndex); err != nil {
			return err
		}
	}
	return errors.Join(checkText("busy.call", b.Call), checkRange("busy.forMs", b.ForMs, math.MaxFloat64))
}

func (s *Snapshot) check() error {
	err := errors.Join(
		checkText("driver.driverVersion", s.Driver.DriverVersion),
		checkText("driver.libraryVersion", s.Driver.LibraryVersion),
		checkText("xidState", s.XidState), checkText("rebuild", s.Rebuild),
		checkRange("tookMs", s.TookMs, math.MaxFloat64),
		checkRange("number of gpus", float64(len(s.GPUs)), maxGPUs),
		checkRange("number of calls", float64(len(s.Calls)), maxCallNames),
	)
	if err != nil {
		return err
	}
	uuids := map[string]bool{}
	for i := range s.GPUs {
		g := &s.GPUs[i]
		if err := g.check(); err != nil {
			return fmt.Errorf("gpus[%d]: %w", i, err)
		}
		if g.UUID != "" && uuids[g.UUID] {
			return fmt.Errorf("gpus[%d]: uuid %q appears twice", i, g.UUID)
		}
		uuids[g.UUID] = true
	}
	for i, c := range s.Calls {
		err := errors.Join(checkText("call", c.Call), checkRange("sumMs", c.SumMs, math.MaxFloat64))
		if err != nil {
			return fmt.Errorf("calls[%d]: %w", i, err)
		}
	}
	return nil
}

func (g *GPU) check() error {
	err := errors.Join(
		checkRange("index", float64(g.Index), maxIndex),
		checkText("uuid", g.UUID), checkText("name", g.Name), checkText("pciBusId", g.PCIBusID),
		checkOptional("utilizationRatio", g.UtilizationRatio, 1),
		checkOptional("temperatureCelsius", g.TemperatureCelsius, 1e6),
		checkOptional("smClockMHz", g.SMClockMHz, 1e9),
		checkOptional("smClockMaxMHz", g.SMClockMaxMHz, 1e9),
		checkOptional("powerWatts", g.PowerWatts, 1e9),
		checkLinks("nvlinkUp", g.NVLinkUp), checkLinks("nvlinkTotal", g.NVLinkTotal),
		checkRange("number of throttleReasons", float64(len(g.ThrottleReasons)), maxThrottleReasons),
		checkRange("number of processes", float64(len(g.Processes)), maxProcesses),
		checkRange("number of missing", float64(len(g.Missing)), maxMissing),
		checkRange("number of instances", float64(len(g.Instances)), maxInstances),
		checkRange("number of nvlinkPeers", float64(len(g.NVLinkPeers)), maxLinks),
		checkRange("number of paths", float64(len(g.Paths)), maxGPUs),
	)
	for i := range g.Instances {
		if e := g.Instances[i].check(); e != nil {
			err = errors.Join(err, fmt.Errorf("instances[%d]: %w", i, e))
		}
	}
	for _, p := range g.NVLinkPeers {
		err = errors.Join(err, checkText("nvlinkPeers.kind", p.Kind), checkText("nvlinkPeers.pciBusId", p.PCIBusID), checkRange("nvlinkPeers.links", float64(p.Links), maxLinks))
	}
	for _, p := range g.Paths {
		err = errors.Join(err, checkRange("paths.to", float64(p.To), maxIndex), checkText("paths.ancestor", p.Ancestor))
	}
	if l := g.PCIe; l != nil {
		err = errors.Join(err, checkRange("pcie.generation", float64(l.Generation), maxPCIeGeneration), checkRange("pcie.lanes", float64(l.Lanes), maxPCIeLanes))
	}
	if f := g.Fabric; f != nil {
		err = errors.Join(err, checkText("fabric.state", f.State), checkText("fabric.failure", f.Failure), checkText("fabric.clusterUuid", f.ClusterUUID))
	}
	for _, r := range g.ThrottleReasons {
		err = errors.Join(err, checkText("throttleReasons", r))
	}
	for field, why := range g.Missing {
		err = errors.Join(err, checkText("missing", field), checkText("missing", why))
	}
	return err
}

func (p *Instance) check() error {
	err := errors.Join(
		checkRange("index", float64(p.Index), maxIndex), checkText("uuid", p.UUID), checkText("name", p.Name),
		checkRange("number of processes", float64(len(p.Processes)), maxProcesses),
		checkRange("number of missing", float64(len(p.Missing)), maxMissing),
	)
	for field, why := range p.Missing {
		err = errors.Join(err, checkText("missing", field), checkText("missing", why))
	}
	return err
}

func checkText(field, s string) error {
	if len(s) > maxTextBytes {
		return fmt.Errorf("%s has %d bytes, at most %d are allowed", field, len(s), maxTextBytes)
	}
	return nil
}

func checkRange(field string, v, largest float64) error {
	if !(v >= 0 && v <= largest) {
		return fmt.Errorf("%s is %v, allowed is 0 to %v", field, v, largest)
	}
	return nil
}

func checkOptional(field string, v *float64, largest float64) error {
	if v == nil {
		return nil
	}
	return checkRange(field, *v, largest)
}

func checkLinks(field string, v *int) error {
	if v == nil {
		return nil
	}
	return checkRange(field, float64(*v), maxLinks)
}

// cut shortens s to what a message may carry. What is no UTF-8 goes as well: JSON
// would write three bytes for each, and the text would be too long again.
func cut(s string) string { return strings.ToValidUTF8(s[:min(len(s), maxTextBytes)], "") }
