package daemon

import (
	"encoding"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"
)

// Enum is implemented by string types with a fixed set of values.
type Enum interface {
	// Allowed returns the values in the order in which to show them.
	Allowed() []string
}

// Validator is implemented by values and tables that must be checked as a
// whole. Validate is called once everything is merged.
type Validator interface {
	Validate() error
}

// FieldError lets the Validate of a table blame one of its fields.
type FieldError struct {
	Field string // toml name within the table
	Err   error
}

func (e *FieldError) Error() string { return e.Field + ": " + e.Err.Error() }
func (e *FieldError) Unwrap() error { return e.Err }

// Defaulter is implemented by the element type of a list of tables to give a
// new element its defaults.
type Defaulter interface {
	SetDefaults()
}

// field is one row of the table of a configuration struct.
type field struct {
	key    string // "mesh.listen"
	value  reflect.Value
	help   string
	secret bool
	reload bool
	tables bool // a list of tables, "engine"
}

var (
	textType = reflect.TypeFor[encoding.TextUnmarshaler]()
	sizeType = reflect.TypeFor[Size]()

	optionalIntType = reflect.TypeFor[OptionalInt]()
)

// isText says whether values of t are written as text by their own rule.
func isText(t reflect.Type) bool { return reflect.PointerTo(t).Implements(textType) }

// isLeaf says whether values of t are single values of a file.
func isLeaf(t reflect.Type) bool {
	if isText(t) {
		return true
	}
	switch t.Kind() {
	case reflect.String, reflect.Bool, reflect.Int, reflect.Int64, reflect.Uint16, reflect.Uint32, reflect.Uint64, reflect.Float64:
		return true
	default:
		return false
	}
}

// fieldsOf makes the table of a configuration struct. It panics on a struct that
// cannot be a configuration: that is a fault of the program.
func fieldsOf(cfg any) []field {
	v := reflect.ValueOf(cfg)
	if v.Kind() != reflect.Pointer || v.Elem().Kind() != reflect.Struct {
		panic(fmt.Sprintf("daemon: configuration must be a pointer to a struct, not %T", cfg))
	}
	return appendFields(nil, "", v.Elem())
}

func appendFields(rows []field, prefix string, v reflect.Value) []field {
	for i := range v.NumField() {
		sf := v.Type().Field(i)
		name := sf.Tag.Get("toml")
		if name == "-" || !sf.IsExported() {
			continue
		}
		if name == "" {
			panic(fmt.Sprintf("daemon: field %s of %s has no toml tag", sf.Name, v.Type()))
		}
		row := field{
			key: prefix + name, value: v.Field(i), help: sf.Tag.Get("help"),
			secret: sf.Tag.Get("secret") == "true", reload: sf.Tag.Get("reload") == "true",
		}
		t := sf.Type
		switch {
		case isLeaf(t):
			rows = append(rows, row)
		case t.Kind() == reflect.Struct:
			rows = appendFields(rows, row.key+".", v.Field(i))
		case t.Kind() == reflect.Slice && isLeaf(t.Elem()):
			rows = append(rows, row)
		case t.Kind() == reflect.Slice && t.Elem().Kind() == reflect.Struct:
			row.tables = true
			rows = append(rows, row)
		default:
			panic(fmt.Sprintf("daemon: field %s has type %s, which a file cannot hold", row.key, t))
		}
	}
	return rows
}

// setValue sets a leaf or a list of leaves from a value of a TOML file.
func setValue(v reflect.Value, in any) error {
	if v.Kind() == reflect.Slice && !isText(v.Type()) {
		list, ok := in.([]any)
		if !ok {
			return fmt.Errorf("want a list, have %s", describe(in))
		}
		out := reflect.MakeSlice(v.Type(), len(list), len(list))
		for i, item := range list {
			if err := setValue(out.Index(i), item); err != nil {
				return fmt.Errorf("item %d: %w", i+1, err)
			}
		}
		v.Set(out)
		return nil
	}
	s, isString := in.(string)
	if n, ok := in.(int64); ok && (v.Type() == sizeType || v.Type() == optionalIntType) {
		s, isString = strconv.FormatInt(n, 10), true // a plain number
	}
	if v.Type() == optionalIntType && !isString {
		return fmt.Errorf("want a whole number, have %s", describe(in))
	}
	if isText(v.Type()) || v.Kind() == reflect.String {
		if !isString {
			return fmt.Errorf("want a string in quotes, have %s", describe(in))
		}
		return setText(v, s)
	}
	switch x := in.(type) {
	case bool:
		if v.Kind() == reflect.Bool {
			v.SetBool(x)
			return nil
		}
	case int64:
		if v.Kind() != reflect.Bool && setText(v, strconv.FormatInt(x, 10)) == nil {
			return nil
		}
	case float64:
		if v.Kind() == reflect.Float64 {
			v.SetFloat(x)
			return nil
		}
	}
	return fmt.Errorf("want %s, have %s", wanted(v), describe(in))
}

// setText sets a leaf or a list of leaves from text, as environment and flags have it.
func setText(v reflect.Value, s string) error {
	if v.Kind() == reflect.Slice && !isText(v.Type()) {
		var items []string
		if strings.TrimSpace(s) != "" {
			items = strings.Split(s, ",")
		}
		out := reflect.MakeSlice(v.Type(), len(items), len(items))
		for i, item := range items {
			if err := setText(out.Index(i), strings.TrimSpace(item)); err != nil {
				return fmt.Errorf("item %d: %w", i+1, err)
			}
		}
		v.Set(out)
		return nil
	}
	if isText(v.Type()) {
		// The value changes only if the text is good.
		fresh := reflect.New(v.Type())
		if err := fresh.Interface().(encoding.TextUnmarshaler).UnmarshalText([]byte(s)); err != nil {
			return err
		}
		v.Set(fresh.Elem())
		return nil
	}
	switch v.Kind() {
	case reflect.String:
		if e, ok := v.Interface().(Enum); ok && !slices.Contains(e.Allowed(), s) {
			return fmt.Errorf("%q is not allowed; want one of %s", s, strings.Join(e.Allowed(), ", "))
		}
		v.SetString(s)
		return nil
	case reflect.Bool:
		if b, err := strconv.ParseBool(s); err == nil {
			v.SetBool(b)
			return nil
		}
	case reflect.Float64:
		if f, err := strconv.ParseFloat(s, 64); err == nil {
			v.SetFloat(f)
			return nil
		}
	case reflect.Int, reflect.Int64:
		if n, err := strconv.ParseInt(s, 10, v.Type().Bits()); err == nil {
			v.SetInt(n)
			return nil
		}
	default:
		if n, err := strconv.ParseUint(s, 10, v.Type().Bits()); err == nil {
			v.SetUint(n)
			return nil
		}
	}
	return fmt.Errorf("want %s, have %.80q", wanted(v), s)
}

func wanted(v reflect.Value) string {
	switch v.Kind() {
	case reflect.Bool:
		return "true or false"
	case reflect.Float64:
		return "a number"
	case reflect.Uint16, reflect.Uint32, reflect.Uint64:
		return "a whole number, 0 or more, of " + strconv.Itoa(v.Type().Bits()) + " bits"
	default:
		return "a whole number"
	}
}

func describe(in any) string {
	switch x := in.(type) {
	case string:
		return fmt.Sprintf("the string %.80q", x)
	case bool:
		return fmt.Sprintf("%v", x)
	case int64, float64:
		return fmt.Sprintf("the number %v", x)
	case []any:
		return "a list"
	case map[string]any:
		return "a table"
	default:
		return "a date or time"
	}
}

// show renders a value as a TOML file would have it.
func show(v reflect.Value) string {
	if v.Kind() == reflect.Slice && !isText(v.Type()) {
		if v.Type().Elem().Kind() == reflect.Struct && !isText(v.Type().Elem()) {
			return fmt.Sprintf("%d tables", v.Len())
		}
		items := make([]string, v.Len())
		for i := range items {
			items[i] = show(v.Index(i))
		}
		return "[" + strings.Join(items, ", ") + "]"
	}
	if n, ok := v.Interface().(OptionalInt); ok && n.Set {
		return strconv.Itoa(n.Value)
	}
	if m, ok := v.Interface().(encoding.TextMarshaler); ok {
		if text, err := m.MarshalText(); err == nil {
			return strconv.Quote(string(text))
		}
	}
	if v.Kind() == reflect.String {
		return strconv.Quote(v.String())
	}
	return fmt.Sprintf("%v", v.Interface())
}
