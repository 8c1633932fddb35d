package vllm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"waypost/agent/engine/enginehttp"
)

// client asks one engine.
type client struct{ *enginehttp.Client }

// tokenize posts a body to /tokenize.
func (c client) tokenize(ctx context.Context, body any) ([]uint32, error) {
	var answer struct {
		Tokens []uint32 `json:"tokens"`
	}
	if err := c.PostJSON(ctx, "/tokenize", body, &answer); err != nil {
		return nil, err
	}
	if answer.Tokens == nil {
		return nil, errors.New("/tokenize: answer has no tokens")
	}
	return answer.Tokens, nil
}

// templateFields are the fields of a chat request that decide its rendering.
var templateFields = []string{
	"model", "messages", "tools", "add_generation_prompt", "continue_final_message", "add_special_tokens",
	"chat_template", "chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs",
}

// renderBody makes the body for /tokenize of a chat request: the same fields
// that generation would render, and those that reach the template under other
// names.
func renderBody(chatJSON []byte) (map[string]json.RawMessage, error) {
	var chat map[string]json.RawMessage
	if err := json.Unmarshal(chatJSON, &chat); err != nil {
		return nil, fmt.Errorf("chat request: %w", err)
	}
	if len(chat["messages"]) == 0 {
		return nil, errors.New("chat request: messages is missing")
	}
	body := map[string]json.RawMessage{}
	for _, f := range templateFields {
		if v, ok := chat[f]; ok {
			body[f] = v
		}
	}
	effort, ok := chat["reasoning_effort"]
	if !ok || string(effort) == "null" {
		return body, nil
	}
	kwargs := map[string]json.RawMessage{}
	if v, ok := body["chat_template_kwargs"]; ok && string(v) != "null" {
		if err := json.Unmarshal(v, &kwargs); err != nil {
			return nil, fmt.Errorf("chat request: chat_template_kwargs: %w", err)
		}
	}
	if _, ok := kwargs["reasoning_effort"]; !ok {
		kwargs["reasoning_effort"] = effort
	}
	var err error
	body["chat_template_kwargs"], err = json.Marshal(kwargs)
	return body, err
}
