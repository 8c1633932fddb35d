package emulator

// The shapes of answers in one piece; fields that are always null here are
// kept, as clients may look for them.

type completionChoice struct {
	Index          int       `json:"index"`
	Text           string    `json:"text"`
	Logprobs       *struct{} `json:"logprobs"`
	FinishReason   *string   `json:"finish_reason"`
	StopReason     *string   `json:"stop_reason"`
	TokenIDs       []uint32  `json:"token_ids"`
	PromptLogprobs *struct{} `json:"prompt_logprobs"`
	PromptTokenIDs []uint32  `json:"prompt_token_ids"`
	RoutedExperts  *struct{} `json:"routed_experts"`
}

type completionAnswer struct {
	ID                string             `json:"id"`
	Object            string             `json:"object"`
	Created           int64              `json:"created"`
	Model             string             `json:"model"`
	Choices           []completionChoice `json:"choices"`
	ServiceTier       *string            `json:"service_tier"`
	SystemFingerprint string             `json:"system_fingerprint"`
	Usage             plainUsage         `json:"usage"`
	KVTransferParams  *struct{}          `json:"kv_transfer_params"`
	ECTransferParams  *struct{}          `json:"ec_transfer_params"`
	Metrics           *struct{}          `json:"metrics"`
}

func (o *response) completionAnswer(created int64, u plainUsage) completionAnswer {
	a := completionAnswer{ID: o.g.id, Object: "text_completion", Created: created, Model: o.g.modelName(o.l), SystemFingerprint: o.l.fingerprint(), Usage: u}
	for i, c := range o.choices {
		a.Choices = append(a.Choices, completionChoice{
			Index: i, Text: detokenize(c.tokens), FinishReason: finishReason(c.finish),
			TokenIDs: o.tokenIDs(c.tokens), PromptTokenIDs: o.promptIDs(i),
		})
	}
	return a
}

type assistantMessage struct {
	Role         string    `json:"role"`
	Content      string    `json:"content"`
	Refusal      *string   `json:"refusal"`
	Annotations  *struct{} `json:"annotations"`
	Audio        *struct{} `json:"audio"`
	FunctionCall *struct{} `json:"function_call"`
	Reasoning    *string   `json:"reasoning"`
}

type chatChoice struct {
	Index         int              `json:"index"`
	Message       assistantMessage `json:"message"`
	Logprobs      *struct{}        `json:"logprobs"`
	FinishReason  *string          `json:"finish_reason"`
	StopReason    *string          `json:"stop_reason"`
	TokenIDs      []uint32         `json:"token_ids"`
	RoutedExperts *struct{}        `json:"routed_experts"`
}

type chatAnswer struct {
	ID                string       `json:"id"`
	Object            string       `json:"object"`
	Created           int64        `json:"created"`
	Model             string       `json:"model"`
	Choices           []chatChoice `json:"choices"`
	ServiceTier       *string      `json:"service_tier"`
	SystemFingerprint string       `json:"system_fingerprint"`
	Usage             plainUsage   `json:"usage"`
	PromptLogprobs    *struct{}    `json:"prompt_logprobs"`
	PromptTokenIDs    []uint32     `json:"prompt_token_ids"`
	PromptText        *string      `json:"prompt_text"`
	KVTransferParams  *struct{}    `json:"kv_transfer_params"`
	ECTransferParams  *struct{}    `json:"ec_transfer_params"`
	Metrics           *struct{}    `json:"metrics"`
}

func (o *response) chatAnswer(created int64, u plainUsage) chatAnswer {
	a := chatAnswer{ID: o.g.id, Object: "chat.completion", Created: created, Model: o.g.modelName(o.l), SystemFingerprint: o.l.fingerprint(), Usage: u, PromptTokenIDs: o.promptIDs(0)}
	for i, c := range o.choices {
		a.Choices = append(a.Choices, chatChoice{
			Index: i, Message: assistantMessage{Role: "assistant", Content: detokenize(c.tokens)},
			FinishReason: finishReason(c.finish), TokenIDs: o.tokenIDs(c.tokens),
		})
	}
	return a
}

// The shapes of streamed chunks. A chat has a first chunk per choice with the
// role; the fingerprint is on the last chunk of a stream.

type chatDelta struct {
	Role    string `json:"role,omitempty"`
	Content string `json:"content"`
}

// firstChatChoice opens a choice.
type firstChatChoice struct {
	Index        int       `json:"index"`
	Delta        chatDelta `json:"delta"`
	Logprobs     *struct{} `json:"logprobs"`
	FinishReason *string   `json:"finish_reason"`
}

type nextChatChoice struct {
	firstChatChoice
	TokenIDs []uint32 `json:"token_ids"`
}

// lastChatChoice ends a choice.
type lastChatChoice struct {
	firstChatChoice
	StopReason *string  `json:"stop_reason"`
	TokenIDs   []uint32 `json:"token_ids"`
}

type chunkHead struct {
	ID      string `json:"id"`
	Object  string `json:"object"`
	Created int64  `json:"created"`
	Model   string `json:"model"`
}

type chunk struct {
	chunkHead
	Choices           any    `json:"choices"`
	Usage             any    `json:"usage,omitempty"`
	SystemFingerprint string `json:"system_fingerprint,omitempty"`
}

type firstChatChunk struct {
	chunkHead
	Choices        any      `json:"choices"`
	Usage          any      `json:"usage,omitempty"`
	PromptTokenIDs []uint32 `json:"prompt_token_ids"`
	PromptText     *string  `json:"prompt_text"`
}

type completionChunkChoice struct {
	Index          int       `json:"index"`
	Text           string    `json:"text"`
	Logprobs       *struct{} `json:"logprobs"`
	FinishReason   *string   `json:"finish_reason"`
	StopReason     *string   `json:"stop_reason"`
	PromptTokenIDs []uint32  `json:"prompt_token_ids"`
	TokenIDs       []uint32  `json:"token_ids"`
}

// begin sends the headers of a stream; a chat's choices open with the first
// token, as the engine waits for that too.
func (o *response) begin(created int64) {
	o.created = created
	o.shown = make([]bool, len(o.choices))
	o.w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
}

func (o *response) head() chunkHead {
	h := chunkHead{ID: o.g.id, Object: "text_completion", Created: o.created, Model: o.g.modelName(o.l)}
	if o.g.chat {
		h.Object = "chat.completion.chunk"
	}
	return h
}

// chunk streams what is new of choice i.
func (o *response) chunk(i int, p portion) {
	if !o.g.chat {
		c := completionChunkChoice{Index: i, Text: detokenize(p.tokens), FinishReason: finishReason(p.finish), TokenIDs: o.tokenIDs(p.tokens)}
		if !o.shown[i] {
			c.PromptTokenIDs = o.promptIDs(i)
		}
		o.shown[i] = true
		o.event(chunk{chunkHead: o.head(), Choices: []completionChunkChoice{c}, Usage: o.continuous(false)})
		return
	}
	if !o.shown[i] {
		o.shown[i] = true
		o.event(firstChatChunk{
			chunkHead: o.head(), Usage: o.continuous(true), PromptTokenIDs: o.promptIDs(i),
			Choices: []firstChatChoice{{Index: i, Delta: chatDelta{Role: "assistant"}}},
		})
	}
	c := firstChatChoice{Index: i, Delta: chatDelta{Content: detokenize(p.tokens)}, FinishReason: finishReason(p.finish)}
	v := chunk{chunkHead: o.head(), Usage: o.continuous(false)}
	if p.finish == "" {
		v.Choices = []nextChatChoice{{c, o.tokenIDs(p.tokens)}}
	} else {
		v.Choices = []lastChatChoice{{firstChatChoice: c, TokenIDs: o.tokenIDs(p.tokens)}}
		if o.done() && !o.includesUsage() {
			v.SystemFingerprint = o.l.fingerprint()
		}
	}
	o.event(v)
}

func (o *response) includesUsage() bool {
	return o.g.common.StreamOptions != nil && o.g.common.StreamOptions.IncludeUsage
}

// continuous is the usage so far, if the client wants it in every chunk. The
// chunk that opens a choice comes before its tokens.
func (o *response) continuous(opening bool) any {
	if !o.includesUsage() || !o.g.common.StreamOptions.Continuous {
		return nil
	}
	u := runningUsage{usage: o.usage()}
	if opening {
		u.CompletionTokens, u.TotalTokens = 0, u.PromptTokens
	}
	return u
}

// end closes a stream, with the usage in a chunk without choices if asked for.
func (o *response) end() {
	if o.includesUsage() {
		u := finalUsage{usage: o.usage()}
		if !o.l.opts.HidePromptTokensDetails {
			cached, stored := o.details()
			u.PromptTokensDetails = &streamDetails{CachedTokens: cached, CreatedCacheTokens: stored}
		}
		o.event(chunk{chunkHead: o.head(), Choices: []struct{}{}, Usage: u, SystemFingerprint: o.l.fingerprint()})
	}
	o.text("data: [DONE]\n\n")
	o.flush()
}
