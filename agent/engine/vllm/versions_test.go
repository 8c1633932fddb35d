package vllm

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"waypost/agent/engine"
	"waypost/agent/engine/enginetest"
	"waypost/agent/engine/kvevents"
)

// One server of several, each with a rank of its own (external load balancing):
// it shows its rank under the number it has among them.
func TestServerOfOneRank(t *testing.T) {
	f := newFakeEngine(t, 1)
	rank := f.ranks[0]
	f.extra["/kv_event_sources"] = fmt.Sprintf(`{"3":{"endpoint":"tcp://*:%d","replay_endpoint":"tcp://*:%d"}}`, rank.Port(), rank.ReplayPort())
	f.extra["/metrics"] = "vllm:num_requests_running{engine=\"3\"} 2\n"
	m := enginetest.NewMirror(t)
	watch(t, f, Options{}, m)
	for _, told := range []int{0, 3} { // releases differ in what such a rank calls itself
		rank.SetRank(told)
		rank.Publish(false, enginetest.Stored(0, told+1))
		m.Await("its events and load", func() bool {
			return m.Known.Ranks == 1 && m.Of(0).Match(told+1) == 2 && m.Of(0).Load.Running != nil && *m.Of(0).Load.Running == 2 && m.Of(0).Coverage == engine.CoverageFull
		})
	}
	m.Mu.Lock()
	defer m.Mu.Unlock()
	if m.Known.RankHeader != "" {
		t.Errorf("a server of one rank is told which: %s", m.Known.RankHeader)
	}
}

// A server of some of the ranks (hybrid load balancing): numbers begin where
// those of the servers before it end.
func TestServerOfSomeRanks(t *testing.T) {
	replay := "tcp://*:5661"
	k := knowledge{sources: []publisher{{Rank: 4, Endpoint: "tcp://*:5561", Replay: &replay}, {Rank: 5, Endpoint: "tcp://*:5562"}}}
	for n, want := range []kvevents.Plan{
		{Events: "tcp://10.1.1.1:5561", Replay: "tcp://10.1.1.1:5661", Named: 4, Others: []int{5}},
		{Events: "tcp://10.1.1.1:5562", Named: 5, Others: []int{4}},
	} {
		got := planFor(engine.Target{URL: "http://10.1.1.1:8000"}, &k, n)
		if got.Events != want.Events || got.Replay != want.Replay || got.Named != want.Named || !slices.Equal(got.Others, want.Others) {
			t.Errorf("rank %d: %+v, want %+v", n, got, want)
		}
	}
}

// What the settings tell: no prefixes kept, blocks longer than asked for, drafts
// that need the last block computed again.
func TestSettings(t *testing.T) {
	f := newFakeEngine(t, 1)
	f.extra["/metrics"] = `vllm:cache_config_info{block_size="16",effective_attention_block_size="528",enable_prefix_caching="False",num_gpu_blocks="101"} 1` + "\n"
	f.extra["/server_info"] = `{"vllm_config":{"speculative_config":{"method":"eagle3"}}}`
	m := enginetest.NewMirror(t)
	watch(t, f, Options{}, m)
	m.Await("no prefixes", func() bool { return m.Of(0).Coverage == engine.CoverageNone && m.Of(0).Hint == hintNoCache })
	m.Mu.Lock()
	defer m.Mu.Unlock()
	if m.Known.BlockTokens != 528 || !m.Known.Capabilities.Has(engine.RecomputesLastBlock) {
		t.Errorf("%+v", m.Known)
	}
}

// Older releases of one connector tell the removals from its host cache as
// removals from GPU memory: their events are not relied on, whoever tells that it
// is there.
func TestConnectorWhoseRemovalsMislead(t *testing.T) {
	for _, configured := range []bool{false, true} {
		f := newFakeEngine(t, 1)
		o := Options{Options: engine.Options{FactsEvery: engine.MinLoadEvery}}
		if configured {
			o.Target.KVConnector = simpleOffload
		} else {
			f.extra["/server_info"] = `{"vllm_config":{"kv_transfer_config":{"kv_connector":"SimpleCPUOffloadConnector"}}}`
		}
		m := enginetest.NewMirror(t)
		watch(t, f, o, m)
		m.Await("doubted", func() bool {
			return m.Of(0).Coverage == engine.CoveragePartial && strings.Contains(m.Of(0).Hint, simpleOffload)
		})
		host := enginetest.Stored(0, 1).(map[string]any)
		host["medium"] = "CPU"
		f.ranks[0].AwaitSubscriber()
		f.ranks[0].Publish(false, host)
		m.Await("relied on", func() bool { return m.Of(0).Coverage == engine.CoverageFull })
	}
}

// An engine of the first releases: events of few fields, no routes but the
// oldest, another name of the usage.
func TestFirstReleases(t *testing.T) {
	f := newFakeEngine(t, 1)
	rank := f.ranks[0]
	f.extra["/metrics"] = "vllm:num_requests_running{model_name=\"m\"} 1\nvllm:gpu_cache_usage_perc{model_name=\"m\"} 0.5\n"
	f.extra["/kv_event_sources"] = "{}"
	m := enginetest.NewMirror(t)
	o := Options{}
	o.Target.Events, o.Target.Replay = fmt.Sprintf("tcp://%s:%d", enginetest.Host, rank.Port()), fmt.Sprintf("tcp://%s:%d", enginetest.Host, rank.ReplayPort())
	watch(t, f, o, m)
	rank.Publish(false, []any{"BlockStored", []any{-5, 7}, nil, []any{1, 2, 3, 4}, 2, nil})
	m.Await("stored", func() bool {
		l := m.Of(0).Load
		return m.Of(0).Table.Match([]uint32{1, 2, 3, 4, 5}, "", "") == 4 && l.KVUsedRatio != nil && *l.KVUsedRatio == .5
	})
	rank.Publish(false, []any{"BlockRemoved", []any{7}}, []any{"AllBlocksCleared"}, []any{"BlockStored", []any{9}, nil, []any{1, 2}, 2, 3})
	m.Await("cleared, and a prompt of an adapter that is not named", func() bool {
		r := m.Of(0)
		return r.Table.Len() == 1 && r.Table.Match([]uint32{1, 2, 3}, "", "") == 0 && m.Known.Capabilities.Has(engine.OmitsAdapters|engine.OmitsSalts)
	})
}

// Numbers that no engine can have, in every answer: the facts are unknown, and
// the engine is watched on.
func TestLies(t *testing.T) {
	f := newFakeEngine(t, 1)
	f.extra["/v1/models"] = fmt.Sprintf(`{"data":[{"id":"tiny","parent":null,"max_model_len":9223372036854775807},{"id":%q,"parent":"tiny"}]}`, strings.Repeat("x", 10_000))
	f.extra["/server_info"] = `{"vllm_config":{"scheduler_config":{"max_num_batched_tokens":-5,"max_num_seqs":9223372036854775807}}}`
	f.extra["/metrics"] = strings.Join([]string{
		`vllm:cache_config_info{block_size="9223372036854775807",engine="0",num_gpu_blocks="9223372036854775808"} 1`,
		`vllm:num_requests_running{engine="0"} -1`, `vllm:num_requests_waiting{engine="0"} NaN`, `vllm:generation_tokens_total{engine="0"} 9.3e18`,
		`vllm:num_requests_running{engine="255"} 1`, `process_start_time_seconds -5`,
	}, "\n")
	m := enginetest.NewMirror(t)
	watch(t, f, Options{}, m)
	m.Await("watched", func() bool { return m.Up && m.Known.Model == "tiny" && m.Of(0).Counts["metricFaults"] > 0 })
	m.Mu.Lock()
	defer m.Mu.Unlock()
	k, l := m.Known, m.Of(0).Load
	if k.MaxModelTokens != 0 || k.Aliases != nil || k.StepTokens != 0 || k.MaxRunning != 0 || k.BlockTokens != 0 || k.PoolBlocks != 0 || k.StartMark != 0 {
		t.Errorf("%+v", k)
	}
	if l.Running != nil || l.Waiting != nil || l.GenerationTokens != nil {
		t.Errorf("%+v", l)
	}
}

// Requests are named only where events then say the name.
func TestVersionsThatNameSessions(t *testing.T) {
	for version, want := range map[string]bool{"": false, "dev": false, "0.11.2": false, "0.31.9": false, "0.32.0": true, "0.32.1rc2.dev9+g1": true, "1.0.0": true} {
		if namesSessions(version) != want {
			t.Errorf("version %q: want %v", version, want)
		}
	}
}

// An engine that is started again with fewer ranks has no cache in the others, and
// nobody asks for their events any more; when they are back they are read again.
func TestFewerRanks(t *testing.T) {
	f := newFakeEngine(t, 2)
	m := enginetest.NewMirror(t)
	watch(t, f, Options{Options: engine.Options{FactsEvery: engine.MinLoadEvery}}, m)
	prompt := []uint32{2, 3, 0}
	f.ranks[1].Publish(true, enginetest.Stored(0, 1))
	m.Await("stored", func() bool { return m.Of(1).Match(1) == 2 && m.Known.Ranks == 2 })
	second := f.ranks[1]
	f.set(func() { f.ranks = f.ranks[:1:1] })
	f.restart()
	m.Await("one rank", func() bool {
		resets := m.Of(1).Resets
		return m.Known.Ranks == 1 && len(resets) > 0 && resets[len(resets)-1] == engine.ResetGone && m.Of(1).Table.Match(prompt, "", "") == 0
	})
	second.Restart()
	second.Publish(true, enginetest.Stored(0, 1))
	f.set(func() { f.ranks = append(f.ranks, second) })
	f.set(func() { f.start += 100 })
	m.Await("two ranks again", func() bool { return m.Known.Ranks == 2 && m.Of(1).Match(1) == 2 })
}
