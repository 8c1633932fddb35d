package mesh

import (
	"context"
	"log"
	"log/slog"
	"net"
	"strings"
	"sync"
	"time"
)

const (
	logEvery      = time.Minute
	maxLogClasses = 64
)

// logBridge takes memberlist's log lines. It gives them slog levels, lets each
// kind of warning through once a minute, and reads from some of them what the
// library tells in no other way: packets and streams it refused, and members
// that answer over TCP only.
type logBridge struct {
	log     *slog.Logger
	refused func(reason, address string)
	udpLost func(member string)

	mu      sync.Mutex
	classes map[string]*logClass
}

type logClass struct {
	last       time.Time
	suppressed int
}

func newLogBridge(log *slog.Logger, refused func(reason, address string), udpLost func(member string)) *logBridge {
	return &logBridge{log: log, refused: refused, udpLost: udpLost, classes: map[string]*logClass{}}
}

// logger returns the logger to hand to memberlist.
func (b *logBridge) logger() *log.Logger { return log.New(b, "", 0) }

// Write implements io.Writer: one line, "[LEVEL] memberlist: message".
func (b *logBridge) Write(line []byte) (int, error) {
	text := strings.TrimSpace(string(line))
	level := slog.LevelWarn
	if word, rest, ok := strings.Cut(text, "] "); ok && strings.HasPrefix(word, "[") {
		text = rest
		if word == "[DEBUG" || word == "[INFO" { // joins and deaths are logged by the mesh itself
			level = slog.LevelDebug
		}
	}
	text = strings.TrimPrefix(text, "memberlist: ")
	if strings.Contains(text, selfReadMark) {
		return len(line), nil
	}
	b.observe(text)
	if !b.log.Enabled(context.Background(), level) {
		return len(line), nil
	}
	if level == slog.LevelDebug {
		b.log.Debug(text)
	} else if again, ok := b.admit(classOf(text)); ok {
		if again > 0 {
			b.log.Warn(text, "suppressed", again)
		} else {
			b.log.Warn(text)
		}
	}
	return len(line), nil
}

// admit says whether a line of a class may be logged now, and how many were not.
func (b *logBridge) admit(class string) (suppressed int, ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	c := b.classes[class]
	if c == nil {
		if len(b.classes) >= maxLogClasses {
			class = "other"
		}
		if c = b.classes[class]; c == nil {
			c = &logClass{}
			b.classes[class] = c
		}
	}
	if now := time.Now(); c.last.IsZero() || now.Sub(c.last) >= logEvery {
		suppressed = c.suppressed
		c.last, c.suppressed = now, 0
		return suppressed, true
	}
	c.suppressed++
	return 0, false
}

// classOf is the part of a message that is the same for all of its kind: what
// comes before names, numbers and addresses.
func classOf(text string) string {
	if i := strings.IndexAny(text, `:"'(0123456789`); i > 0 {
		text = text[:i]
	}
	return text
}

// refusals are the messages that mean that something was thrown away. The first
// match counts.
var refusals = []struct{ text, reason string }{
	{"unacceptable label", "label"},
	{"Decrypt packet failed", "key"},
	{"no installed keys could decrypt", "key"},
	{"remote state is not encrypted", "key"},
	{"remote state is encrypted and encryption is not configured", "key"},
	{"remove the stream label header", "malformed"},
	{"failed to receive", "malformed"},
	{"Failed to read remote state", "malformed"},
	{"Failed to decode", "malformed"},
	{"invalid checksum", "malformed"},
	{"not supported", "malformed"},
	{"invalid msgType", "malformed"},
	{"missing message type byte", "malformed"},
	{"ignoring alive message", "vetoed"},
	{"handler queue full", "queue_full"},
	{"Too many pending push/pull", "stream_limit"},
}

func (b *logBridge) observe(text string) {
	for _, r := range refusals {
		if strings.Contains(text, r.text) {
			b.refused(r.reason, fromOf(text))
			return
		}
	}
	if rest, ok := strings.CutPrefix(text, "Was able to connect to "); ok {
		if member, _, ok := strings.Cut(rest, " over TCP but UDP probes failed"); ok {
			b.udpLost(member)
		}
	}
}

// fromOf returns the host of the "from=host:port" at the end of a message.
func fromOf(text string) string {
	_, from, ok := strings.Cut(text, "from=")
	if !ok {
		return ""
	}
	from, _, _ = strings.Cut(from, " ")
	host, _, err := net.SplitHostPort(from)
	if err != nil {
		return ""
	}
	return host
}
