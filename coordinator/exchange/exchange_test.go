package exchange

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"waypost/coordinator/registry"
	"waypost/gossip/ledger"
	waypostv1 "waypost/proto/waypost/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// newExchange is an exchange of a coordinator that nobody can be reached from.
func newExchange(t *testing.T, change ...func(*Options)) *Exchange {
	t.Helper()
	results := func(name string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: name}, []string{"result"})
	}
	opt := Options{
		Name: "c-1", Process: 1, Began: time.Now(), Dial: func(string) (*grpc.ClientConn, error) { return nil, errors.New("no way") },
		HostsHeard: func() int { return 0 }, Met: func(context.Context, string) {}, Places: results("places"), MemoEntries: results("memo"),
	}
	for _, fn := range change {
		fn(&opt)
	}
	x, err := New(opt)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(x.Stop)
	return x
}

func lost(v *prometheus.CounterVec) float64 { return testutil.ToFloat64(v.WithLabelValues("lost")) }

// What waits for a peer that does not listen is bounded in number and in age,
// and what is lost is counted.
func TestPlacesForASilentPeerAreBounded(t *testing.T) {
	x := newExchange(t)
	l := &link{x: x, wake: make(chan struct{}, 1)}
	now := time.Now()
	for i := range maxPlacesQueued + 10 {
		l.push(now, []ledger.Placed{{RequestID: fmt.Sprint(i)}})
	}
	l.push(now.Add(maxPlaceAge), []ledger.Placed{{RequestID: "new"}})
	if n := lost(x.opt.Places); n != 11 {
		t.Errorf("%v lost for want of room, want 11", n)
	}
	waiting := l.take(now.Add(maxPlaceAge + time.Millisecond))
	if len(waiting) != 1 || waiting[0].RequestID != "new" {
		t.Errorf("%d wait, want the new one", len(waiting))
	}
	if n := lost(x.opt.Places); n != 11+maxPlacesQueued-1 {
		t.Errorf("%v lost in all", n)
	}
}

// What waits for a peer that reads nothing is bounded, however long it lasts.
func TestMemoForASlowPeerIsBounded(t *testing.T) {
	l := &link{x: newExchange(t), wake: make(chan struct{}, 1), up: true}
	e := &waypostv1.MemoEntry{Pool: new("p"), Values: make([]uint64, 1024)}
	now := time.Now()
	for i := range 10_000 {
		l.pushMemo(now.Add(time.Duration(i)*time.Second), []*waypostv1.MemoEntry{e})
	}
	if most := maxMemoWaiting / memoEntryBytes(e); len(l.memo) > most || len(l.memo) < most-1 {
		t.Errorf("%d entries wait, at most %d may", len(l.memo), most)
	}
	if got := len(l.takeMemo()); got == 0 {
		t.Error("nothing is handed over")
	}
	if l.pushMemo(now.Add(time.Hour*9), []*waypostv1.MemoEntry{e}); len(l.memo) != 1 {
		t.Errorf("%d entries wait after room was made", len(l.memo))
	}
}

// listener is another coordinator that keeps what it is told.
type listener struct {
	waypostv1.UnimplementedPeerServiceServer
	told, ended chan string
}

func (l *listener) ExchangePlacements(s waypostv1.PeerService_ExchangePlacementsServer) error {
	defer func() { l.ended <- "ended" }()
	greeted := false
	for {
		m, err := s.Recv()
		if err != nil {
			return err
		}
		if !greeted {
			greeted = true
			l.told <- fmt.Sprintf("%d hears %d", m.GetCoordinator(), m.GetHostsHeard())
			if err := s.Send(&waypostv1.ExchangePlacementsResponse{Coordinator: new(uint64(2))}); err != nil {
				return err
			}
		}
		for _, p := range m.GetPlaces() {
			l.told <- p.GetRequestId()
		}
	}
}

func receive(t *testing.T, c chan string) string {
	t.Helper()
	select {
	case s := <-c:
		return s
	case <-time.After(time.Minute):
		t.Fatal("nothing comes")
		return ""
	}
}

// catalogue is a registry with these coordinators, by name and address.
func catalogue(t *testing.T, members ...[2]string) *registry.State {
	t.Helper()
	state := registry.Empty()
	bodies := []registry.Body{registry.InitCluster{ClusterID: "c", Fleet: "default"}}
	for _, m := range members {
		bodies = append(bodies, registry.RegisterCoordinator{ID: m[0], Name: m[0], ClusterAddress: m[1]})
	}
	for i, b := range bodies {
		cmd, err := registry.Encode(registry.Stamp{RequestID: fmt.Sprint(i), At: time.Now(), By: "a test"}, b)
		if err != nil {
			t.Fatal(err)
		}
		var r registry.Result
		if state, r = state.Apply(cmd); r.Code != registry.CodeOK {
			t.Fatal(r)
		}
	}
	return state
}

// The coordinators of the catalogue are told, but not the own one, until they
// leave it.
func TestFollowsTheCatalogue(t *testing.T) {
	server, peer := grpc.NewServer(), &listener{told: make(chan string, 64), ended: make(chan string, 64)}
	waypostv1.RegisterPeerServiceServer(server, peer)
	socket, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- server.Serve(socket) }()
	address := socket.Addr().String()
	conn, err := grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		server.Stop()
		if err := errors.Join(conn.Close(), <-served); err != nil {
			t.Error(err)
		}
	})
	var dialled atomic.Int32
	met := make(chan string, 64)
	x := newExchange(t, func(o *Options) {
		o.Dial = func(to string) (*grpc.ClientConn, error) {
			dialled.Add(1)
			if to != address {
				t.Errorf("%s is dialled", to)
			}
			return conn, nil
		}
		o.HostsHeard = func() int { return 7 }
		o.Met = func(_ context.Context, at string) { met <- at }
	})
	x.Follow(catalogue(t, [2]string{"c-1", "127.0.0.1:1"}, [2]string{"c-2", address}))
	if got := receive(t, peer.told); got != "1 hears 7" {
		t.Errorf("the first word is %s", got)
	}
	if got := receive(t, met); got != address {
		t.Errorf("met %s", got)
	}
	if peers := x.Peers(); x.Connected() != 1 || len(peers) != 1 || peers[0].Name != "c-2" || !peers[0].Up {
		t.Errorf("%v", x.Peers())
	}
	x.Tell(time.Now(), []ledger.Placed{{RequestID: "r1"}})
	if got := receive(t, peer.told); got != "r1" {
		t.Errorf("told %s", got)
	}
	x.Cut(true)
	x.Tell(time.Now(), []ledger.Placed{{RequestID: "r2"}})
	if n := lost(x.opt.Places); n != 1 || len(peer.told) != 0 {
		t.Errorf("cut, %v are lost and %d told", n, len(peer.told))
	}
	x.Follow(catalogue(t, [2]string{"c-1", "127.0.0.1:1"}))
	receive(t, peer.ended)
	if got := x.Peers(); len(got) != 0 {
		t.Errorf("%v of a catalogue of one", got)
	}
	x.Stop()
	was := dialled.Load()
	x.Follow(catalogue(t, [2]string{"c-2", address}))
	if got := x.Peers(); len(got) != 0 || dialled.Load() != was {
		t.Errorf("%v after the end", got)
	}
}

func TestOptionsThatLack(t *testing.T) {
	if _, err := New(Options{Name: "c-1"}); err == nil {
		t.Error("an exchange without a way to its peers")
	}
}
