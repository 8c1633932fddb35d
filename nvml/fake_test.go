package nvml

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"
)

// script says how a fake driver behaves; tests change it while it runs.
type script struct {
	mu       sync.Mutex
	status   *Status       // Open fails with it
	gpus     []GPU         // what Read finds
	call     time.Duration // each GPU takes so long
	hang     string        // this call never returns
	hangOpen bool
	hangXid  bool
	xidErr   error
	rebuild  string
	crash    string // the process ends with these words
	xids     chan XidEvent
	still    bool // readings do not move
	mute     bool // nothing that is said arrives, as when the process is stopped
}

func newScript(gpus ...GPU) *script { return &script{gpus: gpus} }

func (s *script) set(f func(*script)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f(s)
}

func (s *script) get() (c struct {
	status         *Status
	gpus           []GPU
	call           time.Duration
	hang           string
	hangOpen, xidH bool
	xidErr         error
	rebuild, crash string
	still          bool
},
) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c.status, c.gpus, c.call, c.hang, c.hangOpen = s.status, s.gpus, s.call, s.hang, s.hangOpen
	c.xidH, c.xidErr, c.rebuild, c.crash, c.still = s.hangXid, s.xidErr, s.rebuild, s.crash, s.still
	return c
}

// fakeSource is a driver by script, in a process that ends when dead is closed.
type fakeSource struct {
	script *script
	log    *CallLog
	dead   chan struct{}
	die    func(words string)
}

func (f *fakeSource) Open(log *CallLog) (Session, error) {
	f.log = log
	c := f.script.get()
	if c.hangOpen {
		log.Begin("nvmlInit", -1, time.Now())
		<-f.dead
	}
	if c.status != nil {
		return nil, &StatusError{*c.status}
	}
	return f, nil
}

func (f *fakeSource) Read() *Snapshot {
	c := f.script.get()
	if c.crash != "" {
		f.die(c.crash)
		<-f.dead
	}
	now := time.Now()
	for i := range c.gpus {
		f.log.Begin("nvmlDeviceGetUUID", i, time.Now())
		if c.call > 0 {
			time.Sleep(c.call)
		}
		f.log.End(time.Now())
		if c.hang != "" {
			f.log.Begin(c.hang, i, time.Now())
			<-f.dead
		}
	}
	s := &Snapshot{Driver: Driver{DriverVersion: "580"}, Rebuild: c.rebuild}
	for _, g := range c.gpus {
		if g.PowerWatts != nil && !c.still { // a working sensor never stands still
			g.PowerWatts = new(100 + float64(now.UnixMilli()%1e6)/1000)
		}
		s.GPUs = append(s.GPUs, g)
	}
	return s
}

func (f *fakeSource) WaitXid(timeout time.Duration) (XidEvent, bool, error) {
	c := f.script.get()
	if c.xidH {
		<-f.dead
	}
	if c.xidErr != nil {
		return XidEvent{}, false, c.xidErr
	}
	select {
	case e := <-f.script.xids:
		return e, true, nil
	case <-time.After(timeout):
		return XidEvent{}, false, nil
	case <-f.dead:
		return XidEvent{}, false, errors.New("dead")
	}
}

// fakeProcess runs a child on a fake driver as a process would.
type fakeProcess struct {
	child      *child
	r          *io.PipeReader
	w          *io.PipeWriter
	cancel     context.CancelFunc
	source     *fakeSource
	unkillable bool
	once       sync.Once
	exited     chan struct{}
	code       int
	words      string
}

func startFake(s *script, poll time.Duration, unkillable bool) *fakeProcess {
	r, w := io.Pipe()
	ctx, cancel := context.WithCancel(context.Background())
	p := &fakeProcess{r: r, w: w, cancel: cancel, unkillable: unkillable, exited: make(chan struct{})}
	p.source = &fakeSource{script: s, dead: make(chan struct{}), die: func(words string) { p.end(127, words) }}
	p.child = &child{source: p.source, poll: poll, out: muteWriter{s, w}}
	p.child.workers.Go(func() {
		code := p.child.run(ctx)
		p.end(code, fmt.Sprintf("exit status %d", code))
	})
	return p
}

// muteWriter loses what is written while the script says so.
type muteWriter struct {
	script *script
	w      io.Writer
}

func (m muteWriter) Write(b []byte) (int, error) {
	m.script.mu.Lock()
	mute := m.script.mute
	m.script.mu.Unlock()
	if mute {
		return len(b), nil
	}
	return m.w.Write(b)
}

// end is the end of the process: nothing of it goes on.
func (p *fakeProcess) end(code int, words string) {
	p.once.Do(func() {
		p.code, p.words = code, words
		p.cancel()
		_ = p.w.Close()
		close(p.source.dead)
		close(p.exited)
	})
}

func (p *fakeProcess) Frames() io.Reader       { return p.r }
func (p *fakeProcess) Exited() <-chan struct{} { return p.exited }
func (p *fakeProcess) Exit() (int, string)     { return p.code, p.words }
func (p *fakeProcess) Close()                  { _ = p.r.Close() }

// CloseInput ends it soon: a process needs a moment to see that its input ended.
func (p *fakeProcess) CloseInput() {
	if !p.unkillable {
		time.AfterFunc(closeGrace/2, func() { p.end(exitParentGone, "exit status 0") })
	}
}

func (p *fakeProcess) Kill() {
	if !p.unkillable {
		p.end(-1, "signal: killed")
	}
}
