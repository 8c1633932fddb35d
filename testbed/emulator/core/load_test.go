package core

import (
	"testing"
	"time"
)

// What is loaded is reused like what was computed, and is told.
func TestLoad(t *testing.T) {
	o := Options{BlockTokens: 4, PoolBlocks: 12, MaxModelTokens: 40, StepTokens: 64, MaxRunning: 4, StepTime: Llama8BH100}
	prompt := make([]uint32, 33)
	for i := range prompt {
		prompt[i] = uint32(i)
	}
	r := Request{ID: "a", Prompt: prompt, MaxTokens: 1, Generate: func(int) (uint32, bool) { return 1, false }}
	for _, c := range []struct{ load, want, events int }{{0, 0, 1}, {3, 3, 2}, {8, 8, 1}, {99, 8, 1}} {
		e, err := New(o)
		if err != nil {
			t.Fatal(err)
		}
		if n := len(e.Prefix(r)); n != 8 {
			t.Fatalf("%d blocks can be handed over", n)
		}
		if got := e.Load(r, c.load); got != c.want || e.Held(e.Prefix(r)) != c.want || e.pool.used() != 0 {
			t.Errorf("loaded %d of %d, holds %d, %d in use", got, c.load, e.Held(e.Prefix(r)), e.pool.used())
		}
		s, err := e.Add(r, 0)
		if err != nil {
			t.Fatal(err)
		}
		e.Schedule(0)
		out, _ := e.Finish(time.Millisecond)
		if s.CachedTokens() != 4*c.want || len(out.Events) != c.events {
			t.Errorf("after loading %d: %d tokens cached, %d events", c.load, s.CachedTokens(), len(out.Events))
		}
		// Again: everything is there, nothing is told twice.
		if got := e.Load(r, 8); got != 8 || len(e.pool.events) != 0 {
			t.Errorf("loaded again: %d, %d events", got, len(e.pool.events))
		}
	}
	// A pool that is full of running requests takes what has room.
	e, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	other := r
	other.Prompt = []uint32{9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9}
	if _, err := e.Add(other, 0); err != nil {
		t.Fatal(err)
	}
	e.Schedule(0)
	e.Finish(time.Millisecond)
	other.ID, other.Prompt = "b", prompt[1:20]
	if _, err := e.Add(other, 0); err != nil {
		t.Fatal(err)
	}
	e.Schedule(0)
	e.Finish(time.Millisecond)
	if room := e.pool.free; e.Load(r, 8) != min(room, 8) {
		t.Errorf("holds %d of room for %d", e.Held(e.Prefix(r)), room)
	}
}
