package profile

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"testing"
)

// More answers than memory holds come to their ends: SGLang takes the pages of the
// shortest answers back and computes them anew, TensorRT-LLM lets wait what might not
// fit.
func TestAnswersBeyondMemoryEnd(t *testing.T) {
	const requests, promptTokens, outputTokens, pool = 8, 100, 300, 1024
	for kind, retracts := range map[Kind]bool{SGLang: true, TensorRTLLM: false} {
		e := runEngine(t, Options{Kind: kind, PageTokens: 16, PoolTokens: pool, Speed: 1000})
		l := e.life
		var wg sync.WaitGroup
		for n := range requests {
			wg.Go(func() {
				prompt := make([]uint32, promptTokens)
				for i := range prompt {
					prompt[i] = uint32(1000*n + i)
				}
				o, err := l.generate(context.Background(), &query{prompt: prompt, maxTokens: outputTokens}, func(*outcome, uint32) {})
				if err != nil || len(o.tokens) != outputTokens || o.cached != 0 {
					t.Errorf("%s: %d tokens, %d cached, %v", kind, len(o.tokens), o.cached, err)
				}
			})
		}
		wg.Wait()
		l.mu.Lock()
		if (l.retractions > 0) != retracts {
			t.Errorf("%s: %d retractions", kind, l.retractions)
		}
		if l.running != 0 || l.waiting != 0 || len(l.active) != 0 || l.pages.used() != 0 || l.pages.rest != 0 || l.pages.running != 0 {
			t.Errorf("%s: %d run and %d wait, %d pages are used and %d kept free, once all have ended", kind, l.running, l.waiting, l.pages.used(), l.pages.rest)
		}
		l.mu.Unlock()
		// One that can never fit is refused rather than left waiting.
		if _, err := l.generate(context.Background(), &query{prompt: make([]uint32, pool), maxTokens: 1}, nil); !errors.Is(err, errTooLong) {
			t.Errorf("%s: a prompt as long as memory: %v", kind, err)
		}
	}
}

// What is not computed yet is told to nobody, found by nobody, and in the queue.
func TestAPromptIsKeptOnceItIsComputed(t *testing.T) {
	for _, kind := range []Kind{SGLang, TensorRTLLM} {
		e := runEngine(t, Options{Kind: kind, PageTokens: 16, PoolTokens: 4096, Speed: 1000})
		l := e.life
		stored := 0
		l.mu.Lock()
		inner := l.pages.tree.seen
		l.pages.tree.seen = func(ev event) {
			if ev.op == opStored {
				stored++
			}
			inner(ev)
		}
		l.mu.Unlock()
		prompt := make([]uint32, 321)
		l.gpu <- struct{}{} // another prompt is computed
		var wg sync.WaitGroup
		cached := make([]int, 2)
		for n := range cached {
			wg.Go(func() {
				o, err := l.generate(context.Background(), &query{prompt: prompt, maxTokens: 2}, func(*outcome, uint32) {})
				if cached[n] = o.cached; err != nil {
					t.Error(err)
				}
			})
		}
		for l.pressure().waiting < 2 || l.pressure().running > 0 {
			runtime.Gosched()
		}
		if p := l.pressure(); p.backlog != 2*len(prompt) || p.used < 2*len(prompt) || stored != 0 {
			t.Errorf("%s: %d tokens wait, %d are taken, %d events of blocks that are not computed", kind, p.backlog, p.used, stored)
		}
		<-l.gpu
		wg.Wait()
		o, err := l.generate(context.Background(), &query{prompt: prompt, maxTokens: 2}, func(*outcome, uint32) {})
		if err != nil || cached[0] != 0 || cached[1] != 0 || o.cached != 320 || stored == 0 {
			t.Errorf("%s: two at once found %v tokens, one after them %d; %d events; %v", kind, cached, o.cached, stored, err)
		}
		if p := l.pressure(); p.backlog != 0 || p.waiting != 0 || p.running != 0 || p.used != 0 {
			t.Errorf("%s: %+v once all have ended", kind, p)
		}
	}
}

// A caller that leaves while its request waits for its pages again leaves nothing.
func TestARetractedRequestIsLeft(t *testing.T) {
	e := runEngine(t, Options{Kind: SGLang, PageTokens: 16, PoolTokens: 256, Speed: 1000})
	l := e.life
	ctx, cancel := context.WithCancel(context.Background())
	long, left := make(chan error, 1), make(chan error, 1)
	go func() {
		_, err := l.generate(context.Background(), &query{prompt: make([]uint32, 100), maxTokens: 130}, func(o *outcome, _ uint32) {
			if len(o.tokens) == 30 {
				go func() {
					_, err := l.generate(ctx, &query{prompt: []uint32{7}, maxTokens: 130}, func(*outcome, uint32) {})
					left <- err
				}()
			}
			l.mu.Lock()
			if l.retractions > 0 {
				cancel()
			}
			l.mu.Unlock()
		})
		long <- err
	}()
	if err := <-long; err != nil {
		t.Error(err)
	}
	if err := <-left; err == nil {
		t.Error("a request was answered whose caller had left")
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.running != 0 || l.waiting != 0 || len(l.active) != 0 || l.pages.used() != 0 || l.pages.running != 0 {
		t.Errorf("%d run, %d wait, %d pages are used", l.running, l.waiting, l.pages.used())
	}
}
