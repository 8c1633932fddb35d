package views

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"waypost/coordinator/fleet"
	"waypost/coordinator/placement"
	"waypost/coordinator/prefixindex"
	"waypost/gossip/prefix"
	"waypost/gossip/summary"
	waypostv1 "waypost/proto/waypost/v1"
)

// Session is the lane to a host's agent, a [waypost/gossip/lane.Session].
type Session interface {
	// Host is the name of the host.
	Host() string
	// Hello is the latest that the agent said of its workers.
	Hello() *waypostv1.AgentHello
	// Send queues a frame; an error says that it will not be sent.
	Send(*waypostv1.ConnectResponse) error
	// Done is closed when the lane is down.
	Done() <-chan struct{}
}

// Peers are the other coordinators, which may know a cache already.
type Peers interface {
	// CopyPeers are the addresses of those to ask for a copy, in that order; it
	// returns at once.
	CopyPeers() []string
	// FetchCopy asks one of them for the stream of a worker's engine process, as
	// frames and their age. No frames: it knows nothing.
	FetchCopy(ctx context.Context, address, worker string, process uint64) (frames [][]byte, age time.Duration, err error)
}

// Options wires [Views]. All are required but Logger and Registerer.
type Options struct {
	// Fleet knows the workers and is told the state of their views.
	Fleet *fleet.Fleet
	// Index lists the prefixes.
	Index *prefixindex.Index
	// PrefixKey is the key that frames must be made with.
	PrefixKey prefix.ClusterKey
	// Peers are asked before an agent sends all of a stream.
	Peers Peers
	// Lost is told of a worker of whose stream something was lost on its way. It
	// must not call back.
	Lost func(worker fleet.WorkerID, now time.Time)
	// Refused is told of a frame that was refused, by kind: fenced, prefix or
	// sketch. It must not call back.
	Refused func(kind string)
	// Logger takes what an operator cares about; nil: nobody does.
	Logger *slog.Logger
	// Registerer takes the metrics; nil: nobody does.
	Registerer prometheus.Registerer
}

// Views is what is known of the workers' caches. It is safe for concurrent use.
type Views struct {
	opt       Options
	fleet     *fleet.Fleet
	index     *prefixindex.Index
	prefixKey prefix.ClusterKey
	log       *slog.Logger
	metrics   *metrics

	mu    sync.Mutex
	hosts map[string]*hostStreams
	pulls uint32 // the number of the latest pull

	puller   *puller
	verifier verifier
	sketches atomic.Pointer[map[fleet.WorkerID]sketched]
	// inferred are the workers of which the index retains what was placed.
	inferred sync.Map
	// stopped is closed when Run is about to end.
	stopped chan struct{}
}

// hostStreams are the prefix streams of a host. They outlive a lane, so that an
// agent that comes back continues where it was.
type hostStreams struct {
	mu      sync.Mutex
	session Session // nil: the lane is down
	lane    fleet.Lane
	streams map[uint32]*stream
}

// stream is the prefix stream of one worker.
type stream struct {
	// verification is under way; nil: none.
	verification *verification

	worker  fleet.WorkerID
	process uint64
	decoder *summary.Decoder
	// pull is the id of the pull that is not answered yet; 0: none. wanted says
	// that there is one, or will be.
	pull   uint32
	wanted bool
	// asked is when the latest pull was sent, answer what has come of it so far.
	asked  time.Time
	answer answer
	// short is why the stream is not known to be whole, by what came since the
	// latest pull was sent; empty: it is.
	short string
	// distrusted says that all of the view is to be read anew, not what is
	// missing of it; distrustPull is the pull that asks for that. lacking says that
	// what the view has is not in doubt.
	distrusted   bool
	lacking      bool
	distrustPull uint32
	// peerAsked says that the peers were asked for a copy.
	peerAsked bool
	// untoldMs is the age of the oldest change that the agent has not told, by
	// the latest report; nil: the agent does not say.
	untoldMs *float64
	// viewKind is what was seen of the cache last, viewAt when it was true.
	viewKind placement.ViewKind
	viewAt   time.Time
	// coverage is what the agent says the engine's events show; retainedTokens
	// how much of what was placed the index keeps where that is not all.
	coverage       string
	retainedTokens uint64
	// frames, resyncs and bytes are what `inspect` tells.
	frames, resyncs          map[string]uint32
	streamBytes, pulledBytes uint64
	resyncReason             string
}

// New makes views of no workers; [Views.Run] is to run before anything is
// pulled.
func New(opt Options) (*Views, error) {
	if opt.Fleet == nil || opt.Index == nil || opt.Peers == nil || opt.Lost == nil || opt.Refused == nil {
		return nil, errors.New("views: Fleet, Index, Peers, Lost and Refused are required")
	}
	vs := &Views{
		opt: opt, fleet: opt.Fleet, index: opt.Index, prefixKey: opt.PrefixKey, log: opt.Logger,
		hosts: map[string]*hostStreams{}, stopped: make(chan struct{}),
	}
	if vs.log == nil {
		vs.log = slog.New(slog.DiscardHandler)
	}
	var err error
	if vs.puller, err = newPuller(vs); err != nil {
		return nil, err
	}
	if opt.Registerer == nil {
		opt.Registerer = prometheus.NewRegistry()
	}
	vs.metrics = newMetrics(opt.Registerer, vs)
	return vs, nil
}

// Run sends pulls when their turn comes, until ctx ends, which ends
// verifications too. It is called once.
func (vs *Views) Run(ctx context.Context) {
	vs.puller.run(ctx)
	close(vs.stopped)
	vs.puller.copies.Wait()
}

func (vs *Views) host(name string) *hostStreams {
	vs.mu.Lock()
	defer vs.mu.Unlock()
	hs := vs.hosts[name]
	if hs == nil {
		hs = &hostStreams{streams: map[uint32]*stream{}}
		vs.hosts[name] = hs
	}
	return hs
}

// known is what is kept of a host; nil: nothing.
func (vs *Views) known(name string) *hostStreams {
	vs.mu.Lock()
	defer vs.mu.Unlock()
	return vs.hosts[name]
}

// LaneUp takes over a lane that the fleet has opened; [Views.Sync] asks for what
// is missing.
func (vs *Views) LaneUp(s Session, l fleet.Lane) {
	hs := vs.host(s.Host())
	hs.mu.Lock()
	defer hs.mu.Unlock()
	hs.session, hs.lane = s, l
}

// LaneDown lets the views of a lane's workers age, unless a newer lane took its
// place.
func (vs *Views) LaneDown(s Session) {
	hs := vs.host(s.Host())
	hs.mu.Lock()
	defer hs.mu.Unlock()
	if hs.session != s {
		return
	}
	hs.session = nil
	vs.puller.drop(s.Host())
	vs.stale(hs)
}

// streamOf returns the prefix stream that a lane means by an index. A worker
// with a new engine process starts a stream of its own; what the old one said
// is forgotten with it.
func (vs *Views) streamOf(hs *hostStreams, s Session, index uint32) *stream {
	id, process, ok := vs.fleet.LaneWorker(s.Host(), hs.lane, index)
	if !ok {
		return nil
	}
	st := hs.streams[index]
	if st == nil || st.worker != id || st.process != process {
		if st != nil {
			st.verification.fail(errRestarted)
		}
		st = &stream{worker: id, process: process, frames: map[string]uint32{}, resyncs: map[string]uint32{}}
		st.decoder = summary.NewDecoder(vs.index.WorkerSink(prefixindex.WorkerID(id)))
		st.decoder.RequireKey(vs.prefixKey)
		hs.streams[index] = st
	}
	return st
}

// setView tells the fleet how good a worker's cache view is.
func (vs *Views) setView(id fleet.WorkerID, process uint64, kind placement.ViewKind, age time.Duration) {
	vs.fleet.SetView(time.Now(), id, process, kind, age)
}

// Forget gives up what belongs to hosts and engine lives that the fleet does not
// know any more: the mirror of a cache takes megabytes.
func (vs *Views) Forget() {
	vs.mu.Lock()
	hosts := maps.Clone(vs.hosts)
	vs.mu.Unlock()
	for name, hs := range hosts {
		hs.mu.Lock()
		for index, st := range hs.streams {
			if _, process, ok := vs.fleet.ViewOf(st.worker); !ok || process != st.process {
				st.verification.fail(errRestarted)
				delete(hs.streams, index)
			}
		}
		hs.mu.Unlock()
		vs.mu.Lock()
		// A host that comes is known to the fleet before it asks for its entry.
		if !vs.fleet.HasHost(name) {
			delete(vs.hosts, name)
		}
		vs.mu.Unlock()
	}
}

// Size is how many hosts and streams are kept, and the bytes that the streams'
// decoders take.
func (vs *Views) Size() (hosts, streams, decoderBytes int) {
	vs.mu.Lock()
	all := make([]*hostStreams, 0, len(vs.hosts))
	for _, hs := range vs.hosts {
		all = append(all, hs)
	}
	vs.mu.Unlock()
	for _, hs := range all {
		hs.mu.Lock()
		streams += len(hs.streams)
		for _, st := range hs.streams {
			decoderBytes += st.decoder.MemoryBytes()
		}
		hs.mu.Unlock()
	}
	return len(all), streams, decoderBytes
}

// Stream is how the prefix stream of one engine process stands.
type Stream struct {
	// Coverage is what the agent says the engine's events show; empty: it has
	// not said.
	Coverage string
	// UntoldMs is the age of the oldest change that the agent has not told; nil:
	// it does not say.
	UntoldMs *float64
	// ViewAt is when what was seen last of the cache was true; zero: never.
	ViewAt time.Time
	// Frames counts frames by what became of them, Resyncs pulls by reason.
	Frames, Resyncs map[string]uint32
	// StreamBytes are the bytes of all frames, PulledBytes of those asked for.
	StreamBytes, PulledBytes uint64
	// ResyncReason is why the latest pull was sent, AskedAt when; zero: there was
	// none.
	ResyncReason string
	AskedAt      time.Time
	// InPlace says that Epoch and Seq are those of the newest frame applied:
	// after a mismatch what was known stands until the resync, without its place
	// in the stream.
	InPlace bool
	Epoch   uint32
	Seq     uint64
	// Runs, Keys and DecoderBytes are the size of what the stream lists.
	Runs, Keys, DecoderBytes int
}

// Stream shows the stream of a worker's engine process; false: there is none.
func (vs *Views) Stream(w *fleet.WorkerInfo) (Stream, bool) {
	hs := vs.known(w.Host)
	if hs == nil {
		return Stream{}, false
	}
	hs.mu.Lock()
	defer hs.mu.Unlock()
	_, st := hs.streamFor(w)
	if st == nil {
		return Stream{}, false
	}
	out := Stream{
		Coverage: st.coverage, UntoldMs: st.untoldMs, ViewAt: st.viewAt, Frames: maps.Clone(st.frames), Resyncs: maps.Clone(st.resyncs),
		StreamBytes: st.streamBytes, PulledBytes: st.pulledBytes, ResyncReason: st.resyncReason, AskedAt: st.asked,
		Runs: st.decoder.Runs(), Keys: st.decoder.Keys(), DecoderBytes: st.decoder.MemoryBytes(),
	}
	out.Epoch, out.Seq, out.InPlace = st.decoder.Have()
	return out, true
}
