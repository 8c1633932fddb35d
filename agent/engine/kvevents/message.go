package kvevents

import (
	"bytes"
	"encoding/binary"
	"errors"
	"time"

	"github.com/zeebo/xxh3"
)

// ErrFrames means that a message is not [..., number, payload].
var ErrFrames = errors.New("message is not a number of 8 bytes and a payload")

var endMarker = bytes.Repeat([]byte{0xff}, 8)

// ParseFrames reads a message of the event or the replay socket: the payload
// is the last frame and its number the one before, whatever stands in front.
// end says that it marks the end of a replay.
func ParseFrames(frames [][]byte) (seq uint64, payload []byte, end bool, err error) {
	if len(frames) < 2 || len(frames[len(frames)-2]) != 8 {
		return 0, nil, false, ErrFrames
	}
	number := frames[len(frames)-2]
	if bytes.Equal(number, endMarker) {
		return 0, nil, true, nil
	}
	return binary.BigEndian.Uint64(number), frames[len(frames)-1], false, nil
}

// Message is one event batch as it arrived, not yet decoded.
type Message struct {
	Seq      uint64
	Payload  []byte
	Received time.Time
	Replayed bool
}

// sums remembers the checksums of the latest batches by number: the payload
// holds the time of publication, so equal ones are the same batch.
type sums [64]struct{ seq, sum uint64 }

func (t *sums) put(m Message) {
	e := &t[m.Seq%uint64(len(t))]
	e.seq, e.sum = m.Seq+1, xxh3.Hash(m.Payload) // 0 is none
}

// same says whether m is the batch of its number; one that is not remembered
// is not.
func (t *sums) same(m Message) bool {
	e := &t[m.Seq%uint64(len(t))]
	return e.seq == m.Seq+1 && e.sum == xxh3.Hash(m.Payload)
}

// differs says whether another batch of that number is remembered.
func (t *sums) differs(m Message) bool {
	e := &t[m.Seq%uint64(len(t))]
	return e.seq == m.Seq+1 && e.sum != xxh3.Hash(m.Payload)
}
