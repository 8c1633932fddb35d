package vllm

import (
	"encoding/json"
	"fmt"

	"waypost/agent/engine/enginehttp"
)

// client asks one engine.
type client struct{ *enginehttp.Client }

// templateFields are the fields of a chat request that decide its rendering. The
// tokenizer's route does not know reasoning_effort: it takes another way there.
var templateFields = []string{
	"model", "messages", "tools", "add_generation_prompt", "continue_final_message", "add_special_tokens",
	"chat_template", "chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs", "reasoning_effort",
}

// renderBody makes the body for /tokenize of a chat request: the same fields
// that generation would render, and those that reach the template under other
// names.
func renderBody(chatJSON []byte) (map[string]json.RawMessage, error) {
	body, err := enginehttp.ChatFields(chatJSON, templateFields)
	if err != nil {
		return nil, err
	}
	effort, ok := body["reasoning_effort"]
	delete(body, "reasoning_effort")
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
	body["chat_template_kwargs"], err = json.Marshal(kwargs)
	return body, err
}
