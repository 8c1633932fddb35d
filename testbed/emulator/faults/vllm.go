package faults

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"waypost/testbed/emulator"
	"waypost/testbed/emulator/wire"
)

// withConfig changes the settings that the developer's route tells.
func withConfig(f func(config map[string]any)) map[string]func(*state, int, []byte) (int, []byte) {
	return map[string]func(*state, int, []byte) (int, []byte){"/server_info": edit(func(m map[string]any) {
		if c, ok := m["vllm_config"].(map[string]any); ok {
			f(c)
		}
	})}
}

// withSources changes the description of each rank's publisher.
func withSources(f func(rank string, source map[string]any)) map[string]func(*state, int, []byte) (int, []byte) {
	return map[string]func(*state, int, []byte) (int, []byte){"/kv_event_sources": edit(func(m map[string]any) {
		for rank, v := range m {
			if s, ok := v.(map[string]any); ok {
				f(rank, s)
			}
		}
	})}
}

// burnAll loses every batch after its number was given.
func burnAll(_ *state, b *wire.Batch) { b.Unsent, b.Unkept = true, true }

// hashesAs changes the form of every hash of an event.
func hashesAs(f func(any) any) func(*state, []any) []any {
	return func(_ *state, events []any) (out []any) {
		for _, e := range events {
			m := mapOf(e)
			if m["block_hashes"] == nil {
				out = append(out, e)
				continue
			}
			var hashes []any
			for _, h := range list(m["block_hashes"]) {
				hashes = append(hashes, f(h))
			}
			fields := map[string]any{"block_hashes": hashes}
			if p := m["parent_block_hash"]; p != nil {
				fields["parent_block_hash"] = f(p)
			}
			out = append(out, with(e, fields))
		}
		return out
	}
}

// onTier repeats a store for another tier.
func onTier(medium string, fields map[string]any) func(*state, any) []any {
	return func(_ *state, e any) []any {
		more := map[string]any{"medium": medium}
		for k, v := range fields {
			more[k] = v
		}
		return []any{e, with(e, more)}
	}
}

// windowOf tells the last blocks of a store as a group with a sliding window,
// and the store itself as that of full attention behind it.
func windowOf(sparse bool) func(*state, any) []any {
	const window = 3 // blocks
	return func(s *state, e any) []any {
		full := with(e, map[string]any{"group_idx": 1})
		hashes := list(mapOf(e)["block_hashes"])
		s.batches++
		if sparse && s.batches%2 == 0 {
			return []any{full}
		}
		last := with(e, map[string]any{
			"block_hashes": hashes[max(0, len(hashes)-window):], "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 32, "group_idx": 0, "extra_keys": gone,
		})
		return []any{last, full}
	}
}

func removedOfBoth(_ *state, e any) []any {
	return []any{with(e, map[string]any{"group_idx": 0}), with(e, map[string]any{"group_idx": 1})}
}

func both(a, b func(*state, []any) []any) func(*state, []any) []any {
	return func(s *state, events []any) []any { return b(s, a(s, events)) }
}

var vllmFaults = []Fault{
	{
		Name: "array-events", What: "events are positional arrays, as before 0.24", Want: "read both forms; the view is full",
		vllm: func(o *emulator.Options) { o.ArrayEvents, o.Version = true, "0.23.0" },
	},
	{
		Name: "replay-without-topic", What: "replay answers have no topic frame, as before 0.26", Want: "take the last two frames; a late agent sees all",
		vllm: func(o *emulator.Options) { o.ReplayWithoutTopic, o.Version = true, "0.25.0" },
	},
	{
		Name: "publisher-unset", What: "events are enabled without a publisher: they are made and thrown away", Want: "no view, and the setting is named",
		batch: burnAll,
		answer: merge(map[string]func(*state, int, []byte) (int, []byte){"/kv_event_sources": missing}, withConfig(func(c map[string]any) {
			c["kv_events_config"] = map[string]any{"enable_kv_cache_events": true, "publisher": "null", "endpoint": "tcp://*:5557"}
		})),
	},
	{
		Name: "endpoint-connects", What: "the endpoint has no \"*\": the engine connects to it, nobody listens", Want: "listen there, or say how to change it",
		// The address is the caller's: emulator.Options.EventsDial.
	},
	{
		Name: "late-subscriber", What: "nothing tells a late subscriber of the past", Want: "partial, with the setting that would tell",
		vllm: func(o *emulator.Options) { o.NoReplay = true },
	},
	{
		Name: "tail-dropped", What: "a full queue drops the newest batches: no later number shows it", Want: "find them by asking the replay",
		batch: func(_ *state, b *wire.Batch) { b.Unsent = true },
	},
	{
		Name: "short-ring", What: "the replay buffer holds two batches", Want: "partial, buffer_steps named",
		vllm: func(o *emulator.Options) { o.BufferBatches = 2 },
	},
	{
		Name: "flood", What: "every batch comes a hundred times: a subscriber that does not drain blocks the engine", Want: "keep up: nothing is missing",
		batch: func(s *state, b *wire.Batch) {
			_ = b.Events(func(events []any) []any { return events })
			b.Copies = 0
			for range 100 {
				b.Others = append(b.Others, wire.Message{Seq: 0, Payload: b.Payload})
			}
		},
	},
	{
		Name: "burnt-number", What: "a batch that could not be encoded used up a number: replay does not have it", Want: "one replay, then go on with damage shown",
		batch: func(s *state, b *wire.Batch) {
			if s.batches == 2 {
				b.Skip = 1
			}
		},
	},
	{
		Name: "nothing-encodes", What: "no batch can be encoded (sha256 before 0.10.2)", Want: "no credit; silence while prompts are computed is told",
		batch: burnAll, vllm: func(o *emulator.Options) { o.Version = "0.10.1" },
	},
	{
		Name: "duplicate-stores", What: "each store comes twice and each removal too: two copies", Want: "count copies",
		events: func(_ *state, events []any) (out []any) {
			for _, e := range events {
				if out = append(out, e); isA(e, "BlockStored") || isA(e, "BlockRemoved") {
					out = append(out, e)
				}
			}
			return out
		},
	},
	{
		Name: "removal-of-last-copy", What: "stores tell copies, a removal comes only when the last one goes and says how many are left", Want: "no phantom copy stays",
		events: both(each("BlockStored", func(_ *state, e any) []any { return []any{e, e} }),
			each("BlockRemoved", func(_ *state, e any) []any { return []any{with(e, map[string]any{"remaining_copy_counts": []any{0}})} })),
	},
	{
		Name: "window-skips-hashes", What: "a group with a sliding window tells all tokens and the last hashes only", Want: "tokens of such stores are not mapped; no claim beyond both groups",
		events: both(each("BlockStored", windowOf(false)), each("BlockRemoved", removedOfBoth)),
	},
	{
		Name: "groups-of-sizes", What: "each prefix is told again by a group of another block size", Want: "groups are kept apart",
		events: each("BlockStored", func(_ *state, e any) []any {
			return []any{e, with(e, map[string]any{"group_idx": 1, "kv_cache_spec_kind": "mamba", "block_size": 4 * number(mapOf(e)["block_size"]), "block_hashes": list(mapOf(e)["block_hashes"])[:1]})}
		}),
	},
	{
		Name: "small-hybrid-pool", What: "with events on, the hybrid memory manager is off and the pool is small", Want: "capacity as the engine says now",
		vllm: func(o *emulator.Options) { o.PoolBlocks = o.PoolBlocks * 2 / 3 },
	},
	{
		Name: "inflated-blocks", What: "blocks of 528 tokens: short prompts never fill one", Want: "block size from the engine; nothing predicted below it",
		vllm: func(o *emulator.Options) { o.BlockTokens, o.PoolBlocks = 528, 64 },
	},
	{
		Name: "long-hashes", What: "hashes are concatenations of digests", Want: "opaque handles: the last eight bytes",
		vllm: func(o *emulator.Options) { o.DigestHashes = true },
		events: hashesAs(func(h any) any {
			b, ok := h.([]byte)
			if !ok {
				return h
			}
			return append(bytes.Repeat([]byte{7}, 32), b...)
		}),
	},
	{
		Name: "last-block-recomputed", What: "speculation drops the last block of a match", Want: "that is known before the first request",
		answer: withConfig(func(c map[string]any) { c["speculative_config"] = map[string]any{"method": "eagle"} }),
	},
	{
		Name: "orphan-parent", What: "a store names a parent that was never told", Want: "its blocks match nothing",
		events: func(s *state, events []any) []any {
			for _, e := range events {
				if isA(e, "BlockStored") {
					return append(events, with(e, map[string]any{"parent_block_hash": uint64(1), "block_hashes": []any{uint64(2)}, "token_ids": list(mapOf(e)["token_ids"])[:number(mapOf(e)["block_size"])], "extra_keys": gone}))
				}
			}
			return events
		},
	},
	{
		Name: "sparse-window", What: "the group with a window tells every second store only", Want: "no loss is inferred, no claim beyond it",
		events: both(each("BlockStored", windowOf(true)), each("BlockRemoved", removedOfBoth)),
	},
	{
		Name: "offload-removals-as-gpu", What: "removals from the CPU's cache carry the name of the GPU", Want: "the view is doubted, the connector named",
		answer: withConfig(func(c map[string]any) {
			c["kv_transfer_config"] = map[string]any{"kv_connector": "SimpleCPUOffloadConnector"}
		}),
	},
	{
		Name: "placeholder-stores", What: "stores to the CPU have no tokens and a block size of 0", Want: "joined by hash; nothing breaks",
		events: each("BlockStored", onTier("CPU", map[string]any{"token_ids": []any{}, "block_size": 0, "parent_block_hash": nil, "extra_keys": gone})),
	},
	{
		Name: "store-only-tier", What: "stores to a tier whose removals never come", Want: "they give the GPU no credit",
		events: each("BlockStored", onTier("STORAGE", nil)),
	},
	{
		Name: "tier-left-out", What: "stores do not tell the memory although the layout has a field for it", Want: "tier unknown: named, no credit",
		events: each("BlockStored", func(_ *state, e any) []any { return []any{with(e, map[string]any{"medium": gone})} }),
	},
	{
		Name: "foreign-chunks", What: "a connector tells chunks of another size with a device as medium and one token too many", Want: "length checked, medium taken as external",
		events: each("BlockStored", func(_ *state, e any) []any {
			tokens := append(append([]any{}, list(mapOf(e)["token_ids"])...), 7)
			return []any{e, with(e, map[string]any{"medium": "cuda:0", "token_ids": tokens, "block_hashes": []any{uint64(0xfeed)}, "parent_block_hash": nil, "block_size": 256, "extra_keys": gone})}
		}),
	},
	{
		Name: "wrong-parent", What: "a store connector names the wrong parent and no tokens", Want: "a hint at most",
		events: each("BlockStored", onTier("cpu", map[string]any{"token_ids": nil, "parent_block_hash": uint64(3), "extra_keys": gone})),
	},
	{
		Name: "idle-silence", What: "an idle engine tells of a reset with its next step", Want: "silence is not death",
	},
	{
		Name: "restart", What: "a new process: numbers from 0, equal hashes, no clear", Want: "no credit of the old life",
	},
	{
		Name: "rank-ports-clash", What: "events of another rank arrive on the port", Want: "refused and named",
		vllm: func(o *emulator.Options) { o.Ranks = 2 },
		batch: func(_ *state, b *wire.Batch) {
			_ = b.Edit(func(batch []any) []any { batch[len(batch)-1] = int64(1); return batch })
		},
	},
	{
		Name: "ipc-endpoint", What: "the endpoint is inside the host", Want: "the endpoint that would do is named",
		answer: withSources(func(_ string, s map[string]any) { s["endpoint"] = "ipc:///tmp/kv" }),
	},
	{
		Name: "every-rank-is-0", What: "with external data parallelism every engine calls itself rank 0", Want: "identity from the endpoint",
		answer: withSources(func(_ string, s map[string]any) { s["data_parallel_rank"] = 5 }),
	},
	{
		Name: "untyped-keys", What: "adapter and salt are both plain text among the extra keys", Want: "told apart by name and place",
		vllm: func(o *emulator.Options) { o.Adapters = []emulator.Adapter{{Name: "sql"}} },
	},
	{
		Name: "reports-hits", What: "a request may have its hit told again as a store without a copy", Want: "copies never exceed the pool; doubt instead of credit",
		events: func(s *state, events []any) []any {
			told := s.seen[max(0, len(s.seen)-3):]
			for _, e := range events {
				if isA(e, "BlockStored") {
					s.seen = append(s.seen, e)
				}
			}
			return append(append([]any{}, told...), events...)
		},
	},
	{
		Name: "stale-gauges", What: "gauges are ten seconds old", Want: "they are told as they are; running requests are counted by claims",
		vllm: func(o *emulator.Options) { o.GaugeLag = 10 * time.Second },
	},
	{
		Name: "counters-stuck", What: "the metrics path has died: counters stand still while requests run", Want: "/health is not believed alone; nothing is taken for a restart",
		answer: map[string]func(*state, int, []byte) (int, []byte){"/metrics": frozen},
	},
	{
		Name: "aborts-uncounted", What: "a client that left is counted nowhere", Want: "no rate of aborts is derived",
	},
	{
		Name: "negative-load", What: "/load and a gauge are negative", Want: "unknown, never negative",
		answer: map[string]func(*state, int, []byte) (int, []byte){
			"/load": edit(func(m map[string]any) { m["server_load"] = -3 }),
			"/metrics": func(_ *state, status int, body []byte) (int, []byte) {
				lines := strings.Split(string(body), "\n")
				for i, l := range lines {
					if name, _, ok := strings.Cut(l, "{"); ok && name == "vllm:num_requests_waiting" {
						lines[i] = l[:strings.LastIndexByte(l, ' ')] + " -3"
					}
				}
				return status, []byte(strings.Join(lines, "\n"))
			},
		},
	},
	{
		Name: "stale-adapter-series", What: "hundreds of old series of running adapters", Want: "adapters come from the list of models",
		answer: map[string]func(*state, int, []byte) (int, []byte){"/metrics": addLines(adapterSeries()...)},
	},
	{
		Name: "livelock", What: "the engine stands still with events on, its HTTP answers", Want: "still watched: running and no progress",
		serve: map[string]func(*state, http.ResponseWriter, *http.Request, http.Handler){
			"/v1/completions": func(_ *state, _ http.ResponseWriter, r *http.Request, _ http.Handler) {
				_, _ = io.Copy(io.Discard, r.Body) // who has sent all is seen to leave
				<-r.Context().Done()
			},
		},
	},
	{
		Name: "queue-dropped-oldest", What: "a store's event queue of 65,536 lost its oldest: numbers jump", Want: "the gap is seen",
		batch: func(s *state, b *wire.Batch) {
			if s.batches == 3 {
				b.Skip = 65_536
			}
		},
	},
}

func adapterSeries() (out []string) {
	for i := range 300 {
		out = append(out, fmt.Sprintf(`vllm:lora_requests_info{max_lora="1",running_lora_adapters="old-%d",waiting_lora_adapters="old-%d"} 1.7e9`, i, i))
	}
	return out
}

func merge(maps ...map[string]func(*state, int, []byte) (int, []byte)) map[string]func(*state, int, []byte) (int, []byte) {
	out := map[string]func(*state, int, []byte) (int, []byte){}
	for _, m := range maps {
		for k, v := range m {
			out[k] = v
		}
	}
	return out
}

// jsonList reads a list of objects with numbers as they are.
func jsonList(body []byte) ([]map[string]any, error) {
	d := json.NewDecoder(bytes.NewReader(body))
	d.UseNumber()
	var out []map[string]any
	err := d.Decode(&out)
	return out, err
}
