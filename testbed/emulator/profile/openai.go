package profile

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"
)

// object is a JSON object of an answer.
type object map[string]any

// dialect is how a kind words the answers of the OpenAI routes.
type dialect struct {
	// usage is that of an answer, last what the last chunk or the whole answer
	// has besides.
	usage func(q *query, o *outcome) object
	last  func(b *openAI, q *query, o *outcome) object
	// choice is what each choice has besides.
	choice object
	// fails words a refusal.
	fails func(w http.ResponseWriter, q *query, err error)
}

func (l *life) openAIRoutes(mux *http.ServeMux, d *dialect, auth func(http.HandlerFunc) http.HandlerFunc) {
	serve := func(chat bool) http.HandlerFunc {
		return auth(func(w http.ResponseWriter, r *http.Request) {
			var b openAI
			if err := readBody(r, &b); err != nil {
				d.fails(w, nil, fmt.Errorf("the body is no JSON: %w", err))
				return
			}
			q, err := l.query(&b, chat)
			if err != nil {
				d.fails(w, nil, err)
				return
			}
			l.answer(w, r, d, &b, q)
		})
	}
	mux.HandleFunc("POST /v1/completions", serve(false))
	mux.HandleFunc("POST /v1/chat/completions", serve(true))
}

// answer runs a request and words what comes of it.
func (l *life) answer(w http.ResponseWriter, r *http.Request, d *dialect, b *openAI, q *query) {
	created := time.Now().Unix()
	id := fmt.Sprintf("%016x", mix(uint64(time.Now().UnixNano())))
	model := b.Model
	if model == "" {
		model = l.opts.Model
	}
	head := func(kind string) object {
		return object{"id": id, "object": kind, "created": created, "model": model}
	}
	choice := func(fields object) object {
		c := object{"index": 0, "logprobs": nil}
		for k, v := range d.choice {
			c[k] = v
		}
		for k, v := range fields {
			c[k] = v
		}
		return c
	}
	kind := "text_completion"
	if q.chat {
		kind = "chat.completion"
		if q.stream {
			kind = "chat.completion.chunk"
		}
	}
	begun := false
	chunk := func(v object) {
		if !begun {
			begun = true
			w.Header().Set("Content-Type", "text/event-stream")
		}
		raw, _ := json.Marshal(v) // our own shapes
		_, _ = fmt.Fprintf(w, "data: %s\n\n", raw)
		if f, ok := w.(http.Flusher); ok {
			f.Flush()
		}
	}
	o, err := l.generate(r.Context(), q, func(o *outcome, token uint32) {
		if !q.stream {
			return
		}
		if len(o.tokens) == 1 && q.chat {
			v := head(kind)
			v["choices"] = []any{choice(object{"delta": object{"role": "assistant", "content": ""}, "finish_reason": nil})}
			chunk(v)
		}
		v, text := head(kind), detokenize([]uint32{token})
		c := object{"text": text, "finish_reason": nil}
		if q.chat {
			c = object{"delta": object{"content": text}, "finish_reason": nil}
		}
		v["choices"] = []any{choice(c)}
		chunk(v)
	})
	switch {
	case err != nil && !begun && errors.Is(err, errTooLong):
		d.fails(w, q, err)
		return
	case err != nil:
		panic(http.ErrAbortHandler) // the client or the engine is gone
	}
	extra := d.last(b, q, &o)
	if !q.stream {
		v := head(kind)
		c := object{"text": detokenize(o.tokens), "finish_reason": o.finish}
		if q.chat {
			c = object{"message": object{"role": "assistant", "content": detokenize(o.tokens)}, "finish_reason": o.finish}
		}
		v["choices"], v["usage"] = []any{choice(c)}, d.usage(q, &o)
		for k, x := range extra {
			v[k] = x
		}
		writeJSON(w, http.StatusOK, v)
		return
	}
	v, c := head(kind), object{"text": "", "finish_reason": o.finish}
	if q.chat {
		c = object{"delta": object{}, "finish_reason": o.finish}
	}
	v["choices"] = []any{choice(c)}
	if !q.usage {
		for k, x := range extra {
			v[k] = x
		}
	}
	chunk(v)
	if q.usage {
		v := head(kind)
		v["choices"], v["usage"] = []any{}, d.usage(q, &o)
		for k, x := range extra {
			v[k] = x
		}
		chunk(v)
	}
	_, _ = io.WriteString(w, "data: [DONE]\n\n")
}
