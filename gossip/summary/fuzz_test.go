package summary

import (
	"bytes"
	"errors"
	"maps"
	"strings"
	"testing"
)

// TestMalformedFrames: each is refused with an error that names the field, and
// changes nothing, however much of it was good.
func TestMalformedFrames(t *testing.T) {
	edit := func(at int, v byte) []byte {
		b := bytes.Clone(deltaFrame(2, 0, 0, ops().del(2)))
		b[at] = v
		return b
	}
	delta := func(s *script) []byte { return deltaFrame(2, 0, 0, s) }
	snap := func(s *script) []byte { return snapshotFrame(5, 0, true, 0, s) }
	many := ops().usable(1).uv(16, 0, (maxSpans+1)<<1)
	for _, c := range []struct {
		field, name string
		b           []byte
	}{
		{"version", "empty", nil},
		{"version", "none of ours", edit(0, Version+1)},
		{"version", "0", edit(0, 0)},
		{"kind", "none of ours", edit(1, 3)},
		{"flags", "of a snapshot", edit(1, 0x21)},
		{"flags", "of a delta", append([]byte{Version, 0x12}, snapshotFrame(1, 0, true, 0, ops())[2:]...)},
		{"key id", "cut", deltaFrame(2, 0, 0, ops())[:5]},
		{"digest", "cut", deltaFrame(2, 0, 0, ops())[:11]},
		{"bytes", "too many", make([]byte, MaxFrameBytes+1)},
		{"seq", "endless varint", append(deltaFrame(2, 0, 0, ops())[:8:8], bytes.Repeat([]byte{0xff}, 30)...)},
		{"tag", "run that is not there", delta(ops().del(2).ext(4, 5, 1))},
		{"tag", "number beyond all", delta(ops().uv(2*MaxRuns<<2 + 4))},
		{"tag", "extends the root", delta(ops().ext(0, 5, 1))},
		{"tag", "deletes what another hangs on", delta(ops().del(1))},
		{"tag", "deletes twice", delta(ops().del(2).del(2))},
		{"length", "extends by nothing", delta(ops().del(2).ext(1, 0))},
		{"length", "too deep", delta(ops().ext(1, MaxDepthTokens-599, 1))},
		{"length", "beyond a varint of ours", delta(ops().tag(1, opExtend).uv(1 << 40))},
		{"length", "units that overflow", delta(ops().tag(1, opExtend).uv(MaxDepthTokens &^ 1))},
		{"length", "empty root", delta(ops().root(0))},
		{"length", "trims everything", delta(ops().trim(3, 100))},
		{"length", "trims what another hangs on", delta(ops().trim(1, 51, 3))},
		{"attach", "at the start of the parent", delta(ops().fork(1, 600).uv(3).raw(1))},
		{"attach", "before the parent", delta(ops().fork(2, 40).uv(3).raw(1))},
		{"fingerprint", "cut checkpoint", delta(ops().ext(1, 500, 1))},
		{"fingerprint", "cut end", delta(ops().ext(1, 5))},
		{"fingerprint", "cut attach point", delta(ops().fork(1, 10))},
		{"fingerprint", "cut new end", delta(ops().del(2).trim(1, 7))},
		{"fingerprint", "checkpoints in thousands", delta(ops().ext(1, 8_000_000, 1, 2, 3))},
		{"operation", "none of ours", delta(ops().tag(1, opTrim).uv(0, 9))},
		{"floor", "before the start", delta(ops().usable(2).uv(16, 551<<1|1, 0))},
		{"spans", "open without any", delta(ops().usable(1).uv(16, 0, 1))},
		{"spans", "too many", delta(many)},
		{"span", "empty", delta(ops().usable(1).uv(16, 0, 1<<1, 0, 0))},
		{"span", "too deep", delta(ops().usable(1).uv(5000, 0, 1<<1, 2, 5000))},
		{"stride", "too long", delta(ops().usable(1).uv(MaxDepthTokens + 1))},
		{"gpu tokens", "too many", delta(ops().tier(1).uv(MaxDepthTokens + 2))},
		{"host tokens", "too many", delta(ops().tier(1).uv(1, MaxDepthTokens+2))},
		{"up", "above the root", snap(ops().record(1, 1, 100, 1, 2, 3))},
		{"number", "0", snap(ops().record(0, 0, 100, 1, 2, 3))},
		{"number", "taken", snap(ops().record(0, 1, 100, 1, 2, 3).record(1, 1, 100, 1, 2, 3))},
		{"number", "more than the frame could fill", snap(ops().record(0, 80, 100, 1, 2, 3))},
		{"length", "empty run", snap(ops().uv(0, 1, 0, 0))},
		{"attach", "before the parent", snap(ops().record(0, 1, 100, 1, 2, 3).uv(0, 2, 100<<1|1, 3, 0))},
		{"points", "too many", snap(ops().uv(0, 1, 201, (maxPoints+1)<<1))},
		{"point", "none at the end", snap(ops().uv(0, 1, 201, 0))},
		{"point", "beyond the end", snap(ops().uv(0, 1, 201, 2, 101<<2|2, 1, 2, 3))},
		{"point", "at a checkpoint", snap(ops().uv(0, 1, 601<<1|1, 2, 512<<2|2, 1, 2, 3))},
		{"limit", "limits nothing", snap(ops().uv(0, 1, 201, 1<<1|1, 100<<2|2).raw(1, 2, 3).uv(0, 0))},
	} {
		d, sink := goodDecoder(t)
		before, digest := maps.Clone(sink.held), d.tree.digest
		got, err := d.Apply(c.b)
		if !errors.Is(err, ErrFrame) || !strings.Contains(err.Error(), c.field) {
			t.Errorf("%s %s: %v, error %v", c.field, c.name, got, err)
		}
		if !maps.Equal(sink.held, before) || d.tree.digest != digest || d.Keys() != len(before) || d.Runs() != 3 {
			t.Errorf("%s %s: changed something", c.field, c.name)
		}
		if err := consistent(&d.tree, sink); err != nil {
			t.Errorf("%s %s: %v", c.field, c.name, err)
		}
		if _, seq, ok := d.Have(); seq != 1 || !ok {
			t.Errorf("%s %s: position lost", c.field, c.name)
		}
	}
}

// FuzzApply gives a decoder with some state a frame twice.
func FuzzApply(f *testing.F) {
	for _, s := range []*script{
		ops(), good(), ops().del(2).trim(1, 60, 5, 5).ext(1, 500, 1, 2, 3), ops().usable(1).uv(16, 0, 3, 32, 4, 64),
		ops().tier(1).uv(100, 50), ops().usable(2).uv(48, 33, 2<<1, 33, 0),
	} {
		f.Add(deltaFrame(2, 0, 0, s))
		f.Add(deltaFrame(2, flagClear, 0, s))
	}
	f.Add(snapshotFrame(7, 0, true, keyOf100.mix(), ops().record(0, 1, 100, 1, 2, 3)))
	d, _ := goodDecoder(f)
	frames, _ := d.Snapshot()
	f.Add(frames[0])
	f.Fuzz(func(t *testing.T, b []byte) {
		d, sink := goodDecoder(t)
		room := 8<<10 + FrameMemoryFactor*len(b)
		for range 2 {
			before := maps.Clone(sink.held)
			got, err := d.Apply(b)
			if (err != nil || got == Gap || got == Duplicate || got == Snapshotting) && !maps.Equal(before, sink.held) {
				t.Fatalf("%v, %v changed the sink", got, err)
			}
			if n := d.MemoryBytes(); n > room {
				t.Fatalf("%d bytes kept of a frame of %d", n, len(b))
			}
			if err := consistent(&d.tree, sink); err != nil {
				t.Fatal(err)
			}
			frames, ok := d.Snapshot()
			if !ok {
				return
			}
			copied := newKeySink()
			fresh := NewDecoder(copied)
			for _, s := range frames {
				if got, err := fresh.Apply(s); err != nil || got != Applied && got != Snapshotting {
					t.Fatalf("copy: %v, %v", got, err)
				}
			}
			if !maps.Equal(copied.held, sink.held) {
				t.Fatal("copy differs")
			}
		}
	})
}

// FuzzStream cuts its input into frames that follow one another, with headers
// that fit, so that operations meet many states.
func FuzzStream(f *testing.F) {
	for _, s := range []*script{good(), ops().ext(1, 500, 1, 2, 3).raw(0xff).del(2), ops().fork(1, 0).uv(33).raw(9, 9)} {
		f.Add(s.b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		d, sink := goodDecoder(t)
		total := 0
		for i, body := range bytes.Split(b, []byte{0xff}) {
			total += len(body)
			frame := deltaFrame(uint64(i+2), uint8(len(body)&63/63), 0, ops().raw(body...))
			d.have, d.seq = true, uint64(i+1) // as if the digest had been right
			if _, err := d.Apply(frame); err != nil && !errors.Is(err, ErrFrame) {
				t.Fatal(err)
			}
			if err := consistent(&d.tree, sink); err != nil {
				t.Fatal(err)
			}
			if n := d.MemoryBytes(); n > 8<<10+FrameMemoryFactor*total {
				t.Fatalf("%d bytes kept of %d", n, total)
			}
		}
	})
}
