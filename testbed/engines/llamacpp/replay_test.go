package llamacpp

import (
	"net/http"
	"os"
	"strings"
	"testing"

	"waypost/agent/engine/llamacpp/slots"
	"waypost/gossip/ledger"
	"waypost/gossip/prefix"
	waypostv1 "waypost/proto/waypost/v1"
	"waypost/testbed/engines"
)

// TestRulesAreTheServers sets the replayed rules against the server itself, with
// nothing between: what they give a request is what the server says it reused,
// but for the answer's tokens and what lies between two points.
func TestRulesAreTheServers(t *testing.T) {
	for _, c := range []struct {
		name  string
		flags []string
		opt   slots.Options
	}{
		{"own buffers", []string{"--parallel", "4", "-c", "16384", "--cache-ram", "64"}, slots.Options{Slots: 4, HostTokens: 1 << 17}},
		{"shared buffer", []string{"-c", "16384", "--cache-ram", "64"}, slots.Options{Slots: 4, Shared: true, HostTokens: 1 << 17}},
		{"no host cache", []string{"--parallel", "2", "-c", "8192", "--cache-ram", "0"}, slots.Options{Slots: 2}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := startServer(t, append([]string{"-lv", "4"}, c.flags...)...)
			r.Client = &engines.Client{HTTP: &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: patience}}
			replay := slots.New(c.opt)
			keyer := prefix.NewKeyer(prefix.ClusterKey{1}, prefix.Domain{Model: "tiny"})
			var table engines.Table
			chats := r.begin(14)
			p := &waypostv1.Placement{Worker: &waypostv1.WorkerRef{Url: &r.server.URL}}
			for i := range 100 {
				at := r.writer.Rand().IntN(1 + r.writer.Rand().IntN(len(chats)))
				q := r.request(chats[at], i, 12)
				var probe prefix.Probe
				probe.ResetTokens(q.Tokens, keyer)
				var keys []prefix.Key
				for d := ledger.PointTokens; d <= len(q.Tokens); d += ledger.PointTokens {
					k, _ := probe.At(d)
					keys = append(keys, k)
				}
				id := ledger.ClaimID{Coordinator: 1, Seq: uint64(i + 1)}
				expected := replay.Begin(id, keys, len(q.Tokens), -1)
				slot := replay.Slot(id)
				a, err := r.Send(t.Context(), p, q)
				if err != nil {
					t.Fatal(err)
				}
				replay.Done(id, a.Output, a.Cached)
				table.Add(engines.Result{Phase: "replay", Prompt: a.Prompt, Expected: expected, Actual: a.Cached})
				if expected > a.Cached || a.Cached-expected > 12+2*ledger.PointTokens {
					t.Logf("request %d of %d tokens: slot %d, %d by the rules, %d reused; %+v", i, a.Prompt, slot, expected, a.Cached, replay.Counts())
				}
				chats[at].Messages = append(chats[at].Messages, engines.Message{Role: "assistant", Content: a.Text})
				chats[at] = r.next(chats[at], 2500)
			}
			var b strings.Builder
			table.Print(&b)
			t.Log("\n" + b.String())
			row := table.Row("")
			if row.OverRatio() > .005 || row.Recall() < .95 {
				t.Errorf("%.2f %% too many, %.2f %% found", 100*row.OverRatio(), 100*row.Recall())
			}
			if path := os.Getenv("WAYPOST_TEST_LOG"); path != "" {
				text, _ := os.ReadFile(r.server.Log.Name())
				_ = os.WriteFile(path+"-"+strings.ReplaceAll(c.name, " ", "-"), text, 0o600)
			}
		})
	}
}
