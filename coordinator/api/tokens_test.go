package api

import (
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protojson"

	waypostv1 "waypost/proto/waypost/v1"
)

func TestLiftTokens(t *testing.T) {
	le := binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint32(nil, 7), 1<<31)
	for _, c := range []struct {
		name, body string
		ids        []uint32
		rest       string
		err        string
	}{
		{name: "numbers", body: `{"input":{"tokenIds":[1, 2,4294967295]},"pool":"p"}`, ids: []uint32{1, 2, 4294967295}, rest: `{"input":{"tokenIds":null},"pool":"p"}`},
		{name: "proto name", body: `{"input":{"token_ids":[5]}}`, ids: []uint32{5}, rest: `{"input":{"token_ids":null}}`},
		{name: "base64", body: `{"input":{"tokenIds":"` + base64.StdEncoding.EncodeToString(le) + `"}}`, ids: []uint32{7, 1 << 31}, rest: `{"input":{"tokenIds":null}}`},
		{name: "empty", body: `{"input":{"tokenIds":[]}}`, ids: []uint32{}, rest: `{"input":{"tokenIds":null}}`},
		{name: "none", body: `{"input":{"prompt":"tokenIds"}}`, rest: `{"input":{"prompt":"tokenIds"}}`},
		{name: "same name elsewhere", body: `{"input":{"messages":[{"tokenIds":[1]}]}}`, rest: `{"input":{"messages":[{"tokenIds":[1]}]}}`},
		{name: "outside input", body: `{"other":{"tokenIds":[1]},"input":{}}`, rest: `{"other":{"tokenIds":[1]},"input":{}}`},
		{name: "key inside a string", body: `{"input":{"prompt":"\"tokenIds\":[1]"}}`, rest: `{"input":{"prompt":"\"tokenIds\":[1]"}}`},
		{name: "negative", body: `{"input":{"tokenIds":[1,-4]}}`, err: "-4 is not a token id (0 to 4294967295)"},
		{name: "2^32", body: `{"input":{"tokenIds":[4294967296]}}`, err: "4294967296 is not a token id"},
		{name: "fraction", body: `{"input":{"tokenIds":[1.5]}}`, err: "1.5 is not a token id"},
		{name: "null inside", body: `{"input":{"tokenIds":[null]}}`, err: "null is not a token id"},
		{name: "nothing between commas", body: `{"input":{"tokenIds":[1,,2]}}`, err: "nothing is not a token id"},
		{name: "no comma", body: `{"input":{"tokenIds":[1 2]}}`, err: "a comma or ] must follow"},
		{name: "three bytes", body: `{"input":{"tokenIds":"AAAA"}}`, err: "3 bytes are not a whole number"},
		{name: "not base64", body: `{"input":{"tokenIds":"*"}}`, err: "base64"},
	} {
		t.Run(c.name, func(t *testing.T) {
			rest, ids, err := liftTokens([]byte(c.body), new(idPool))
			if c.err != "" {
				if err == nil || !strings.Contains(err.Error(), c.err) || !strings.HasPrefix(FieldOf(err), "input.token_ids") {
					t.Fatalf("error %v (field %q), want one with %q", err, FieldOf(err), c.err)
				}
				return
			}
			if err != nil || string(rest) != c.rest || !slices.Equal(ids, c.ids) || (ids == nil) != (c.ids == nil) {
				t.Errorf("got %s %v %v, want %s %v", rest, ids, err, c.rest, c.ids)
			}
		})
	}
}

// FuzzLiftTokens compares the scanner with the general decoder: what the
// scanner accepts must be exactly what is in the JSON.
func FuzzLiftTokens(f *testing.F) {
	f.Add([]byte(`{"input":{"tokenIds":[1,2,3]}}`))
	f.Add([]byte(`{"input":{"prompt":"x","tokenIds":"AQAAAA=="},"pool":"p"}`))
	f.Add([]byte(`{"a":[{"input":{"tokenIds":[9]}}],"input":{"messages":[{"content":"\\\""}],"tokenIds":[ 4 ]}}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		rest, ids, err := liftTokens(body, new(idPool))
		if err != nil || ids == nil || !json.Valid(body) {
			return
		}
		if !json.Valid(rest) {
			t.Fatalf("valid JSON %s became %s", body, rest)
		}
		req := &waypostv1.PlaceRequest{}
		if protojson.Unmarshal(body, req) != nil {
			return // base64, unknown fields, or a place only a lenient reader accepts
		}
		if want := req.GetInput().GetTokenIds(); !slices.Equal(ids, want) {
			t.Fatalf("scanner found %v in %s, the general decoder %v", ids, body, want)
		}
	})
}

func BenchmarkLiftTokens16k(b *testing.B) {
	ids := make([]uint32, 16384)
	for i := range ids {
		ids[i] = uint32(i * 7919 % 151000)
	}
	list, err := json.Marshal(ids)
	if err != nil {
		b.Fatal(err)
	}
	body := []byte(`{"pool":"p","input":{"tokenIds":` + string(list) + `}}`)
	b.SetBytes(int64(len(body)))
	b.ReportAllocs()
	for b.Loop() {
		if _, got, err := liftTokens(body, new(idPool)); err != nil || len(got) != len(ids) {
			b.Fatal(err)
		}
	}
}
