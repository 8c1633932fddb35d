package api

import (
	"encoding/binary"
	"math/bits"
	"sync"

	"google.golang.org/grpc/encoding"
	grpcproto "google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	waypostv1 "waypost/proto/waypost/v1"
)

// codec is gRPC's protobuf codec with a faster way for placement requests that
// carry many token ids: the general decoder takes most of such a call's time.
type codec struct {
	encoding.CodecV2
	buffers mem.BufferPool
	ids     *idPool
}

// newBuffers makes a pool of buffers in more sizes than gRPC's own, which clears
// a megabyte for a message of 50 kB.
func newBuffers() mem.BufferPool {
	return mem.NewTieredBufferPool(256, 4<<10, 16<<10, 32<<10, 64<<10, 128<<10, 512<<10, 1<<20, 4<<20)
}

func newCodec(buffers mem.BufferPool, ids *idPool) codec {
	return codec{encoding.GetCodecV2(grpcproto.Name), buffers, ids}
}

// Unmarshal implements encoding.CodecV2.
func (c codec) Unmarshal(data mem.BufferSlice, v any) error {
	req, ok := v.(*waypostv1.PlaceRequest)
	if !ok {
		return c.CodecV2.Unmarshal(data, v)
	}
	buf := data.MaterializeToBuffer(c.buffers)
	defer buf.Free()
	return unmarshalPlace(buf.ReadOnlyData(), req, c.ids)
}

// Numbers of the fields on the way to the token ids.
const (
	placeInputField    = 4
	inputTokenIDsField = 4
)

// unmarshalPlace does what proto.Unmarshal does. What is out of the ordinary,
// faults among them, it leaves to it.
func unmarshalPlace(b []byte, req *waypostv1.PlaceRequest, pool *idPool) error {
	input, others, ok := cutField(b, placeInputField)
	if !ok || input == nil {
		return proto.Unmarshal(b, req)
	}
	packed, rest, ok := cutField(input, inputTokenIDsField)
	if !ok || packed == nil {
		return proto.Unmarshal(b, req)
	}
	ids, ok := unpack(packed, pool)
	if !ok {
		return proto.Unmarshal(b, req)
	}
	if err := proto.Unmarshal(others, req); err != nil {
		return err
	}
	req.Input = &waypostv1.Input{}
	if err := proto.Unmarshal(rest, req.Input); err != nil {
		return err
	}
	req.Input.TokenIds = ids
	return nil
}

// cutField takes the value of a length-delimited field out of a message; nil: it
// has none. It reports false for a message that is malformed or has the field
// more than once or in another form.
func cutField(b []byte, field protowire.Number) (value, others []byte, ok bool) {
	start, end := 0, 0
	for i := 0; i < len(b); {
		number, form, n := protowire.ConsumeTag(b[i:])
		if n < 0 {
			return nil, nil, false
		}
		size := protowire.ConsumeFieldValue(number, form, b[i+n:])
		if size < 0 {
			return nil, nil, false
		}
		if number == field {
			if form != protowire.BytesType || value != nil {
				return nil, nil, false
			}
			value, _ = protowire.ConsumeBytes(b[i+n:])
			start, end = i, i+n+size
		}
		i += n + size
	}
	if value == nil {
		return nil, b, true
	}
	others = make([]byte, 0, len(b)-(end-start))
	return value, append(append(others, b[:start]...), b[end:]...), true
}

// continues are the bits of eight bytes of varints that say that more follows.
const continues = 0x8080808080808080

// unpack reads packed varints into memory of the pool. It reports false if they
// are malformed.
func unpack(b []byte, pool *idPool) ([]uint32, bool) {
	count, i := 0, 0
	for ; i+8 <= len(b); i += 8 {
		count += bits.OnesCount64(^binary.LittleEndian.Uint64(b[i:]) & continues)
	}
	for ; i < len(b); i++ {
		count += int(^b[i] >> 7)
	}
	ids := pool.get(count)
	n := 0
	for i = 0; i < len(b); {
		if i+8 <= len(b) && n+2 <= count {
			pair := ids[n : n+2 : n+2]
			x := binary.LittleEndian.Uint64(b[i:])
			// Twice three bytes is the usual case, which a processor foresees:
			// then the next pair need not wait for the length of this one.
			if x&twiceThreeMask == twiceThree {
				pair[0], pair[1] = threeBytes(x), threeBytes(x>>24)
				n, i = n+2, i+6
				continue
			}
			// Else two of at most four bytes.
			first, size, short := shortVarint(x)
			second, more, alsoShort := shortVarint(x >> size)
			if short && alsoShort {
				pair[0], pair[1] = first, second
				n, i = n+2, i+int(size+more)/8
				continue
			}
		}
		v, size := protowire.ConsumeVarint(b[i:])
		if size < 0 {
			pool.put(ids)
			return nil, false
		}
		ids[n] = uint32(v) // as every reader of protobuf does
		n, i = n+1, i+size
	}
	return ids, true
}

// Two varints of three bytes each: the bits that say that more follows.
const (
	twiceThreeMask = 0x808080_808080
	twiceThree     = 0x008080_008080
)

func threeBytes(x uint64) uint32 { return uint32(x&0x7f | x>>1&0x3f80 | x>>2&0x1fc000) }

// shortVarint reads the varint in the low four bytes of x and its length in
// bits. It reports false if it is longer.
func shortVarint(x uint64) (v uint32, length uint, ok bool) {
	ends := ^uint32(x) & (continues & 0xffffffff)
	length = uint(bits.TrailingZeros32(ends)) + 1
	x &= 1<<(length&63) - 1
	return uint32(x&0x7f | x>>1&0x3f80 | x>>2&0x1fc000 | x>>3&0xfe00000), length, ends != 0
}

// idPool keeps the memory of token ids from one call to the next: else half a
// server's garbage is that of long prompts.
type idPool struct{ pool sync.Pool }

// maxPooledIDs bounds what is kept of one call.
const maxPooledIDs = 1 << 18

func (p *idPool) get(n int) []uint32 {
	if b, ok := p.pool.Get().(*[]uint32); ok && cap(*b) >= n {
		return (*b)[:n]
	}
	// Room for prompts somewhat longer, so that the next ones fit.
	return make([]uint32, n, n+n/4)
}

func (p *idPool) put(ids []uint32) {
	if n := cap(ids); n > 0 && n <= maxPooledIDs {
		p.pool.Put(&ids)
	}
}

// reuse takes the memory of a request's ids back when its call has ended.
func (p *idPool) reuse(req *waypostv1.PlaceRequest) {
	if in := req.GetInput(); in != nil {
		p.put(in.TokenIds)
		in.TokenIds = nil
	}
}
