package coordinator

import (
	"encoding/json"
	"fmt"
	"hash/fnv"
	"strings"
	"sync"
	"testing"

	"waypost/gossip/lane"
	"waypost/gossip/ledger"
	waypostv1 "waypost/proto/waypost/v1"
)

// textWorker is a fake agent whose engine renders chats by appending and makes a
// token of each word.
type textWorker struct {
	fakeAgent

	mu     sync.Mutex
	asked  []string // texts it was asked about
	refuse string
}

func startText(t *testing.T, to ...*one) *textWorker {
	t.Helper()
	w := newTextWorker(0)
	w.connect(t, to...)
	for _, o := range to {
		eventually(t, "a worker is ready and the coordinator can reserve", func() bool {
			ws, err := waypostv1.NewOperatorServiceClient(o.conn).ListWorkers(t.Context(), &waypostv1.ListWorkersRequest{})
			return err == nil && len(ws.GetWorkers()) == 1 && ws.GetWorkers()[0].GetState() == "ready" && o.Joined()
		})
	}
	return w
}

// newTextWorker makes a worker of which what was placed there is known, and
// whose engine answers no questions until it is allowed to.
func newTextWorker(agent uint64) *textWorker {
	w := &textWorker{refuse: "not now", fakeAgent: fakeAgent{
		workers: 1, process: agent, pulled: func(*waypostv1.PrefixPull) [][]byte { return [][]byte{} },
		facts: func(f *waypostv1.WorkerFacts) { f.Coverage = new("none") },
		state: func(_ int, l *ledger.Load) { l.Coverage = "none" },
	}}
	w.asks = w.answer
	return w
}

func (w *textWorker) allow() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.refuse = ""
}

func (w *textWorker) answer(l *lane.Lane, f *waypostv1.ConnectResponse) {
	reply := &waypostv1.TokenizeReply{}
	switch {
	case f.GetRender() != nil:
		reply.AskId = f.GetRender().AskId
		reply.TokenIds = rendered([]byte(f.GetRender().GetChatJson()))
		w.note(f.GetRender().GetChatJson())
	case f.GetTokenize() != nil:
		reply.AskId = f.GetTokenize().AskId
		reply.TokenIds = wordIDs(f.GetTokenize().GetPrompt())
		w.note(f.GetTokenize().GetPrompt())
	default:
		return
	}
	w.mu.Lock()
	if w.refuse != "" {
		reply.TokenIds, reply.Error = nil, new(w.refuse)
	}
	w.mu.Unlock()
	// A lane that is down is dialled again.
	_ = l.Send(&waypostv1.ConnectRequest{Frame: &waypostv1.ConnectRequest_TokenizeReply{TokenizeReply: reply}})
}

func (w *textWorker) note(text string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.asked = append(w.asked, text)
}

func (w *textWorker) questions() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.asked)
}

func wordIDs(text string) (ids []uint32) {
	for _, word := range strings.Fields(text) {
		h := fnv.New32a()
		_, _ = h.Write([]byte(word))
		ids = append(ids, h.Sum32())
	}
	return ids
}

type message struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

func rendered(body []byte) []uint32 {
	var chat struct {
		Messages []message       `json:"messages"`
		Tools    json.RawMessage `json:"tools"`
	}
	if json.Unmarshal(body, &chat) != nil {
		return nil
	}
	text := string(chat.Tools)
	for _, m := range chat.Messages {
		text += " <|" + m.Role + "|> " + m.Content + " <|end|>"
	}
	return wordIDs(text + " <|assistant|>")
}

// prose is a text of n words.
func prose(seed, n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, "word%d-%d ", seed, i%97+i/7)
	}
	return strings.TrimSpace(b.String())
}

func chatOf(messages ...message) string {
	b, err := json.Marshal(map[string]any{"messages": messages})
	if err != nil {
		panic(err)
	}
	return string(b)
}

func bodyInput(body string) *waypostv1.Input { return &waypostv1.Input{BodyJson: &body} }

// noBudget places without asking an engine first.
func noBudget(in *waypostv1.Input) *waypostv1.PlaceRequest {
	return &waypostv1.PlaceRequest{Input: in, TokenizeBudgetMs: new(0.)}
}

func (o *one) learn(t *testing.T, placement string, prompt, output []uint32, answer string) *waypostv1.LearnTokensResponse {
	t.Helper()
	req := &waypostv1.LearnTokensRequest{PlacementId: &placement, PromptTokenIds: prompt, OutputTokenIds: output}
	if answer != "" {
		req.MessageJson = &answer
	}
	resp, err := waypostv1.NewPlacementServiceClient(o.conn).LearnTokens(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	return resp
}
