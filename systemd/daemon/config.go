package daemon

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/pflag"
)

// ErrConfig is in the chain of every error about a configuration: the daemon
// exits with status 2, on which its unit is not started again.
var ErrConfig = errors.New("configuration error")

// Error is one thing wrong with a configuration.
type Error struct {
	Where string // "agent.toml:12", "WAYPOST_LOG_LEVEL", "--log.level"
	Msg   string
}

func (e *Error) Error() string { return e.Where + ": " + e.Msg }

// Is makes every Error an ErrConfig.
func (e *Error) Is(target error) bool { return target == ErrConfig }

// maxErrors bounds how many faults are shown at once.
const maxErrors = 20

// Source says where a value comes from.
type Source struct {
	Kind  string // "default", "file", "env" or "flag"
	Where string // "agent.toml:12", "WAYPOST_LOG_LEVEL", "--log.level"; empty for defaults
}

func (s Source) String() string {
	if s.Where == "" {
		return s.Kind
	}
	return s.Where
}

// Setting is one row of `config show`.
type Setting struct {
	Key        string
	Value      string // as a TOML file would have it; secrets are hidden
	Default    string
	Source     Source
	Help       string
	Reloadable bool // taken over by a reload, without a restart
}

// LoadOptions say what is laid over the defaults.
type LoadOptions struct {
	// File is the configuration file; empty: none.
	File string
	// MustExist makes a missing file an error. The standard path may be missing.
	MustExist bool
	// Env is the environment as os.Environ gives it; only names with EnvPrefix
	// are looked at. "mesh.listen" is WAYPOST_MESH_LISTEN.
	Env []string
	// Flags are flags made by [BindFlags], parsed; nil: none.
	Flags *pflag.FlagSet
}

// EnvPrefix begins the names of environment variables.
const EnvPrefix = "WAYPOST_"

// Loaded tells where the values of a configuration come from.
type Loaded struct {
	// Settings are all settings in the order of the struct.
	Settings []Setting
	// UnknownEnv are variables whose names are nearly those of settings, each with
	// the setting that may be meant. They are worth a warning and no error: other
	// commands have variables of their own.
	UnknownEnv []string
}

// Load lays file, environment and flags over the defaults in cfg, a pointer to a
// struct with toml tags. When it returns an error, cfg is not changed; the error
// is an [ErrConfig] and lists all that is wrong, one fault per line.
func Load(cfg any, opts LoadOptions) (*Loaded, error) {
	target := reflect.ValueOf(cfg)
	fresh := reflect.New(target.Elem().Type())
	fresh.Elem().Set(target.Elem())
	l := &loader{fields: fieldsOf(fresh.Interface()), sources: map[string]Source{}, lines: map[string]string{}}
	defaults := make([]string, len(l.fields))
	for i, f := range l.fields {
		defaults[i] = f.show()
	}
	if opts.File != "" {
		l.file(opts.File, opts.MustExist)
	}
	l.env(opts.Env)
	if opts.Flags != nil {
		l.flags(opts.Flags)
	}
	if len(l.errs) == 0 {
		l.validate(fresh.Elem(), "")
	}
	if err := l.err(); err != nil {
		return nil, err
	}
	target.Elem().Set(fresh.Elem())
	out := &Loaded{UnknownEnv: l.unknownEnv}
	for i, f := range l.fields {
		src, ok := l.sources[f.key]
		if !ok {
			src = Source{Kind: "default"}
		}
		out.Settings = append(out.Settings, Setting{Key: f.key, Value: f.show(), Default: defaults[i], Source: src, Help: f.help, Reloadable: f.reload})
	}
	return out, nil
}

func (f field) show() string {
	if f.secret && !f.value.IsZero() {
		return `"(hidden)"`
	}
	return show(f.value)
}

// Change is a setting with different values in two configurations of one type.
type Change struct {
	Key, Old, New string
	Reloadable    bool
}

// Diff returns what differs between two configurations of one type.
func Diff(before, after any) []Change {
	a, b := fieldsOf(before), fieldsOf(after)
	var out []Change
	for i := range a {
		if !reflect.DeepEqual(a[i].value.Interface(), b[i].value.Interface()) {
			out = append(out, Change{Key: a[i].key, Old: a[i].show(), New: b[i].show(), Reloadable: a[i].reload})
		}
	}
	return out
}

// BindFlags adds one flag per setting, "--mesh.listen" for example. Lists of
// tables have none. The flags hold text only; [Load] reads it.
func BindFlags(fs *pflag.FlagSet, cfg any) {
	for _, f := range fieldsOf(cfg) {
		if !f.tables {
			usage := f.help
			if usage == "" {
				usage = "sets " + f.key
			}
			fs.String(f.key, "", usage+" (default "+f.show()+")")
		}
	}
}

func envName(key string) string {
	return EnvPrefix + strings.ToUpper(strings.NewReplacer(".", "_", "-", "_").Replace(key))
}

// loader collects faults and sources while the layers are laid.
type loader struct {
	fields     []field
	sources    map[string]Source
	lines      map[string]string // where a table or an element of a list begins
	errs       []*Error
	unknownEnv []string
}

func (l *loader) fail(where, format string, args ...any) {
	l.errs = append(l.errs, &Error{Where: where, Msg: fmt.Sprintf(format, args...)})
}

// err joins the faults in the order of the file's lines.
func (l *loader) err() error {
	slices.SortStableFunc(l.errs, func(a, b *Error) int {
		fa, la := splitWhere(a.Where)
		fb, lb := splitWhere(b.Where)
		return cmp.Or(cmp.Compare(fa, fb), cmp.Compare(la, lb), cmp.Compare(a.Msg, b.Msg))
	})
	var errs []error
	for i, e := range l.errs {
		if i == maxErrors {
			errs = append(errs, &Error{Where: "…", Msg: fmt.Sprintf("and %d more", len(l.errs)-i)})
			break
		}
		errs = append(errs, e)
	}
	return errors.Join(errs...)
}

func splitWhere(where string) (file string, line int) {
	if i := strings.LastIndexByte(where, ':'); i >= 0 {
		if n, err := strconv.Atoi(where[i+1:]); err == nil {
			return where[:i], n
		}
	}
	return where, 0
}

func (l *loader) file(file string, mustExist bool) {
	doc, err := readDocument(file)
	var e *Error
	switch {
	case errors.Is(err, fs.ErrNotExist) && !mustExist:
		return
	case errors.As(err, &e):
		l.errs = append(l.errs, e)
		return
	case err != nil:
		l.fail(filepath.Base(file), "%v", err)
		return
	}
	l.document(doc)
}

func (l *loader) document(doc *document) {
	rows := rowsByKey(l.fields)
	l.walk(doc, doc.root, rows, keysOf(l.fields), "", "", "", func(f field, where string) {
		l.sources[f.key] = Source{Kind: "file", Where: where}
	})
}

func rowsByKey(fields []field) map[string]field {
	rows := map[string]field{}
	for _, f := range fields {
		rows[f.key] = f
	}
	return rows
}

func keysOf(fields []field) []string {
	keys := make([]string, 0, len(fields))
	for _, f := range fields {
		keys = append(keys, f.key)
		if f.tables {
			for _, sub := range fieldsOf(reflect.New(f.value.Type().Elem()).Interface()) {
				keys = append(keys, f.key+"."+sub.key)
			}
		}
	}
	return keys
}

// walk takes one table of a file in. prefix is its key within rows, at its
// place in the document, and outer the list of tables that it is an element of.
func (l *loader) walk(doc *document, t map[string]any, rows map[string]field, known []string, at path, prefix, outer string, set func(field, string)) {
	for name, value := range t {
		key := prefix + name
		here := at.child(name)
		where := doc.name + ":" + strconv.Itoa(doc.line(here))
		row, ok := rows[key]
		switch {
		case ok && row.tables:
			l.tables(doc, row, value, here, where, outer, set)
		case ok:
			if err := setValue(row.value, value); err != nil {
				l.fail(where, "%s: %v", outer+key, err)
			} else {
				set(row, where)
			}
		case isTable(rows, key):
			sub, ok := value.(map[string]any)
			if !ok {
				l.fail(where, "%s: want a table, have %s", outer+key, describe(value))
				continue
			}
			l.lines[outer+key] = where
			l.walk(doc, sub, rows, known, here, key+".", outer, set)
		default:
			l.unknown(doc, value, known, here, where, outer+key)
		}
	}
}

// isTable says whether a key is that of a table with known settings.
func isTable(rows map[string]field, key string) bool {
	for k := range rows {
		if strings.HasPrefix(k, key+".") {
			return true
		}
	}
	return false
}

// unknown reports a key that is no setting; of an unknown table its keys.
func (l *loader) unknown(doc *document, value any, known []string, at path, where, key string) {
	if sub, ok := value.(map[string]any); ok && len(sub) > 0 {
		for name, v := range sub {
			here := at.child(name)
			l.unknown(doc, v, known, here, doc.name+":"+strconv.Itoa(doc.line(here)), key+"."+name)
		}
		return
	}
	l.fail(where, "unknown key %q%s", key, didYouMean(key, known))
}

func didYouMean(key string, known []string) string {
	if n, ok := nearest(key, known); ok {
		return fmt.Sprintf("; did you mean %q?", n)
	}
	return ""
}

// tables takes a list of tables in.
func (l *loader) tables(doc *document, row field, value any, at path, where, outer string, set func(field, string)) {
	list, ok := value.([]any)
	if !ok {
		l.fail(where, "%s: want a list of tables ([[%s]]), have %s", outer+row.key, row.key, describe(value))
		return
	}
	elem := row.value.Type().Elem()
	out := reflect.MakeSlice(row.value.Type(), len(list), len(list))
	for i, item := range list {
		here := at.item(i)
		line := doc.name + ":" + strconv.Itoa(doc.line(here))
		t, ok := item.(map[string]any)
		if !ok {
			l.fail(line, "%s: want a table, have %s", outer+row.key, describe(item))
			continue
		}
		element := reflect.New(elem)
		if d, ok := element.Interface().(Defaulter); ok {
			d.SetDefaults()
		}
		fields := fieldsOf(element.Interface())
		key := outer + row.key + "[" + strconv.Itoa(i) + "]"
		l.lines[key] = line
		known := keysOf(fields)
		for j := range known {
			known[j] = outer + row.key + "." + known[j]
		}
		l.walk(doc, t, rowsByKey(fields), known, here, "", outer+row.key+".", func(f field, w string) {
			l.lines[key+"."+f.key] = w
		})
		out.Index(i).Set(element.Elem())
	}
	row.value.Set(out)
	set(row, where)
}

func (l *loader) env(environ []string) {
	byName := map[string]field{}
	var names []string
	for _, f := range l.fields {
		if !f.tables {
			byName[envName(f.key)] = f
			names = append(names, strings.TrimPrefix(envName(f.key), EnvPrefix))
		}
	}
	for _, kv := range environ {
		name, value, _ := strings.Cut(kv, "=")
		if !strings.HasPrefix(name, EnvPrefix) {
			continue
		}
		f, ok := byName[name]
		if !ok {
			if near, ok := nearest(strings.TrimPrefix(name, EnvPrefix), names); ok {
				l.unknownEnv = append(l.unknownEnv, fmt.Sprintf("%s; did you mean %s?", name, EnvPrefix+near))
			}
			continue
		}
		if err := setText(f.value, value); err != nil {
			l.fail(name, "%s: %v", f.key, err)
			continue
		}
		l.sources[f.key] = Source{Kind: "env", Where: name}
	}
	slices.Sort(l.unknownEnv)
}

func (l *loader) flags(flags *pflag.FlagSet) {
	rows := rowsByKey(l.fields)
	flags.Visit(func(fl *pflag.Flag) {
		f, ok := rows[fl.Name]
		if !ok || f.tables {
			return // a flag of the command, not of the configuration
		}
		if err := setText(f.value, fl.Value.String()); err != nil {
			l.fail("--"+f.key, "%v", err)
			return
		}
		l.sources[f.key] = Source{Kind: "flag", Where: "--" + f.key}
	})
}

// validate runs the Validate of every value and table, inner ones first.
func (l *loader) validate(v reflect.Value, key string) {
	t := v.Type()
	switch {
	case t.Kind() == reflect.Struct && !isText(t):
		for i := range v.NumField() {
			name := t.Field(i).Tag.Get("toml")
			if name != "-" && t.Field(i).IsExported() {
				l.validate(v.Field(i), join(key, name))
			}
		}
	case t.Kind() == reflect.Slice && !isText(t):
		for i := range v.Len() {
			l.validate(v.Index(i), key+"["+strconv.Itoa(i)+"]")
		}
	}
	val, ok := v.Interface().(Validator)
	if !ok && v.CanAddr() {
		val, ok = v.Addr().Interface().(Validator)
	}
	if !ok {
		return
	}
	err := val.Validate()
	if err == nil {
		return
	}
	var fe *FieldError
	if errors.As(err, &fe) {
		key, err = join(key, fe.Field), fe.Err
	}
	if key == "" {
		l.fail(l.where(key), "%v", err)
	} else {
		l.fail(l.where(key), "%s: %v", key, err)
	}
}

func join(a, b string) string {
	if a == "" {
		return b
	}
	return a + "." + b
}

// where returns the place to blame for a key: where it is set, else where its
// table begins, else the defaults.
func (l *loader) where(key string) string {
	for k := key; k != ""; {
		if s, ok := l.sources[k]; ok && s.Where != "" {
			return s.Where
		}
		if w, ok := l.lines[k]; ok {
			return w
		}
		i := max(strings.LastIndexByte(k, '.'), strings.LastIndexByte(k, '['))
		if i < 0 {
			break
		}
		k = k[:i]
	}
	return "configuration"
}
