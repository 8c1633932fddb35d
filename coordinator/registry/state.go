package registry

import (
	"crypto/sha256"
	"slices"
	"time"
)

// FleetFile is one version of the fleet file as it was applied.
type FleetFile struct {
	// Version counts from 1; 0 is the empty fleet before the first file.
	Version uint32 `json:"version"`
	TOML    string `json:"toml"`
	By      string `json:"by"`
	// AtMs is when its proposer made it, Unix ms.
	AtMs    int64  `json:"at_ms"`
	Message string `json:"message,omitempty"`
}

// Coordinator is one entry of the catalogue.
type Coordinator struct {
	// Number counts from 1 and is never given twice; placement ids carry it.
	Number uint32 `json:"number"`
	ID     string `json:"id"`
	Name   string `json:"name"`
	// ClusterAddress is host:port of Raft and lanes.
	ClusterAddress string `json:"cluster_address"`
	// APIAddress is host:port of the API; empty: unknown.
	APIAddress string `json:"api_address,omitempty"`
	// Voter says whether it may become a voter.
	Voter bool `json:"voter"`
}

// AuditEntry is one change of the state.
type AuditEntry struct {
	// Revision of the state that the change made.
	Revision uint64 `json:"revision"`
	// AtMs is when its proposer made it, Unix ms.
	AtMs int64  `json:"at_ms"`
	By   string `json:"by"`
	Via  string `json:"via,omitempty"`
	Kind Kind   `json:"kind"`
	// Detail says what changed, one line.
	Detail string `json:"detail"`
}

// At is when the change was made by its proposer's clock.
func (a AuditEntry) At() time.Time { return time.UnixMilli(a.AtMs).UTC() }

// At is when the file was made by its proposer's clock.
func (f FleetFile) At() time.Time { return time.UnixMilli(f.AtMs).UTC() }

// answered is the answer to one request id.
type answered struct {
	RequestID   string `json:"request_id"`
	Fingerprint uint64 `json:"fingerprint,string"`
	Result      Result `json:"result"`
}

// removed is a coordinator that was taken out.
type removed struct {
	ID   string `json:"id"`
	Name string `json:"name"`
	By   string `json:"by"`
	AtMs int64  `json:"at_ms"`
}

// State is what operators want, at one point of the log. It is immutable.
type State struct {
	revision     uint64
	featureLevel uint32
	clusterID    string
	fleetName    string
	nextNumber   uint32
	coordinators []Coordinator // by number
	removed      []removed     // oldest first
	cordons      cordonSet
	files        ring[FleetFile] // the newest is in force
	audit        ring[AuditEntry]
	answers      ring[answered]

	// Derived from the newest file.
	fleet        *Fleet
	fleetProblem error
}

// Empty is the state before the first command.
func Empty() *State {
	return &State{
		featureLevel: 1,
		nextNumber:   1,
		files:        newRing[FleetFile](FleetVersions),
		audit:        newRing[AuditEntry](AuditEntries),
		answers:      newRing[answered](DedupWindow),
		fleet:        EmptyFleet(),
	}
}

// Apply returns the state after a command and what became of it. A command that
// cannot be read leaves the state as it is.
func (s *State) Apply(cmd []byte) (*State, Result) {
	stamp, body, fingerprint, err := decode(cmd)
	if err != nil {
		return s, Result{Code: codeOf(err), Message: err.Error(), Revision: s.revision}
	}
	if a := s.answerTo(stamp.RequestID); a != nil {
		if a.Fingerprint != fingerprint {
			r := refusef(CodeReused, "request id %q was used for another change; make a new one", stamp.RequestID)
			r.Kind, r.Revision = body.Kind(), s.revision
			return s, r
		}
		r := a.Result
		r.Duplicate = true
		return s, r
	}
	next := *s
	r := body.apply(&next, stamp)
	r.Kind, r.Revision = body.Kind(), next.revision
	next.answers = next.answers.push(answered{stamp.RequestID, fingerprint, r})
	return &next, r
}

func (s *State) answerTo(requestID string) *answered {
	for a := range s.answers.all {
		if a.RequestID == requestID {
			return a
		}
	}
	return nil
}

// changed counts a change and records it. It returns the result to complete.
func (s *State) changed(stamp Stamp, kind Kind, detail string) Result {
	s.revision++
	s.audit = s.audit.push(AuditEntry{s.revision, stamp.At.UnixMilli(), stamp.By, stamp.Via, kind, detail})
	return Result{Code: CodeOK, Changed: true}
}

// Revision counts the changes since the cluster was made. Of two states of one
// cluster, the one with the higher revision is newer.
func (s *State) Revision() uint64 { return s.revision }

// FeatureLevel is the level in force, from 1.
func (s *State) FeatureLevel() uint32 { return s.featureLevel }

// ClusterID tells this cluster from others; empty before the first command.
func (s *State) ClusterID() string { return s.clusterID }

// FleetName is the name people see; empty before the first command.
func (s *State) FleetName() string { return s.fleetName }

// FleetFile is the file in force; Version 0 when none was applied.
func (s *State) FleetFile() FleetFile {
	if last := s.files.slice(1); len(last) == 1 {
		return last[0]
	}
	return FleetFile{}
}

// FleetFiles are the files kept, oldest first, at most FleetVersions.
func (s *State) FleetFiles() []FleetFile { return s.files.slice(FleetVersions) }

// Fleet is the file in force as typed values, with defaults filled in; never
// nil. Callers must not change it.
func (s *State) Fleet() *Fleet { return s.fleet }

// FleetProblem says why this version of the program cannot read the file in
// force; nil if it can. Fleet is then the empty fleet, which must not be placed
// by: the constraints of the file are not in it.
func (s *State) FleetProblem() error { return s.fleetProblem }

// Coordinators is the catalogue by number.
func (s *State) Coordinators() []Coordinator { return slices.Clone(s.coordinators) }

// Coordinator returns the catalogue's entry of an id.
func (s *State) Coordinator(id string) (Coordinator, bool) {
	if i := s.coordinatorIndex(id); i >= 0 {
		return s.coordinators[i], true
	}
	return Coordinator{}, false
}

func (s *State) coordinatorIndex(id string) int {
	return slices.IndexFunc(s.coordinators, func(c Coordinator) bool { return c.ID == id })
}

// Audit is the newest n changes, oldest first.
func (s *State) Audit(n int) []AuditEntry { return s.audit.slice(n) }

// Hash is a digest over all of the state; equal states have equal hashes.
func (s *State) Hash() [sha256.Size]byte { return sha256.Sum256(s.AppendSnapshot(nil)) }
