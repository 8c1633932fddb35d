package coordinator

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"waypost/coordinator/events"
	waypostv1 "waypost/proto/waypost/v1"
)

// watching reads a watch until stop says so, and returns what was read.
func watching(t *testing.T, o *one, after *string, kinds []string, stop func(*waypostv1.WatchResponse) bool) (list []*waypostv1.WatchResponse) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	s, err := waypostv1.NewOperatorServiceClient(o.conn).Watch(ctx, &waypostv1.WatchRequest{Kinds: kinds, After: after})
	if err != nil {
		t.Fatal(err)
	}
	for {
		m, err := s.Recv()
		if err != nil {
			t.Fatalf("%v after %v", err, list)
		}
		if list = append(list, m); stop(m) {
			return list
		}
	}
}

func synced(m *waypostv1.WatchResponse) bool { return m.GetKind() == kindSynced }

// A watch tells what is, says that this was all, and goes on with changes; who
// comes back with a place gets what changed after it, and nothing twice.
func TestWatch(t *testing.T) {
	o := startOne(t)
	a := joined(t, o)
	first := watching(t, o, nil, watchKinds, synced)
	kinds := map[string]int{}
	for _, m := range first {
		kinds[m.GetKind()]++
	}
	if kinds[kindWorkers] != 1 || kinds[kindMembers] != 1 || kinds[kindFleet] != 1 || kinds[kindEvents] == 0 || kinds[kindSynced] != 1 {
		t.Fatalf("what is: %v", kinds)
	}
	place := first[len(first)-1].Rev
	if quiet := watching(t, o, place, []string{kindFleet}, synced); len(quiet) != 1 {
		t.Errorf("what has not changed is told again: %v", quiet)
	}
	op := waypostv1.NewOperatorServiceClient(o.conn)
	if _, err := op.CordonTarget(t.Context(), &waypostv1.CordonTargetRequest{Selector: new("gpu-01"), Reason: new("fans"), RequestId: new("w")}); err != nil {
		t.Fatal(err)
	}
	// Nobody watched meanwhile; the cordon is told all the same, as the worker's
	// state and as an event.
	cordoned, event := false, false
	again := watching(t, o, place, []string{kindWorkers, kindEvents}, func(m *waypostv1.WatchResponse) bool {
		cordoned = cordoned || m.GetWorker().GetState() == "cordoned"
		event = event || m.GetEvent().GetEvent() == "cordoned" && m.GetEvent().GetFields()["target"] == "gpu-01" && m.GetEvent().GetFields()["reason"] == "fans"
		return cordoned && event
	})
	rev := func(text string) uint64 {
		n, ok, err := o.board.parseRev(text)
		if !ok || err != nil {
			t.Fatalf("rev %q: %v", text, err)
		}
		return n
	}
	for _, m := range again {
		if m.GetKind() == kindRestart || m.GetKind() == kindMembers || m.Rev != nil && m.GetKind() != kindSynced && rev(m.GetRev()) <= rev(*place) {
			t.Errorf("told again: %v", m)
		}
	}
	if _, err := op.UncordonTarget(t.Context(), &waypostv1.UncordonTargetRequest{Selector: new("gpu-01"), RequestId: new("w2")}); err != nil {
		t.Fatal(err)
	}
	watching(t, o, again[len(again)-1].Rev, []string{kindEvents}, func(m *waypostv1.WatchResponse) bool { return m.GetEvent().GetEvent() == "uncordoned" })

	// A host that is forgotten is gone for those who knew it.
	a.dialer.Close()
	eventually(t, "the host is forgotten", func() bool {
		o.note(o.fleet.Tick(time.Now().Add(48 * time.Hour)))
		return !o.fleet.HasHost("gpu-01")
	})
	watching(t, o, place, []string{kindWorkers}, func(m *waypostv1.WatchResponse) bool {
		return m.GetRemoved() == "gpu-01/vllm-8000/0" && m.Worker == nil
	})
	for _, m := range watching(t, o, nil, []string{kindWorkers}, synced) {
		if m.Removed != nil {
			t.Errorf("who begins hears of what is gone: %v", m)
		}
	}
}

// However many watch, what they are told is made once; who begins sees what is at
// that moment.
func TestWatchersShareWhatIsTold(t *testing.T) {
	o := startOne(t)
	joined(t, o)
	workers := map[string]bool{kindWorkers: true}
	told := func() *waypostv1.WatchResponse {
		o.board.mu.Lock()
		defer o.board.mu.Unlock()
		for _, w := range o.board.kinds[kindWorkers].things {
			return w.told
		}
		return nil
	}
	now := time.Now()
	o.board.look(workers, now, 0)
	first := told()
	if first == nil {
		t.Fatal("no worker is seen")
	}
	o.board.look(workers, now.Add(lookOld/2), lookOld)
	if told() != first {
		t.Error("the next watcher has it made again")
	}
	o.board.look(workers, now.Add(lookOld/2), 0)
	if told() == first {
		t.Error("who begins is told what was before")
	}
	second := told()
	o.board.look(workers, now.Add(2*lookOld), lookOld)
	if told() == second {
		t.Error("nobody looks any more")
	}
}

// A place of another life, or one after which too much happened, begins anew and
// says so; what is no place is an error.
func TestWatchFromAPlaceThatIsGone(t *testing.T) {
	o := startOne(t)
	eventually(t, "it is a cluster", o.Joined)
	restarted := func(after string) {
		t.Helper()
		list := watching(t, o, &after, []string{kindFleet, kindEvents}, synced)
		if list[0].GetKind() != kindRestart || len(list) < 3 {
			t.Errorf("after %s: %v", after, list)
		}
	}
	restarted("00000000000000aa.3")
	restarted(fmt.Sprintf("%016x.%d", o.process, uint64(1)<<60))
	place := *watching(t, o, nil, []string{kindEvents}, synced)[0].Rev
	for i := range events.Kept + 10 {
		o.log.Info("flood", "event", "view_gap", "n", i)
	}
	restarted(place)
	if happened, _ := o.board.events.After(0); len(happened) != events.Kept {
		t.Errorf("%d events are kept", len(happened))
	}
	// Of more workers that went than are remembered, not all can be named.
	o.board.mu.Lock()
	for i := range keptGone + 1 {
		o.board.put(kindWorkers, fmt.Sprint(i), &waypostv1.WatchResponse{}, &waypostv1.Worker{})
	}
	o.board.sweep(kindWorkers, nil)
	o.board.mu.Unlock()
	if list := watching(t, o, &place, []string{kindWorkers}, synced); list[0].GetKind() != kindRestart {
		t.Errorf("after removals that are forgotten: %v", list[0])
	}
	for _, c := range []struct {
		kinds []string
		after string
		want  string
	}{
		{[]string{"gpus"}, "", `"gpus": use workers`},
		{nil, "", "use workers, members, fleet, events"},
		{[]string{kindFleet}, "yesterday", "no rev"},
		{[]string{kindFleet}, "12.-1", "no rev"},
	} {
		req := &waypostv1.WatchRequest{Kinds: c.kinds}
		if c.after != "" {
			req.After = &c.after
		}
		s, err := waypostv1.NewOperatorServiceClient(o.conn).Watch(t.Context(), req)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.Recv(); status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v after %q: %v", c.kinds, c.after, err)
		}
	}
}

// The same over HTTP: lines, or a plain error where nothing was told yet.
func TestWatchLines(t *testing.T) {
	t.Cleanup(http.DefaultClient.CloseIdleConnections)
	o := startOne(t)
	eventually(t, "it is a cluster", o.Joined)
	get := func(query string) (*http.Response, *bufio.Reader) {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+o.APIAddress()+"/v1/watch?"+query, nil)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = resp.Body.Close() })
		return resp, bufio.NewReader(resp.Body)
	}
	resp, lines := get("kinds=fleet,workers")
	for _, want := range []string{`{"kind":"fleet"`, `{"kind":"synced"`} {
		line, err := lines.ReadString('\n')
		if err != nil || !strings.HasPrefix(strings.ReplaceAll(line, " ", ""), want) || resp.StatusCode != http.StatusOK {
			t.Errorf("%d %q %v, want %s", resp.StatusCode, line, err, want)
		}
	}
	if err := resp.Body.Close(); err != nil {
		t.Error(err)
	}
	for _, bad := range []string{"kinds=fleet,gpus", "kinds=fleet&after=x"} {
		if resp, lines := get(bad); resp.StatusCode != http.StatusBadRequest {
			body, _ := io.ReadAll(lines)
			t.Errorf("%s: %d %s", bad, resp.StatusCode, body)
		}
	}
}
