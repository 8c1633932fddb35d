package zmtp

import (
	"bytes"
	"encoding/binary"
	"testing"
)

// play is a peer that follows the transcript to the byte.
func play(lines []exchange) func(*rawPeer) {
	return func(p *rawPeer) {
		for _, e := range lines {
			if e.fromClient {
				p.expect(e.bytes)
			} else {
				p.send(e.bytes)
			}
		}
		p.untilClosed()
	}
}

func TestTranscriptOfLiveEvents(t *testing.T) {
	lines := readTranscript(t)["pub"]
	s := mustDialSub(t, Options{Endpoint: startPeer(t, play(lines)), Topics: []string{"kv@"}})
	ctx := testContext(t)
	wantNotice[*Connected](t, ctx, s)
	for seq, payloadBytes := range []int{128, 128, 35, 644} {
		frames, err := s.Recv(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if len(frames) != 3 || string(frames[0]) != "kv@node1" || binary.BigEndian.Uint64(frames[1]) != uint64(seq) {
			t.Fatalf("message %d: %x", seq, frames)
		}
		whole := lines[5+seq].bytes
		if p := frames[2]; len(p) != payloadBytes || !bytes.HasSuffix(whole, p) {
			t.Errorf("message %d: payload of %d bytes, want %d: %x", seq, len(p), payloadBytes, p)
		}
	}
}

func TestTranscriptOfReplay(t *testing.T) {
	for version, frameCount := range map[string]int{"router 0.25": 3, "router 0.26": 4} {
		t.Run(version, func(t *testing.T) {
			d := mustDialDealer(t, Options{Endpoint: startPeer(t, play(readTranscript(t)[version]))})
			ctx := testContext(t)
			if err := d.Send(ctx, nil, []byte{0, 0, 0, 0, 0, 0, 0, 1}); err != nil {
				t.Fatal(err)
			}
			for i, want := range []uint64{1, 2, 1<<64 - 1} {
				frames, err := d.Recv(ctx)
				if err != nil {
					t.Fatal(err)
				}
				if len(frames) != frameCount || len(frames[0]) != 0 {
					t.Fatalf("reply %d has frames %x", i, frames)
				}
				if got := binary.BigEndian.Uint64(frames[frameCount-2]); got != want {
					t.Errorf("reply %d has sequence %d, want %d", i, got, want)
				}
				if got, want := len(frames[frameCount-1]), []int{128, 35, 0}[i]; got != want {
					t.Errorf("reply %d has a payload of %d bytes, want %d", i, got, want)
				}
			}
		})
	}
}
