// Package wire is where event batches of emulated engines can be changed on
// their way out: what a fault does to them is written once for all engines.
package wire

import (
	"errors"
	"fmt"

	"github.com/tinylib/msgp/msgp"
)

// Batch is one event batch before it is numbered.
type Batch struct {
	// Rank is the publisher's.
	Rank int
	// Payload is what will be sent: MessagePack.
	Payload []byte
	// Unsent loses the batch on the way to subscribers, Unkept from the replay
	// buffer. With both its number is burnt.
	Unsent, Unkept bool
	// Copies sends the batch again under the next numbers.
	Copies int
	// Others go out before it as if another process published on this port.
	Others []Message
	// Skip is how many numbers are burnt before this one.
	Skip uint64
}

// Message is a batch with a number of its own.
type Message struct {
	Seq     uint64
	Payload []byte
}

// Tap sees every batch of a publisher in order and may change it. Calls of one
// publisher do not overlap; those of two may.
type Tap func(*Batch)

var errShape = errors.New("wire: a batch is an array of time, events and rank")

// Edit decodes the batch, lets f change it and encodes it again. f gets the
// array of time, events and rank, whose events are maps or arrays.
func (b *Batch) Edit(f func(batch []any) []any) error {
	v, rest, err := msgp.ReadIntfBytes(b.Payload)
	if err != nil {
		return fmt.Errorf("wire: %w", err)
	}
	list, ok := v.([]any)
	if !ok || len(list) < 2 || len(rest) > 0 {
		return errShape
	}
	out, err := msgp.AppendIntf(nil, f(list))
	if err != nil {
		return fmt.Errorf("wire: %w", err)
	}
	b.Payload = out
	return nil
}

// Events lets f change the events of the batch; what f returns is sent.
func (b *Batch) Events(f func(events []any) []any) error {
	return b.Edit(func(batch []any) []any {
		if events, ok := batch[1].([]any); ok {
			batch[1] = f(events)
		}
		return batch
	})
}
