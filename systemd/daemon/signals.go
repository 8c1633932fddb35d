package daemon

import (
	"context"
	"os"
	"os/signal"
	"sync"
	"syscall"
)

// Signals turns signals into Go. The context ends at the first SIGINT or
// SIGTERM, with the signal as its cause; from then on a second one ends the
// process at once, as it does without a handler. Each SIGHUP puts a token into
// reload, at most one ahead. Stop gives the signals back.
func Signals(parent context.Context) (ctx context.Context, reload <-chan struct{}, stop func()) {
	ctx, cancel := context.WithCancelCause(parent)
	ends := make(chan os.Signal, 1)
	hups := make(chan os.Signal, 1)
	tokens := make(chan struct{}, 1)
	signal.Notify(ends, syscall.SIGINT, syscall.SIGTERM)
	signal.Notify(hups, syscall.SIGHUP)
	stopped := make(chan struct{})
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case s := <-ends:
				signal.Stop(ends)
				cancel(signalCause{s})
			case <-hups:
				select {
				case tokens <- struct{}{}:
				default:
				}
			case <-stopped:
				return
			}
		}
	}()
	return ctx, tokens, sync.OnceFunc(func() {
		signal.Stop(ends)
		signal.Stop(hups)
		close(stopped)
		<-done
		cancel(context.Canceled)
	})
}

// signalCause is why a context of [Signals] ended.
type signalCause struct{ s os.Signal }

func (c signalCause) Error() string { return "received " + c.s.String() }
