package api

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	waypostv1 "waypost/proto/waypost/v1"
)

// packedPlace is a request with packed varints as they are.
func packedPlace(varints []byte) []byte {
	input := protowire.AppendBytes(protowire.AppendTag(nil, inputTokenIDsField, protowire.BytesType), varints)
	return protowire.AppendBytes(protowire.AppendTag(nil, placeInputField, protowire.BytesType), input)
}

func placeRequests() [][]byte {
	var long []uint32
	rng := rand.New(rand.NewPCG(1, 2))
	for range 2000 {
		long = append(long, rng.Uint32()>>rng.IntN(32))
	}
	marshal := func(m proto.Message) []byte {
		b, err := proto.Marshal(m)
		if err != nil {
			panic(err)
		}
		return b
	}
	usual := marshal(&waypostv1.PlaceRequest{
		RequestId: new("r"), Input: &waypostv1.Input{TokenIds: long}, Attempt: new(uint32(2)), Exclude: []string{"a", "b"}, Reserve: new(false),
	})
	all := marshal(&waypostv1.PlaceRequest{Input: &waypostv1.Input{TokenIds: []uint32{0, 1, 127, 128, 16383, 16384, 1<<21 - 1, 1 << 21, math.MaxUint32}, Prompt: new("text"), TokenIdsLe: []byte{1, 2}}})
	unpacked := protowire.AppendVarint(protowire.AppendTag(nil, inputTokenIDsField, protowire.VarintType), 7)
	unpacked = protowire.AppendBytes(protowire.AppendTag(nil, placeInputField, protowire.BytesType), unpacked)
	badText := protowire.AppendBytes(protowire.AppendTag(packedPlace([]byte{1}), 1, protowire.BytesType), []byte{0xff})
	unknown := protowire.AppendVarint(protowire.AppendTag(packedPlace([]byte{1, 2}), 999, protowire.VarintType), 7)
	return [][]byte{
		nil, usual, all, unpacked, badText, unknown, append(append([]byte(nil), usual...), all...), usual[:len(usual)-1], usual[:len(usual)/2],
		packedPlace(nil), packedPlace([]byte{0x80}), packedPlace([]byte{1, 0x80, 0x80}), packedPlace([]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1}),
		packedPlace([]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2}), packedPlace([]byte{0x80, 0x80, 0x80, 0x80, 0x00, 5, 6, 7, 8, 9}),
	}
}

// asGeneral compares with the general decoder: the message and whether there is
// one must be the same.
func asGeneral(t *testing.T, b []byte) {
	t.Helper()
	want := &waypostv1.PlaceRequest{}
	wantErr := proto.Unmarshal(b, want)
	got := &waypostv1.PlaceRequest{RequestId: new("what was there before")}
	err := newCodec(newBuffers(), new(idPool)).Unmarshal(mem.BufferSlice{mem.SliceBuffer(b)}, got)
	if (err != nil) != (wantErr != nil) {
		t.Fatalf("%x: error %v, the general decoder says %v", b, err, wantErr)
	}
	if err == nil && !proto.Equal(got, want) {
		t.Fatalf("%x:\n got %v\nwant %v", b, got, want)
	}
}

func TestCodec(t *testing.T) {
	faults := 0
	for _, b := range placeRequests() {
		asGeneral(t, b)
		if proto.Unmarshal(b, &waypostv1.PlaceRequest{}) != nil {
			faults++
		}
	}
	if faults < 5 {
		t.Errorf("%d malformed requests: too few to tell anything", faults)
	}
	// Other messages take the general way.
	other := &waypostv1.ReleasePlacementRequest{}
	b, err := proto.Marshal(&waypostv1.ReleasePlacementRequest{PlacementId: new("pl")})
	if err != nil {
		t.Fatal(err)
	}
	if err := newCodec(newBuffers(), new(idPool)).Unmarshal(mem.BufferSlice{mem.SliceBuffer(b)}, other); err != nil || other.GetPlacementId() != "pl" {
		t.Errorf("%v %v", other, err)
	}
}

func FuzzCodec(f *testing.F) {
	for _, b := range placeRequests() {
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) { asGeneral(t, b) })
}

// The long way and back: split over buffers as frames arrive.
func TestCodecOfFrames(t *testing.T) {
	b := placeRequests()[1]
	var frames mem.BufferSlice
	for len(b) > 0 {
		n := min(len(b), 1000)
		frames, b = append(frames, mem.SliceBuffer(b[:n])), b[n:]
	}
	req := &waypostv1.PlaceRequest{}
	if err := newCodec(newBuffers(), new(idPool)).Unmarshal(frames, req); err != nil || len(req.GetInput().GetTokenIds()) != 2000 {
		t.Errorf("%d ids, %v", len(req.GetInput().GetTokenIds()), err)
	}
}

// Memory that one request leaves to the next shows nothing of it.
func TestCodecReusesMemory(t *testing.T) {
	var pool idPool
	rng := rand.New(rand.NewPCG(3, 4))
	reused := 0
	for range 200 {
		ids := make([]uint32, 1+rng.IntN(3000))
		for i := range ids {
			ids[i] = rng.Uint32() >> rng.IntN(32)
		}
		body, err := proto.Marshal(&waypostv1.PlaceRequest{Input: &waypostv1.Input{TokenIds: ids}})
		if err != nil {
			t.Fatal(err)
		}
		req := &waypostv1.PlaceRequest{}
		if err := unmarshalPlace(body, req, &pool); err != nil || !slices.Equal(req.GetInput().GetTokenIds(), ids) {
			t.Fatalf("%d ids of %d, %v", len(req.GetInput().GetTokenIds()), len(ids), err)
		}
		if cap(req.Input.TokenIds) > len(ids)+len(ids)/4+1024 {
			reused++
		}
		pool.reuse(req)
		if req.Input.TokenIds != nil {
			t.Fatal("a request keeps memory that another one gets")
		}
	}
	if reused < 10 {
		t.Errorf("memory was used again %d times of 200", reused)
	}
}

func BenchmarkUnmarshalPlace(b *testing.B) {
	ids := make([]uint32, 16_000)
	for i := range ids {
		ids[i] = uint32(i*7919) % 128_000
	}
	body, err := proto.Marshal(&waypostv1.PlaceRequest{Input: &waypostv1.Input{TokenIds: ids}})
	if err != nil {
		b.Fatal(err)
	}
	b.Run("general", func(b *testing.B) {
		for b.Loop() {
			if err := proto.Unmarshal(body, &waypostv1.PlaceRequest{}); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("ours", func(b *testing.B) {
		var pool idPool
		for b.Loop() {
			req := &waypostv1.PlaceRequest{}
			if err := unmarshalPlace(body, req, &pool); err != nil {
				b.Fatal(err)
			}
			pool.reuse(req)
		}
	})
}
