package vllm

import (
	"encoding/json"
	"errors"

	"waypost/agent/engine/enginehttp"
)

// client asks one engine.
type client struct{ *enginehttp.Client }

// templateFields are the fields of a chat request that decide its rendering. The
// tokenizer's route does not know the last two: they take another way there.
var templateFields = []string{
	"model", "messages", "tools", "add_generation_prompt", "continue_final_message", "add_special_tokens",
	"chat_template", "chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs", "reasoning_effort", "documents",
}

// renderBody makes the body for /tokenize of a chat request: the same fields
// that generation would render, and those that reach the template under other
// names.
func renderBody(chatJSON []byte) (map[string]json.RawMessage, error) {
	body, err := enginehttp.ChatFields(chatJSON, templateFields)
	if err != nil {
		return nil, err
	}
	more := map[string]json.RawMessage{}
	for _, name := range []string{"reasoning_effort", "documents"} {
		if v, ok := body[name]; ok && string(v) != "null" {
			more[name] = v
		}
		delete(body, name)
	}
	if len(more) == 0 {
		return body, nil
	}
	if string(more["reasoning_effort"]) == `"low"` {
		more["enable_thinking"] = json.RawMessage("true") // as chat sets it by itself
	}
	kwargs := map[string]json.RawMessage{}
	if v, ok := body["chat_template_kwargs"]; ok && string(v) != "null" {
		if json.Unmarshal(v, &kwargs) != nil {
			return nil, errors.New("chat request: chat_template_kwargs is no JSON object")
		}
	}
	for name, v := range more {
		if _, ok := kwargs[name]; !ok {
			kwargs[name] = v
		}
	}
	body["chat_template_kwargs"], err = json.Marshal(kwargs)
	return body, err
}
