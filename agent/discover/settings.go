package discover

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"
)

const (
	maxConfigBytes  = 64 << 10  // of an engine's file of settings
	maxEnvironBytes = 256 << 10 // of a process's environment
	maxSettings     = 1 << 10   // lines of such a file that are looked at
)

// settings are what an engine was told besides its command line: by a file that
// the command line names, or by its environment. Only what decides where it
// listens, what it publishes and which group it belongs to is kept.
type settings struct {
	// file is its name as the engine was told it; empty: there is none.
	file string
	// unread says why the file, or a part of it, is not known; empty: all is.
	unread string
	// words are the settings as flags, for kinds that take them as such; values are
	// those of other kinds by name.
	words  []string
	values map[string]string
}

// keptSettings are the names of flags that are kept of a file, with dashes as
// underscores. Of an engine's key it is kept that there is one.
var keptSettings = []string{
	"port", "host", "model", "model_path", "served_model_name", "nnodes", "node_rank", "master_addr", "master_port", "headless",
	"dist_init_addr", "nccl_init_addr", "data_parallel_size", "data_parallel_size_local", "data_parallel_start_rank", "data_parallel_rank",
	"data_parallel_address", "data_parallel_rpc_port", "data_parallel_external_lb", "data_parallel_hybrid_lb", "dp_size", "kv_events_config",
	"enable_prompt_tokens_details", "enable_cache_report", "disable_log_stats", "enable_prefix_caching", "no_enable_prefix_caching",
	"prefix_caching_hash_algo", "page_size", "disable_radix_cache", "enable_dp_attention", keySetting,
}

const keySetting = "api_key"

// keptValues are those of TensorRT-LLM's file.
var keptValues = []string{eventBuffer, blockReuse, eventPublisher, iterStats}

// The values by name.
const (
	cacheConfig    = "kv_cache_config"
	eventBuffer    = cacheConfig + ".event_buffer_max_size"
	blockReuse     = cacheConfig + ".enable_block_reuse"
	eventPublisher = cacheConfig + ".kv_events_config"
	iterStats      = "enable_iter_perf_stats"
)

// environmentFlags are the flags that stand for variables of llama.cpp's
// environment; a flag that takes no value is there when the variable is true, or
// where whenFalse says so when it is false.
var environmentFlags = map[string]struct {
	flag             string
	takes, whenFalse bool
}{
	"LLAMA_ARG_PORT":              {flag: "--port", takes: true},
	"LLAMA_ARG_HOST":              {flag: "--host", takes: true},
	"LLAMA_ARG_MODEL":             {flag: "--model", takes: true},
	"LLAMA_ARG_ALIAS":             {flag: "--alias", takes: true},
	"LLAMA_ARG_HF_REPO":           {flag: "--hf-repo", takes: true},
	"LLAMA_ARG_ENDPOINT_METRICS":  {flag: "--metrics"},
	"LLAMA_ARG_ENDPOINT_SLOTS":    {flag: "--no-slots", whenFalse: true},
	"LLAMA_ARG_NO_ENDPOINT_SLOTS": {flag: "--no-slots"},
	"LLAMA_ARG_CACHE_PROMPT":      {flag: "--no-cache-prompt", whenFalse: true},
	"LLAMA_ARG_NO_CACHE_PROMPT":   {flag: "--no-cache-prompt"},
}

// keyVariables hold engines' keys: only that they are set is kept.
var keyVariables = []string{"LLAMA_API_KEY", "VLLM_API_KEY"}

// life names one process.
type life struct {
	pid     int
	started uint64
}

// settingsOf are the settings of an engine besides its command line. They are
// read once per life of its process: what a file says later is not in force.
func (s *Scanner) settingsOf(c *candidate, trusted bool) *settings {
	key := life{c.pid, c.started}
	if known := s.settings[key]; known != nil {
		return known
	}
	out := &settings{file: settingsFile(c.kind.name, c.words)}
	if out.file != "" {
		s.readSettings(c, out, trusted)
	}
	s.readEnvironment(c, out)
	s.settings[key] = out
	return out
}

// settingsFile is the file of settings that a command line names; empty: none.
func settingsFile(kind string, f Flags) (name string) {
	switch kind {
	case "vllm", "sglang":
		name, _ = f.Get("--config")
	case "trtllm":
		name, _ = f.Get("--extra_llm_api_options", "--config")
	}
	return name
}

// readSettings reads a file of settings where the engine sees it.
func (s *Scanner) readSettings(c *candidate, out *settings, trusted bool) {
	if !trusted {
		// An ordinary user could have this process open anything.
		out.unread = "an ordinary user's process names it"
		return
	}
	name := fmt.Sprintf("%d/cwd/%s", c.pid, out.file)
	if path.IsAbs(out.file) {
		name = fmt.Sprintf("%d/root%s", c.pid, path.Clean(out.file))
	}
	if name = strings.ReplaceAll(name, "/./", "/"); !fs.ValidPath(name) {
		out.unread = "its name leads out of the directory that the engine was started in"
		return
	}
	info, err := fs.Stat(s.proc, name)
	switch {
	case err != nil:
		out.unread = reasonOf(err)
		return
	case !info.Mode().IsRegular():
		out.unread = "it is no regular file"
		return
	case info.Size() > maxConfigBytes:
		out.unread = fmt.Sprintf("it has more than %d bytes", maxConfigBytes)
		return
	}
	text, err := readSome(s.proc, name, maxConfigBytes)
	if err != nil {
		out.unread = reasonOf(err)
		return
	}
	out.take(c.kind.name, text)
}

// reasonOf is an error without the path, which is of this host's process table.
func reasonOf(err error) string {
	var p *fs.PathError
	if errors.As(err, &p) {
		return p.Err.Error()
	}
	return err.Error()
}

// take keeps what counts of a file's text.
func (out *settings) take(kind, text string) {
	list, odd := parseYAML(text)
	if odd != "" {
		out.unread = odd
	}
	for _, l := range list {
		top, under, nested := strings.Cut(l.name, ".")
		switch {
		case kind == "trtllm" && l.name == cacheConfig:
			var under map[string]json.RawMessage
			if json.Unmarshal([]byte(l.value), &under) != nil {
				out.unread = cacheConfig + " stands there in a form that is not read"
			}
			for name, value := range under {
				out.keep(cacheConfig+"."+name, string(value))
			}
		case kind == "trtllm":
			out.keep(l.name, l.value)
		case !slices.Contains(keptSettings, top):
		case top == keySetting:
			out.words = append(out.words, "--api-key")
		case nested:
			out.words = append(out.words, "--"+top+"."+under, l.value)
		case strings.HasPrefix(l.value, "{") && !json.Valid([]byte(l.value)):
			out.unread = top + " stands there in a form that is not read"
		case isTrue(l.value):
			out.words = append(out.words, "--"+top)
		case isFalse(l.value):
		default:
			out.words = append(out.words, "--"+top, l.value)
		}
	}
}

// under puts a command line's words after the settings: of a flag that is given
// twice the last one counts, as with the engines.
func (out *settings) under(words []string) Flags {
	if len(out.words) == 0 {
		return words
	}
	// What stands between keeps the last setting from taking the first word for its
	// value.
	return slices.Concat(out.words, []string{"--"}, words)
}

// keep keeps a value if it is one of those that count.
func (out *settings) keep(name, value string) {
	if !slices.Contains(keptValues, name) {
		return
	}
	if out.values == nil {
		out.values = map[string]string{}
	}
	out.values[name] = value
}

func isTrue(s string) bool { return slices.Contains([]string{"true", "on", "yes"}, strings.ToLower(s)) }

func isFalse(s string) bool {
	return slices.Contains([]string{"false", "off", "no"}, strings.ToLower(s))
}

// readEnvironment keeps what counts of a process's environment, if this process
// may see it.
func (s *Scanner) readEnvironment(c *candidate, out *settings) {
	if c.kind.name != "llamacpp" && c.kind.name != "vllm" {
		return
	}
	text, err := readSome(s.proc, strconv.Itoa(c.pid)+"/environ", maxEnvironBytes)
	if err != nil {
		return
	}
	for variable := range strings.SplitSeq(text, "\x00") {
		name, value, _ := strings.Cut(variable, "=")
		if slices.Contains(keyVariables, name) && value != "" {
			out.words = append(out.words, "--api-key")
			continue
		}
		e, known := environmentFlags[name]
		on := isTrue(value) || value == "1" || strings.EqualFold(value, "enabled")
		off := isFalse(value) || value == "0" || strings.EqualFold(value, "disabled")
		switch {
		case !known || c.kind.name != "llamacpp" || value == "":
		case e.takes:
			out.words = append(out.words, e.flag, value)
		case e.whenFalse && off, !e.whenFalse && on:
			out.words = append(out.words, e.flag)
		}
	}
}

// yamlLine is one scalar of a file, named by its keys with dots between, dashes
// as underscores.
type yamlLine struct{ name, value string }

// parseYAML reads the scalars of a file of settings: keys with values, and one
// level of keys below. odd names the first line that it cannot make anything of;
// what it holds is not known. Lists give their first entry.
func parseYAML(text string) (list []yamlLine, odd string) {
	top, skipping := "", false
	for n, line := range strings.Split(text, "\n") {
		if n >= maxSettings {
			return list, fmt.Sprintf("it has more than %d lines", maxSettings)
		}
		line = strings.TrimRight(withoutComment(line), " \t\r")
		body := strings.TrimLeft(line, " ")
		indent := len(line) - len(body)
		if body == "" || body == "---" || body == "..." || indent > 0 && skipping {
			continue
		}
		skipping = false
		if entry, ok := strings.CutPrefix(body, "- "); ok {
			if top != "" && !slices.ContainsFunc(list, func(l yamlLine) bool { return l.name == top }) {
				list = append(list, yamlLine{top, unquote(strings.TrimSpace(entry))})
			}
			continue
		}
		key, value, ok := cutKey(body)
		if !ok || indent > 0 && top == "" {
			if odd == "" {
				odd = fmt.Sprintf("its line %d is not read", n+1)
			}
			continue
		}
		if indent == 0 {
			top = key
		} else {
			key = top + "." + key
		}
		switch {
		case value == "" && indent > 0:
			list = append(list, yamlLine{key, ""}) // more stands below
		case value == "":
		case value[0] == '|' || value[0] == '>' || value[0] == '&' || value[0] == '*' || value[0] == '!':
			skipping = true
			if odd == "" {
				odd = fmt.Sprintf("its line %d is not read", n+1)
			}
		default:
			list = append(list, yamlLine{key, unquote(value)})
		}
	}
	return list, odd
}

// cutKey cuts "key: value".
func cutKey(body string) (key, value string, ok bool) {
	key, value, ok = strings.Cut(body, ":")
	if !ok || value != "" && value[0] != ' ' && value[0] != '\t' {
		return "", "", false
	}
	key = strings.ReplaceAll(unquote(strings.TrimSpace(key)), "-", "_")
	return key, strings.TrimSpace(value), key != "" && !strings.ContainsAny(key, " .{}[]\"'")
}

// withoutComment is a line up to a # that begins it or follows a space, outside
// quotes.
func withoutComment(line string) string {
	quote := byte(0)
	for i := range len(line) {
		switch b := line[i]; {
		case quote != 0:
			if b == quote {
				quote = 0
			}
		case b == '"' || b == '\'':
			quote = b
		case b == '#' && (i == 0 || line[i-1] == ' ' || line[i-1] == '\t'):
			return line[:i]
		}
	}
	return line
}

// unquote takes a scalar's quotes off.
func unquote(s string) string {
	if len(s) < 2 || s[0] != s[len(s)-1] {
		return s
	}
	switch s[0] {
	case '\'':
		return strings.ReplaceAll(s[1:len(s)-1], "''", "'")
	case '"':
		if t, err := strconv.Unquote(s); err == nil {
			return t
		}
		return s[1 : len(s)-1]
	}
	return s
}
