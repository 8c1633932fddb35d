package discover

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

// The shares of engines over several hosts as their command lines tell them.
func TestGroupOf(t *testing.T) {
	for _, c := range []struct {
		name string
		args []string
		want *Group
	}{
		{"one host", []string{"vllm", "serve", "m", "--tensor-parallel-size", "8"}, nil},
		{"one host, said", []string{"vllm", "serve", "m", "--nnodes", "1"}, nil},
		{"head", []string{"vllm", "serve", "m", "--nnodes", "2", "--node-rank", "0", "--master-addr", "10.0.0.1"}, &Group{Meeting: "10.0.0.1:29501", Nodes: 2, Front: true}},
		{"head by default", []string{"vllm", "serve", "m", "--nnodes=2", "--master-addr=10.0.0.1", "--master-port=7000"}, &Group{Meeting: "10.0.0.1:7000", Nodes: 2, Front: true}},
		{"second", []string{"vllm", "serve", "m", "--nnodes", "2", "--node_rank", "1", "--master-addr", "10.0.0.1", "--headless"}, &Group{Meeting: "10.0.0.1:29501", Node: 1, Nodes: 2}},
		{"no such node", []string{"vllm", "serve", "m", "--nnodes", "2", "--node-rank", "2"}, nil},
		{"IPv6", []string{"vllm", "serve", "m", "--nnodes", "2", "--node-rank", "1", "--master-addr", "fd00::1", "--headless"}, &Group{Meeting: "[fd00::1]:29501", Node: 1, Nodes: 2}},
		{
			"head of ranks on two hosts",
			[]string{"vllm", "serve", "m", "--data-parallel-size", "4", "--data-parallel-size-local", "2", "--data-parallel-address", "10.0.0.1", "--data-parallel-rpc-port", "13345"},
			&Group{Meeting: "10.0.0.1:13345", LocalRanks: 2, Ranks: 4, Front: true},
		},
		{
			"its other ranks",
			[]string{"vllm", "serve", "m", "--headless", "-dp", "4", "-dpl", "2", "--data-parallel-start-rank", "2", "-dpa", "10.0.0.1", "-dpp", "13345"},
			&Group{Meeting: "10.0.0.1:13345", FirstRank: 2, LocalRanks: 2, Ranks: 4},
		},
		{
			"head without ranks",
			[]string{"vllm", "serve", "m", "--data-parallel-size", "4", "--data-parallel-size-local", "0", "--data-parallel-address", "10.0.0.1"},
			&Group{Meeting: "10.0.0.1:29550", Ranks: 4, Front: true},
		},
		{"all ranks here", []string{"vllm", "serve", "m", "--data-parallel-size", "4", "--data-parallel-size-local", "4"}, nil},
		{"each host serves its own ranks", []string{"vllm", "serve", "m", "--data-parallel-size", "4", "--data-parallel-size-local", "2", "--data-parallel-hybrid-lb"}, nil},
		{"more ranks than there are", []string{"vllm", "serve", "m", "--headless", "-dp", "4", "-dpl", "3", "-dpr", "2"}, nil},
		{"SGLang", []string{"sglang", "serve", "--nnodes", "2", "--node-rank", "1", "--dist-init-addr", "10.0.0.1:20000"}, &Group{Meeting: "10.0.0.1:20000", Node: 1, Nodes: 2}},
		{"SGLang with a scheme", []string{"sglang", "serve", "--nnodes", "2", "--dist-init-addr", "tcp://head:20000"}, &Group{Meeting: "head:20000", Nodes: 2, Front: true}},
		{"llama.cpp has none", []string{"llama-server", "--nnodes", "2"}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := engineOf(t, c.args...)
			if d := cmp.Diff(c.want, groupOf(e.Kind, e.Flags)); d != "" {
				t.Error(d)
			}
		})
	}
}
