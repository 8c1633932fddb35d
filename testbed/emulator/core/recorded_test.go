package core_test

import (
	"fmt"
	"io/fs"
	"testing"

	"github.com/google/go-cmp/cmp"

	"waypost/testbed/emulator/core"
	"waypost/testbed/emulator/internal/recording"
)

// story tells what a recording did, and what the core did with the same
// requests: batch by batch, with hashes renamed in order of appearance.
func story(t *testing.T, done []recording.Emulated) (recorded, emulated []string) {
	t.Helper()
	theirs, ours := recording.Namer{}, recording.Namer{}
	for _, e := range done {
		recorded = append(recorded, fmt.Sprintf("request %d: %d tokens cached", e.Request.N, e.Request.Cached))
		emulated = append(emulated, fmt.Sprintf("request %d: %d tokens cached", e.Request.N, e.Cached))
		if e.Request.Created != nil {
			recorded = append(recorded, fmt.Sprintf("%d tokens of new blocks", *e.Request.Created))
			emulated = append(emulated, fmt.Sprintf("%d tokens of new blocks", e.Created))
		}
		for _, b := range e.Recorded {
			recorded = append(recorded, "batch")
			for _, v := range b.Events {
				recorded = append(recorded, theirs.Recorded(v))
			}
		}
		for _, b := range e.Batches {
			emulated = append(emulated, "batch")
			for _, v := range b {
				emulated = append(emulated, ours.Emulated(v))
			}
		}
	}
	return recorded, emulated
}

func testRecordings(t *testing.T, dir fs.FS, names []string) {
	for _, name := range names {
		t.Run(name, func(t *testing.T) {
			done, err := recording.Run(dir, name, nil)
			if err != nil {
				t.Fatal(err)
			}
			recorded, emulated := story(t, done)
			if d := cmp.Diff(recorded, emulated); d != "" {
				t.Errorf("the core differs from the engine (-engine +core):\n%s", d)
			}
		})
	}
}

// TestRecordedSample: given the same requests one at a time, the core stores,
// evicts and reports what the real engine did.
func TestRecordedSample(t *testing.T) {
	testRecordings(t, recording.Sample(), recording.SampleNames)
}

func TestRecordedFull(t *testing.T) {
	dir, err := recording.Full(".")
	if err != nil {
		t.Skip(err)
	}
	testRecordings(t, dir, recording.SequentialNames)
}

// TestRecordedNoticesOrder: the comparison would notice a core that evicts in
// another order than the engine.
func TestRecordedNoticesOrder(t *testing.T) {
	for _, test := range []struct {
		name   string
		adjust func(*core.Core)
		sample string
	}{
		{"head before tail", core.ReleaseHeadFirst, "dup-one"},
		{"head before tail", core.ReleaseHeadFirst, "evict-21"},
		{"empty blocks in order", core.ReuseInOrder, "evict-21"},
	} {
		t.Run(test.name+" on "+test.sample, func(t *testing.T) {
			done, err := recording.Run(recording.Sample(), test.sample, test.adjust)
			if err != nil {
				t.Fatal(err)
			}
			if recorded, emulated := story(t, done); cmp.Equal(recorded, emulated) {
				t.Error("the changed core equals the recording: the comparison is blind to the order")
			}
		})
	}
}
