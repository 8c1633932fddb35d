package explain

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/gob"
	"hash/crc32"
	"io"

	"waypost/coordinator/outcome"
	"waypost/coordinator/placement"
)

// A segment is its header and frames: u32 length and u32 CRC-32C of the
// payload, little-endian, then the payload: a kind byte and, of an entry, the
// u32 length of its summary, the summary and the record; of an outcome, the
// outcome. Summaries, records and outcomes are three gob streams that run
// through the segment. A record that cannot be read, because another version
// wrote it, leaves its summary readable.
const segmentHeader = "waypost-records 1\n"

const (
	maxFrameBytes = 4 << 20
	frameHead     = 8
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// keptOutcome is the outcome of an entry on disk.
type keptOutcome struct {
	Placement string
	Outcome   outcome.Outcome
	Class     outcome.Class
}

// gobStream encodes values of one type one after the other.
type gobStream struct {
	buf bytes.Buffer
	enc *gob.Encoder
}

func newGobStream() *gobStream {
	s := &gobStream{}
	s.enc = gob.NewEncoder(&s.buf)
	return s
}

// encode returns the bytes of one more value, valid until the next call.
func (s *gobStream) encode(v any) ([]byte, error) {
	s.buf.Reset()
	err := s.enc.Encode(v)
	return s.buf.Bytes(), err
}

// frameWriter makes the frames of one segment.
type frameWriter struct {
	entries, records, outcomes *gobStream
	frames                     []byte
}

func newFrameWriter() *frameWriter {
	return &frameWriter{entries: newGobStream(), records: newGobStream(), outcomes: newGobStream()}
}

func (*frameWriter) header() []byte { return []byte(segmentHeader) }

// frame makes the frame of an item, valid until the next call. An entry that
// came with its outcome gets the frame of an outcome from whoever joined it.
func (w *frameWriter) frame(item journalItem) []byte {
	w.frames = append(w.frames[:0], make([]byte, frameHead)...)
	w.frames = append(w.frames, byte(item.kind))
	if item.kind == journalOutcome {
		// The type is fixed and all its fields are exported.
		b, _ := w.outcomes.encode(&keptOutcome{item.entry.Placement, *item.entry.Outcome, item.entry.Class})
		w.frames = append(w.frames, b...)
	} else {
		e := *item.entry
		e.Record, e.Outcome, e.Class, e.Provisional = nil, nil, "", false
		b, _ := w.entries.encode(&e)
		w.frames = binary.LittleEndian.AppendUint32(w.frames, uint32(len(b)))
		w.frames = append(w.frames, b...)
		if item.entry.Full {
			if b, err := w.records.encode(item.entry.Record); err == nil && len(w.frames)+len(b) < maxFrameBytes {
				w.frames = append(w.frames, b...)
			}
		}
	}
	payload := w.frames[frameHead:]
	binary.LittleEndian.PutUint32(w.frames, uint32(len(payload)))
	binary.LittleEndian.PutUint32(w.frames[4:], crc32.Checksum(payload, castagnoli))
	return w.frames
}

// gobReader decodes a gob stream that comes in pieces.
type gobReader struct {
	buf    bytes.Buffer
	dec    *gob.Decoder
	broken bool
}

func newGobReader() *gobReader {
	r := &gobReader{}
	r.dec = gob.NewDecoder(&r.buf)
	return r
}

// decode reads one value out of its bytes. After a failure nothing more of the
// stream can be read.
func (r *gobReader) decode(b []byte, v any) bool {
	if r.broken || len(b) == 0 {
		return false
	}
	r.buf.Write(b)
	if r.dec.Decode(v) != nil || r.buf.Len() > 0 {
		r.broken = true
	}
	return !r.broken
}

// readFrames reads a segment and returns how many frames were skipped. It
// never fails: what cannot be read is skipped, and a torn end ends it.
func readFrames(from io.Reader, entry func(*Entry), out func(*keptOutcome)) (skipped int) {
	in := bufio.NewReaderSize(from, 1<<16)
	head := make([]byte, len(segmentHeader))
	if _, err := io.ReadFull(in, head); err != nil || string(head) != segmentHeader {
		return 1
	}
	entries, records, outcomes := newGobReader(), newGobReader(), newGobReader()
	var frame [frameHead]byte
	var payload []byte
	for {
		if n, err := io.ReadFull(in, frame[:]); err != nil {
			if n > 0 {
				skipped++
			}
			return skipped
		}
		size := binary.LittleEndian.Uint32(frame[:])
		if size == 0 || size > maxFrameBytes {
			return skipped + 1
		}
		if cap(payload) < int(size) {
			payload = make([]byte, size)
		}
		payload = payload[:size]
		if _, err := io.ReadFull(in, payload); err != nil {
			return skipped + 1
		}
		if crc32.Checksum(payload, castagnoli) != binary.LittleEndian.Uint32(frame[4:]) {
			skipped++
			continue
		}
		body := payload[1:]
		switch journalKind(payload[0]) {
		case journalOutcome:
			var k keptOutcome
			if !outcomes.decode(body, &k) || k.Outcome.Validate() != nil {
				skipped++
				continue
			}
			out(&k)
		case journalEntry:
			e, ok := readEntry(body, entries, records)
			if !ok {
				skipped++
				continue
			}
			entry(e)
		default:
			skipped++
		}
	}
}

func readEntry(body []byte, entries, records *gobReader) (*Entry, bool) {
	if len(body) < 4 {
		return nil, false
	}
	size := int(binary.LittleEndian.Uint32(body))
	body = body[4:]
	e := &Entry{}
	if size > len(body) || !entries.decode(body[:size], e) || e.Placement == "" {
		return nil, false
	}
	e.Record = nil // a summary's own is empty
	if e.Full {
		r := new(placement.Record)
		if e.Full = records.decode(body[size:], r) && r.Restored(); e.Full {
			e.Record = r
		}
	}
	return e, true
}
