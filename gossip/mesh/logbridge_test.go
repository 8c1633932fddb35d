package mesh

import (
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func TestLogBridge(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out strings.Builder
		var refused, udp []string
		b := newLogBridge(slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
			if a.Key == slog.TimeKey {
				return slog.Attr{}
			}
			return a
		}})), func(reason, host string) { refused = append(refused, reason+" "+host) }, func(member string) { udp = append(udp, member) })
		log := b.logger()
		for i := range 1000 {
			log.Printf("[ERR] memberlist: Decrypt packet failed: no installed keys could decrypt the message from=10.0.0.%d:7710", i%3)
			log.Printf("[DEBUG] memberlist: Stream connection from=10.0.0.1:1")
			log.Printf("[INFO] memberlist: Suspect gpu-01 has failed, no acks received")
		}
		if len(refused) != 1000 || refused[1] != "key 10.0.0.1" {
			t.Errorf("%d refusals, second %q", len(refused), refused[1])
		}
		if n := strings.Count(out.String(), "\n"); n != 1 {
			t.Errorf("%d lines logged of 3000:\n%s", n, out.String())
		}
		time.Sleep(logEvery)
		log.Printf("[ERR] memberlist: Decrypt packet failed: x from=10.0.0.9:7710")
		if !strings.Contains(out.String(), "level=WARN msg=\"Decrypt packet failed: x from=10.0.0.9:7710\" suppressed=999") {
			t.Errorf("log:\n%s", out.String())
		}
		log.Printf("[WARN] memberlist: Was able to connect to gpu-03 over TCP but UDP probes failed, network may be misconfigured")
		if len(udp) != 1 || udp[0] != "gpu-03" {
			t.Errorf("members that answer over TCP only: %v", udp)
		}
		refused = nil
		log.Printf(`[ERR] memberlist: discarding stream with unacceptable label "other": from=[2001:db8::1]:999`)
		log.Printf(`[ERR] memberlist: failed to receive: EOF from=10.0.0.4:5`)
		log.Printf(`[ERR] memberlist: discarding packet with unacceptable label "": from=<unknown address>`)
		if got := strings.Join(refused, ", "); got != "label 2001:db8::1, malformed 10.0.0.4, label " {
			t.Errorf("refused %q", got)
		}
		// However many kinds of messages there are, the memory is bounded.
		for i := range 1000 {
			log.Printf("[WARN] memberlist: %s something", strings.Repeat("x", i))
		}
		if len(b.classes) > maxLogClasses+1 {
			t.Errorf("%d kinds are remembered", len(b.classes))
		}
		log.Print("no prefix at all")
		if got := fmt.Sprint(classOf("Conflicting address for gpu-07. Mine: 1")); got != "Conflicting address for gpu-" {
			t.Errorf("class %q", got)
		}
	})
}
