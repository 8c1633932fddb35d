package registry

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// MaxSnapshotBytes bounds an encoded State.
const MaxSnapshotBytes = 64 << 20

// snapshotHeader is the first line of a snapshot; its number is the format.
const snapshotHeader = "waypost-registry 1\n"

// ErrSnapshot: bytes are not a snapshot that this version can read.
var ErrSnapshot = errors.New("registry snapshot cannot be read")

// snapshot is the JSON after the header.
type snapshot struct {
	Revision     uint64        `json:"revision"`
	FeatureLevel uint32        `json:"feature_level"`
	ClusterID    string        `json:"cluster_id"`
	FleetName    string        `json:"fleet_name"`
	NextNumber   uint32        `json:"next_number"`
	Coordinators []Coordinator `json:"coordinators,omitempty"`
	Removed      []removed     `json:"removed,omitempty"`
	Cordons      []Cordon      `json:"cordons,omitempty"`
	FleetFiles   []FleetFile   `json:"fleet_files,omitempty"`
	Audit        []AuditEntry  `json:"audit,omitempty"`
	Answers      []answered    `json:"answers,omitempty"`
}

// AppendSnapshot appends the whole state to dst. Equal states give equal bytes.
func (s *State) AppendSnapshot(dst []byte) []byte {
	text, err := marshal(snapshot{
		s.revision, s.featureLevel, s.clusterID, s.fleetName, s.nextNumber, s.coordinators, s.removed, s.cordons.sorted,
		s.files.slice(FleetVersions), s.audit.slice(AuditEntries), s.answers.slice(DedupWindow),
	})
	if err != nil {
		panic("registry: a state of strings and numbers does not encode: " + err.Error())
	}
	return append(append(dst, snapshotHeader...), text...)
}

// DecodeSnapshot reads what AppendSnapshot wrote. Errors wrap ErrSnapshot.
func DecodeSnapshot(b []byte) (*State, error) {
	s, err := decodeSnapshot(b)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrSnapshot, err)
	}
	return s, nil
}

func decodeSnapshot(b []byte) (*State, error) {
	text, ok := bytes.CutPrefix(b, []byte(snapshotHeader))
	switch {
	case len(b) > MaxSnapshotBytes:
		return nil, fmt.Errorf("it has %d bytes, at most %d", len(b), MaxSnapshotBytes)
	case !ok:
		head, _, _ := strings.Cut(string(b[:min(len(b), 40)]), "\n")
		return nil, fmt.Errorf("it begins with %q, this version reads %q", head, strings.TrimSpace(snapshotHeader))
	}
	var doc snapshot
	if err := unmarshal(text, &doc); err != nil {
		return nil, err
	}
	if err := doc.check(); err != nil {
		return nil, err
	}
	s := &State{
		revision: doc.Revision, featureLevel: doc.FeatureLevel, clusterID: doc.ClusterID, fleetName: doc.FleetName,
		nextNumber: doc.NextNumber, coordinators: doc.Coordinators, removed: doc.Removed,
		cordons: newCordonSet(doc.Cordons),
		files:   ringOf(FleetVersions, doc.FleetFiles),
		audit:   ringOf(AuditEntries, doc.Audit),
		answers: ringOf(DedupWindow, doc.Answers),
	}
	s.deriveFleet()
	return s, nil
}

// check refuses what Apply could not have made and lookups would stumble over.
func (d *snapshot) check() error {
	limits := []struct {
		what     string
		n, limit int
	}{
		{"coordinators", len(d.Coordinators), MaxCoordinators},
		{"removed", len(d.Removed), maxRemoved},
		{"cordons", len(d.Cordons), MaxCordons},
		{"fleet_files", len(d.FleetFiles), FleetVersions},
		{"audit", len(d.Audit), AuditEntries},
		{"answers", len(d.Answers), DedupWindow},
	}
	for _, l := range limits {
		if l.n > l.limit {
			return fmt.Errorf("%s: %d entries, at most %d", l.what, l.n, l.limit)
		}
	}
	if d.FeatureLevel == 0 || d.NextNumber == 0 {
		return errors.New("feature_level and next_number begin at 1")
	}
	return errors.Join(d.checkCoordinators(), d.checkCordons(), d.checkFiles(), d.checkTrail())
}

func (d *snapshot) checkCoordinators() error {
	last := uint32(0)
	ids := map[string]bool{}
	for _, c := range d.Coordinators {
		if c.Number <= last || c.Number >= d.NextNumber || ids[c.ID] {
			return fmt.Errorf("coordinators: number %d, id %q: numbers rise, stay below next_number, and ids are unique", c.Number, c.ID)
		}
		last, ids[c.ID] = c.Number, true
	}
	return nil
}

func (d *snapshot) checkCordons() error {
	for i, c := range d.Cordons {
		sel, err := ParseSelector(c.Selector)
		if err != nil {
			return fmt.Errorf("cordons: %w", err)
		}
		if sel.String() != c.Selector || i > 0 && d.Cordons[i-1].Selector >= c.Selector {
			return fmt.Errorf("cordons: %q is out of order or not in its normal form", c.Selector)
		}
		if len(c.GPUUUIDs) > maxCordonGPUs || !slices.Equal(c.GPUUUIDs, normalUUIDsIfValid(c.GPUUUIDs)) {
			return fmt.Errorf("cordons: %q: gpu_uuids are not in their normal form", c.Selector)
		}
	}
	return nil
}

func normalUUIDsIfValid(in []string) []string {
	if slices.ContainsFunc(in, func(u string) bool { return !isGPUUUID(u) }) {
		return nil
	}
	return normalUUIDs(in)
}

func (d *snapshot) checkFiles() error {
	for i, f := range d.FleetFiles {
		if f.Version == 0 || i > 0 && f.Version != d.FleetFiles[i-1].Version+1 {
			return fmt.Errorf("fleet_files: version %d is out of order", f.Version)
		}
		if len(f.TOML) > MaxFleetBytes {
			return fmt.Errorf("fleet_files: version %d has %d bytes, at most %d", f.Version, len(f.TOML), MaxFleetBytes)
		}
	}
	return nil
}

func (d *snapshot) checkTrail() error {
	last := uint64(0)
	for _, a := range d.Audit {
		if a.Revision <= last || a.Revision > d.Revision {
			return fmt.Errorf("audit: revision %d is out of order", a.Revision)
		}
		last = a.Revision
	}
	ids := make(map[string]bool, len(d.Answers))
	for _, a := range d.Answers {
		if ids[a.RequestID] {
			return fmt.Errorf("answers: request id %q is there twice", a.RequestID)
		}
		ids[a.RequestID] = true
	}
	return nil
}
