package lane

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"

	waypostv1 "waypost/proto/waypost/v1"
)

func render(n int) *waypostv1.ConnectResponse {
	return &waypostv1.ConnectResponse{Frame: &waypostv1.ConnectResponse_Render{Render: &waypostv1.RenderAsk{ChatJson: new(fmt.Sprint(n))}}}
}

// A coordinator that stops in good order has its lanes bring what is queued on
// them first, all of it and in turn, to an agent that speaks all the while: its
// next word finds the stream closed before it has read the last frame.
func TestQueuedFramesArriveBeforeTheLaneEnds(t *testing.T) {
	for range 20 {
		c := startCoordinator(t, coordinatorOptions{})
		a := startAgent(t, agentOptions{edit: func(o *DialerOptions) { o.LoadEvery, o.LoadGap = time.Microsecond, time.Microsecond }}, c.addr)
		a.lane()
		s, ok := c.srv.Session("gpu-01")
		if !ok {
			t.Fatal("no session")
		}
		eventually(t, "LOADs at the coordinator", func() bool { return c.count("gpu-01 load") >= 3 })
		for n := range outboxFrames / 2 {
			if err := s.Send(render(n)); err != nil {
				t.Fatal(err)
			}
		}
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		c.srv.Finish(ctx)
		if ctx.Err() != nil {
			t.Fatal("lanes that read did not end")
		}
		cancel()
		c.grpc.GracefulStop()
		eventually(t, "lane down", func() bool { a.mu.Lock(); defer a.mu.Unlock(); return len(a.downs) > 0 })
		a.mu.Lock()
		for n, f := range a.frames {
			if got, want := f.GetRender().GetChatJson(), fmt.Sprint(n); got != want {
				t.Errorf("frame %d is %q, want %q", n, got, want)
			}
		}
		if len(a.frames) != outboxFrames/2 {
			t.Errorf("%d of %d frames arrived", len(a.frames), outboxFrames/2)
		}
		if cause := a.downs[0]; !strings.Contains(cause.Error(), errStops.Error()) {
			t.Errorf("the agent was told %q, want %q", cause, errStops)
		}
		a.mu.Unlock()
		if err := s.Send(render(0)); err == nil {
			t.Error("a lane that has ended takes a frame")
		}
		a.d.Close()
		c.stop()
	}
}

// What is queued before the end is taken; what comes later would hold the end up.
func TestOutboxFinishes(t *testing.T) {
	o := newOutbox[*waypostv1.ConnectResponse]()
	if err := o.push(render(0)); err != nil {
		t.Fatal(err)
	}
	o.finish()
	if err := o.push(render(1)); !errors.Is(err, ErrLaneDown) {
		t.Errorf("a frame after the end: %v", err)
	}
	if f, ok := o.pop(); !ok || f.GetRender().GetChatJson() != "0" || !o.finished() {
		t.Errorf("took %v, finished %v", f, o.finished())
	}
}

// An agent that reads nothing, or too slowly, holds the end for as long as it is
// given and a Send that has begun may last, no longer; one that never said who it
// is not at all.
func TestFinishIsBounded(t *testing.T) {
	const bound, stall = time.Second, 400 * time.Millisecond
	for _, tc := range []struct {
		name        string
		readEvery   time.Duration // 0: never
		least, most time.Duration
	}{
		{"reads nothing", 0, 0, 2 * stall},
		{"reads slowly", stall / 8, bound, bound + 2*stall},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newLineNet(1, 0)
				c := startCoordinator(t, coordinatorOptions{net: n, addr: "127.0.0.1:1", edit: func(o *ServerOptions) { o.StallAfter = stall }})
				mute, _ := rawLane(t, c.addr, grpc.WithContextDialer(n.dial))
				defer mute.Close()
				conn, stream, s := greetedLane(t, c, n)
				defer conn.Close()
				for range 50 { // each more than the window holds
					big := &waypostv1.ConnectResponse{Frame: &waypostv1.ConnectResponse_Render{Render: &waypostv1.RenderAsk{ChatJson: new(strings.Repeat("x", 300<<10))}}}
					if err := s.Send(big); err != nil {
						t.Fatal(err)
					}
				}
				if tc.readEvery > 0 {
					go func() {
						for err := error(nil); err == nil; _, err = stream.Recv() {
							time.Sleep(tc.readEvery)
						}
					}()
				}
				began := time.Now()
				ctx, cancel := context.WithTimeout(t.Context(), bound)
				defer cancel()
				c.srv.Finish(ctx)
				if took := time.Since(began); took < tc.least || took > tc.most {
					t.Errorf("ended after %v, want %v to %v", took, tc.least, tc.most)
				}
				<-s.Done()
			})
		})
	}
}
