package daemon

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/pelletier/go-toml/v2"
	"github.com/pelletier/go-toml/v2/unstable"
)

// maxFileBytes bounds a configuration file; a larger one is another kind of file.
const maxFileBytes = 1 << 20

// document is a parsed TOML file with the line of every key.
type document struct {
	name  string // shown in errors
	root  map[string]any
	lines map[string]int // by path
}

// path is a key as the file nests it; separators cannot occur in keys.
type path string

const pathSep = "\x00"

func (p path) child(key string) path {
	if p == "" {
		return path(key)
	}
	return p + pathSep + path(key)
}

func (p path) item(i int) path { return p + pathSep + path(strconv.Itoa(i)) }

func (d *document) line(p path) int { return d.lines[string(p)] }

// readDocument reads and parses a file.
func readDocument(file string) (*document, error) {
	info, err := os.Stat(file)
	if err != nil {
		return nil, err
	}
	if info.Size() > maxFileBytes {
		return nil, fmt.Errorf("%s: %d bytes, a configuration has at most %d", file, info.Size(), maxFileBytes)
	}
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	return parseDocument(filepath.Base(file), data)
}

func parseDocument(name string, data []byte) (*document, error) {
	d := &document{name: name, root: map[string]any{}, lines: map[string]int{}}
	if err := toml.Unmarshal(data, &d.root); err != nil {
		var de *toml.DecodeError
		if errors.As(err, &de) {
			row, _ := de.Position()
			msg := strings.TrimPrefix(de.Error(), "toml: ")
			if strings.Contains(msg, "at start of value") {
				msg += " (strings need quotes)"
			}
			return nil, &Error{Where: name + ":" + strconv.Itoa(row), Msg: msg}
		}
		return nil, &Error{Where: name, Msg: strings.TrimPrefix(err.Error(), "toml: ")}
	}
	d.index(data)
	return d, nil
}

// index notes the line of every key. The text has parsed before.
func (d *document) index(data []byte) {
	p := &unstable.Parser{}
	p.Reset(data)
	counts := map[path]int{} // elements so far of each list of tables
	var table path
	for p.NextExpression() {
		e := p.Expression()
		switch e.Kind {
		case unstable.Table, unstable.ArrayTable:
			table = ""
			for it := e.Key(); it.Next(); {
				k := it.Node()
				table = table.child(string(k.Data))
				d.note(table, p, k)
				if it.IsLast() && e.Kind == unstable.ArrayTable {
					counts[table]++
				}
				if n := counts[table]; n > 0 { // further keys are of its last element
					table = table.item(n - 1)
					d.note(table, p, k)
				}
			}
		case unstable.KeyValue:
			d.indexKeyValue(table, p, e)
		}
	}
}

func (d *document) indexKeyValue(at path, p *unstable.Parser, e *unstable.Node) {
	var last *unstable.Node
	for it := e.Key(); it.Next(); {
		last = it.Node()
		at = at.child(string(last.Data))
		d.note(at, p, last)
	}
	d.indexValue(at, p, e.Value(), last)
}

// indexValue notes what is inside a value; near is the key it belongs to.
func (d *document) indexValue(at path, p *unstable.Parser, v, near *unstable.Node) {
	switch v.Kind {
	case unstable.InlineTable:
		for it := v.Children(); it.Next(); {
			if it.Node().Kind == unstable.KeyValue {
				d.indexKeyValue(at, p, it.Node())
			}
		}
	case unstable.Array:
		i := 0
		for it := v.Children(); it.Next(); {
			if it.Node().Kind == unstable.Comment {
				continue
			}
			d.note(at.item(i), p, near)
			d.indexValue(at.item(i), p, it.Node(), near)
			i++
		}
	}
}

func (d *document) note(at path, p *unstable.Parser, key *unstable.Node) {
	if _, known := d.lines[string(at)]; !known {
		d.lines[string(at)] = p.Shape(key.Raw).Start.Line
	}
}
