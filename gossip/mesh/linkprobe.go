package mesh

import (
	"context"
	"crypto/subtle"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"
)

// A link probe measures the way from one member to another through the port that
// gossip uses, so that no other one has to be opened: one TCP connection, in clear,
// that carries zeros. The sender begins with probePreface and the token that the
// receiver was told to expect, and waits for a byte; the receiver counts until the
// end and answers with the number of bytes (u64, little-endian) and the time from
// the first of them to the last in ns (u64).

// Bounds of a link probe.
const (
	// MaxProbeBytes and MaxProbeTime are the most that a probe may ask for.
	MaxProbeBytes = 16 << 30
	MaxProbeTime  = 10 * time.Second

	// probePreface is the first byte of a probe's stream; that of gossip is the
	// type of the label, 244.
	probePreface = 'W'
	// probeWait is how long a receiver expects a probe, and how long either side
	// waits for the other's word.
	probeWait  = 10 * time.Second
	probeBlock = 256 << 10
)

// Errors of link probes.
var (
	ErrProbeBusy   = errors.New("a link probe is under way here already")
	ErrProbeLimits = errors.New("bad limits of a link probe")
	errNotExpected = errors.New("probe is not expected")
)

// ProbeToken is what lets a probe in: a random word that both ends were told by a
// coordinator, good once.
type ProbeToken [16]byte

// ProbeLimits bound a probe: it ends with whichever is reached first.
type ProbeLimits struct {
	Bytes int64         // 1 to MaxProbeBytes
	Time  time.Duration // above 0, up to MaxProbeTime
}

func (l ProbeLimits) check() error {
	switch {
	case l.Bytes < 1 || l.Bytes > MaxProbeBytes:
		return fmt.Errorf("%w: %d bytes are not in 1 to %d", ErrProbeLimits, l.Bytes, int64(MaxProbeBytes))
	case l.Time <= 0 || l.Time > MaxProbeTime:
		return fmt.Errorf("%w: %s is not above 0 and up to %s", ErrProbeLimits, l.Time, MaxProbeTime)
	}
	return nil
}

// LinkProbe is what a probe measured.
type LinkProbe struct {
	// Bytes arrived, in Took from the first to the last, by the receiver's clock.
	Bytes int64
	Took  time.Duration
	// Answer is the time until the receiver's first word: a round trip.
	Answer time.Duration
}

// probes is the one probe that a member expects, and whether it takes part in one:
// it does in one at a time, on either side.
type probes struct {
	mu       sync.Mutex
	busy     bool
	expected ProbeToken
	limits   ProbeLimits
	until    time.Time // expected until then
}

// begin takes the member for a probe; it is free again by end.
func (p *probes) begin() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.busy {
		return ErrProbeBusy
	}
	p.busy = true
	return nil
}

func (p *probes) end() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.busy = false
}

// take begins the probe that a token was given out for.
func (p *probes) take(token ProbeToken) (ProbeLimits, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.busy || !time.Now().Before(p.until) || subtle.ConstantTimeCompare(token[:], p.expected[:]) != 1 {
		return ProbeLimits{}, errNotExpected
	}
	p.until, p.busy = time.Time{}, true
	return p.limits, nil
}

// ExpectProbe lets one probe with this token in within the next ten seconds, in the
// place of one that was expected and has not come.
func (m *Mesh) ExpectProbe(token ProbeToken, limits ProbeLimits) error {
	if err := limits.check(); err != nil {
		return err
	}
	if !m.started.Load() {
		return errors.New("mesh is not started")
	}
	p := &m.transport.probes
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.busy {
		return ErrProbeBusy
	}
	p.expected, p.limits, p.until = token, limits, time.Now().Add(probeWait)
	return nil
}

// serveProbe receives a probe, if it is the expected one.
func (t *transport) serveProbe(c net.Conn) {
	var token ProbeToken
	if _, err := io.ReadFull(c, token[:]); err != nil {
		return
	}
	limits, err := t.probes.take(token)
	if err != nil {
		t.limited()
		return
	}
	defer t.probes.end()
	if c.SetDeadline(time.Now().Add(limits.Time+probeWait)) != nil {
		return
	}
	if _, err := c.Write([]byte{1}); err != nil {
		return
	}
	buf := make([]byte, probeBlock)
	var n int64
	var first, last time.Time
	for n <= limits.Bytes {
		k, err := c.Read(buf)
		if k > 0 {
			last = time.Now()
			if n == 0 {
				first = last
			}
			n += int64(k)
			t.bytesIn.Add(uint64(k))
		}
		if err != nil {
			break // the sender's end, or a fault that its answer will show
		}
	}
	answer := binary.LittleEndian.AppendUint64(nil, uint64(n))
	// The sender sees a lost answer as one.
	_, _ = c.Write(binary.LittleEndian.AppendUint64(answer, uint64(last.Sub(first))))
}

// ProbeTo measures the way to a member that expects the token.
func (m *Mesh) ProbeTo(ctx context.Context, member string, token ProbeToken, limits ProbeLimits) (LinkProbe, error) {
	if err := limits.check(); err != nil {
		return LinkProbe{}, err
	}
	address := ""
	for _, o := range m.Members() {
		if o.Name == member && o.Status == StatusAlive && !o.Self {
			address = o.Address
		}
	}
	if address == "" {
		return LinkProbe{}, fmt.Errorf("no other member %q is alive here", member)
	}
	p := &m.transport.probes
	if err := p.begin(); err != nil {
		return LinkProbe{}, err
	}
	defer p.end()
	if m.transport.loses(false, address) {
		return LinkProbe{}, errCut
	}
	c, err := m.transport.NetTransport.DialAddressTimeout(memberlist.Address{Addr: address, Name: member}, streamTimeout)
	if err != nil {
		return LinkProbe{}, fmt.Errorf("%s at %s: %w", member, address, err)
	}
	defer c.Close()
	// Whoever gives up closes the connection, which ends what is below.
	defer context.AfterFunc(ctx, func() { c.Close() })()
	probe, err := m.transport.sendProbe(c, token, limits)
	if ctx.Err() != nil {
		err = ctx.Err()
	}
	if err != nil {
		return LinkProbe{}, fmt.Errorf("%s at %s: %w", member, address, err)
	}
	return probe, nil
}

func (t *transport) sendProbe(c net.Conn, token ProbeToken, limits ProbeLimits) (p LinkProbe, err error) {
	if err := c.SetDeadline(time.Now().Add(limits.Time + 2*probeWait)); err != nil {
		return p, err
	}
	began := time.Now()
	if _, err := c.Write(append([]byte{probePreface}, token[:]...)); err != nil {
		return p, err
	}
	var answer [16]byte
	if _, err := io.ReadFull(c, answer[:1]); err != nil {
		return p, fmt.Errorf("the other end did not let the probe in: %w", err)
	}
	p.Answer = time.Since(began)
	block := make([]byte, min(probeBlock, limits.Bytes))
	began = time.Now()
	var sent int64
	for sent < limits.Bytes && time.Since(began) < limits.Time {
		n, err := c.Write(block[:min(int64(len(block)), limits.Bytes-sent)])
		sent += int64(n)
		t.bytesOut.Add(uint64(n))
		if err != nil {
			return p, err
		}
	}
	half, ok := c.(interface{ CloseWrite() error })
	if !ok {
		return p, errors.New("the connection cannot be closed on one side")
	}
	if err := half.CloseWrite(); err != nil {
		return p, err
	}
	if _, err := io.ReadFull(c, answer[:]); err != nil {
		return p, fmt.Errorf("the other end did not tell what arrived: %w", err)
	}
	p.Bytes, p.Took = int64(binary.LittleEndian.Uint64(answer[:8])), time.Duration(binary.LittleEndian.Uint64(answer[8:]))
	if p.Bytes != sent || p.Took < 0 {
		return p, fmt.Errorf("%d bytes were sent, %d arrived in %s", sent, p.Bytes, p.Took)
	}
	return p, nil
}
