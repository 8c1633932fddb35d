package llamacpp

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"strings"
	"syscall"
)

// errGGUF means that a model's file does not tell the size of its KV.
var errGGUF = errors.New("model file")

// Bounds of a model's file: what is beyond them is not read.
const (
	maxHeaderBytes = 64 << 20 // vocabularies stand between the fields
	maxFields      = 1 << 16
	maxTextBytes   = 1 << 16
	maxLayers      = 1 << 12
)

// The types of values in a GGUF file.
const (
	ggufText, ggufList = 8, 9
)

// ggufBytes are the sizes of the other types.
var ggufBytes = map[uint32]int{0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}

// otherCaches are parts of the names of fields that only models have which do
// not keep one key and one value of every layer for each token.
var otherCaches = []string{".sliding_window", ".kv_lora_rank", ".ssm.", ".shortconv.", ".wkv", ".full_attention_interval", ".shared_kv_layers"}

// shape is how much a model keeps for each token.
type shape struct {
	// keys and values are the elements of all layers.
	keys, values int
}

// readShape reads the fields at the head of a GGUF file.
func readShape(name string) (shape, error) {
	// A pipe of that name must not hold the agent up.
	f, err := os.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return shape{}, fmt.Errorf("%w: %w", errGGUF, err)
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		return shape{}, fmt.Errorf("%w: not a regular file", errGGUF)
	}
	return parseShape(io.LimitReader(f, maxHeaderBytes))
}

func parseShape(in io.Reader) (shape, error) {
	r := &ggufReader{r: bufio.NewReaderSize(in, 64<<10)}
	if magic := r.bytes(4); string(magic) != "GGUF" {
		return shape{}, fmt.Errorf("%w: not a GGUF file", errGGUF)
	}
	if v := r.uint(4); v != 2 && v != 3 {
		return shape{}, fmt.Errorf("%w: version %d of GGUF is not known", errGGUF, v)
	}
	r.uint(8) // tensors
	count := r.uint(8)
	if count > maxFields {
		return shape{}, fmt.Errorf("%w: %d fields", errGGUF, count)
	}
	fields, architecture := map[string][]int{}, ""
	for i := uint64(0); i < count && r.err == nil; i++ {
		name := r.text()
		t := uint32(r.uint(4))
		for _, other := range otherCaches {
			if strings.Contains(name, other) {
				return shape{}, fmt.Errorf("%w: %s: not every layer keeps every token", errGGUF, name)
			}
		}
		if name == "general.architecture" && t == ggufText {
			architecture = r.text()
			continue
		}
		if v := r.value(t); v != nil {
			fields[name] = v
		}
	}
	if r.err != nil {
		return shape{}, fmt.Errorf("%w: %w", errGGUF, r.err)
	}
	return shapeOf(architecture, fields)
}

func shapeOf(architecture string, fields map[string][]int) (s shape, err error) {
	one := func(name string, orElse int) int {
		v := fields[architecture+"."+name]
		if len(v) == 0 {
			return orElse
		}
		return v[0]
	}
	layers, width := one("block_count", 0), one("embedding_length", 0)
	heads := fields[architecture+".attention.head_count"]
	kvHeads := fields[architecture+".attention.head_count_kv"]
	if len(kvHeads) == 0 {
		kvHeads = heads
	}
	if layers < 1 || layers > maxLayers || width < 1 || len(heads) == 0 || slices.Min(heads) < 1 ||
		len(kvHeads) != 1 && len(kvHeads) != layers || slices.Min(kvHeads) < 1 {
		return s, fmt.Errorf("%w: fields of the attention of %.40q are missing", errGGUF, architecture)
	}
	// What a layer has of its own makes these the model's only if it is stated.
	key, value := one("attention.key_length", width/heads[0]), one("attention.value_length", width/heads[0])
	all := 0
	for i := range layers {
		all += kvHeads[min(i, len(kvHeads)-1)]
	}
	s = shape{keys: all * key, values: all * value}
	if s.keys < 1 || s.values < 1 || all > math.MaxInt32 || max(key, value) > math.MaxUint16 {
		return shape{}, fmt.Errorf("%w: fields of the attention of %.40q make no sense", errGGUF, architecture)
	}
	return s, nil
}

// ggufReader reads values until one fails.
type ggufReader struct {
	r   *bufio.Reader
	err error
	b   [8]byte
}

func (r *ggufReader) bytes(n int) []byte {
	if r.err == nil {
		_, r.err = io.ReadFull(r.r, r.b[:n])
	}
	if r.err != nil {
		clear(r.b[:])
	}
	return r.b[:n]
}

// uint reads a number of n bytes.
func (r *ggufReader) uint(n int) uint64 {
	b := r.bytes(n)
	switch n {
	case 1:
		return uint64(b[0])
	case 2:
		return uint64(binary.LittleEndian.Uint16(b))
	case 4:
		return uint64(binary.LittleEndian.Uint32(b))
	}
	return binary.LittleEndian.Uint64(b)
}

func (r *ggufReader) skip(n uint64) {
	if r.err == nil && n > maxHeaderBytes {
		r.err = errors.New("a value is too long")
	}
	if r.err == nil {
		_, r.err = r.r.Discard(int(n))
	}
}

func (r *ggufReader) text() string {
	n := r.uint(8)
	if r.err == nil && n > maxTextBytes {
		r.err = errors.New("a name is too long")
	}
	if r.err != nil {
		return ""
	}
	b := make([]byte, n)
	_, r.err = io.ReadFull(r.r, b)
	return string(b)
}

// value reads a value and returns its whole numbers, if it is one or a list of
// not more than there are layers.
func (r *ggufReader) value(t uint32) []int {
	switch t {
	case ggufText:
		r.skip(r.uint(8))
		return nil
	case ggufList:
		of, n := uint32(r.uint(4)), r.uint(8)
		if size := ggufBytes[of]; size > 0 && n > maxLayers {
			if n > maxHeaderBytes {
				r.err = errors.New("a list is too long")
				return nil
			}
			r.skip(n * uint64(size))
			return nil
		}
		var out []int
		for i := uint64(0); i < n && r.err == nil; i++ {
			if of == ggufText {
				r.skip(r.uint(8))
			} else if v := r.value(of); len(v) == 1 && of != ggufList {
				out = append(out, v[0])
			} else {
				r.err = errors.New("a list of lists")
			}
		}
		return out
	}
	size := ggufBytes[t]
	if size == 0 {
		if r.err == nil {
			r.err = fmt.Errorf("a value of type %d", t)
		}
		return nil
	}
	// Beyond 31 bits it is no length of anything; so is what is no whole number.
	return []int{int(min(r.uint(size), math.MaxInt32))}
}
