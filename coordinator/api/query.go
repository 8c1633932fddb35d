package api

import (
	"fmt"
	"net/http"
	"net/url"
	"sort"
	"strconv"
	"time"
)

// query reads a request's query parameters strictly: an unknown or malformed
// one is an error that names it, because a filter that is silently ignored
// answers another question than the one asked.
type query struct {
	values url.Values
	known  map[string]bool
	err    error
}

func newQuery(r *http.Request) *query {
	return &query{values: r.URL.Query(), known: map[string]bool{}}
}

func (q *query) get(name string) (string, bool) {
	q.known[name] = true
	if !q.values.Has(name) {
		return "", false
	}
	return q.values.Get(name), true
}

func (q *query) fail(name, detail string) {
	if q.err == nil {
		q.err = BadField(name, detail)
	}
}

func (q *query) str(name string) *string {
	if v, ok := q.get(name); ok {
		return &v
	}
	return nil
}

func (q *query) flag(name string) *bool {
	v, ok := q.get(name)
	if !ok {
		return nil
	}
	b, err := strconv.ParseBool(v)
	if err != nil && v != "" {
		q.fail(name, fmt.Sprintf("%q is not true or false", v))
	}
	b = b || v == ""
	return &b
}

func (q *query) count(name string) *uint32 {
	v, ok := q.get(name)
	if !ok {
		return nil
	}
	n, err := strconv.ParseUint(v, 10, 32)
	if err != nil {
		q.fail(name, fmt.Sprintf("%q is not a number from 0 to 4294967295", v))
	}
	u := uint32(n)
	return &u
}

// ms reads a duration such as 10m as milliseconds.
func (q *query) ms(name string) *float64 {
	v, ok := q.get(name)
	if !ok {
		return nil
	}
	d, err := time.ParseDuration(v)
	if err != nil || d < 0 {
		q.fail(name, fmt.Sprintf("%q is not a duration such as 10m", v))
	}
	ms := float64(d) / float64(time.Millisecond)
	return &ms
}

// ok reports a problem to the caller, unknown parameters included.
func (q *query) ok(w http.ResponseWriter) bool {
	if q.err == nil {
		for name := range q.values {
			if !q.known[name] {
				names := make([]string, 0, len(q.known))
				for k := range q.known {
					names = append(names, k)
				}
				sort.Strings(names)
				q.fail(name, fmt.Sprintf("unknown parameter; known are %v", names))
			}
		}
	}
	if q.err != nil {
		writeError(w, q.err)
		return false
	}
	return true
}
