package replay

import (
	"cmp"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"slices"

	"waypost/agent/engine/kvevents"

	"github.com/zeebo/xxh3"
)

// frame is what the agent of a rank learns at one moment: a batch, a message
// that is none, or that the publisher is another process.
type frame struct {
	t         float64 // seconds since the recording began
	seq       uint64
	payload   []byte // nil: unreadable
	restarted bool

	published float64 // seconds since the recording began
}

// recorded is one line of a recorded event stream.
type recorded struct {
	Kind  string   `json:"kind"`
	T     float64  `json:"t"`
	T0    float64  `json:"t0"`
	Start *int64   `json:"start"`
	Parts []string `json:"parts"`
}

// recording collects the frames of one publisher. Batches that only a recorded
// replay shows, because the recorder came late, count from when they were
// published: an agent asks for them when it connects. A replay that ends
// without the last known batch shows another process.
type recording struct {
	t0     float64
	frames []frame
	seen   map[uint64]bool // batches by checksum of number and payload
	live   bool            // a live batch was seen
	last   uint64          // number of the last batch

	asked    *uint64 // start of the replay under way, if its request came first
	answered bool
	lone     *float64 // when a replay ended with nothing, until its start is known

	decoder *kvevents.Decoder
}

// readFrames reads a recorded event stream in the order of time.
func readFrames(name string, r io.Reader) ([]frame, error) {
	rec := recording{seen: map[uint64]bool{}, decoder: kvevents.NewDecoder()}
	err := eachLine(name, r, func(_ int, line []byte) error {
		var l recorded
		if err := json.Unmarshal(line, &l); err != nil {
			return err
		}
		parts := make([][]byte, len(l.Parts))
		for i, p := range l.Parts {
			var err error
			if parts[i], err = hex.DecodeString(p); err != nil {
				return fmt.Errorf("parts[%d]: %w", i, err)
			}
		}
		rec.take(&l, parts)
		return nil
	})
	// Publication orders batches, in all lives of the publisher.
	slices.SortStableFunc(rec.frames, func(a, b frame) int { return cmp.Compare(a.published, b.published) })
	return rec.frames, err
}

func (r *recording) take(l *recorded, parts [][]byte) {
	switch l.Kind {
	case "header":
		r.t0 = l.T0
	case "live":
		seq, payload, end, err := kvevents.ParseFrames(parts)
		if err != nil || end {
			r.frames = append(r.frames, frame{t: l.T, published: l.T})
			return
		}
		r.batch(l.T, true, seq, payload)
	case "replay-request":
		if r.lone != nil { // the request of the answers before it
			r.judge(*r.lone, l.start(parts))
			return
		}
		r.asked, r.answered = l.start(parts), false
	case "replay":
		seq, payload, end, err := kvevents.ParseFrames(parts)
		switch {
		case err != nil:
		case !end:
			r.answered = true
			r.batch(l.T, false, seq, payload)
		case r.answered:
			r.asked, r.answered = nil, false
		case r.asked != nil:
			r.judge(l.T, r.asked)
		default:
			t := l.T
			r.lone = &t
		}
	}
}

func (l *recorded) start(parts [][]byte) *uint64 {
	if len(parts) == 2 && len(parts[1]) == 8 {
		n := binary.BigEndian.Uint64(parts[1])
		return &n
	}
	if l.Start != nil && *l.Start >= 0 {
		n := uint64(*l.Start)
		return &n
	}
	return nil // not a request that is answered
}

// judge takes a replay from start that brought nothing.
func (r *recording) judge(t float64, start *uint64) {
	if start != nil && r.live && *start <= r.last {
		r.frames = append(r.frames, frame{t: t, published: t, restarted: true})
		r.live = false
	}
	r.asked, r.lone = nil, nil
}

func (r *recording) batch(t float64, live bool, seq uint64, payload []byte) {
	id := xxh3.HashSeed(payload, seq)
	if r.seen[id] {
		return
	}
	r.seen[id] = true
	f := frame{t: t, published: t, seq: seq, payload: payload}
	if b, err := r.decoder.Decode(payload); err == nil && b.PublishedUnixSeconds > 0 && r.t0 > 0 {
		f.published = min(t, b.PublishedUnixSeconds-r.t0)
	}
	if live {
		r.live, r.last = true, seq
	} else {
		f.t = f.published
	}
	r.frames = append(r.frames, f)
}
