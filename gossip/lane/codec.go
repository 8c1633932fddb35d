package lane

import (
	"fmt"
	"sync"
	"time"

	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"

	waypostv1 "waypost/proto/waypost/v1"
)

// minPooledBytes is above gRPC's threshold for pooled buffers (1 KiB): smaller
// ones are not given back, and giving back is how a written frame is noticed.
const minPooledBytes = 2 << 10

// writtenBytesPerSec is the slowest link a lane is made for. A frame on its way
// is granted its size over this rate on top of the stall limit.
const writtenBytesPerSec = 1 << 20

// tracker knows which frames of one stream have reached the socket. gRPC's Send
// returns when a frame is queued inside the transport, which holds 64 KiB per
// stream; only the release of the frame's buffer tells that it was written.
type tracker struct {
	freed chan struct{} // one-place flag: a frame was written

	mu           sync.Mutex
	begun        uint64 // frames handed to gRPC
	written      uint64 // of these, written
	load         uint64 // number of the last LOAD
	pendingBytes int
	progress     time.Time // last time something was written, or pending became non-zero
}

func newTracker() *tracker { return &tracker{freed: make(chan struct{}, 1)} }

func (t *tracker) begin(size int, isLoad bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.begun == t.written {
		t.progress = time.Now()
	}
	t.begun++
	t.pendingBytes += size
	if isLoad {
		t.load = t.begun
	}
}

func (t *tracker) end(size int) {
	t.mu.Lock()
	t.written++
	t.pendingBytes -= size
	t.progress = time.Now()
	t.mu.Unlock()
	signal(t.freed)
}

// loadPending says whether the last LOAD has not been written yet.
func (t *tracker) loadPending() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.load > t.written
}

// stalledFor returns how long nothing could be written although something
// should, beyond what the size of the frames on their way explains.
func (t *tracker) stalledFor(now time.Time) time.Duration {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.begun == t.written {
		return 0
	}
	granted := time.Duration(t.pendingBytes) * time.Second / writtenBytesPerSec
	return max(0, now.Sub(t.progress)-granted)
}

// codec is gRPC's protobuf codec for one stream of requests, with a tracker. It
// counts frames itself: a stats handler makes gRPC tell of each step of a frame.
type codec struct {
	track *tracker
	bytes *kindBytes
}

var _ encoding.CodecV2 = codec{}

// Name implements encoding.CodecV2.
func (codec) Name() string { return "proto" }

// Marshal implements encoding.CodecV2.
func (c codec) Marshal(v any) (mem.BufferSlice, error) {
	msg, ok := v.(*waypostv1.ConnectRequest)
	if !ok {
		return nil, fmt.Errorf("lane codec: cannot encode %T", v)
	}
	options := proto.MarshalOptions{UseCachedSize: true}
	size := proto.Size(msg)
	buf := *framePool.Get().(*[]byte)
	if cap(buf) < size {
		buf = make([]byte, 0, size)
	}
	buf, err := options.MarshalAppend(buf[:0], msg)
	if err != nil {
		return nil, err
	}
	_, isLoad := msg.GetFrame().(*waypostv1.ConnectRequest_Load)
	c.track.begin(len(buf), isLoad)
	c.bytes.add(msg, len(buf))
	return mem.BufferSlice{mem.NewBuffer(&buf, writtenPool{c.track})}, nil
}

// Unmarshal implements encoding.CodecV2.
func (c codec) Unmarshal(data mem.BufferSlice, v any) error {
	msg, ok := v.(*waypostv1.ConnectResponse)
	if !ok {
		return fmt.Errorf("lane codec: cannot decode %T", v)
	}
	buf := data.MaterializeToBuffer(mem.DefaultBufferPool())
	defer buf.Free()
	if err := proto.Unmarshal(buf.ReadOnlyData(), msg); err != nil {
		return err
	}
	c.bytes.add(msg, buf.Len())
	return nil
}

// framePool keeps buffers of ordinary frames; larger ones are left to the
// garbage collector.
var framePool = sync.Pool{New: func() any {
	b := make([]byte, 0, minPooledBytes)
	return &b
}}

const maxPooledBytes = 64 << 10

// writtenPool is told by gRPC when it is done with a frame.
type writtenPool struct{ track *tracker }

// Get implements mem.BufferPool; buffers come from Marshal instead.
func (writtenPool) Get(length int) *[]byte {
	b := make([]byte, length)
	return &b
}

// Put implements mem.BufferPool.
func (p writtenPool) Put(b *[]byte) {
	p.track.end(len(*b))
	if cap(*b) <= maxPooledBytes {
		framePool.Put(b)
	}
}
