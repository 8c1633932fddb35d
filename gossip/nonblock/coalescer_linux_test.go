package nonblock

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math"
	"math/rand/v2"
	"net"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// always has reads wait for ticks once there was one, and for ever.
const always = 1e-9

// coalescing runs a coalescer for as long as the test.
func coalescing(t testing.TB, o CoalescerOptions) (k *Coalescer, stop func()) {
	t.Helper()
	k, err := NewCoalescer(o)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- k.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(stop)
	return k, stop
}

// coalescedPair is a connection of a coalescer and its bare peer.
func coalescedPair(t testing.TB, k *Coalescer) (c *coalesced, peer *net.TCPConn) {
	t.Helper()
	wrapped, peer := pair(t)
	return k.Conn(wrapped.(*conn).TCPConn).(*coalesced), peer
}

// begin has the coalescer tick, by reads of one connection.
func begin(t testing.TB, k *Coalescer, c net.Conn, peer net.Conn) {
	t.Helper()
	for until := time.Now().Add(time.Minute); !k.Ticking(); {
		if time.Now().After(until) {
			t.Fatal("reads wait for no ticks")
		}
		message(t, c, peer)
	}
}

// message has one byte read.
func message(t testing.TB, c net.Conn, peer net.Conn) {
	t.Helper()
	if _, err := peer.Write([]byte{1}); err != nil {
		t.Fatal(err)
	}
	if n, err := c.Read(make([]byte, 16)); n != 1 || err != nil {
		t.Fatalf("%d bytes, %v", n, err)
	}
}

// waits is how many reads wait for a tick.
func waits(k *Coalescer) (n int) {
	k.with(func() { n = len(k.waiting[others]) })
	return n
}

// lowAt is how many bytes wake who reads a connection.
func lowAt(t *testing.T, c *coalesced) (bytes int) {
	t.Helper()
	return option(t, c, syscall.SOL_SOCKET, syscall.SO_RCVLOWAT)
}

func option(t *testing.T, c *coalesced, level, name int) (value int) {
	t.Helper()
	err := c.raw.Control(func(fd uintptr) {
		var err error
		if value, err = syscall.GetsockoptInt(int(fd), level, name); err != nil {
			t.Error(err)
		}
	})
	if err != nil {
		t.Error(err)
	}
	return value
}

// What is read on ticks is not acknowledged with each read.
func TestTicksDelayAcks(t *testing.T) {
	t.Parallel()
	k, _ := coalescing(t, CoalescerOptions{BeginReadsPerSec: always})
	c, peer := coalescedPair(t, k)
	begin(t, k, c, peer)
	for until := time.Now().Add(time.Minute); option(t, c, syscall.IPPROTO_TCP, syscall.TCP_QUICKACK) != 0; {
		if time.Now().After(until) {
			t.Fatal("each read is acknowledged")
		}
		message(t, c, peer)
	}
}

// Whatever is sent arrives whole and in order, of each of several connections:
// small messages, and bursts that no buffer holds.
func TestTicksLoseNothing(t *testing.T) {
	t.Parallel()
	k, _ := coalescing(t, CoalescerOptions{BeginReadsPerSec: always, Period: time.Millisecond})
	var all sync.WaitGroup
	for i := range 4 {
		c, peer := coalescedPair(t, k)
		begin(t, k, c, peer)
		rng := rand.New(rand.NewPCG(1, uint64(i)))
		sent := make([]byte, 2<<20)
		for i := range sent {
			sent[i] = byte(rng.Uint32())
		}
		all.Go(func() {
			for rest := sent; len(rest) > 0; {
				n := min(len(rest), 1+rng.IntN(2000))
				if rng.IntN(20) == 0 {
					n = min(len(rest), 1<<20)
				}
				if _, err := peer.Write(rest[:n]); err != nil {
					t.Error(err)
					break
				}
				rest = rest[n:]
			}
			if err := peer.CloseWrite(); err != nil {
				t.Error(err)
			}
		})
		all.Go(func() {
			var got bytes.Buffer
			if _, err := io.Copy(&got, c); err != nil {
				t.Error(err)
			}
			if !bytes.Equal(got.Bytes(), sent) {
				t.Errorf("connection %d: %d bytes of %d, or others", i, got.Len(), len(sent))
			}
		})
	}
	all.Wait()
}

// A connection is read once on a tick, however many messages came since the last.
func TestTicksReadTogether(t *testing.T) {
	t.Parallel()
	const period, messages = 250 * time.Millisecond, 100
	k, _ := coalescing(t, CoalescerOptions{BeginReadsPerSec: always, Period: period})
	c, peer := coalescedPair(t, k)
	begin(t, k, c, peer)
	message(t, c, peer)
	began := time.Now()
	go func() {
		for range messages {
			time.Sleep(time.Millisecond)
			if _, err := peer.Write([]byte{1}); err != nil {
				t.Error(err)
			}
		}
	}()
	reads := 0
	for got := 0; got < messages; reads++ {
		n, err := c.Read(make([]byte, 1<<10))
		if err != nil {
			t.Fatal(err)
		}
		got += n
	}
	if most := 2 + int(time.Since(began)/period); reads > most {
		t.Errorf("%d reads on at most %d ticks", reads, most)
	}
	if n := lowAt(t, c); n != lowWater {
		t.Errorf("%d bytes wake the process between ticks, want %d", n, lowWater)
	}
}

// Connections of Conn are read on every so many ticks, those of ConnFirst on each.
func TestTicksThatOthersAreReadOn(t *testing.T) {
	t.Parallel()
	const every = 4
	k, _ := coalescing(t, CoalescerOptions{Period: 5 * time.Millisecond, Every: every, BeginReadsPerSec: always})
	other, otherPeer := coalescedPair(t, k)
	begin(t, k, other, otherPeer)
	wrapped, firstPeer := pair(t)
	first := k.ConnFirst(wrapped.(*conn).TCPConn)
	tick := func() uint64 {
		k.mu.Lock()
		defer k.mu.Unlock()
		return k.tick
	}
	const reads = 5
	before := tick()
	for range reads {
		message(t, other, otherPeer)
	}
	if passed := tick() - before; passed < (reads-1)*every {
		t.Errorf("the other was read %d times on %d ticks", reads, passed)
	}
	for until := time.Now().Add(time.Minute); ; {
		message(t, first, firstPeer)
		before := tick()
		if message(t, first, firstPeer); tick()-before < every {
			break
		}
		if time.Now().After(until) {
			t.Fatal("the first one waits for ticks of the others")
		}
	}
}

// What ends a read ends one that waits for a tick as well, whether it comes before
// or while it waits.
func TestTicksInterrupt(t *testing.T) {
	for _, tc := range []struct {
		name      string
		interrupt func(c *coalesced, peer *net.TCPConn) error
		want      error
	}{
		{"deadline", func(c *coalesced, _ *net.TCPConn) error { return c.SetReadDeadline(time.Unix(1, 0)) }, os.ErrDeadlineExceeded},
		{"close", func(c *coalesced, _ *net.TCPConn) error { return c.Close() }, net.ErrClosed},
		{"peer's close", func(_ *coalesced, peer *net.TCPConn) error { return peer.Close() }, io.EOF},
		{"peer's reset", func(_ *coalesced, peer *net.TCPConn) error { return errors.Join(peer.SetLinger(0), peer.Close()) }, syscall.ECONNRESET},
	} {
		for _, first := range []bool{true, false} {
			t.Run(tc.name+map[bool]string{true: " before", false: " meanwhile"}[first], func(t *testing.T) {
				t.Parallel()
				k, _ := coalescing(t, CoalescerOptions{BeginReadsPerSec: always})
				c, peer := coalescedPair(t, k)
				begin(t, k, c, peer)
				read := func() error {
					_, err := c.Read(make([]byte, 1))
					return err
				}
				result := make(chan error, 1)
				if !first {
					go func() { result <- read() }()
					for until := time.Now().Add(time.Minute); waits(k) == 0 && time.Now().Before(until); {
						time.Sleep(time.Millisecond)
					}
				}
				if err := tc.interrupt(c, peer); err != nil {
					t.Fatal(err)
				}
				if first {
					go func() { result <- read() }()
				}
				if err := <-result; !errors.Is(err, tc.want) {
					t.Errorf("%v, want %v", err, tc.want)
				}
			})
		}
	}
}

// A connection without messages does not wait for ticks, among others that do: its
// next byte wakes it.
func TestTicksLeaveIdleConnections(t *testing.T) {
	t.Parallel()
	k, _ := coalescing(t, CoalescerOptions{BeginReadsPerSec: always})
	c, peer := coalescedPair(t, k)
	begin(t, k, c, peer)
	message(t, c, peer)
	got := make(chan error, 1)
	go func() {
		_, err := c.Read(make([]byte, 16))
		got <- err
	}()
	for until := time.Now().Add(time.Minute); waits(k) > 0 || lowAt(t, c) != 1; time.Sleep(time.Millisecond) {
		if time.Now().After(until) {
			t.Fatal("a connection waits for ticks that bring nothing")
		}
	}
	if _, err := peer.Write([]byte{1}); err != nil {
		t.Fatal(err)
	}
	if err := <-got; err != nil {
		t.Error(err)
	}
	if !k.Ticking() {
		t.Error("the ticks ended")
	}
	message(t, c, peer)
	if n := lowAt(t, c); n != lowWater {
		t.Errorf("back among the others, %d bytes wake it, want %d", n, lowWater)
	}
}

// With few messages, and at the end of Run, the ticks end, and who waits for one
// waits for the next byte instead.
func TestTicksEnd(t *testing.T) {
	for name, o := range map[string]CoalescerOptions{
		"few messages": {BeginReadsPerSec: always, EndReadsPerSec: always},
		"end of Run":   {BeginReadsPerSec: always, Period: time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			k, stop := coalescing(t, o)
			c, peer := coalescedPair(t, k)
			begin(t, k, c, peer)
			timer := k.NewTimer()
			defer timer.Stop()
			timer.Reset(time.Second)
			got := make(chan error, 1)
			go func() {
				_, err := c.Read(make([]byte, 1))
				got <- err
			}()
			if o.EndReadsPerSec == 0 {
				for until := time.Now().Add(time.Minute); waits(k) == 0; time.Sleep(time.Millisecond) {
					if time.Now().After(until) {
						t.Fatal("no read waits for a tick")
					}
				}
				stop()
			}
			for until := time.Now().Add(time.Minute); k.Ticking() || lowAt(t, c) != 1; time.Sleep(time.Millisecond) {
				if time.Now().After(until) {
					t.Fatal("the ticks go on")
				}
			}
			if _, err := peer.Write([]byte{1}); err != nil {
				t.Fatal(err)
			}
			if err := <-got; err != nil {
				t.Error(err)
			}
			<-timer.C
			if o.EndReadsPerSec == 0 {
				message(t, c, peer)
				return
			}
			begin(t, k, c, peer) // and again
			message(t, c, peer)
		})
	}
}

// Few messages begin no ticks, and none do without Run.
func TestTicksNeedMessages(t *testing.T) {
	t.Parallel()
	k, _ := coalescing(t, CoalescerOptions{BeginReadsPerSec: 1e9})
	never, err := NewCoalescer(CoalescerOptions{BeginReadsPerSec: always})
	if err != nil {
		t.Fatal(err)
	}
	for _, k := range []*Coalescer{k, never} {
		c, peer := coalescedPair(t, k)
		for until := time.Now().Add(2 * rateWindow); time.Now().Before(until); {
			message(t, c, peer)
		}
		if k.Ticking() {
			t.Error("reads wait for ticks")
		}
	}
}

// A timer fires once for each time it is set, on ticks and without, not before it
// is due.
func TestTimer(t *testing.T) {
	t.Parallel()
	k, _ := coalescing(t, CoalescerOptions{BeginReadsPerSec: always})
	c, peer := coalescedPair(t, k)
	fires := func(name string, timer *Timer) {
		for _, d := range []time.Duration{0, 12 * time.Millisecond} {
			began := time.Now()
			timer.Reset(d)
			<-timer.C
			if took := time.Since(began); took < d {
				t.Errorf("%s: fired after %v, set to %v", name, took, d)
			}
		}
		timer.Reset(time.Hour)
		timer.Reset(time.Millisecond)
		<-timer.C
		select {
		case <-timer.C:
			t.Errorf("%s: fired twice", name)
		default:
		}
	}
	// One connection that has something to read on each tick keeps the ticks going,
	// and so it does where some find nothing.
	for _, period := range []time.Duration{0, time.Millisecond, 50 * time.Millisecond, time.Second} {
		k, err := NewCoalescer(CoalescerOptions{Period: period})
		if err != nil {
			t.Fatal(err)
		}
		if share := k.o.EndReadsPerSec * k.o.Period.Seconds(); share <= 0 || share > .7 {
			t.Errorf("ticks of %v end with something to read on %.2f of them", k.o.Period, share)
		}
	}
	var nobody *Coalescer
	without := nobody.NewTimer()
	defer without.Stop()
	fires("no coalescer", without)
	timer := k.NewTimer()
	defer timer.Stop()
	fires("before the ticks", timer)
	timer.Reset(time.Second)
	begin(t, k, c, peer)
	<-timer.C
	fires("on ticks", timer)
}

// Reading on ticks allocates nothing.
func TestTicksAllocateNothing(t *testing.T) {
	k, _ := coalescing(t, CoalescerOptions{BeginReadsPerSec: always, Period: time.Millisecond})
	c, peer := coalescedPair(t, k)
	begin(t, k, c, peer)
	one, buf := []byte{1}, make([]byte, 16)
	allocs := testing.AllocsPerRun(100, func() {
		if _, err := peer.Write(one); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Read(buf); err != nil {
			t.Fatal(err)
		}
	})
	if allocs > 0 {
		t.Errorf("%.1f allocations", allocs)
	}
}

func TestCoalescerOptions(t *testing.T) {
	t.Parallel()
	for want, o := range map[string]CoalescerOptions{
		"Period is -1ns":              {Period: -1},
		"Every is -1":                 {Every: -1},
		"Every is 101":                {Every: 101},
		"below the 25 ticks a second": {Every: 2, BeginReadsPerSec: 300, EndReadsPerSec: 30},
		"Period is 2s":                {Period: 2 * time.Second},
		"must not be neg":             {BeginReadsPerSec: -1},
		"above BeginReads":            {BeginReadsPerSec: 1, EndReadsPerSec: 2},
		"below the 50 ticks a second": {BeginReadsPerSec: 300, EndReadsPerSec: 50},
		"below the 20 ticks a second": {Period: 50 * time.Millisecond, BeginReadsPerSec: 300, EndReadsPerSec: 60},
	} {
		if _, err := NewCoalescer(o); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want %q", o, err, want)
		}
	}
	var nobody *Coalescer
	c, _ := pair(t)
	if _, ok := nobody.Conn(c.(*conn).TCPConn).(*conn); !ok {
		t.Error("a connection of no coalescer is not one of Conn")
	}
	a, b := net.Pipe()
	defer a.Close()
	defer b.Close()
	if k, _ := coalescing(t, CoalescerOptions{}); k.ConnFirst(a) != a {
		t.Error("a pipe was wrapped")
	}
	// Where connections are read less often, fewer reads are enough to go on.
	for every, want := range map[int]float64{0: 30, 1: 30, 2: 15} {
		k, err := NewCoalescer(CoalescerOptions{Every: every})
		if err != nil || math.Abs(k.o.EndReadsPerSec-want) > 1e-9 {
			t.Errorf("read on every %d ticks: %v, want an end below %v reads a second", every, err, want)
		}
	}
}
