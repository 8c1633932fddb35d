package discover

import (
	"path"
	"slices"
	"strconv"
	"strings"
)

// kind is how one kind of engine is started.
type kind struct {
	name  string
	title string // as people write it
	port  int    // by default
	// programs are the files that start a server, modules those given to the
	// interpreter; verb must be the first word after them, if it is not empty.
	programs, modules []string
	verb              string
	// parts is how titles of the engine's further processes begin.
	parts string
	// model are the flags that name the model, the name it is served under first;
	// positional says that it may be the first word.
	model      []string
	positional bool
}

// kinds are the engines that are known by their command lines.
var kinds = []kind{
	{
		name: "vllm", title: "vLLM", port: 8000, programs: []string{"vllm"}, verb: "serve", parts: "VLLM::",
		modules: []string{"vllm.entrypoints.cli.main"}, model: []string{"--served-model-name", "--model"}, positional: true,
	},
	{
		name: "vllm", title: "vLLM", port: 8000, modules: []string{"vllm.entrypoints.openai.api_server"}, model: []string{"--served-model-name", "--model"},
	},
	{
		name: "sglang", title: "SGLang", port: 30000, programs: []string{"sglang"}, verb: "serve", parts: "sglang::",
		model: []string{"--served-model-name", "--model-path", "--model"}, positional: true,
	},
	{
		name: "sglang", title: "SGLang", port: 30000, programs: []string{"launch_server.py"}, modules: []string{"sglang.launch_server"},
		model: []string{"--served-model-name", "--model-path", "--model"},
	},
	{
		name: "trtllm", title: "TensorRT-LLM", port: 8000, programs: []string{"trtllm-serve"}, modules: []string{"tensorrt_llm.commands.serve"},
		model: []string{"--served_model_name", "--model"}, positional: true,
	},
	{
		name: "llamacpp", title: "llama.cpp", port: 8080, programs: []string{"llama-server"}, model: []string{"--alias", "-a", "--model", "-m", "-hf", "--hf-repo", "-hfr"},
	},
}

// classify tells what a command line starts. words are those after the program
// and its verb. part says that it is a further process of an engine.
func classify(args []string) (k *kind, words []string, part bool) {
	if len(args) == 0 {
		return nil, nil, false
	}
	program, module, rest := programOf(args)
	for i := range kinds {
		k := &kinds[i]
		if k.parts != "" && strings.HasPrefix(args[0], k.parts) {
			return k, nil, true
		}
		if !slices.Contains(k.programs, program) && (module == "" || !slices.Contains(k.modules, module)) {
			continue
		}
		if k.verb != "" {
			if len(rest) == 0 || rest[0] != k.verb {
				continue
			}
			return k, rest[1:], false
		}
		if k.name == "trtllm" && len(rest) > 0 {
			switch rest[0] {
			case "serve":
				return k, rest[1:], false
			case "disaggregated", "disaggregated_mpi_worker", "mm_embedding_serve":
				return nil, nil, false // these serve no prompts of their own
			}
		}
		return k, rest, false
	}
	return nil, nil, false
}

// programOf is the program that a command line runs: of an interpreter, the
// script or the module.
func programOf(args []string) (program, module string, rest []string) {
	program, rest = path.Base(args[0]), args[1:]
	if !strings.HasPrefix(program, "python") && !strings.HasPrefix(program, "pypy") {
		return program, "", rest
	}
	for len(rest) > 0 {
		a := rest[0]
		switch {
		case a == "-m" && len(rest) > 1:
			return "", rest[1], rest[2:]
		case a == "-c":
			return "", "", nil
		case a == "-X" || a == "-W":
			rest = rest[min(2, len(rest)):]
		case strings.HasPrefix(a, "-"):
			rest = rest[1:]
		default:
			return path.Base(a), "", rest[1:]
		}
	}
	return "", "", nil
}

// Flags reads the flags of a command line.
type Flags []string

// sameFlag compares flags as the engines do: a dash and an underscore are alike.
func sameFlag(a, b string) bool {
	return a == b || strings.HasPrefix(a, "--") && strings.ReplaceAll(a, "_", "-") == strings.ReplaceAll(b, "_", "-")
}

// Get is the value of a flag, the last one given; ok is false if it is not there.
// A flag without a value is empty.
func (f Flags) Get(names ...string) (value string, ok bool) {
	for i, word := range f {
		name, v, glued := strings.Cut(word, "=")
		if !strings.HasPrefix(word, "-") || !slices.ContainsFunc(names, func(n string) bool { return sameFlag(name, n) }) {
			continue
		}
		value, ok = v, true
		if !glued {
			value = ""
			if i+1 < len(f) && (!strings.HasPrefix(f[i+1], "-") || isNumber(f[i+1])) {
				value = f[i+1]
			}
		}
	}
	return value, ok
}

func isNumber(s string) bool {
	_, err := strconv.ParseFloat(s, 64)
	return err == nil
}

// Has says whether a flag is there.
func (f Flags) Has(names ...string) bool {
	_, ok := f.Get(names...)
	return ok
}

// Under are the values of "--name.key value", by key.
func (f Flags) Under(name string) map[string]string {
	var out map[string]string
	for i, word := range f {
		flag, v, glued := strings.Cut(word, "=")
		dot := strings.IndexByte(flag, '.')
		if dot < 0 || !sameFlag(flag[:dot], name) {
			continue
		}
		if !glued && i+1 < len(f) {
			v = f[i+1]
		}
		if out == nil {
			out = map[string]string{}
		}
		out[strings.ReplaceAll(flag[dot+1:], "-", "_")] = v
	}
	return out
}

// Int is the value of a flag as a number; ok is false if it is none.
func (f Flags) Int(names ...string) (n int, ok bool) {
	v, _ := f.Get(names...)
	n, err := strconv.Atoi(v)
	return n, err == nil
}

// portOf is the port that a command line asks for, the kind's own if it asks for
// none.
func (k *kind) portOf(f Flags) (port int, asked bool) {
	if n, ok := f.Int("--port"); ok && n > 0 && n < 1<<16 {
		return n, true
	}
	return k.port, false
}

// modelOf is the model as the command line names it; empty: it does not.
func (k *kind) modelOf(f Flags) string {
	for _, flag := range k.model {
		if v, _ := f.Get(flag); v != "" {
			return v
		}
	}
	if k.positional && len(f) > 0 && !strings.HasPrefix(f[0], "-") {
		return f[0]
	}
	return ""
}
