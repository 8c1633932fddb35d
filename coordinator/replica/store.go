package replica

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/raft"
	raftboltdb "github.com/hashicorp/raft-boltdb/v2"
	"go.etcd.io/bbolt"
)

// Files of a state directory, beside the identity.
const (
	logFile     = "raft.db"
	appliedFile = "applied"
	// snapshotDir is the name the snapshot store gives to its folder.
	snapshotDir     = "snapshots"
	snapshotsKept   = 2
	cachedLogs      = 64
	fileLockWait    = time.Second
	appliedBytes    = 12
	diskRetry       = 200 * time.Millisecond
	snapshotTmpName = ".tmp"
)

// stores are what Raft keeps, and the means to let go of them.
type stores struct {
	logs      raft.LogStore
	stable    raft.StableStore
	snapshots raft.SnapshotStore
	applied   *appliedMark // nil: none is kept
	close     func() error
}

// openStores opens the state in dir and checks that it can be read.
func openStores(dir string, logger *raftLogger) (*stores, error) {
	bolt, err := raftboltdb.New(raftboltdb.Options{
		Path: filepath.Join(dir, logFile),
		BoltOptions: &bbolt.Options{
			Timeout: fileLockWait, // the file is locked against a second process
			// The free list is rebuilt at the start instead of being written
			// with every entry.
			NoFreelistSync: true, FreelistType: bbolt.FreelistMapType,
		},
	})
	switch {
	case errors.Is(err, bbolt.ErrTimeout):
		return nil, fmt.Errorf("%w: %s is locked by another process", ErrInUse, filepath.Join(dir, logFile))
	case err != nil:
		return nil, fmt.Errorf("%w: %s: %w; %s", ErrDamaged, filepath.Join(dir, logFile), err, rejoinAdvice(dir))
	}
	s := &stores{logs: bolt, stable: bolt, close: bolt.Close}
	if s.snapshots, err = raft.NewFileSnapshotStoreWithLogger(dir, snapshotsKept, logger); err != nil {
		return nil, errors.Join(fmt.Errorf("snapshots: %w", err), bolt.Close())
	}
	if s.applied, err = openAppliedMark(filepath.Join(dir, appliedFile)); err != nil {
		return nil, errors.Join(err, bolt.Close())
	}
	s.close = func() error { return errors.Join(s.applied.close(), bolt.Close()) }
	return s, nil
}

// guardDamage runs f, which reads a log that may be cut short or overwritten, and
// turns the panic or fault that the log store ends in into ErrDamaged.
func guardDamage(dir string, f func() error) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("%w: %s: %v; %s", ErrDamaged, filepath.Join(dir, logFile), p, rejoinAdvice(dir))
		}
	}()
	return f()
}

// load returns the newest state on disk: the newest snapshot and the log after
// it, as far as it was applied before. It refuses a state of which a part is
// missing, with what to do about it.
func (s *stores) load(dir string) (*view, error) {
	var v *view
	err := guardDamage(dir, func() error {
		first, err := s.logs.FirstIndex()
		if err != nil {
			return fmt.Errorf("%w: %s: %w", ErrDamaged, logFile, err)
		}
		last, err := s.logs.LastIndex()
		if err != nil {
			return fmt.Errorf("%w: %s: %w", ErrDamaged, logFile, err)
		}
		snapshotIndex := uint64(0)
		if v, snapshotIndex, err = s.loadSnapshot(dir, first); err != nil {
			return err
		}
		if last > snapshotIndex && first > snapshotIndex+1 {
			return fmt.Errorf("%w: the log in %s begins at %d and the newest snapshot ends at %d; %s",
				ErrDamaged, filepath.Join(dir, logFile), first, snapshotIndex, rejoinAdvice(dir))
		}
		return s.replay(dir, v, snapshotIndex, last)
	})
	return v, err
}

// replay reads the log after the snapshot and applies what was applied before.
func (s *stores) replay(dir string, v *view, snapshotIndex, last uint64) error {
	upTo := uint64(0)
	if s.applied != nil {
		upTo = s.applied.read()
	}
	if upTo > last {
		upTo = 0 // the mark belongs to another log
	}
	for i := snapshotIndex + 1; i <= last; i++ {
		var entry raft.Log
		if err := s.logs.GetLog(i, &entry); err != nil {
			return fmt.Errorf("%w: entry %d of %s: %w; %s", ErrDamaged, i, filepath.Join(dir, logFile), err, rejoinAdvice(dir))
		}
		if i > upTo || i <= v.index || entry.Type != raft.LogCommand {
			continue
		}
		state, _ := v.state.Apply(entry.Data)
		*v = view{state, i}
	}
	return nil
}

func rejoinAdvice(dir string) string {
	return "if other coordinators have the state, empty " + dir + " and join this one again"
}

// loadSnapshot reads the newest snapshot. A damaged one is an error even if an
// older one is intact: a person decides.
func (s *stores) loadSnapshot(dir string, firstLog uint64) (*view, uint64, error) {
	list, err := s.snapshots.List()
	if err != nil {
		return nil, 0, fmt.Errorf("%w: %s: %w", ErrDamaged, filepath.Join(dir, snapshotDir), err)
	}
	newest := uint64(0)
	if len(list) > 0 {
		newest = list[0].Index
	}
	if path, index := newestFolder(filepath.Join(dir, snapshotDir)); index > newest {
		return nil, 0, s.damagedSnapshot(dir, path, errors.New("its meta.json cannot be read"), list, firstLog)
	}
	if len(list) == 0 {
		return emptyView(), 0, nil
	}
	v, err := s.readSnapshot(list[0].ID)
	if err != nil {
		return nil, 0, s.damagedSnapshot(dir, filepath.Join(dir, snapshotDir, list[0].ID), err, list[1:], firstLog)
	}
	return v, list[0].Index, nil
}

func (s *stores) readSnapshot(id string) (*view, error) {
	_, r, err := s.snapshots.Open(id)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	return decodeView(r)
}

// damagedSnapshot says what is lost without a snapshot: nothing, if the log
// still reaches back to an older one.
func (s *stores) damagedSnapshot(dir, path string, cause error, older []*raft.SnapshotMeta, firstLog uint64) error {
	advice := rejoinAdvice(dir)
	for _, o := range append(older, &raft.SnapshotMeta{}) {
		intact := o.ID == ""
		if !intact {
			_, err := s.readSnapshot(o.ID)
			intact = err == nil
		}
		if intact && firstLog > 0 && firstLog <= o.Index+1 {
			advice = "the log still holds all of it: move that folder away and start again"
			break
		}
	}
	return fmt.Errorf("%w: snapshot %s: %w; %s", ErrDamaged, path, cause, advice)
}

// newestFolder is the snapshot folder with the highest index in its name,
// whether it can be read or not.
func newestFolder(dir string) (path string, index uint64) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return "", 0
	}
	for _, e := range entries {
		parts := strings.Split(e.Name(), "-") // term-index-milliseconds
		if !e.IsDir() || strings.HasSuffix(e.Name(), snapshotTmpName) || len(parts) != 3 {
			continue
		}
		if n, err := strconv.ParseUint(parts[1], 10, 64); err == nil && n > index {
			path, index = filepath.Join(dir, e.Name()), n
		}
	}
	return path, index
}

// appliedMark is a file with the index of the log applied last. It is not
// flushed with every change: after a power cut it may be behind, which costs
// knowledge only until a leader is found.
type appliedMark struct {
	mu sync.Mutex
	f  *os.File
}

func openAppliedMark(path string) (*appliedMark, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("applied mark: %w", err)
	}
	return &appliedMark{f: f}, nil
}

// read returns 0 if there is no mark or it is not whole.
func (m *appliedMark) read() uint64 {
	var b [appliedBytes]byte
	if n, err := m.f.ReadAt(b[:], 0); n != len(b) || err != nil && !errors.Is(err, io.EOF) {
		return 0
	}
	if crc32.ChecksumIEEE(b[:8]) != binary.LittleEndian.Uint32(b[8:]) {
		return 0
	}
	return binary.LittleEndian.Uint64(b[:8])
}

func (m *appliedMark) write(index uint64) error {
	var b [appliedBytes]byte
	binary.LittleEndian.PutUint64(b[:8], index)
	binary.LittleEndian.PutUint32(b[8:], crc32.ChecksumIEEE(b[:8]))
	m.mu.Lock()
	defer m.mu.Unlock()
	_, err := m.f.WriteAt(b[:], 0)
	return err
}

func (m *appliedMark) close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return errors.Join(m.f.Sync(), m.f.Close())
}

// diskWatch knows how long the write under way has taken.
type diskWatch struct {
	mu     sync.Mutex
	writes map[uint64]time.Time
	next   uint64
	failed error // of the newest write that ended
}

func newDiskWatch() *diskWatch { return &diskWatch{writes: map[uint64]time.Time{}} }

// during runs one write.
func (w *diskWatch) during(write func() error) error {
	w.mu.Lock()
	id := w.next
	w.next++
	w.writes[id] = time.Now()
	w.mu.Unlock()
	err := write()
	w.mu.Lock()
	delete(w.writes, id)
	w.failed = err
	w.mu.Unlock()
	return err
}

// stalledFor is how long the oldest write under way has taken, 0 if there is
// none, and the error of the newest write that ended.
func (w *diskWatch) stalledFor() (time.Duration, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	var longest time.Duration
	for _, since := range w.writes {
		longest = max(longest, time.Since(since))
	}
	return longest, w.failed
}

// watchedLogs is a log store under the watch.
type watchedLogs struct {
	raft.LogStore
	watch *diskWatch
}

// StoreLog stores one entry.
func (s watchedLogs) StoreLog(l *raft.Log) error { return s.StoreLogs([]*raft.Log{l}) }

// StoreLogs stores entries.
func (s watchedLogs) StoreLogs(l []*raft.Log) error {
	return s.watch.during(func() error { return s.LogStore.StoreLogs(l) })
}

// DeleteRange drops entries.
func (s watchedLogs) DeleteRange(from, to uint64) error {
	return s.watch.during(func() error { return s.LogStore.DeleteRange(from, to) })
}

// currentTermKey is the one value that Raft ends the process over when it
// cannot be stored.
const currentTermKey = "CurrentTerm"

// watchedStable is a stable store under the watch. It waits while the current
// term cannot be stored, on a full disk, instead of failing: the replica then
// neither votes nor leads until there is space.
type watchedStable struct {
	raft.StableStore
	watch   *diskWatch
	logger  *slog.Logger
	closing <-chan struct{}
}

// Set stores a value.
func (s watchedStable) Set(key, value []byte) error {
	return s.watch.during(func() error { return s.StableStore.Set(key, value) })
}

// SetUint64 stores a number.
func (s watchedStable) SetUint64(key []byte, value uint64) error {
	return s.watch.during(func() error {
		err := s.StableStore.SetUint64(key, value)
		if err == nil || string(key) != currentTermKey {
			return err
		}
		s.logger.Error("the raft term cannot be stored; this coordinator takes no part in votes until it can", "error", err)
		for {
			select {
			case <-s.closing:
				// It does nothing in the new term any more: a vote would have
				// to be stored too, and that fails.
				return nil
			case <-time.After(diskRetry):
			}
			if err = s.StableStore.SetUint64(key, value); err == nil {
				s.logger.Info("the raft term is stored again")
				return nil
			}
		}
	})
}
