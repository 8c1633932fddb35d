package agent

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	waypostv1 "waypost/proto/waypost/v1"
	"waypost/systemd/daemon"
)

// A host's own wish to be drained is kept in a file of the state directory: a
// restart of the agent does not bring placements back.
const (
	wishFile       = "drain.json"
	maxWishBytes   = 4096
	maxReasonBytes = 512
)

// drainWish is the wish, until a leader has made a drain of it.
type drainWish struct {
	file string
	log  *slog.Logger
	// kick has the coordinators told at once.
	kick func()

	mu  sync.Mutex
	now *wishContents // nil: none
}

type wishContents struct {
	ID     string `json:"id"`
	Reason string `json:"reason"`
}

func newDrainWish(stateDir string, log *slog.Logger, kick func()) *drainWish {
	return &drainWish{file: filepath.Join(stateDir, wishFile), log: log, kick: kick}
}

// read takes the file in; one that is missing is no wish.
func (d *drainWish) read() error {
	f, err := os.Open(d.file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxWishBytes))
	if err != nil {
		return err
	}
	var w wishContents
	if err := json.Unmarshal(data, &w); err != nil {
		return fmt.Errorf("%s: %w", d.file, err)
	}
	if id, err := hex.DecodeString(w.ID); err != nil || len(id) != 8 || len(w.Reason) > maxReasonBytes {
		return fmt.Errorf("%s: id must be 16 hex digits, reason at most %d bytes", d.file, maxReasonBytes)
	}
	d.mu.Lock()
	d.now = &w
	d.mu.Unlock()
	return nil
}

// set wishes. It is kept before anybody hears of it; a wish that is there
// already stays, with a new reason.
func (d *drainWish) set(reason string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	w := &wishContents{Reason: reason}
	if d.now != nil {
		w.ID = d.now.ID
	} else {
		var id [8]byte
		_, _ = rand.Read(id[:]) // it never fails
		w.ID = hex.EncodeToString(id[:])
	}
	data, err := json.Marshal(w)
	if err != nil {
		return err
	}
	if err := daemon.ReplaceFile(d.file, data); err != nil {
		return err
	}
	d.now = w
	d.kick()
	return nil
}

// clear takes the wish back; had says that there was one.
func (d *drainWish) clear() (had bool, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.now == nil {
		return false, nil
	}
	if err := os.Remove(d.file); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return true, err
	}
	d.now = nil
	d.kick()
	return true, nil
}

// recorded takes note that a leader has made a drain of a wish.
func (d *drainWish) recorded(id string) {
	d.mu.Lock()
	its := d.now != nil && id == d.now.ID
	d.mu.Unlock()
	if !its {
		return
	}
	if _, err := d.clear(); err != nil {
		d.log.Warn("a wish to be drained that was granted cannot be forgotten; the leader is told again", "error", err)
		return
	}
	d.log.Info("the wish to be drained is on record")
}

// proto is the wish as it is told; nil: none.
func (d *drainWish) proto() *waypostv1.DrainWish {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.now == nil {
		return nil
	}
	return &waypostv1.DrainWish{Id: &d.now.ID, Reason: &d.now.Reason}
}

// CordonTarget sets this host's wish to be drained: the local socket stands for
// the host, so it needs no leader. It answers with the coordinators that hear
// of it as pending.
func (s *localServer) CordonTarget(_ context.Context, req *waypostv1.CordonTargetRequest) (*waypostv1.CordonTargetResponse, error) {
	reason := strings.TrimSpace(req.GetReason())
	switch {
	case !req.GetDrain():
		return nil, status.Error(codes.InvalidArgument, "drain: must be true: a host wishes to be drained, not cordoned")
	case reason == "" || len(reason) > maxReasonBytes || strings.ContainsAny(reason, "\n\r\t"):
		return nil, status.Errorf(codes.InvalidArgument, "reason: must be one line of 1 to %d bytes", maxReasonBytes)
	}
	out := &waypostv1.CordonTargetResponse{Cordon: &waypostv1.Cordon{Selector: &s.a.name, Reason: &reason, Drain: proto.Bool(true)}, Workers: s.a.workerNames(), PendingOn: s.a.lanes.coordinators()}
	if req.GetDryRun() {
		return out, nil
	}
	if err := s.a.wish.set(reason); err != nil {
		return nil, status.Errorf(codes.Internal, "the wish cannot be kept, so it is not said: %v", err)
	}
	s.a.log.Info("this host wishes to be drained", "event", "drain_started", "local", true, "reason", reason)
	return out, nil
}

// UncordonTarget takes the wish back. A drain that a leader has made of it is
// taken back like any other.
func (s *localServer) UncordonTarget(_ context.Context, req *waypostv1.UncordonTargetRequest) (*waypostv1.UncordonTargetResponse, error) {
	out := &waypostv1.UncordonTargetResponse{Workers: s.a.workerNames(), Removed: proto.Bool(s.a.wish.proto() != nil)}
	if req.GetDryRun() {
		return out, nil
	}
	had, err := s.a.wish.clear()
	if err != nil {
		return nil, status.Errorf(codes.Internal, "the wish cannot be forgotten, so it stays: %v", err)
	}
	out.Removed = &had
	if had {
		s.a.log.Info("this host wishes to be drained no more", "event", "uncordoned", "local", true)
	}
	return out, nil
}

// workerNames are the names of this host's workers.
func (a *Agent) workerNames() (names []string) {
	for _, r := range a.ranks() {
		names = append(names, fmt.Sprintf("%s/%s/%d", a.name, r.engine, r.number))
	}
	return names
}

// coordinators are the names of those that hear this host.
func (h *lanes) coordinators() (names []string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for l := range h.up {
		names = append(names, name(l))
	}
	slices.Sort(names)
	return names
}
