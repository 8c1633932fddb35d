package mesh

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// Role is what a member is.
type Role string

// The roles of members.
const (
	RoleAgent       Role = "agent"
	RoleCoordinator Role = "coordinator"
)

// Protocol is the mesh protocol spoken, ProtocolMin the oldest one understood.
const (
	Protocol    = 1
	ProtocolMin = 1
)

// Meta is what a member says of itself. It is gossiped on every change, so it
// holds only what seldom changes.
type Meta struct {
	Role     Role
	Protocol uint8
	Version  string // of Waypost
	// Process is the process mark. Life tells apart memberships of one process.
	Process uint64
	Life    uint32
	// KeyID is the fingerprint of the key it encrypts with, 4 hex digits; empty:
	// not encrypted.
	KeyID string
	// ClusterAddress is where a coordinator takes lanes and Raft, APIAddress where
	// it serves the API; host:port, empty: none.
	ClusterAddress string
	APIAddress     string
}

// Bounds of the strings, so that the whole stays far below memberlist's 512 B.
const (
	maxVersionBytes = 48
	maxAddressBytes = 128
)

// Wire form: version byte, role byte, protocol byte, u64 process, u32 life, two
// bytes of key fingerprint, then fields (tag, length, bytes). A decoder skips
// tags it does not know, so that a newer member can say more.
const (
	metaVersion  = 1
	metaHead     = 1 + 1 + 1 + 8 + 4 + 2
	tagVersion   = 1
	tagCluster   = 2
	tagAPI       = 3
	tagEncrypted = 4 // present without bytes: the fingerprint is meant
)

var roleBytes = map[Role]byte{RoleAgent: 1, RoleCoordinator: 2}

// ErrMeta: a member's description cannot be read.
var ErrMeta = errors.New("malformed member description")

func (m Meta) check() error {
	if roleBytes[m.Role] == 0 {
		return fmt.Errorf("mesh: role %q, want agent or coordinator", m.Role)
	}
	for _, f := range []struct {
		name, value string
		limit       int
	}{{"version", m.Version, maxVersionBytes}, {"cluster address", m.ClusterAddress, maxAddressBytes}, {"API address", m.APIAddress, maxAddressBytes}} {
		if len(f.value) > f.limit {
			return fmt.Errorf("mesh: %s has %d bytes, at most %d", f.name, len(f.value), f.limit)
		}
	}
	return nil
}

func (m Meta) encode() []byte {
	b := make([]byte, metaHead, 96)
	b[0], b[1], b[2] = metaVersion, roleBytes[m.Role], m.Protocol
	binary.BigEndian.PutUint64(b[3:], m.Process)
	binary.BigEndian.PutUint32(b[11:], m.Life)
	if m.KeyID != "" {
		var id uint16
		_, _ = fmt.Sscanf(m.KeyID, "%04x", &id)
		binary.BigEndian.PutUint16(b[15:], id)
		b = append(b, tagEncrypted, 0)
	}
	for _, f := range []struct {
		tag   byte
		value string
	}{{tagVersion, m.Version}, {tagCluster, m.ClusterAddress}, {tagAPI, m.APIAddress}} {
		if f.value != "" {
			b = append(b, f.tag, byte(len(f.value)))
			b = append(b, f.value...)
		}
	}
	return b
}

func decodeMeta(b []byte) (Meta, error) {
	if len(b) < metaHead {
		return Meta{}, fmt.Errorf("%w: %d bytes", ErrMeta, len(b))
	}
	if b[0] != metaVersion {
		return Meta{}, fmt.Errorf("%w: version %d, this process reads %d", ErrMeta, b[0], metaVersion)
	}
	m := Meta{Protocol: b[2], Process: binary.BigEndian.Uint64(b[3:]), Life: binary.BigEndian.Uint32(b[11:])}
	for role, rb := range roleBytes {
		if rb == b[1] {
			m.Role = role
		}
	}
	if m.Role == "" {
		return Meta{}, fmt.Errorf("%w: role %d", ErrMeta, b[1])
	}
	id := binary.BigEndian.Uint16(b[15:])
	for rest := b[metaHead:]; len(rest) > 0; {
		if len(rest) < 2 || len(rest) < 2+int(rest[1]) {
			return Meta{}, fmt.Errorf("%w: field cut short", ErrMeta)
		}
		tag, value := rest[0], string(rest[2:2+int(rest[1])])
		rest = rest[2+len(value):]
		switch tag {
		case tagVersion:
			m.Version = value
		case tagCluster:
			m.ClusterAddress = value
		case tagAPI:
			m.APIAddress = value
		case tagEncrypted:
			m.KeyID = fmt.Sprintf("%04x", id)
		}
	}
	return m, m.check()
}
