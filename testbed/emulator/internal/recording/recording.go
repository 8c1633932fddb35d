// Package recording reads recorded traffic of real engines (event frames and
// HTTP exchanges) for the emulator's tests, and runs the same requests through
// the emulated core, one at a time.
package recording

import (
	"bufio"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/tinylib/msgp/msgp"

	"waypost/testbed/emulator/core"
)

// Batch is one recorded event batch.
type Batch struct {
	AtSeconds float64
	Seq       uint64
	Topic     string
	Payload   []byte
	// Time is the first element of the payload, seconds since the epoch.
	Time   float64
	Rank   int
	Events []Event
}

// Event is a decoded event. Hashes are the low 64 bits, and the digests too if
// the engine sent them.
type Event struct {
	Type       string
	Hashes     []uint64
	Digests    []core.Hash
	Parent     uint64
	HasParent  bool
	Tokens     []uint32
	BlockSize  int
	LoRAName   string
	ExtraKeys  string
	SessionID  string
	FieldCount int
}

// Request is one recorded generation.
type Request struct {
	N                         int
	SentSeconds, DoneSeconds  float64
	Path                      string
	Prompt                    []uint32
	PromptTokens, Completion  int
	MaxTokens                 int
	Model, Salt, SessionID    string
	ReportFull, SkipCacheRead bool
	Stream                    bool
	Cached                    int
	// Created is nil if the engine said null.
	Created *int
}

// Control is another recorded call, "/reset_prefix_cache" for example.
type Control struct {
	AtSeconds float64
	Path      string
}

// Scenario is one recording.
type Scenario struct {
	Name     string
	Batches  []Batch
	Requests []Request
	Controls []Control
}

// Shared finds the folder of full recordings: by the environment variable
// WAYPOST_SHARED, else beside the repository that holds dir. It fails if there
// is none.
func Shared(dir string) (string, error) {
	if p := os.Getenv("WAYPOST_SHARED"); p != "" {
		return p, nil
	}
	at, err := filepath.Abs(dir)
	if err != nil {
		return "", err
	}
	for ; ; at = filepath.Dir(at) {
		if _, err := os.Stat(filepath.Join(at, "go.mod")); err == nil {
			break
		}
		if at == filepath.Dir(at) {
			return "", errors.New("no go.mod above the test's folder")
		}
	}
	p := filepath.Join(filepath.Dir(at), "shared")
	if _, err := os.Stat(p); err != nil {
		return "", fmt.Errorf("no full recordings: set WAYPOST_SHARED or place them beside the repository: %w", err)
	}
	return p, nil
}

// Load reads NAME.frames.jsonl and NAME.requests.jsonl of a folder.
func Load(dir fs.FS, name string) (*Scenario, error) {
	s := &Scenario{Name: name}
	if err := eachLine(dir, name+".frames.jsonl", s.addFrame); err != nil {
		return nil, err
	}
	if err := eachLine(dir, name+".requests.jsonl", s.addExchange); err != nil {
		return nil, err
	}
	slices.SortStableFunc(s.Requests, func(a, b Request) int {
		switch {
		case a.SentSeconds < b.SentSeconds:
			return -1
		case a.SentSeconds > b.SentSeconds:
			return 1
		}
		return 0
	})
	return s, nil
}

func eachLine(dir fs.FS, name string, f func([]byte) error) error {
	file, err := dir.Open(name)
	if err != nil {
		return err
	}
	defer file.Close()
	lines := bufio.NewScanner(file)
	lines.Buffer(nil, 16<<20)
	for i := 1; lines.Scan(); i++ {
		if err := f(lines.Bytes()); err != nil {
			return fmt.Errorf("%s line %d: %w", name, i, err)
		}
	}
	return lines.Err()
}

func (s *Scenario) addFrame(line []byte) error {
	var f struct {
		Kind  string
		T     float64
		Parts []string
	}
	if err := json.Unmarshal(line, &f); err != nil {
		return err
	}
	if f.Kind != "live" {
		return nil
	}
	if len(f.Parts) != 3 {
		return fmt.Errorf("%d parts: want 3", len(f.Parts))
	}
	var parts [3][]byte
	for i, p := range f.Parts {
		b, err := hex.DecodeString(p)
		if err != nil {
			return err
		}
		parts[i] = b
	}
	b := Batch{AtSeconds: f.T, Topic: string(parts[0]), Seq: binary.BigEndian.Uint64(parts[1]), Payload: parts[2]}
	if err := b.decode(); err != nil {
		return err
	}
	s.Batches = append(s.Batches, b)
	return nil
}

func (b *Batch) decode() error {
	v, _, err := msgp.ReadIntfBytes(b.Payload)
	if err != nil {
		return err
	}
	batch, ok := v.([]any)
	if !ok || len(batch) != 3 {
		return errors.New("the batch is no array of 3")
	}
	b.Time, b.Rank = batch[0].(float64), int(toUint(batch[2]))
	for _, e := range batch[1].([]any) {
		event, ok := e.(map[string]any)
		if !ok {
			return errors.New("the event is no map")
		}
		b.Events = append(b.Events, decodeEvent(event))
	}
	return nil
}

func decodeEvent(m map[string]any) Event {
	e := Event{Type: m["type"].(string), FieldCount: len(m)}
	for _, h := range list(m["block_hashes"]) {
		low, digest := toHash(h)
		e.Hashes = append(e.Hashes, low)
		if digest != nil {
			e.Digests = append(e.Digests, *digest)
		}
	}
	if p := m["parent_block_hash"]; p != nil {
		e.Parent, _ = toHash(p)
		e.HasParent = true
	}
	for _, t := range list(m["token_ids"]) {
		e.Tokens = append(e.Tokens, uint32(toUint(t)))
	}
	if size := m["block_size"]; size != nil {
		e.BlockSize = int(toUint(size))
	}
	e.LoRAName, _ = m["lora_name"].(string)
	e.SessionID, _ = m["session_id"].(string)
	if keys := m["extra_keys"]; keys != nil {
		e.ExtraKeys = fmt.Sprint(keys)
	}
	return e
}

func list(v any) []any {
	l, _ := v.([]any)
	return l
}

func toUint(v any) uint64 {
	switch n := v.(type) {
	case int64:
		return uint64(n)
	case uint64:
		return n
	}
	return 0
}

func toHash(v any) (uint64, *core.Hash) {
	b, ok := v.([]byte)
	if !ok {
		return toUint(v), nil
	}
	var h core.Hash
	copy(h[:], b)
	return h.Low64(), &h
}

type usage struct {
	PromptTokens     int `json:"prompt_tokens"`
	CompletionTokens int `json:"completion_tokens"`
	Details          *struct {
		Cached  int  `json:"cached_tokens"`
		Created *int `json:"created_cache_tokens"`
	} `json:"prompt_tokens_details"`
}

type exchange struct {
	N              int
	TSend          float64 `json:"t_send"`
	TDone          float64 `json:"t_done"`
	Path           string
	Status         int
	Headers        map[string]string
	PromptTokenIDs []uint32 `json:"prompt_token_ids"`
	Request        struct {
		Model          string
		Prompt         json.RawMessage
		MaxTokens      int             `json:"max_tokens"`
		Salt           string          `json:"cache_salt"`
		SessionID      string          `json:"session_id"`
		Stream         bool            `json:"stream"`
		PromptLogprobs json.RawMessage `json:"prompt_logprobs"`
		XArgs          struct {
			ReportMode string `json:"kv_cache_report_mode"`
		} `json:"vllm_xargs"`
	}
	Response json.RawMessage
	SSE      []string
}

func (s *Scenario) addExchange(line []byte) error {
	var x exchange
	if err := json.Unmarshal(line, &x); err != nil {
		return err
	}
	if x.Path != "/v1/completions" && x.Path != "/v1/chat/completions" {
		s.Controls = append(s.Controls, Control{AtSeconds: x.TSend, Path: x.Path})
		return nil
	}
	if x.Status != 200 {
		return nil
	}
	u, err := x.usage()
	if err != nil || u == nil {
		return err
	}
	q := x.Request
	r := Request{
		N: x.N, SentSeconds: x.TSend, DoneSeconds: x.TDone, Path: x.Path, Prompt: x.PromptTokenIDs,
		PromptTokens: u.PromptTokens, Completion: u.CompletionTokens, MaxTokens: q.MaxTokens,
		Model: q.Model, Salt: q.Salt, SessionID: q.SessionID, Stream: q.Stream,
		ReportFull: q.XArgs.ReportMode == "full", SkipCacheRead: q.PromptLogprobs != nil,
		Cached: u.Details.Cached, Created: u.Details.Created,
	}
	if id := x.Headers["X-Session-ID"]; id != "" {
		r.SessionID = id
	}
	if len(q.Prompt) > 0 && q.Prompt[0] == '[' {
		if err := json.Unmarshal(q.Prompt, &r.Prompt); err != nil {
			return err
		}
	}
	s.Requests = append(s.Requests, r)
	return nil
}

func (x *exchange) usage() (*usage, error) {
	var body struct{ Usage *usage }
	if len(x.Response) > 0 {
		if err := json.Unmarshal(x.Response, &body); err != nil {
			return nil, err
		}
	}
	for _, l := range x.SSE {
		if data, ok := strings.CutPrefix(l, "data: {"); ok {
			if err := json.Unmarshal([]byte("{"+data), &body); err != nil {
				return nil, err
			}
		}
	}
	if body.Usage == nil || body.Usage.Details == nil {
		return nil, nil
	}
	return body.Usage, nil
}
