package registry

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"
	"unicode/utf8"
)

// Limits that Apply enforces; see the package comment before changing one.
const (
	// MaxCommandBytes bounds an encoded command.
	MaxCommandBytes = 2 << 20
	// MaxFleetBytes bounds the text of a fleet file.
	MaxFleetBytes = 512 << 10
	// MaxCordons bounds the cordons kept at the same time.
	MaxCordons = 4096
	// MaxCoordinators bounds the catalogue.
	MaxCoordinators = 64
	// DedupWindow is how many of the newest request ids are remembered.
	DedupWindow = 4096
	// AuditEntries is how many changes the audit trail keeps.
	AuditEntries = 10_000
	// FleetVersions is how many of the newest fleet files are kept.
	FleetVersions = 10

	maxNameBytes   = 128
	maxReasonBytes = 512
	maxCordonGPUs  = 64
	maxRemoved     = 256
	maxAtMs        = 253_402_300_799_999 // year 9999
)

// SupportedFeatureLevel is the highest feature level this version knows.
const SupportedFeatureLevel = 1

// commandVersion is the first byte of every encoded command.
const commandVersion = 1

// Kind names what a command does.
type Kind string

// The kinds of commands of feature level 1.
const (
	KindInitCluster         Kind = "init_cluster"
	KindPutFleet            Kind = "put_fleet"
	KindSetCordon           Kind = "set_cordon"
	KindRemoveCordon        Kind = "remove_cordon"
	KindRegisterCoordinator Kind = "register_coordinator"
	KindRemoveCoordinator   Kind = "remove_coordinator"
	KindSetFeatureLevel     Kind = "set_feature_level"
)

// Stamp is what a proposer puts on a command.
type Stamp struct {
	// RequestID makes a retry harmless: 1 to 128 bytes, unique per wish.
	RequestID string
	// At is the proposer's wall clock. It is shown to people and decides nothing.
	At time.Time
	// By is who wants it, 1 to 128 bytes.
	By string
	// Via is the coordinator that took the wish, at most 128 bytes.
	Via string
}

// Body is one of the commands below.
type Body interface {
	// Kind names the command.
	Kind() Kind
	// bounds is what every coordinator checks, of any version.
	bounds() error
	// apply changes next, which is a copy of its own.
	apply(next *State, s Stamp) Result
}

// InitCluster names a new cluster. It is the first command of every log.
type InitCluster struct {
	// ClusterID tells clusters under one CA apart, 1 to 128 bytes.
	ClusterID string `json:"cluster_id"`
	// Fleet is the name people see.
	Fleet string `json:"fleet"`
}

// PutFleet replaces the fleet file.
type PutFleet struct {
	// TOML is the file, at most MaxFleetBytes.
	TOML string `json:"toml"`
	// BaseVersion is the version it was made from; 0 is the empty fleet.
	BaseVersion uint32 `json:"base_version"`
	// Message says why, at most 512 bytes.
	Message string `json:"message,omitempty"`
}

// SetCordon stops new placements on what the selector names, now or later.
type SetCordon struct {
	// Selector is host, host/engine, host/engine/rank or a GPU UUID.
	Selector string `json:"selector"`
	// Reason says why, 1 to 512 bytes.
	Reason string `json:"reason"`
	// Drain says that it came from a drain.
	Drain bool `json:"drain,omitempty"`
	// GPUUUIDs are the GPUs the named engine or worker uses now, at most 64.
	// Together with Model they keep the cordon when the engine returns under
	// another name. Empty for hosts and GPUs, and when unknown.
	GPUUUIDs []string `json:"gpu_uuids,omitempty"`
	// Model is the served model of the named engine or worker, if known.
	Model string `json:"model,omitempty"`
}

// RemoveCordon takes the cordon with this very selector back.
type RemoveCordon struct {
	Selector string `json:"selector"`
	Reason   string `json:"reason,omitempty"`
}

// RegisterCoordinator adds a coordinator to the catalogue or changes its entry.
type RegisterCoordinator struct {
	// ID is its identity for life.
	ID string `json:"id"`
	// Name is unique among those in the catalogue.
	Name string `json:"name"`
	// ClusterAddress is host:port of Raft and lanes.
	ClusterAddress string `json:"cluster_address"`
	// APIAddress is host:port of the API; may be empty.
	APIAddress string `json:"api_address,omitempty"`
	// Voter says whether it may become a voter.
	Voter bool `json:"voter"`
}

// RemoveCoordinator takes a coordinator out for good: neither its number nor
// its id comes back.
type RemoveCoordinator struct {
	ID string `json:"id"`
}

// SetFeatureLevel raises the level that gates new commands and keys.
type SetFeatureLevel struct {
	Level uint32 `json:"level"`
}

// Kind names the command.
func (InitCluster) Kind() Kind { return KindInitCluster }

// Kind names the command.
func (PutFleet) Kind() Kind { return KindPutFleet }

// Kind names the command.
func (SetCordon) Kind() Kind { return KindSetCordon }

// Kind names the command.
func (RemoveCordon) Kind() Kind { return KindRemoveCordon }

// Kind names the command.
func (RegisterCoordinator) Kind() Kind { return KindRegisterCoordinator }

// Kind names the command.
func (RemoveCoordinator) Kind() Kind { return KindRemoveCoordinator }

// Kind names the command.
func (SetFeatureLevel) Kind() Kind { return KindSetFeatureLevel }

// Sentinel errors of commands and results.
var (
	// ErrInvalid: a field of the command is out of its bounds.
	ErrInvalid = errors.New("invalid command")
	// ErrUnknownCommand: the command is of a kind or format this version does not know.
	ErrUnknownCommand = errors.New("unknown command")
	// ErrConflict: the state changed since the command was made.
	ErrConflict = errors.New("conflict")
	// ErrRefused: the state does not allow the command.
	ErrRefused = errors.New("refused")
	// ErrRequestReused: the request id belongs to another command.
	ErrRequestReused = errors.New("request id was used for another change")
)

type envelope struct {
	Kind      Kind            `json:"kind"`
	RequestID string          `json:"request_id"`
	AtMs      int64           `json:"at_ms"`
	By        string          `json:"by"`
	Via       string          `json:"via,omitempty"`
	Body      json.RawMessage `json:"body"`
}

// Encode checks a command and writes it as Apply reads it: a version byte, then
// JSON. Errors wrap ErrInvalid and name the field, or are a *FleetError.
func Encode(s Stamp, body Body) ([]byte, error) {
	if err := s.bounds(); err != nil {
		return nil, err
	}
	if err := body.bounds(); err != nil {
		return nil, err
	}
	switch b := body.(type) {
	case PutFleet:
		if _, err := ParseFleet("fleet.toml", b.TOML); err != nil {
			return nil, err
		}
	case SetFeatureLevel:
		if b.Level > SupportedFeatureLevel {
			return nil, invalid("level", "%d is above %d, the highest this version knows", b.Level, SupportedFeatureLevel)
		}
	}
	raw, err := marshal(body)
	if err != nil {
		return nil, err
	}
	text, err := marshal(envelope{body.Kind(), s.RequestID, s.At.UnixMilli(), s.By, s.Via, raw})
	if err != nil {
		return nil, err
	}
	cmd := append([]byte{commandVersion}, text...)
	if len(cmd) > MaxCommandBytes {
		return nil, invalid("command", "%d bytes encoded, at most %d", len(cmd), MaxCommandBytes)
	}
	return cmd, nil
}

// Decode reads an encoded command. Errors wrap ErrUnknownCommand or ErrInvalid.
func Decode(cmd []byte) (Stamp, Body, error) {
	s, body, _, err := decode(cmd)
	return s, body, err
}

// decode also returns a fingerprint of kind and body, without the stamp.
func decode(cmd []byte) (Stamp, Body, uint64, error) {
	fail := func(err error) (Stamp, Body, uint64, error) { return Stamp{}, nil, 0, err }
	switch {
	case len(cmd) == 0:
		return fail(fmt.Errorf("%w: it is empty", ErrUnknownCommand))
	case cmd[0] != commandVersion:
		return fail(fmt.Errorf("%w: format %d, this version reads format %d", ErrUnknownCommand, cmd[0], commandVersion))
	case len(cmd) > MaxCommandBytes:
		return fail(invalid("command", "%d bytes, at most %d", len(cmd), MaxCommandBytes))
	case !utf8.Valid(cmd[1:]):
		return fail(invalid("command", "it is not UTF-8"))
	}
	var e envelope
	if err := unmarshal(cmd[1:], &e); err != nil {
		return fail(invalid("command", "%v", err))
	}
	s := Stamp{RequestID: e.RequestID, At: time.UnixMilli(e.AtMs).UTC(), By: e.By, Via: e.Via}
	if err := s.bounds(); err != nil {
		return fail(err)
	}
	body, err := decodeBody(e.Kind, e.Body)
	if err != nil {
		return fail(err)
	}
	if err := body.bounds(); err != nil {
		return fail(err)
	}
	canonical, err := marshal(body)
	if err != nil {
		return fail(invalid("body", "%v", err))
	}
	sum := sha256.Sum256(append([]byte(string(e.Kind)+"\x00"), canonical...))
	return s, body, binary.BigEndian.Uint64(sum[:8]), nil
}

func decodeBody(kind Kind, raw []byte) (Body, error) {
	switch kind {
	case KindInitCluster:
		return bodyOf[InitCluster](raw)
	case KindPutFleet:
		return bodyOf[PutFleet](raw)
	case KindSetCordon:
		return bodyOf[SetCordon](raw)
	case KindRemoveCordon:
		return bodyOf[RemoveCordon](raw)
	case KindRegisterCoordinator:
		return bodyOf[RegisterCoordinator](raw)
	case KindRemoveCoordinator:
		return bodyOf[RemoveCoordinator](raw)
	case KindSetFeatureLevel:
		return bodyOf[SetFeatureLevel](raw)
	}
	return nil, fmt.Errorf("%w: kind %q", ErrUnknownCommand, clip(string(kind), maxNameBytes))
}

func bodyOf[T Body](raw []byte) (Body, error) {
	var b T
	if err := unmarshal(raw, &b); err != nil {
		return nil, invalid("body", "%v", err)
	}
	return b, nil
}

func marshal(v any) ([]byte, error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false) // a fleet file may hold "<" and must not grow sixfold
	if err := enc.Encode(v); err != nil {
		return nil, fmt.Errorf("encode: %w", err)
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), nil
}

// unmarshal refuses unknown fields and anything after the value: a field that
// this version would overlook is a command it does not know.
func unmarshal(data []byte, v any) error {
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	if err := dec.Decode(v); err != nil {
		return err
	}
	if _, err := dec.Token(); err != io.EOF {
		return errors.New("data after the end")
	}
	return nil
}

func invalid(field, format string, args ...any) error {
	return fmt.Errorf("%w: %s: %s", ErrInvalid, field, fmt.Sprintf(format, args...))
}

// clip shortens s to at most n bytes without splitting a character.
func clip(s string, n int) string {
	if len(s) <= n {
		return s
	}
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n] + "…"
}

// checkText refuses what textFault finds fault with.
func checkText(field, s string, required bool, maxBytes int) error {
	if fault := textFault(s, required, maxBytes); fault != "" {
		return invalid(field, "%s", fault)
	}
	return nil
}

// textFault says whether text is empty (if required), too long or unprintable.
func textFault(s string, required bool, maxBytes int) string {
	switch {
	case required && strings.TrimSpace(s) == "":
		return "it is empty"
	case len(s) > maxBytes:
		return fmt.Sprintf("it has %d bytes, at most %d", len(s), maxBytes)
	case !utf8.ValidString(s):
		return "it is not UTF-8"
	case strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r == 0x7f }):
		return fmt.Sprintf("%q holds a control character", clip(s, 40))
	}
	return ""
}

func (s Stamp) bounds() error {
	if ms := s.At.UnixMilli(); ms < 0 || ms > maxAtMs {
		return invalid("at", "%d ms is not a time from 1970 to 9999", ms)
	}
	return errors.Join(
		checkText("request_id", s.RequestID, true, maxNameBytes),
		checkText("by", s.By, true, maxNameBytes),
		checkText("via", s.Via, false, maxNameBytes),
	)
}

func (c InitCluster) bounds() error {
	return errors.Join(checkText("cluster_id", c.ClusterID, true, maxNameBytes), checkText("fleet", c.Fleet, true, maxNameBytes))
}

func (c PutFleet) bounds() error {
	switch {
	case len(c.TOML) > MaxFleetBytes:
		return invalid("toml", "%d bytes, at most %d", len(c.TOML), MaxFleetBytes)
	case !utf8.ValidString(c.TOML):
		return invalid("toml", "it is not UTF-8")
	}
	return checkText("message", c.Message, false, maxReasonBytes)
}

func (c SetCordon) bounds() error {
	sel, err := ParseSelector(c.Selector)
	if err != nil {
		return err
	}
	if len(c.GPUUUIDs) > maxCordonGPUs {
		return invalid("gpu_uuids", "%d, at most %d", len(c.GPUUUIDs), maxCordonGPUs)
	}
	if named := len(c.GPUUUIDs) > 0 || c.Model != ""; named && sel.Engine == "" {
		return invalid("gpu_uuids", "they are recorded for an engine or a worker only, %q is a %s", c.Selector, sel.Kind)
	}
	for i, u := range c.GPUUUIDs {
		if !isGPUUUID(u) {
			return invalid(fmt.Sprintf("gpu_uuids[%d]", i), "%q is not a GPU UUID such as GPU-8a1f2b3c-…", clip(u, 60))
		}
	}
	return errors.Join(checkText("reason", c.Reason, true, maxReasonBytes), checkText("model", c.Model, false, maxReasonBytes))
}

func (c RemoveCordon) bounds() error {
	if _, err := ParseSelector(c.Selector); err != nil {
		return err
	}
	return checkText("reason", c.Reason, false, maxReasonBytes)
}

func (c RegisterCoordinator) bounds() error {
	err := errors.Join(
		checkText("id", c.ID, true, maxNameBytes),
		checkName("name", c.Name),
		checkAddress("cluster_address", c.ClusterAddress),
	)
	if c.APIAddress != "" {
		err = errors.Join(err, checkAddress("api_address", c.APIAddress))
	}
	return err
}

func (c RemoveCoordinator) bounds() error { return checkText("id", c.ID, true, maxNameBytes) }

func (c SetFeatureLevel) bounds() error {
	if c.Level == 0 {
		return invalid("level", "levels begin at 1")
	}
	return nil
}
