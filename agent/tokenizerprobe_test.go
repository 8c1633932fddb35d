package agent

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"waypost/agent/engine"
	"waypost/gossip/boundary"
	"waypost/gossip/doctor"
	"waypost/gossip/prefix"
)

// brokenTokenizer has the route and fails.
type brokenTokenizer struct{ noTokenizer }

func (brokenTokenizer) Tokenize(context.Context, string, bool) ([]uint32, error) {
	return nil, errors.New("500 out of memory")
}

// Doctor and the capabilities say what came of asking an engine for token ids, not
// what engines of its kind can do.
func TestTokenizerProbe(t *testing.T) {
	const can = engine.TokenizesText | engine.TokenizesChats
	refusing := qwenLike()
	refusing.noTools = true
	for name, c := range map[string]struct {
		tokenizer engine.Tokenizer
		can       engine.Capability
		up        bool
		state     string
		says      []string
		able      bool
	}{
		"it tells ids":            {qwenLike(), can, true, doctor.OK, []string{"the engine tells token ids"}, true},
		"it refuses tools":        {refusing, can, true, doctor.OK, []string{"it refused 1: chat rendering, probe 3", "the template refuses it"}, true},
		"it has no route":         {noTokenizer{}, can, true, doctor.Unknown, []string{"tells no token ids: raw text tokenisation, probe 1", "404"}, false},
		"its kind has none":       {nil, 0, true, doctor.Unknown, []string{"tells no token ids"}, false},
		"it fails":                {brokenTokenizer{}, can, true, doctor.Problem, []string{"does not answer", "500 out of memory"}, true},
		"it was not asked so far": {qwenLike(), can, false, doctor.Unknown, []string{"not asked for token ids yet"}, true},
	} {
		synctest.Test(t, func(t *testing.T) {
			p := newProber(proberOptions{
				tokenizer: c.tokenizer, hasher: boundary.NewHasher(prefix.ClusterKey{5}), changed: func() {}, log: slog.New(slog.DiscardHandler),
				state: func() probedState { return probedState{life: engineLife{model: "m"}, up: c.up} },
			})
			probeForAMinute(t, p)
			able := p.able(c.can).Has(engine.TokenizesText)
			l := &doctor.List{}
			checkTokenizer(l, "gpu-01/x", able, p)
			if checks := l.Sorted(); able != c.able || !finds(checks, "tokenizer-probe", c.state, c.says...) {
				t.Errorf("%s: able %v, checks %v", name, able, checks)
			}
			// What was refused in a former life says nothing about the next one.
			p.begin(&probedState{life: engineLife{mark: 9, model: "m"}, up: true})
			if n, refused, why := p.tellsIDs(); n+refused != 0 || why != nil || p.able(c.can) != c.can {
				t.Errorf("%s: in the next life %d answered, %d refused, %v", name, n, refused, why)
			}
		})
	}
}

// A probe that is answered in the end was not refused.
func TestProbeThatIsAnsweredInTheEnd(t *testing.T) {
	p := newProber(proberOptions{tokenizer: qwenLike(), hasher: boundary.NewHasher(prefix.ClusterKey{5}), log: slog.New(slog.DiscardHandler)})
	key := probeKey{boundary.PartChat, 1}
	p.took(key, nil, errors.New("busy"))
	if _, refused, why := p.tellsIDs(); refused != 1 || !strings.Contains(why.Error(), "busy") {
		t.Errorf("%d refused: %v", refused, why)
	}
	p.took(key, []uint32{1, 2}, nil)
	if answered, refused, why := p.tellsIDs(); answered != 1 || refused != 0 || why != nil {
		t.Errorf("%d answered, %d refused: %v", answered, refused, why)
	}
}

// What changes in a rendering is a date only where the day can have changed: within
// half an hour, or in another life, it is another template.
func TestAChangedTemplateIsNoDate(t *testing.T) {
	for name, c := range map[string]struct {
		mark  uint64
		after time.Duration
		want  bool
	}{
		"at once":                  {7, time.Minute, false},
		"at midnight somewhere":    {7, time.Hour, true},
		"its life is not told":     {0, time.Hour, false},
		"just before the half":     {7, 30*time.Minute - time.Second, false},
		"just after the half hour": {7, 30*time.Minute + time.Second, true},
	} {
		synctest.Test(t, func(t *testing.T) {
			p := newProber(proberOptions{tokenizer: qwenLike(), hasher: boundary.NewHasher(prefix.ClusterKey{5}), log: slog.New(slog.DiscardHandler)})
			p.begin(&probedState{life: engineLife{mark: c.mark, model: "m"}, up: true})
			key := probeKey{boundary.PartChat, 1}
			p.took(key, []uint32{1, 2, 3, 4}, nil)
			time.Sleep(c.after) // time begins at midnight
			p.took(key, []uint32{1, 2, 9, 4}, nil)
			if v := p.vector(); v.DateDependent() != c.want {
				t.Errorf("%s: taken for a date: %v", name, v.DateDependent())
			}
		})
	}
}

// dateless refuses the text of dates.
type dateless struct{ *textEngine }

func (e dateless) Tokenize(ctx context.Context, text string, special bool) ([]uint32, error) {
	if strings.Count(text, "\n") > 20 {
		return nil, errors.New("too long")
	}
	return e.textEngine.Tokenize(ctx, text, special)
}

// probeForAMinute runs a prober so long, and waits for its end.
func probeForAMinute(t *testing.T, p *prober) {
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { p.run(ctx); close(done) }()
	time.Sleep(time.Minute)
	cancel()
	<-done
}

// The text of dates is a help and no condition: chats are measured without it.
func TestBoundaryWithoutTheTextOfDates(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProber(proberOptions{
			tokenizer: dateless{qwenLike()}, hasher: boundary.NewHasher(prefix.ClusterKey{5}), changed: func() {}, log: slog.New(slog.DiscardHandler),
			state: func() probedState { return probedState{life: engineLife{mark: 7, model: "m"}, up: true} },
		})
		probeForAMinute(t, p)
		if n := len(p.vector().Probes); n != len(boundary.Published()) {
			t.Errorf("%d of %d probes were measured", n, len(boundary.Published()))
		}
	})
}

// A probe that a coordinator asks for is tried as often as any other, whatever came
// of it before.
func TestAProbeAskedForIsTriedAgain(t *testing.T) {
	p := newProber(proberOptions{tokenizer: qwenLike(), hasher: boundary.NewHasher(prefix.ClusterKey{5}), log: slog.New(slog.DiscardHandler)})
	key := probeKey{boundary.PartChat, 1}
	for range probeTries {
		p.took(key, nil, errors.New("busy"))
	}
	p.again(key.part, key.number)
	p.queue = nil // it is asked
	if p.took(key, nil, errors.New("busy")); len(p.queue) != 1 || p.queue[0] != key {
		t.Errorf("waiting to be asked: %v", p.queue)
	}
}
