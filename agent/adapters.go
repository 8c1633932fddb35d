package agent

import (
	"waypost/agent/engine"
	"waypost/agent/engine/generic"
	"waypost/agent/engine/llamacpp"
	"waypost/agent/engine/sglang"
	"waypost/agent/engine/trtllm"
	"waypost/agent/engine/vllm"
)

// adapters are the engine kinds that can be watched: a new one is a folder and
// a line here.
var adapters = []struct {
	kind Kind
	make func(engine.Options) (engine.Adapter, error)
}{
	{"vllm", func(o engine.Options) (engine.Adapter, error) { return vllm.New(vllm.Options{Options: o}) }},
	{"sglang", func(o engine.Options) (engine.Adapter, error) { return sglang.New(sglang.Options{Options: o}) }},
	{"trtllm", func(o engine.Options) (engine.Adapter, error) { return trtllm.New(trtllm.Options{Options: o}) }},
	{"llamacpp", func(o engine.Options) (engine.Adapter, error) { return llamacpp.New(llamacpp.Options{Options: o}) }},
	{"generic", func(o engine.Options) (engine.Adapter, error) { return generic.New(generic.Options{Options: o}) }},
}

// newAdapter makes the adapter of an engine.
func newAdapter(kind Kind, o engine.Options) (engine.Adapter, error) {
	for _, a := range adapters {
		if a.kind == kind {
			return a.make(o)
		}
	}
	return nil, bad("engine.kind", "%q: no engine of this kind is known", kind)
}

// kinds are the names of the engine kinds, in the order in which to show them.
func kinds() []string {
	out := make([]string, 0, len(adapters))
	for _, a := range adapters {
		out = append(out, string(a.kind))
	}
	return out
}
