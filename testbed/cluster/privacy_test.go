package cluster

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"google.golang.org/protobuf/proto"

	waypostv1 "waypost/proto/waypost/v1"
	"waypost/testbed/emulator"
)

// lockedBuffer takes log lines of many goroutines.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// No prompt text and no token id is written to a file or a log line by the agent,
// at any level: whether an engine tokenises it, refuses it and quotes it, stores it,
// loses events of it, is tested or restarts.
func TestNoPromptInFilesAndLogs(t *testing.T) {
	t.Parallel()
	const text = "xyzzy-plugh-confidential"
	id := uint32(77_777)
	log := &lockedBuffer{}
	var quoted sync.Map
	r := start(t, 1, 1, emulator.Options{
		BlockTokens: 16, PoolBlocks: 1400, MaxModelTokens: 8192, VocabularyTokens: 100_000,
		Wrap: func(next http.Handler) http.Handler {
			return http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
				if q.URL.Path == "/tokenize" {
					var body bytes.Buffer
					_, _ = body.ReadFrom(q.Body)
					q.Body = http.NoBody
					if bytes.Contains(body.Bytes(), []byte(text)) {
						if _, again := quoted.LoadOrStore("refused", true); !again {
							http.Error(w, body.String(), http.StatusBadRequest)
							return
						}
						quoted.Store("answered", true)
					}
					q.Body = io.NopCloser(bytes.NewReader(body.Bytes()))
				}
				next.ServeHTTP(w, q)
			})
		},
	}, func(o *Options) {
		o.SelfTest, o.Logger = true, slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	})
	worker := WorkerName(0, 0)
	r.eventually("no self-test", func() string {
		if c := fmt.Sprint(r.worker(0, worker).GetCapabilities()); !strings.Contains(c, "self-test") {
			return c
		}
		return ""
	})
	n := 0
	r.eventually("the engine is not asked about the text", func() string {
		n++
		body := fmt.Sprintf(`{"messages":[{"role":"user","content":%q}]}`, fmt.Sprint(n, " ", strings.Repeat(text+" ", 200)))
		resp, err := r.Placement(0).Place(t.Context(), &waypostv1.PlaceRequest{Input: &waypostv1.Input{BodyJson: &body}, Reserve: proto.Bool(true), Attempt: proto.Uint32(1), TokenizeBudgetMs: proto.Float64(1000)})
		if err != nil || resp.GetPlacement() == nil {
			return fmt.Sprint(err, resp)
		}
		if _, ok := quoted.Load("answered"); !ok {
			return "input source " + resp.GetPlacement().GetBasis().GetInputSource()
		}
		return ""
	})
	a := ask{tokens: append(tokens(3, 600), id, id, id), output: 3}
	r.serve(0, a)
	r.settled(worker, a, len(a.tokens), 16)
	if err := r.Engines[0].DropBatches(0, 2, emulator.DropLive); err != nil {
		t.Fatal(err)
	}
	for i := range 4 {
		r.serve(0, ask{tokens: append([]uint32{id, id, id}, tokens(uint32(20+i), 300)...), output: 1})
	}
	if err := r.Engines[0].Restart(0); err != nil {
		t.Fatal(err)
	}
	r.noCredit(worker, a)
	r.serve(0, a)
	if err := r.StopAgent(0); err != nil {
		t.Fatal(err)
	}
	forms := map[string]string{"text": text, "ids in binary": strings.Repeat(string(binary.LittleEndian.AppendUint32(nil, id)), 2)}
	for _, between := range []string{",", ", ", " "} {
		forms["ids with "+between] = fmt.Sprintf("%d%s%d", id, between, id)
	}
	look := func(where, content string) {
		for what, f := range forms {
			if i := strings.Index(content, f); i >= 0 {
				t.Errorf("%s holds %s: %q", where, what, content[max(0, i-100):min(len(content), i+100)])
			}
		}
	}
	files := 0
	err := filepath.WalkDir(filepath.Join(r.opt.Dir, HostName(0)), func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		files++
		b, err := os.ReadFile(path)
		look(path, string(b))
		return err
	})
	if err != nil || files == 0 {
		t.Errorf("%d files, %v", files, err)
	}
	lines := log.String()
	look("the log", lines)
	for _, says := range []string{"level=DEBUG", "self-test", "cache view"} {
		if !strings.Contains(lines, says) {
			t.Errorf("the log says nothing with %q: the test proves little", says)
		}
	}
}
