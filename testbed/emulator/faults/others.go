package faults

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"time"

	"waypost/testbed/emulator/profile"
	"waypost/testbed/emulator/wire"
)

// polled changes the events of an answer of TensorRT-LLM.
func polled(f func(s *state, events []map[string]any) []map[string]any) map[string]func(*state, int, []byte) (int, []byte) {
	return map[string]func(*state, int, []byte) (int, []byte){"/kv_cache_events": func(s *state, status int, body []byte) (int, []byte) {
		events, err := jsonList(body)
		if err != nil {
			return status, body
		}
		out := f(s, events)
		if out == nil {
			out = []map[string]any{}
		}
		raw, err := json.Marshal(out)
		if err != nil {
			return status, body
		}
		return status, raw
	}}
}

func dataOf(e map[string]any) map[string]any {
	d, _ := e["data"].(map[string]any)
	return d
}

var sglangFaults = []Fault{
	{
		Name: "publisher-null", What: "the flag without publisher: events are collected and dropped", Want: "no view, the setting named",
		other: func(o *profile.Options) { o.NoEvents = true },
	},
	{
		Name: "hash-without-place", What: "before 0.5.6 a page's hash is of its tokens alone: the same page elsewhere has the same hash", Want: "no credit for false parents",
		events: unplaced,
	},
	{
		Name: "hash-without-salt", What: "before 0.5.18 two tenants' equal prefixes have one hash", Want: "no salted prompt is credited with another's pages",
		other: func(o *profile.Options) { o.Layout, o.UnsaltedHashes = profile.SGMedium, true },
	},
	{
		Name: "salt-in-a-map", What: "stores with a salt have an eighth field that is a map", Want: "read by shape",
		other: func(o *profile.Options) { o.Layout = profile.SGSalted },
	},
	{
		Name: "replicas-on-one-port", What: "another replica publishes on the same port, with numbers of its own", Want: "no credit for the other's pages that stays; restarts are counted",
		batch: func(s *state, b *wire.Batch) {
			if s.batches%3 == 0 {
				b.Others = append(b.Others, wire.Message{Seq: 0, Payload: b.Payload})
			}
		},
	},
	{
		Name: "release-without-removal", What: "a session's pages are freed without an event", Want: "corrected by what answers report; the view can be read anew",
		events: each("BlockRemoved", func(*state, any) []any { return nil }),
	},
	{
		Name: "window-evicted-silently", What: "the window's part of a page is given up without an event", Want: "as a release without removal",
		events: each("BlockRemoved", func(*state, any) []any { return nil }),
	},
	{
		Name: "page-on-two-tiers", What: "a page is on the GPU and, pinned, in host memory", Want: "kept by medium: the GPU's removal counts",
		events: each("BlockStored", onTier("CPU_PINNED", nil)),
	},
	{
		Name: "no-events-of-this-cache", What: "the cache in use tells no events though the flag is set", Want: "silence while prompts are computed is told",
		batch: burnAll,
	},
	{
		Name: "one-event-per-page", What: "older releases tell each page by itself", Want: "the same view",
		other: func(o *profile.Options) { o.Layout = profile.SGMedium },
	},
	{
		Name: "page-of-one-token", What: "a page is a token: an entry for each", Want: "an exact view at any volume",
		other: func(o *profile.Options) { o.PageTokens = 1 },
	},
	{
		Name: "slow-health", What: "/health generates a token and takes seconds", Want: "load is the sign of life",
		serve: map[string]func(*state, http.ResponseWriter, *http.Request, http.Handler){"/health": slowly(20 * time.Second)},
	},
	{
		Name: "stale-page", What: "the page of metrics is half a minute old", Want: "load comes from /v1/loads",
		answer: map[string]func(*state, int, []byte) (int, []byte){"/metrics": frozen},
	},
	{
		Name: "late-events", What: "what an answer filled is told half a second after it", Want: "less claimed till then, never more; full afterwards",
		other: func(o *profile.Options) { o.StoresLag = 500 * time.Millisecond },
	},
}

// unplaced makes a hash of the tokens of each page alone.
func unplaced(s *state, events []any) (out []any) {
	alone := func(tokens []any) int64 {
		h := int64(1469598103934665603)
		for _, t := range tokens {
			h = (h ^ int64(number(t))) * 1099511628211
		}
		return h
	}
	for _, e := range events {
		m := mapOf(e)
		size := number(m["block_size"])
		if !isA(e, "BlockStored") || size == 0 {
			if isA(e, "BlockRemoved") {
				continue // the names of what goes are not at hand: it is not told
			}
			out = append(out, e)
			continue
		}
		var hashes []any
		tokens := list(m["token_ids"])
		for i := 0; i+size <= len(tokens); i += size {
			hashes = append(hashes, alone(tokens[i:i+size]))
		}
		fields := map[string]any{"block_hashes": hashes}
		if m["parent_block_hash"] != nil && len(s.seen) > 0 {
			fields["parent_block_hash"] = s.seen[len(s.seen)-1]
		}
		s.seen = append(s.seen, hashes[len(hashes)-1])
		out = append(out, with(e, fields))
	}
	return out
}

func slowly(d time.Duration) func(*state, http.ResponseWriter, *http.Request, http.Handler) {
	return func(_ *state, w http.ResponseWriter, r *http.Request, next http.Handler) {
		t := time.NewTimer(d)
		defer t.Stop()
		select {
		case <-r.Context().Done():
		case <-t.C:
			next.ServeHTTP(w, r)
		}
	}
}

var trtFaults = []Fault{
	{
		Name: "second-reader", What: "polling is destructive and somebody else polls too", Want: "a gap is damage: partial",
		answer: polled(func(s *state, events []map[string]any) (out []map[string]any) {
			for _, e := range events {
				if n := s.calls.Add(1); n == 3 {
					continue // the other reader got it
				}
				out = append(out, e)
			}
			return out
		}),
	},
	{
		Name: "wrong-parent-hash", What: "early versions name a wrong parent", Want: "nothing is credited behind it",
		answer: polled(func(_ *state, events []map[string]any) []map[string]any {
			for _, e := range events {
				if d := dataOf(e); d["type"] == "stored" && d["parent_hash"] != nil {
					d["parent_hash"] = json.Number("12345")
				}
			}
			return events
		}),
	},
	{
		Name: "serialiser-crash", What: "a null priority breaks an answer: 500, its events are lost", Want: "asked again; the gap is damage",
		serve: map[string]func(*state, http.ResponseWriter, *http.Request, http.Handler){"/kv_cache_events": func(s *state, w http.ResponseWriter, r *http.Request, next http.Handler) {
			rec := httptest.NewRecorder()
			next.ServeHTTP(rec, r)
			if events, err := jsonList(rec.Body.Bytes()); err == nil && len(events) > 0 && s.calls.Add(1) == 2 {
				http.Error(w, "priority is None", http.StatusInternalServerError)
				return
			}
			w.Header().Set("Content-Type", "application/json")
			_, _ = w.Write(rec.Body.Bytes())
		}},
	},
	{
		Name: "several-windows", What: "smaller windows tell their blocks too", Want: "the largest window counts",
		answer: polled(func(s *state, events []map[string]any) (out []map[string]any) {
			// A small window loses at once what was stored; all windows of a rank
			// count together.
			count := func(e map[string]any) { e["event_id"] = s.calls.Add(1) - 1 }
			for _, e := range events {
				count(e)
				out = append(out, e)
				d := dataOf(e)
				if d["type"] != "stored" {
					continue
				}
				var hashes []any
				blocks, _ := d["blocks"].([]any)
				for _, b := range blocks {
					m, _ := b.(map[string]any)
					hashes = append(hashes, m["block_hash"])
				}
				small := map[string]any{"window_size": 128, "data": map[string]any{"type": "removed", "block_hashes": hashes}}
				count(small)
				out = append(out, small)
			}
			return out
		}),
	},
	{
		Name: "hexadecimal-hashes", What: "hash_algo makes hashes text", Want: "both forms are read",
		other: func(o *profile.Options) { o.Hash = profile.TRTSHA256 },
	},
	{
		Name: "event-ring-overflow", What: "the event buffer holds four", Want: "a gap is damage: partial",
		other: func(o *profile.Options) { o.EventBuffer = 4 },
	},
	{
		Name: "polling-answers-nothing", What: "with streaming on, polling answers an empty list for ever", Want: "no credit; the stream is read where configured",
		other: func(o *profile.Options) { o.Streams = true },
	},
}

var llamaFaults = []Fault{
	{
		Name: "prompt-counter-changed", What: "older builds count cached tokens among the prompt's", Want: "no rate of hits is made of it",
		other: func(o *profile.Options) { o.CountsCached = false },
	},
	{
		Name: "slots-without-content", What: "/slots shows no text, and of a slot never used not even a length", Want: "fields are optional; the cache follows from claims",
	},
}

// library is all faults.
var library = of(VLLM, vllmFaults, of(profile.SGLang, sglangFaults, of(profile.TensorRTLLM, trtFaults, of(profile.LlamaCpp, llamaFaults, nil))))

func of(kind profile.Kind, list, more []Fault) (out []Fault) {
	for _, f := range list {
		f.Kind = kind
		out = append(out, f)
	}
	return append(out, more...)
}
