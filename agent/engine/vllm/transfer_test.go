package vllm

import (
	"encoding/json"
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"

	"waypost/agent/engine"
	"waypost/agent/engine/enginetest"
)

const transferInfo = `{
"model_config":{"model":"m","revision":null,"dtype":"torch.bfloat16","quantization":null},
"cache_config":{"block_size":16,"cache_dtype":"auto","kv_cache_layout":null,"prefix_caching_hash_algo":"sha256","num_gpu_blocks_override":null,"kv_cache_memory_bytes":1048576000,"kv_cache_size_tokens":16000},
"parallel_config":{"tensor_parallel_size":2,"pipeline_parallel_size":1},
"kv_transfer_config":{"kv_connector":"OffloadingConnector","kv_role":"kv_both","kv_connector_extra_config":{"secondary_tiers":[{"type":"p2p"}]}}}`

func transferFrom(t *testing.T, config string, change func(map[string]map[string]any), env string) engine.Transfer {
	t.Helper()
	var m map[string]map[string]any
	if err := json.Unmarshal([]byte(config), &m); err != nil {
		t.Fatal(err)
	}
	if change != nil {
		change(m)
	}
	b, err := json.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	var c transferConfig
	if err := json.Unmarshal(b, &c); err != nil {
		t.Fatal(err)
	}
	return c.facts("0.32.0", json.RawMessage(env))
}

func TestTransferConfig(t *testing.T) {
	const env = `{"VLLM_P2P_SIDE_CHANNEL_HOST":"10.0.0.7","VLLM_P2P_SIDE_CHANNEL_PORT":5710,"VLLM_NIXL_SIDE_CHANNEL_HOST":"10.0.0.8","VLLM_NIXL_SIDE_CHANNEL_PORT":5600}`
	base := transferFrom(t, transferInfo, nil, env)
	want := engine.Transfer{Connector: "OffloadingConnector", SideChannel: "10.0.0.7:5710", ExportedTier: "host", Fingerprint: base.Fingerprint, BytesPerToken: 131072}
	if diff := cmp.Diff(want, base); diff != "" || len(base.Fingerprint) != 16 {
		t.Errorf("fingerprint %q\n%s", base.Fingerprint, diff)
	}
	for name, c := range map[string]struct {
		change func(map[string]map[string]any)
		env    string
		want   engine.Transfer
	}{
		"no connector": {func(m map[string]map[string]any) { m["kv_transfer_config"] = nil }, env, engine.Transfer{BytesPerToken: 131072}},
		"no peer tier": {
			func(m map[string]map[string]any) { m["kv_transfer_config"]["kv_connector_extra_config"] = nil }, env,
			engine.Transfer{Connector: "OffloadingConnector", Fingerprint: base.Fingerprint, BytesPerToken: 131072},
		},
		"environment not told": {
			nil, `"a text"`,
			engine.Transfer{Connector: "OffloadingConnector", ExportedTier: "host", Fingerprint: base.Fingerprint, BytesPerToken: 131072},
		},
		"pool of a set size": {
			func(m map[string]map[string]any) { m["cache_config"]["num_gpu_blocks_override"] = 100 }, env,
			engine.Transfer{Connector: "OffloadingConnector", SideChannel: "10.0.0.7:5710", ExportedTier: "host", Fingerprint: base.Fingerprint},
		},
		"model not told": {
			func(m map[string]map[string]any) { delete(m, "model_config") }, env,
			engine.Transfer{Connector: "OffloadingConnector", SideChannel: "10.0.0.7:5710", ExportedTier: "host", BytesPerToken: 131072},
		},
	} {
		if diff := cmp.Diff(c.want, transferFrom(t, transferInfo, c.change, c.env)); diff != "" {
			t.Errorf("%s:\n%s", name, diff)
		}
	}
	for _, c := range []struct{ role, want, tier string }{{"kv_producer", "prefill", "gpu"}, {"kv_consumer", "decode", ""}, {"kv_both", "", "gpu"}} {
		got := transferFrom(t, transferInfo, func(m map[string]map[string]any) {
			m["kv_transfer_config"]["kv_connector"], m["kv_transfer_config"]["kv_role"] = "NixlConnector", c.role
		}, env)
		if got.Role != c.want || got.ExportedTier != c.tier || got.SideChannel != "10.0.0.8:5600" {
			t.Errorf("%s: %+v", c.role, got)
		}
	}
	// Whatever two ends must have alike changes the fingerprint.
	seen := map[string]string{base.Fingerprint: "as it is"}
	for name, change := range map[string]func(map[string]map[string]any){
		"model":       func(m map[string]map[string]any) { m["model_config"]["model"] = "n" },
		"revision":    func(m map[string]map[string]any) { m["model_config"]["revision"] = "r" },
		"type":        func(m map[string]map[string]any) { m["model_config"]["dtype"] = "float16" },
		"quantised":   func(m map[string]map[string]any) { m["model_config"]["quantization"] = "fp8" },
		"block":       func(m map[string]map[string]any) { m["cache_config"]["block_size"] = 32 },
		"cache type":  func(m map[string]map[string]any) { m["cache_config"]["cache_dtype"] = "fp8" },
		"layout":      func(m map[string]map[string]any) { m["cache_config"]["kv_cache_layout"] = "HND" },
		"hash":        func(m map[string]map[string]any) { m["cache_config"]["prefix_caching_hash_algo"] = "xxhash" },
		"tensor":      func(m map[string]map[string]any) { m["parallel_config"]["tensor_parallel_size"] = 4 },
		"pipeline":    func(m map[string]map[string]any) { m["parallel_config"]["pipeline_parallel_size"] = 2 },
		"a connector": func(m map[string]map[string]any) { m["kv_transfer_config"]["kv_connector"] = "Other" },
	} {
		f := transferFrom(t, transferInfo, change, env).Fingerprint
		if seen[f] != "" {
			t.Errorf("%s has the fingerprint of %s", name, seen[f])
		}
		seen[f] = name
	}
}

// Host memory is reused where the connector says both what comes and what goes.
func TestReadsHostTier(t *testing.T) {
	for connector, want := range map[string]bool{
		"OffloadingConnector": true, "SimpleCPUOffloadConnector": true,
		"LMCacheConnectorV1": false, "LMCacheMPConnector": false, "MooncakeStoreConnector": false, "NixlConnector": false, "": false,
	} {
		for _, told := range []bool{true, false} {
			f, o := newFakeEngine(t, 1), Options{}
			if told {
				f.extra["/server_info"] = fmt.Sprintf(`{"vllm_config":{"kv_transfer_config":{"kv_connector":%q}}}`, connector)
			} else {
				o.Target.KVConnector = connector
			}
			m := enginetest.NewMirror(t)
			watch(t, f, o, m)
			m.Await("facts", func() bool { return m.Known.Model != "" })
			m.Mu.Lock()
			got := m.Known.Capabilities.Has(engine.ReadsHostTier)
			m.Mu.Unlock()
			if got != want {
				t.Errorf("%q, told by the engine %v: reads host memory %v", connector, told, got)
			}
		}
	}
}
