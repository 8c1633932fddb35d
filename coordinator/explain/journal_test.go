package explain

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"waypost/coordinator/outcome"
	"waypost/coordinator/placement"
	"waypost/gossip/ledger"
)

func openJournal(t testing.TB, options JournalOptions) *Journal {
	t.Helper()
	j, err := OpenJournal(options)
	if err != nil {
		t.Fatal(err)
	}
	return j
}

// session fills a store through fn and ends it as a clean stop does.
func session(t testing.TB, options JournalOptions, fn func(s *Store)) *Journal {
	t.Helper()
	j := openJournal(t, options)
	s := newStore(t, Options{Journal: j, FullPerSec: 1e9})
	done, ended := make(chan struct{}), make(chan struct{})
	go func() { j.Run(done); close(ended) }()
	fn(s)
	close(done)
	<-ended
	return j
}

func addFull(t testing.TB, s *Store, i int) {
	req, candidates, policy, sit, d := decide(t, 4, 900)
	e := NewEntry(&req, candidates, sit, d)
	e.Placement, e.RequestID, e.Coordinator, e.Attempt = fmt.Sprint("pl_", i), fmt.Sprint("req-", i), "c-1", 1
	s.Add(at(float64(i)), e, func() placement.Record {
		return placement.NewRecord(&req, candidates, &policy, sit, d, s.KeepCandidates())
	})
}

func TestRecordsSurviveARestart(t *testing.T) {
	dir := t.TempDir()
	var before *Entry
	session(t, JournalOptions{Dir: dir}, func(s *Store) {
		for i := range 20 {
			addFull(t, s, i)
		}
		o := outcome.NewOutcome(outcome.ResultDone)
		o.CachedTokens, o.FirstTokenMs = 0, 281
		if _, err := s.Join("pl_7", o, outcome.Evidence{}); err != nil {
			t.Fatal(err)
		}
		before, _ = s.Get("pl_7")
	})
	session(t, JournalOptions{Dir: dir}, func(s *Store) {
		if n, _ := s.Size(); n != 20 {
			t.Fatalf("%d of 20 entries are back", n)
		}
		after, _ := s.Get("pl_7")
		if diff := cmp.Diff(before, after, everything, equalNaN, cmp.Comparer(time.Time.Equal)); diff != "" {
			t.Error(diff)
		}
		var was, is placement.Decision
		if err := errors.Join(before.Record.Redecide(&was), after.Record.Redecide(&is)); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(was.Terms, is.Terms, everything, equalNaN); diff != "" || was.Chosen != is.Chosen {
			t.Errorf("decided again otherwise: %s", diff)
		}
		if a, b := before.Record.WouldChange(&was), after.Record.WouldChange(&is); len(a) == 0 || fmt.Sprint(a) != fmt.Sprint(b) {
			t.Errorf("would change: %v, after the restart %v", a, b)
		}
		if got := ids(s.ByRequest("req-3", 5)); got != "pl_3" {
			t.Errorf("by request: %q", got)
		}
		addFull(t, s, 20)
	})
	if j := openJournal(t, JournalOptions{Dir: dir}); j.State().Read != 21 || j.State().Skipped != 0 {
		t.Errorf("state %+v", j.State())
	}
}

var everything = cmp.Exporter(func(reflect.Type) bool { return true })

var equalNaN = cmp.Comparer(func(a, b float64) bool { return a == b || math.IsNaN(a) && math.IsNaN(b) })

// Every field of a record comes back: one that the disk's form forgets would
// decide otherwise after a restart.
func TestEveryFieldOfARecordIsKept(t *testing.T) {
	e := Entry{}
	n := 0
	fill(t, reflect.ValueOf(&e).Elem(), &n)
	e.Placement, e.Full, e.Outcome, e.Class, e.Provisional = "pl_1", true, nil, "", false
	e.MadeAt = at(3)
	works := func(w *placement.Worker) {
		w.Steps = ledger.NewSteps(ledger.StepModel{P0Ms: 3, P1MsPerToken: .05, QMsPerToken2: 1e-6, P2MsPerToken2: 1e-7, D0Ms: 9, D1MsPerRequest: .1, D2MsPerToken: 1e-5, D3Ms: -4, Source: "learnt"}, 4096, 12)
		w.Waiting = ledger.AtLoad(&w.Steps, 1000, 700, 300)
	}
	for i := range e.Record.Candidates {
		works(e.Record.Candidates[i].Worker)
		for k := range e.Record.Candidates[i].Partners {
			works(e.Record.Candidates[i].Partners[k].Worker)
		}
	}
	for i := range e.Record.Situation.Sources {
		works(e.Record.Situation.Sources[i].Worker)
	}
	if !e.Record.Restored() {
		t.Fatal("the record lacks something")
	}
	w := newFrameWriter()
	frame := append(w.header(), w.frame(journalItem{&e, journalEntry})...)
	var got *Entry
	if skipped := readFrames(strings.NewReader(string(frame)), func(e *Entry) { got = e }, func(*keptOutcome) {}); skipped != 0 || got == nil {
		t.Fatalf("%d skipped", skipped)
	}
	if diff := cmp.Diff(&e, got, everything, equalNaN, cmp.Comparer(time.Time.Equal)); diff != "" {
		t.Errorf("lost on disk (-kept +read):\n%s", diff)
	}
}

// Every part of a record counts: one that was forgotten would grow beyond the
// bound unseen.
func TestEveryPartOfARecordCounts(t *testing.T) {
	e := Entry{}
	n := 0
	fill(t, reflect.ValueOf(&e).Elem(), &n)
	if counts, is := sizeOf(&e)-indexBytes, entryBytes+heldBy(reflect.ValueOf(&e).Elem()); counts < is {
		t.Errorf("counts as %d bytes, is %d", counts, is)
	}
}

// heldBy is the memory that a value leads to, beyond its own.
func heldBy(v reflect.Value) (bytes int64) {
	switch v.Kind() {
	case reflect.String:
		return int64(v.Len())
	case reflect.Pointer:
		switch {
		case v.IsNil() || v.Type() == reflect.TypeFor[*time.Location]():
			return 0 // shared by all
		case v.Type() == reflect.TypeFor[*outcome.Outcome]():
			return heldBy(v.Elem()) // itself is part of every entry
		}
		return int64(v.Type().Elem().Size()) + heldBy(v.Elem())
	case reflect.Slice:
		bytes = int64(v.Len()) * int64(v.Type().Elem().Size())
		fallthrough
	case reflect.Array:
		for i := range v.Len() {
			bytes += heldBy(v.Index(i))
		}
	case reflect.Struct:
		for i := range v.NumField() {
			bytes += heldBy(v.Field(i))
		}
	}
	return bytes
}

// fill sets every exported field to a value of its own.
func fill(t *testing.T, v reflect.Value, n *int) {
	t.Helper()
	*n++
	switch v.Kind() {
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		v.SetInt(int64(*n % 100))
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		v.SetUint(uint64(*n % 100))
	case reflect.Float32, reflect.Float64:
		v.SetFloat(float64(*n) + .5)
	case reflect.String:
		v.SetString(fmt.Sprint("s", *n))
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(t, v.Elem(), n)
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		for i := range v.Len() {
			fill(t, v.Index(i), n)
		}
	case reflect.Array:
		for i := range v.Len() {
			fill(t, v.Index(i), n)
		}
	case reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
	case reflect.Struct:
		switch v.Interface().(type) {
		case time.Time, ledger.Steps, ledger.Waiting:
			return
		}
		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() {
				fill(t, v.Field(i), n)
			}
		}
	default:
		t.Fatalf("a field of kind %s: teach the disk's form and this test", v.Kind())
	}
}

// A crash may tear the file anywhere: what stands before the tear is read, and
// nothing else is.
func TestTornTailIsSkippedAndCounted(t *testing.T) {
	dir := t.TempDir()
	session(t, JournalOptions{Dir: dir}, func(s *Store) {
		for i := range 6 {
			addFull(t, s, i)
		}
	})
	path := filepath.Join(dir, "000000000001"+segmentSuffix)
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	last := -1
	for cut := len(whole); cut >= 0; cut -= 7 {
		if err := os.WriteFile(path, whole[:cut], 0o600); err != nil {
			t.Fatal(err)
		}
		j := openJournal(t, JournalOptions{Dir: dir})
		read := int(j.State().Read)
		if last >= 0 && read > last || read < last-1 {
			t.Fatalf("%d entries of %d bytes, before %d", read, cut, last)
		}
		if j.State().Skipped > 1 {
			t.Fatalf("%d skipped of one torn file", j.State().Skipped)
		}
		if read < 6 && cut > 20 && j.State().Skipped == 0 && !endsOnFrame(whole[:cut]) {
			t.Fatalf("a tear at %d is not counted", cut)
		}
		last = read
	}
	// And a new start writes on, in a file of its own.
	session(t, JournalOptions{Dir: dir}, func(s *Store) { addFull(t, s, 9) })
	if j := openJournal(t, JournalOptions{Dir: dir}); j.State().Read != 1 {
		t.Errorf("state %+v", j.State())
	}
}

func endsOnFrame(b []byte) bool {
	b = b[len(segmentHeader):]
	for len(b) >= frameHead {
		size := int(b[0]) | int(b[1])<<8 | int(b[2])<<16 | int(b[3])<<24
		if len(b) < frameHead+size {
			return false
		}
		b = b[frameHead+size:]
	}
	return len(b) == 0
}

// Damage costs frames, never the start.
func TestDamagedFilesAreReadAsFarAsTheyGo(t *testing.T) {
	dir := t.TempDir()
	session(t, JournalOptions{Dir: dir}, func(s *Store) {
		for i := range 6 {
			addFull(t, s, i)
		}
	})
	path := filepath.Join(dir, "000000000001"+segmentSuffix)
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	rapid.Check(t, func(t *rapid.T) {
		b := append([]byte(nil), whole...)
		for range rapid.IntRange(1, 4).Draw(t, "bytes") {
			b[rapid.IntRange(0, len(b)-1).Draw(t, "at")] ^= byte(rapid.IntRange(1, 255).Draw(t, "by"))
		}
		if string(b) == string(whole) {
			t.Skip("what was changed was changed back")
		}
		read := 0
		skipped := readFrames(strings.NewReader(string(b)), func(e *Entry) {
			read++
			if e.Placement == "" {
				t.Fatal("an entry without an id")
			}
		}, func(*keptOutcome) {})
		if read == 6 && skipped == 0 {
			t.Fatal("damage that nobody noticed")
		}
	})
}

func FuzzReadFrames(f *testing.F) {
	w := newFrameWriter()
	e := entry(1)
	b := append(w.header(), w.frame(journalItem{&e, journalEntry})...)
	o := outcome.NewOutcome(outcome.ResultDone)
	e.Outcome = &o
	f.Add(append(b, w.frame(journalItem{&e, journalOutcome})...))
	f.Add([]byte(segmentHeader))
	req, candidates, policy, sit, d := decide(f, 3, 900)
	full := NewEntry(&req, candidates, sit, d)
	record := placement.NewRecord(&req, candidates, &policy, sit, d, 8)
	full.Placement, full.Full, full.Record = "pl_2", true, &record
	w = newFrameWriter()
	frame := w.frame(journalItem{&full, journalEntry})
	f.Add(append(w.header(), frame...))
	f.Add(frame[frameHead:])
	f.Fuzz(func(t *testing.T, b []byte) {
		read := func(segment []byte) (records int) {
			readFrames(bytes.NewReader(segment), func(e *Entry) {
				if e.Full {
					var d placement.Decision
					// A record from a file may be anything; it must not panic.
					_ = e.Record.Redecide(&d)
					records++
				}
			}, func(*keptOutcome) {})
			return records
		}
		read(b)
		// As a payload whose checksum is right: what a disk changed is seen by that,
		// what was written wrong is not.
		sealed := binary.LittleEndian.AppendUint32([]byte(segmentHeader), uint32(len(b)))
		sealed = binary.LittleEndian.AppendUint32(sealed, crc32.Checksum(b, castagnoli))
		if n := read(append(sealed, b...)); n == 0 && bytes.Equal(b, frame[frameHead:]) {
			t.Fatal("no record is read: nothing is tried")
		}
	})
}

func TestRingIsBounded(t *testing.T) {
	dir := t.TempDir()
	const limit = 2 << 20
	options := JournalOptions{Dir: dir, MaxBytes: limit}
	last := 0
	for range 3 {
		session(t, options, func(s *Store) {
			for range 1500 {
				addFull(t, s, last)
				last++
			}
		})
		var size int64
		files, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			info, err := f.Info()
			if err != nil {
				t.Fatal(err)
			}
			size += info.Size()
		}
		if size > limit || size < limit/4 {
			t.Errorf("%d bytes in %d files, bound %d", size, len(files), limit)
		}
	}
	j := openJournal(t, options)
	read := j.takeRead()
	if len(read) == 0 || read[len(read)-1].Placement != fmt.Sprint("pl_", last-1) {
		t.Error("the newest entry is not the last one kept")
	}
	// With little memory the older ones are found on disk.
	options.ReadBytes = 20_000
	j = openJournal(t, options)
	s := newStore(t, Options{Journal: j})
	oldest := read[0].Placement
	if _, ok := s.Get(oldest); ok {
		t.Fatal("the oldest entry is in memory: the test proves nothing")
	}
	if e, ok := s.Find(oldest); !ok || !e.Full {
		t.Errorf("%s is not found on disk", oldest)
	}
	if got := ids(s.ByRequest(read[0].RequestID, 3)); got != oldest {
		t.Errorf("by request on disk: %q", got)
	}
	if _, ok := s.Find("pl_none"); ok {
		t.Error("found what nobody wrote")
	}
}

// fullDisk fails writes while it is full.
type fullDisk struct {
	segmentFile
	full *bool
}

var errDiskFull = errors.New("no space left on device")

func (f fullDisk) Write(b []byte) (int, error) {
	if *f.full {
		n, err := f.segmentFile.Write(b[:len(b)/2])
		return n, errors.Join(err, errDiskFull)
	}
	return f.segmentFile.Write(b)
}

func TestFullDiskIsToldAndMemoryGoesOn(t *testing.T) {
	dir := t.TempDir()
	full := false
	options := JournalOptions{Dir: dir, RetryEvery: time.Minute, create: func(path string) (segmentFile, error) {
		f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
		return fullDisk{f, &full}, err
	}}
	j := openJournal(t, options)
	s := newStore(t, Options{Journal: j, FullPerSec: 1e9})
	now := at(0)
	drain := func() {
		for len(j.queue) > 0 {
			j.write(<-j.queue, now)
		}
	}
	addFull(t, s, 1)
	drain()
	full = true
	for i := range 5 {
		addFull(t, s, 2+i)
	}
	drain()
	if st := j.State(); st.Failed != 5 || st.Written != 1 || !strings.Contains(st.Problem, "no space") {
		t.Errorf("while full: %+v", st)
	}
	if _, ok := s.Get("pl_6"); !ok {
		t.Error("memory does not go on")
	}
	full = false
	now = now.Add(2 * time.Minute)
	addFull(t, s, 7)
	drain()
	if st := j.State(); st.Problem != "" || st.Written != 2 {
		t.Errorf("with room again: %+v", st)
	}
	j.endSegment()
	again := openJournal(t, JournalOptions{Dir: dir})
	if st := again.State(); st.Read != 2 || st.Skipped != 0 {
		t.Errorf("read back: %+v", st)
	}
}

func TestSlowDiskDropsAndCounts(t *testing.T) {
	j := openJournal(t, JournalOptions{Dir: t.TempDir()})
	s := newStore(t, Options{Journal: j})
	for i := range journalQueue + 10 {
		s.Add(at(0), entry(i), nil)
	}
	if got := j.State().Dropped; got != 10 {
		t.Errorf("%d dropped, want 10", got)
	}
}

func TestUnusableDirectory(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := OpenJournal(JournalOptions{Dir: filepath.Join(file, "records")}); err == nil {
		t.Error("a directory below a file")
	}
	if _, err := OpenJournal(JournalOptions{}); !errors.Is(err, ErrOptions) {
		t.Error("no directory")
	}
}

// Nothing of a prompt reaches the disk: the request's tokens are not even part
// of what an entry can hold.
func TestNoTokensOnDisk(t *testing.T) {
	var walk func(t reflect.Type, path string, seen map[reflect.Type]bool)
	walk = func(typ reflect.Type, path string, seen map[reflect.Type]bool) {
		switch typ.Kind() {
		case reflect.Pointer, reflect.Slice, reflect.Array:
			if k := typ.Elem().Kind(); typ.Kind() == reflect.Slice && (k == reflect.Uint32 || k == reflect.Int32 || k == reflect.Uint8) {
				t.Errorf("%s is a %s: it could hold token ids or text", path, typ)
			}
			walk(typ.Elem(), path, seen)
		case reflect.Struct:
			if seen[typ] {
				return
			}
			seen[typ] = true
			for i := range typ.NumField() {
				walk(typ.Field(i).Type, path+"."+typ.Field(i).Name, seen)
			}
		}
	}
	seen := map[reflect.Type]bool{reflect.TypeFor[time.Time](): true}
	walk(reflect.TypeFor[Entry](), "Entry", seen)
}

func BenchmarkFrame(b *testing.B) {
	req, candidates, policy, sit, d := decide(b, 16, 900)
	e := NewEntry(&req, candidates, sit, d)
	e.Placement, e.Full = "pl_1", true
	record := placement.NewRecord(&req, candidates, &policy, sit, d, 64)
	e.Record = &record
	w := newFrameWriter()
	size := 0
	b.ReportAllocs()
	for b.Loop() {
		size = len(w.frame(journalItem{&e, journalEntry}))
	}
	b.ReportMetric(float64(size), "bytes/record")
}
