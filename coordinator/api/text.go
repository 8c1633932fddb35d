package api

import (
	"bytes"
	"encoding/json"
)

// liftText takes messages, tools and bodyJson out of the input of a placement
// request as they are written: a general decoder loses the order of keys, which
// chat templates render. It returns the body without them, and the chat's own
// body; empty: there is none. What is not JSON is left for the general decoder to
// complain about.
func liftText(body []byte) (rest []byte, chat string) {
	if !bytes.Contains(body, []byte(`"messages"`)) && !bytes.Contains(body, []byte(`"bodyJson"`)) && !bytes.Contains(body, []byte(`"body_json"`)) {
		return body, ""
	}
	var top, input map[string]json.RawMessage
	if json.Unmarshal(body, &top) != nil || json.Unmarshal(top["input"], &input) != nil {
		return body, ""
	}
	whole := input["bodyJson"]
	if whole == nil {
		whole = input["body_json"]
	}
	switch messages := input["messages"]; {
	case isObject(whole) && messages == nil:
		chat = string(whole)
		delete(input, "bodyJson")
		delete(input, "body_json")
	case whole == nil && isList(messages):
		chat = `{"messages":` + string(messages)
		if tools := input["tools"]; isList(tools) {
			chat += `,"tools":` + string(tools)
			delete(input, "tools")
		}
		chat += "}"
		delete(input, "messages")
	default:
		return body, ""
	}
	in, err := json.Marshal(input)
	if err != nil {
		return body, ""
	}
	top["input"] = in
	if rest, err = json.Marshal(top); err != nil {
		return body, ""
	}
	return rest, chat
}

// isObject says that a value is an object; a text that holds one is left to the
// general decoder.
func isObject(v json.RawMessage) bool { return len(v) > 0 && v[0] == '{' }

// isList says that a value is a list with something in it.
func isList(v json.RawMessage) bool {
	return len(v) > 0 && v[0] == '[' && len(bytes.TrimSpace(v[1:len(v)-1])) > 0
}
