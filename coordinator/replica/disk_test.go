package replica

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/raft"
	"go.etcd.io/bbolt"
)

// faultyDisk hangs or is full, as told.
type faultyDisk struct {
	raft.LogStore
	raft.StableStore
	full atomic.Bool
	hang atomic.Pointer[chan struct{}]
}

func (d *faultyDisk) fault() error {
	if c := d.hang.Load(); c != nil {
		<-*c
	}
	if d.full.Load() {
		return syscall.ENOSPC
	}
	return nil
}

func (d *faultyDisk) StoreLogs(l []*raft.Log) error {
	if err := d.fault(); err != nil {
		return err
	}
	return d.LogStore.StoreLogs(l)
}

func (d *faultyDisk) SetUint64(k []byte, v uint64) error {
	if err := d.fault(); err != nil {
		return err
	}
	return d.StableStore.SetUint64(k, v)
}

func (d *faultyDisk) Set(k, v []byte) error {
	if err := d.fault(); err != nil {
		return err
	}
	return d.StableStore.Set(k, v)
}

// withDisk starts a node again on a disk with faults.
func (n *node) withDisk() *faultyDisk {
	n.c.t.Helper()
	n.crash()
	o := n.options(false)
	o.Timing.DiskStall = 300 * time.Millisecond
	r, err := New(o)
	if err != nil {
		n.c.t.Fatal(err)
	}
	d := &faultyDisk{LogStore: r.stores.logs, StableStore: r.stores.stable}
	r.stores.logs, r.stores.stable = d, d
	if err := r.Start(); err != nil {
		n.c.t.Fatal(err)
	}
	n.c.mu.Lock()
	n.Replica = r
	n.c.mu.Unlock()
	return d
}

// TestLeaderWithAHungDiskIsReplaced: heartbeats go on without a disk, so the
// others would wait for ever if the leader did not fall silent.
func TestLeaderWithAHungDiskIsReplaced(t *testing.T) {
	virtual(t, func(t *testing.T, c *cluster) {
		n := c.three()
		disks := map[*node]*faultyDisk{}
		for _, x := range n {
			disks[x] = x.withDisk()
			c.leader(n...)
		}
		l := c.leader(n...)
		var rest []*node
		for _, x := range n {
			if x != l {
				rest = append(rest, x)
			}
		}
		gate := make(chan struct{})
		disks[l].hang.Store(&gate)
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		type end struct {
			done Applied
			err  error
		}
		stuck := make(chan end, 1)
		go func() {
			done, err := l.Propose(ctx, cordon(t, 1))
			stuck <- end{done, err}
		}()
		next := c.leader(rest...)
		// The others serve; reads here do not wait for the disk.
		propose(t, rest[0], cordon(t, 2))
		if l.IsLeader() || l.DiskStalledFor() == 0 {
			t.Errorf("it leads %v, stalled for %v", l.IsLeader(), l.DiskStalledFor())
		}
		l.State()
		l.Members()
		if _, err := l.ProposeHere(ctx, cordon(t, 3)); !errors.Is(err, ErrNoLeader) || !strings.Contains(err.Error(), "the disk under "+l.dir) || !strings.Contains(err.Error(), "does not answer") {
			t.Errorf("a change on the hung one: %v", err)
		}
		l2 := disks[l]
		l2.hang.Store(nil)
		close(gate)
		// The change that hung is made after all, once, or is free to be made.
		if e := <-stuck; e.err != nil {
			t.Errorf("the change that hung: %v", e.err)
		}
		c.leader(n...)
		c.same(n...)
		if got := len(next.State().Cordons()); got != 2 {
			t.Errorf("%d cordons, want 2", got)
		}
	})
}

func TestFullDiskRefusesAndRecovers(t *testing.T) {
	virtual(t, func(t *testing.T, c *cluster) {
		a := c.add(true)
		c.leader(a)
		propose(t, a, cordon(t, 1))
		d := a.withDisk()
		c.leader(a)
		d.full.Store(true)
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		_, err := a.Propose(ctx, cordon(t, 2))
		// Whether it was tried before the leadership was lost is a matter of chance.
		if !errors.Is(err, ErrNoLeader) || !strings.Contains(err.Error(), a.dir) || !strings.Contains(err.Error(), "(no space left on device)") {
			t.Errorf("a change on a full disk: %v", err)
		}
		c.eventually("it waits for space to store its term", func() bool { return strings.Contains(a.logs.String(), "the raft term cannot be stored") })
		if len(a.State().CordonsFor("host-000001/e/0", "", nil)) != 1 {
			t.Error("reads fail on a full disk")
		}
		d.full.Store(false)
		c.leader(a)
		propose(t, a, cordon(t, 2))
		if got := len(a.State().Cordons()); got != 2 {
			t.Errorf("%d cordons", got)
		}
		// It can also be stopped while the disk is full.
		d.full.Store(true)
		ctx2, cancel2 := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel2()
		if _, err := a.Propose(ctx2, cordon(t, 3)); err == nil {
			t.Error("a change on a full disk is answered")
		}
		a.crash()
		a.open(false)
		c.leader(a)
		if got := len(a.State().Cordons()); got != 2 {
			t.Errorf("%d cordons after the restart", got)
		}
	})
}

// restartWith stops a node with a snapshot and entries behind it, lets damage
// have its directory, and returns what New says.
func restartWith(t *testing.T, damage func(t *testing.T, dir string)) error {
	t.Helper()
	c := newCluster(t)
	a := c.add(true)
	c.leader(a)
	for i := range 10 {
		propose(t, a, cordon(t, i))
	}
	for i := range 2 {
		if err := a.raft.Snapshot().Error(); err != nil {
			t.Fatal(err)
		}
		for k := range 10 {
			propose(t, a, cordon(t, 100+10*i+k))
		}
	}
	a.crash()
	damage(t, a.dir)
	o := a.options(false)
	r, err := New(o)
	if err != nil {
		o.Listener.Close()
		return err
	}
	if got := len(r.State().Cordons()); got != 30 {
		t.Errorf("%d cordons on disk, want 30", got)
	}
	if err := r.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	return nil
}

// newestSnapshot is a file of the newest snapshot.
func newestSnapshot(t *testing.T, dir, file string) string {
	t.Helper()
	path, index := newestFolder(filepath.Join(dir, snapshotDir))
	if index == 0 {
		t.Fatal("no snapshot")
	}
	return filepath.Join(path, file)
}

func rewrite(t *testing.T, path string, change func([]byte) []byte) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, change(b), 0o600); err != nil {
		t.Fatal(err)
	}
}

func flip(b []byte) []byte { b[len(b)/2] ^= 1; return b }

func TestDamage(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		damage func(t *testing.T, dir string)
		want   []string // nil: it starts
	}{
		"none": {func(*testing.T, string) {}, nil},
		"snapshot bit": {
			func(t *testing.T, dir string) { rewrite(t, newestSnapshot(t, dir, "state.bin"), flip) },
			[]string{snapshotDir, "CRC mismatch", "the log still holds all of it"},
		},
		"snapshot cut": {func(t *testing.T, dir string) {
			rewrite(t, newestSnapshot(t, dir, "state.bin"), func(b []byte) []byte { return b[:len(b)/2] })
		}, []string{snapshotDir, "CRC mismatch"}},
		"snapshot meta": {func(t *testing.T, dir string) {
			rewrite(t, newestSnapshot(t, dir, "meta.json"), func([]byte) []byte { return []byte("{") })
		}, []string{snapshotDir, "meta.json cannot be read"}},
		"all snapshots": {func(t *testing.T, dir string) {
			files, _ := filepath.Glob(filepath.Join(dir, snapshotDir, "*", "state.bin"))
			for _, f := range files {
				rewrite(t, f, flip)
			}
		}, []string{"CRC mismatch", "the log still holds all of it"}},
		"snapshots away": {func(t *testing.T, dir string) { os.RemoveAll(filepath.Join(dir, snapshotDir)) }, nil}, // the log reaches back to 1
		"log compacted and snapshots away": {func(t *testing.T, dir string) {
			dropLogs(t, dir, 12)
			os.RemoveAll(filepath.Join(dir, snapshotDir))
		}, []string{"the log in", "begins at 13", "join this one again"}},
		"log compacted and snapshots bad": {func(t *testing.T, dir string) {
			files, _ := filepath.Glob(filepath.Join(dir, snapshotDir, "*", "state.bin"))
			for _, f := range files {
				rewrite(t, f, flip)
			}
			dropLogs(t, dir, 12)
		}, []string{"CRC mismatch", "join this one again"}},
		"log hole": {func(t *testing.T, dir string) { dropLog(t, dir, 30) }, []string{"entry 30 of", logFile}},
		"log cut": {func(t *testing.T, dir string) {
			rewrite(t, filepath.Join(dir, logFile), func(b []byte) []byte { return b[:len(b)/4] })
		}, []string{dir(logFile)}},
		"log pages": {func(t *testing.T, dir string) {
			rewrite(t, filepath.Join(dir, logFile), func(b []byte) []byte {
				for i := 2 * os.Getpagesize(); i < len(b); i++ {
					b[i] = 0xff
				}
				return b
			})
		}, []string{dir(logFile)}},
		"log is junk": {func(t *testing.T, dir string) {
			rewrite(t, filepath.Join(dir, logFile), func(b []byte) []byte { return bytes.Repeat([]byte{0xff}, len(b)) })
		}, []string{logFile}},
		"mark bit": {func(t *testing.T, dir string) { rewrite(t, filepath.Join(dir, appliedFile), flip) }, []string{"10 of 30"}},
		"identity": {
			func(t *testing.T, dir string) {
				rewrite(t, filepath.Join(dir, idFile), func([]byte) []byte { return nil })
			},
			[]string{"is empty"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if name == "mark bit" {
				testLostMark(t)
				return
			}
			err := restartWith(t, tt.damage)
			if tt.want == nil {
				if err != nil {
					t.Errorf("%v", err)
				}
				return
			}
			if !errors.Is(err, ErrDamaged) {
				t.Fatalf("got %v, want ErrDamaged", err)
			}
			for _, want := range tt.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%v\nwant it to say %q", err, want)
				}
			}
		})
	}
}

func dir(file string) string { return string(filepath.Separator) + file }

// testLostMark: without the mark the state begins at the snapshot, and is whole
// again once there is a leader.
func testLostMark(t *testing.T) {
	c := newCluster(t)
	a := c.add(true)
	c.leader(a)
	for i := range 30 {
		propose(t, a, cordon(t, i))
	}
	a.crash()
	rewrite(t, filepath.Join(a.dir, appliedFile), flip)
	a.open(false)
	c.eventually("all cordons are back", func() bool { return len(a.State().Cordons()) == 30 })
}

// dropLogs deletes the entries up to an index, as compaction does.
func dropLogs(t *testing.T, dir string, upTo uint64) {
	t.Helper()
	s, err := openStores(dir, newRaftLogger(discard()))
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(s.logs.DeleteRange(1, upTo), s.close()); err != nil {
		t.Fatal(err)
	}
}

// dropLog deletes one entry from the middle.
func dropLog(t *testing.T, dir string, index uint64) {
	t.Helper()
	db, err := bbolt.Open(filepath.Join(dir, logFile), 0o600, nil)
	if err != nil {
		t.Fatal(err)
	}
	err = db.Update(func(tx *bbolt.Tx) error {
		return tx.Bucket([]byte("logs")).Delete([]byte{0, 0, 0, 0, 0, 0, 0, byte(index)})
	})
	if err := errors.Join(err, db.Close()); err != nil {
		t.Fatal(err)
	}
}

func TestDirectoryOfAnother(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	a := c.add(true)
	c.leader(a)
	o := (&node{c: c, name: "c-1", dir: a.dir, address: "127.0.0.1:0", logs: &recorder{}}).options(false)
	defer o.Listener.Close()
	if _, err := New(o); !errors.Is(err, ErrInUse) || !strings.Contains(err.Error(), a.dir) {
		t.Errorf("%v", err)
	}
	propose(t, a, cordon(t, 1))
}

func TestAppliedMark(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), appliedFile)
	m, err := openAppliedMark(path)
	if err != nil {
		t.Fatal(err)
	}
	if got := m.read(); got != 0 {
		t.Errorf("a new mark is %d", got)
	}
	for _, i := range []uint64{1, 1 << 60, 7} {
		if err := m.write(i); err != nil || m.read() != i {
			t.Errorf("%d reads back as %d, %v", i, m.read(), err)
		}
	}
	if err := m.close(); err != nil {
		t.Fatal(err)
	}
	for cut := range appliedBytes {
		if err := os.WriteFile(path, make([]byte, cut), 0o600); err != nil {
			t.Fatal(err)
		}
		m, err := openAppliedMark(path)
		if err != nil || m.read() != 0 {
			t.Errorf("%d bytes: %d, %v", cut, m.read(), err)
		}
		m.close()
	}
}
