package lane

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"google.golang.org/protobuf/proto"
)

// Errors of sending.
var (
	// ErrQueueFull: the lane's queue has no room now.
	ErrQueueFull = errors.New("lane queue is full")
	// ErrLaneDown: the lane is closed.
	ErrLaneDown = errors.New("lane is down")
	// ErrTooBig: the frame is larger than a lane carries.
	ErrTooBig = errors.New("frame is too big for a lane")
)

const (
	outboxFrames = 64
	outboxBytes  = 16 << 20
)

// outbox is the bounded queue of one lane: at most 64 frames and 16 MiB.
type outbox[T proto.Message] struct {
	mu     sync.Mutex
	frames []T
	sizes  []int
	bytes  int
	closed bool
	last   bool          // what is queued goes, more does not come
	ready  chan struct{} // a frame is there
	room   chan struct{} // a frame was taken
	done   chan struct{}
}

func newOutbox[T proto.Message]() *outbox[T] {
	return &outbox[T]{ready: make(chan struct{}, 1), room: make(chan struct{}, 1), done: make(chan struct{})}
}

// push queues a frame, which the caller must not change any more.
func (o *outbox[T]) push(frame T) error {
	size := proto.Size(frame)
	if size > MaxMessageBytes {
		return fmt.Errorf("%w: %d bytes, at most %d", ErrTooBig, size, MaxMessageBytes)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.closed || o.last {
		return ErrLaneDown
	}
	if len(o.frames) >= outboxFrames || len(o.frames) > 0 && o.bytes+size > outboxBytes {
		return ErrQueueFull
	}
	o.frames = append(o.frames, frame)
	o.sizes = append(o.sizes, size)
	o.bytes += size
	signal(o.ready)
	if len(o.frames) < outboxFrames && o.bytes < outboxBytes {
		signal(o.room) // for the next of several waiters
	}
	return nil
}

// pushWait queues a frame as soon as there is room.
func (o *outbox[T]) pushWait(ctx context.Context, frame T) error {
	for {
		err := o.push(frame)
		if !errors.Is(err, ErrQueueFull) {
			return err
		}
		select {
		case <-o.room:
		case <-o.done:
			return ErrLaneDown
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", ErrQueueFull, ctx.Err())
		}
	}
}

// finish refuses more; what is queued is still taken.
func (o *outbox[T]) finish() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.last = true
	signal(o.ready)
}

// finished says that nothing is queued and nothing more will be.
func (o *outbox[T]) finished() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.last && len(o.frames) == 0
}

func (o *outbox[T]) pop() (frame T, ok bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.frames) == 0 {
		return frame, false
	}
	var none T
	frame = o.frames[0]
	o.bytes -= o.sizes[0]
	o.frames[0] = none
	o.frames, o.sizes = o.frames[1:], o.sizes[1:]
	if len(o.frames) > 0 {
		signal(o.ready)
	}
	signal(o.room)
	return frame, true
}

// close drops what is queued and refuses more.
func (o *outbox[T]) close() {
	o.mu.Lock()
	defer o.mu.Unlock()
	if !o.closed {
		o.closed = true
		o.frames, o.sizes, o.bytes = nil, nil, 0
		close(o.done)
	}
}

// signal sets a one-place flag.
func signal(ch chan struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}
