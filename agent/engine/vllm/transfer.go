package vllm

import (
	"encoding/json"
	"fmt"
	"net"
	"strconv"
	"strings"

	"github.com/zeebo/xxh3"

	"waypost/agent/engine"
)

// Connectors of vLLM that are known to send saved KV to a named peer: one of
// any prompt from its host memory, the other what a prefill leg left on the
// GPU.
const (
	offloadingConnector = "OffloadingConnector"
	nixlConnector       = "NixlConnector"
)

// readsHostTier says whether a connector keeps blocks in host memory that it reads
// back, and tells of both ends there: others never tell what they remove. One
// whose older releases tell of removals only never tells a store, so that nothing
// is believed to be there.
func readsHostTier(connector string) bool {
	return connector == offloadingConnector || connector == simpleOffload
}

// transferConfig is the part of vllm_config that decides whether, and how, KV
// travels between two engines.
type transferConfig struct {
	Transfer *struct {
		Connector string          `json:"kv_connector"`
		Role      string          `json:"kv_role"`
		Extra     json.RawMessage `json:"kv_connector_extra_config"`
	} `json:"kv_transfer_config"`
	Model struct {
		Model        string  `json:"model"`
		Revision     *string `json:"revision"`
		DType        string  `json:"dtype"`
		Quantization *string `json:"quantization"`
	} `json:"model_config"`
	Cache struct {
		BlockTokens int      `json:"block_size"`
		DType       string   `json:"cache_dtype"`
		Layout      *string  `json:"kv_cache_layout"`
		HashAlgo    string   `json:"prefix_caching_hash_algo"`
		Bytes       *float64 `json:"kv_cache_memory_bytes"`
		Tokens      *float64 `json:"kv_cache_size_tokens"`
		Override    *int     `json:"num_gpu_blocks_override"`
	} `json:"cache_config"`
	Parallel struct {
		Tensor   int `json:"tensor_parallel_size"`
		Pipeline int `json:"pipeline_parallel_size"`
		Context  int `json:"decode_context_parallel_size"`
	} `json:"parallel_config"`
}

// facts reads the configuration; version is the engine's, env its environment
// as it tells it. Without a connector nothing is known but the size of KV.
func (c *transferConfig) facts(version string, env json.RawMessage) engine.Transfer {
	out := engine.Transfer{BytesPerToken: c.bytesPerToken()}
	t := c.Transfer
	if t == nil || t.Connector == "" {
		return out
	}
	out.Connector = t.Connector
	switch t.Role {
	case "kv_producer":
		out.Role = "prefill"
	case "kv_consumer":
		out.Role = "decode"
	}
	switch {
	case t.Connector == offloadingConnector && strings.Contains(string(t.Extra), `"p2p"`):
		out.ExportedTier, out.SideChannel = "host", sideChannel(env, "VLLM_P2P_SIDE_CHANNEL")
	case t.Connector == nixlConnector:
		out.SideChannel = sideChannel(env, "VLLM_NIXL_SIDE_CHANNEL")
		if out.Role != "decode" {
			out.ExportedTier = "gpu"
		}
	}
	out.Fingerprint = c.fingerprint(version)
	return out
}

// fingerprint stands for what two engines must have alike so that one can read
// the other's blocks; empty without what it cannot do without.
func (c *transferConfig) fingerprint(version string) string {
	if c.Model.Model == "" || c.Cache.BlockTokens <= 0 || version == "" {
		return ""
	}
	optional := func(s *string) string {
		if s == nil {
			return ""
		}
		return *s
	}
	// Quoted, so that no value reads as the end of another.
	text := fmt.Sprintf("%q %q %q %q %d %q %q %q %d %d %d %q %q",
		c.Model.Model, optional(c.Model.Revision), c.Model.DType, optional(c.Model.Quantization),
		c.Cache.BlockTokens, c.Cache.DType, optional(c.Cache.Layout), c.Cache.HashAlgo,
		c.Parallel.Tensor, c.Parallel.Pipeline, c.Parallel.Context, c.Transfer.Connector, version)
	return fmt.Sprintf("%016x", xxh3.HashString(text))
}

// bytesPerToken is the memory of the KV pool over its tokens. A pool whose
// number of blocks was set by hand does not fill its memory, and says nothing.
func (c *transferConfig) bytesPerToken() float64 {
	if c.Cache.Bytes == nil || c.Cache.Tokens == nil || c.Cache.Override != nil || !(*c.Cache.Bytes > 0) || !(*c.Cache.Tokens > 0) {
		return 0
	}
	return *c.Cache.Bytes * float64(max(1, c.Parallel.Tensor)*max(1, c.Parallel.Pipeline)) / *c.Cache.Tokens
}

// sideChannel is the host and port in the engine's environment; empty: not
// told, or not both.
func sideChannel(env json.RawMessage, prefix string) string {
	var values map[string]json.RawMessage
	if json.Unmarshal(env, &values) != nil {
		return ""
	}
	var host string
	var port uint16
	if json.Unmarshal(values[prefix+"_HOST"], &host) != nil || json.Unmarshal(values[prefix+"_PORT"], &port) != nil || host == "" || port == 0 {
		return ""
	}
	return net.JoinHostPort(host, strconv.Itoa(int(port)))
}
