package explain

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// JournalOptions configures a Journal. Zero values take the defaults.
type JournalOptions struct {
	// Dir is the directory of the segments; it is made if missing.
	Dir string
	// MaxBytes bounds the files together, 256 MiB; the oldest segment goes
	// first.
	MaxBytes int64
	// MaxAge is how long entries are kept, one hour.
	MaxAge time.Duration
	// ReadBytes bounds the memory of the entries read back at the start, 64
	// MiB; older ones are found on disk.
	ReadBytes int64
	// RetryEvery is the pause after a write failed, 30 s.
	RetryEvery time.Duration
	// Logger takes what an operator cares about; nil: nobody.
	Logger *slog.Logger

	// create makes a segment file; tests let it fail.
	create func(path string) (segmentFile, error)
}

// segmentFile is what a journal does with a file it writes.
type segmentFile interface {
	io.Writer
	Sync() error
	Truncate(size int64) error
	Close() error
}

// JournalState is what a journal did and how it is.
type JournalState struct {
	// Read counts entries read back at the start, Skipped frames that could
	// not be: torn by a crash, damaged, or of another version.
	Read, Skipped uint64
	// Written counts frames, Dropped those that came faster than the disk,
	// Failed those that the disk refused.
	Written, Dropped, Failed uint64
	// Bytes are on disk now, in Segments files.
	Bytes    int64
	Segments int
	// Problem says why nothing is written now; empty: all is well.
	Problem string
}

// journalQueue bounds the frames that wait for the disk.
const journalQueue = 4096

// Journal keeps entries on disk in a ring of segment files. Open reads what is
// there; Run writes until its context ends.
type Journal struct {
	options JournalOptions
	queue   chan journalItem

	finding sync.Mutex

	mu       sync.Mutex
	state    JournalState
	segments []segment // oldest first
	read     []*Entry

	// The rest belongs to Run.
	file     segmentFile
	writer   *frameWriter
	retryAt  time.Time
	segBytes int64
}

type journalKind uint8

const (
	journalEntry journalKind = 1 + iota
	journalOutcome
)

type journalItem struct {
	entry *Entry
	kind  journalKind
}

// segment is one file of the ring.
type segment struct {
	number uint64
	bytes  int64
	newest time.Time
}

const (
	segmentSuffix = ".records"
	// segmentsPerRing is about how many files a full ring has.
	segmentsPerRing = 16
	minSegmentBytes = 64 << 10
)

// OpenJournal reads the entries that are kept in a directory. What cannot be
// read is skipped and counted. An error means that the directory itself is
// unusable: go on without.
func OpenJournal(options JournalOptions) (*Journal, error) {
	if options.Dir == "" || options.MaxBytes < 0 || options.MaxAge < 0 || options.RetryEvery < 0 {
		return nil, fmt.Errorf("%w: journal: dir must be set, maxBytes, maxAge and retryEvery not negative", ErrOptions)
	}
	if options.MaxBytes == 0 {
		options.MaxBytes = 256 << 20
	}
	if options.MaxAge == 0 {
		options.MaxAge = time.Hour
	}
	if options.ReadBytes == 0 {
		options.ReadBytes = 64 << 20
	}
	if options.RetryEvery == 0 {
		options.RetryEvery = 30 * time.Second
	}
	if options.Logger == nil {
		options.Logger = slog.New(slog.DiscardHandler)
	}
	if options.create == nil {
		options.create = func(path string) (segmentFile, error) {
			return os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
		}
	}
	j := &Journal{options: options, queue: make(chan journalItem, journalQueue), segBytes: max(options.MaxBytes/segmentsPerRing, minSegmentBytes)}
	if err := os.MkdirAll(options.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("decision records: %w", err)
	}
	names, err := os.ReadDir(options.Dir)
	if err != nil {
		return nil, fmt.Errorf("decision records: %w", err)
	}
	for _, f := range names {
		digits, ok := strings.CutSuffix(f.Name(), segmentSuffix)
		number, err := strconv.ParseUint(digits, 10, 64)
		if !ok || err != nil || !f.Type().IsRegular() {
			continue
		}
		j.segments = append(j.segments, segment{number: number})
	}
	slices.SortFunc(j.segments, func(a, b segment) int {
		if a.number < b.number {
			return -1
		}
		return 1
	})
	j.readAll()
	return j, nil
}

func (j *Journal) path(number uint64) string {
	return filepath.Join(j.options.Dir, fmt.Sprintf("%012d%s", number, segmentSuffix))
}

// readAll reads every segment, oldest first, and keeps the newest entries
// within ReadBytes.
func (j *Journal) readAll() {
	bytes, first := int64(0), 0
	byID := map[string]*Entry{}
	for i := range j.segments {
		s := &j.segments[i]
		info, err := os.Stat(j.path(s.number))
		if err == nil {
			s.bytes, s.newest = info.Size(), info.ModTime()
		}
		skipped := j.readSegment(s.number, func(e *Entry) {
			j.state.Read++
			byID[e.Placement] = e
			j.read = append(j.read, e)
			bytes += sizeOf(e)
			for ; bytes > j.options.ReadBytes && first < len(j.read)-1; first++ {
				bytes -= sizeOf(j.read[first])
				delete(byID, j.read[first].Placement)
				j.read[first] = nil
			}
		}, func(id string) *Entry { return byID[id] })
		j.state.Skipped += uint64(skipped)
	}
	j.read = j.read[first:]
	j.count()
}

// readSegment reads one file: entry is told each entry, known finds the entry
// of an outcome.
func (j *Journal) readSegment(number uint64, entry func(*Entry), known func(id string) *Entry) (skipped int) {
	f, err := os.Open(j.path(number))
	if err != nil {
		return 1
	}
	// It is only read.
	defer func() { _ = f.Close() }()
	return readFrames(f, entry, func(o *keptOutcome) {
		if e := known(o.Placement); e != nil {
			out := o.Outcome
			e.Outcome, e.Class = &out, o.Class
		}
	})
}

// find reads the files for entries that match, oldest first, at most limit. It
// takes a second per 256 MiB; one search runs at a time.
func (j *Journal) find(match func(*Entry) bool, limit int) []*Entry {
	if j == nil {
		return nil
	}
	j.finding.Lock()
	defer j.finding.Unlock()
	j.mu.Lock()
	segments := slices.Clone(j.segments)
	j.mu.Unlock()
	var found []*Entry
	byID := map[string]*Entry{}
	for _, s := range segments {
		j.readSegment(s.number, func(e *Entry) {
			if len(found) < limit && match(e) {
				byID[e.Placement] = e
				found = append(found, e)
			}
		}, func(id string) *Entry { return byID[id] })
	}
	return found
}

// takeRead gives the entries read at the start, once, oldest first.
func (j *Journal) takeRead() []*Entry {
	j.mu.Lock()
	defer j.mu.Unlock()
	read := j.read
	j.read = nil
	return read
}

// count sums up the files.
func (j *Journal) count() {
	j.state.Bytes, j.state.Segments = 0, len(j.segments)
	for _, s := range j.segments {
		j.state.Bytes += s.bytes
	}
}

// State is what the journal did and how it is.
func (j *Journal) State() JournalState {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.state
}

// put hands an entry to the writer; one that finds no room is dropped and
// counted. A nil journal takes nothing.
func (j *Journal) put(e *Entry, kind journalKind) {
	if j == nil {
		return
	}
	select {
	case j.queue <- journalItem{e, kind}:
	default:
		j.mu.Lock()
		j.state.Dropped++
		j.mu.Unlock()
	}
}

// Run writes until done is closed; then what waits is written and the file
// closed.
func (j *Journal) Run(done <-chan struct{}) {
	for {
		select {
		case item := <-j.queue:
			j.write(item, time.Now())
		case <-done:
			for {
				select {
				case item := <-j.queue:
					j.write(item, time.Now())
				default:
					j.endSegment()
					return
				}
			}
		}
	}
}

// write appends one frame. A failure costs the frame, and all others until the
// next try; placements go on in memory.
func (j *Journal) write(item journalItem, now time.Time) {
	if j.file == nil && now.Before(j.retryAt) {
		j.fail(nil, 1)
		return
	}
	if j.file == nil {
		if err := j.beginSegment(now); err != nil {
			j.retryAt = now.Add(j.options.RetryEvery)
			j.fail(err, 1)
			return
		}
	}
	frame := j.writer.frame(item)
	last := &j.segments[len(j.segments)-1]
	if _, err := j.file.Write(frame); err != nil {
		// What was half written must not hide what a later start could read.
		err = errors.Join(err, j.file.Truncate(last.bytes), j.file.Close())
		j.file, j.retryAt = nil, now.Add(j.options.RetryEvery)
		j.fail(err, 1)
		return
	}
	j.mu.Lock()
	last.bytes += int64(len(frame))
	last.newest = now
	j.state.Written++
	j.count()
	full := last.bytes >= j.segBytes
	j.mu.Unlock()
	if full {
		j.endSegment()
	}
	j.drop(now)
}

// fail counts frames that were not written and says why, once per cause.
func (j *Journal) fail(err error, frames uint64) {
	j.mu.Lock()
	j.state.Failed += frames
	news := err != nil && j.state.Problem == ""
	if err != nil {
		j.state.Problem = err.Error()
	}
	j.mu.Unlock()
	if news {
		j.options.Logger.Error("decision records are kept in memory only", "error", err, "next", "free space under "+j.options.Dir)
	}
}

// beginSegment opens a new file with encoders of its own. Old files go first,
// so that a full disk is given room by what may be forgotten.
func (j *Journal) beginSegment(now time.Time) error {
	j.drop(now)
	number := uint64(1)
	if n := len(j.segments); n > 0 {
		number = j.segments[n-1].number + 1
	}
	f, err := j.options.create(j.path(number))
	if err != nil {
		return fmt.Errorf("decision records: %w", err)
	}
	w := newFrameWriter()
	head := w.header()
	if _, err := f.Write(head); err != nil {
		return errors.Join(fmt.Errorf("decision records: %w", err), f.Close(), os.Remove(j.path(number)))
	}
	j.file, j.writer = f, w
	j.mu.Lock()
	j.segments = append(j.segments, segment{number: number, bytes: int64(len(head)), newest: now})
	well := j.state.Problem != ""
	j.state.Problem = ""
	j.count()
	j.mu.Unlock()
	if well {
		j.options.Logger.Info("decision records are written again")
	}
	return nil
}

func (j *Journal) endSegment() {
	if j.file == nil {
		return
	}
	if err := errors.Join(j.file.Sync(), j.file.Close()); err != nil {
		j.fail(fmt.Errorf("decision records: %w", err), 0)
	}
	j.file = nil
}

// drop removes the oldest segments beyond the bounds, never the open one.
func (j *Journal) drop(now time.Time) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for len(j.segments) > 0 {
		oldest := j.segments[0]
		open := len(j.segments) == 1 && j.file != nil
		if open || j.state.Bytes <= j.options.MaxBytes-j.segBytes && now.Sub(oldest.newest) <= j.options.MaxAge {
			return
		}
		if err := os.Remove(j.path(oldest.number)); err != nil && !errors.Is(err, os.ErrNotExist) {
			j.state.Problem = err.Error()
			return
		}
		j.segments = j.segments[1:]
		j.count()
	}
}
