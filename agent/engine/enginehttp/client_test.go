package enginehttp

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func serve(t *testing.T, h http.HandlerFunc) (*Client, *httptest.Server) {
	t.Helper()
	s := httptest.NewServer(h)
	c, err := New(Options{URL: s.URL + "/base/?x=1", APIKey: " secret\n"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		c.Close()
		s.CloseClientConnections()
		s.Close()
	})
	return c, s
}

// A lying engine costs one refused answer of bounded time and memory.
func TestBadAnswers(t *testing.T) {
	var elsewhere atomic.Int32
	other := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { elsewhere.Add(1) }))
	defer other.Close()
	var bomb bytes.Buffer
	z := gzip.NewWriter(&bomb)
	for range 4 {
		if _, err := z.Write(make([]byte, 1<<20)); err != nil {
			t.Fatal(err)
		}
	}
	z.Close()
	hold := func(w http.ResponseWriter, r *http.Request) {
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	}
	for _, test := range []struct {
		name   string
		answer http.HandlerFunc
		is     error
		says   string
	}{
		{"endless", func(w http.ResponseWriter, _ *http.Request) {
			for block := bytes.Repeat([]byte("x 1\n"), 1000); ; {
				if _, err := w.Write(block); err != nil {
					return
				}
			}
		}, ErrTooLarge, "more than 100000 bytes"},
		{"one byte too much", func(w http.ResponseWriter, _ *http.Request) { w.Write(make([]byte, 100_001)) }, ErrTooLarge, ""},
		{"a length that is a lie", func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Length", "99999999999999")
			w.Write([]byte("x"))
			w.(http.Flusher).Flush()
			panic(http.ErrAbortHandler)
		}, io.ErrUnexpectedEOF, ""},
		{"slow to begin", func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }, nil, "deadline"},
		{"slow to end", func(w http.ResponseWriter, r *http.Request) {
			w.Write([]byte("x"))
			hold(w, r)
		}, nil, "deadline"},
		{"drip by drip", func(w http.ResponseWriter, r *http.Request) {
			for r.Context().Err() == nil {
				w.Write([]byte("x"))
				w.(http.Flusher).Flush()
			}
		}, nil, ""}, // time or size ends it, whichever is first
		{"redirect to another host", func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, other.URL, http.StatusTemporaryRedirect)
		}, ErrRedirect, ""},
		{"redirect without a place", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusFound) }, ErrRedirect, ""},
		{"gzip bomb", func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Encoding", "gzip")
			w.Write(bomb.Bytes())
		}, ErrCompressed, ""},
		{"endless header", func(w http.ResponseWriter, _ *http.Request) {
			for i := range 1000 {
				w.Header().Set(fmt.Sprintf("X-%d", i), strings.Repeat("x", 1000))
			}
		}, nil, "header"},
		{"error page without end", func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusInternalServerError)
			for {
				if _, err := w.Write(bytes.Repeat([]byte("\xffe"), 1000)); err != nil {
					return
				}
			}
		}, nil, "answered 500"},
	} {
		t.Run(test.name, func(t *testing.T) {
			c, _ := serve(t, test.answer)
			var buf bytes.Buffer
			// The time is short only where it is what ends the answer.
			timeout := 30 * time.Second
			if test.is == nil && (strings.Contains(test.says, "deadline") || test.says == "") {
				timeout = 200 * time.Millisecond
			}
			_, err := c.Ask(t.Context(), Question{Path: "/metrics", MaxBytes: 100_000, Timeout: timeout}, &buf)
			if err == nil || test.is != nil && !errors.Is(err, test.is) || !strings.Contains(err.Error(), test.says) {
				t.Errorf("error %v", err)
			}
			if err != nil && len(err.Error()) > 2000 {
				t.Errorf("an error of %d bytes", len(err.Error()))
			}
			if buf.Cap() > 1<<20 {
				t.Errorf("%d bytes were kept", buf.Cap())
			}
		})
	}
	if n := elsewhere.Load(); n != 0 {
		t.Errorf("another host was asked %d times", n)
	}
}

func TestQuestions(t *testing.T) {
	var got string
	c, s := serve(t, func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		got = fmt.Sprintf("%s %s %s %s %s", r.Method, r.URL, r.Header.Get("Authorization"), r.Header.Get("Accept-Encoding"), b)
		w.Header().Set("Process-Start", "7")
		io.WriteString(w, `{"n":3}`)
	})
	var v struct{ N int }
	if err := c.GetJSON(t.Context(), "/a?b=c", &v); err != nil || v.N != 3 || got != "GET /base/a?b=c Bearer secret identity " {
		t.Errorf("%v %+v %q", err, v, got)
	}
	if err := c.PostJSON(t.Context(), "/a", map[string]int{"x": 1}, &v); err != nil || got != `POST /base/a Bearer secret identity {"x":1}` {
		t.Errorf("%v %q", err, got)
	}
	var buf bytes.Buffer
	if h, err := c.Ask(t.Context(), Question{Path: "/"}, &buf); err != nil || h.Get("Process-Start") != "7" {
		t.Errorf("%v %v", err, h)
	}
	if err := c.PostJSON(t.Context(), "/a", func() {}, &v); err == nil {
		t.Error("a body that is no JSON was sent")
	}
	if c.Host() != "127.0.0.1" {
		t.Errorf("host %q", c.Host())
	}
	s.Close()
	if err := c.GetJSON(t.Context(), "/a", &v); err == nil || Status(err) != 0 {
		t.Errorf("%v", err)
	}
}

// Engines repeat the prompt in what they complain about: it must not come into
// errors, which are logged.
func TestPromptsStayOutOfErrors(t *testing.T) {
	const prompt = "my secret is 42"
	code, body := http.StatusBadRequest, prompt
	c, _ := serve(t, func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(code)
		io.WriteString(w, body)
	})
	var v struct{ Tokens []uint32 }
	err := c.PostJSON(t.Context(), "/tokenize", map[string]string{"prompt": prompt}, &v)
	if Status(err) != code || strings.Contains(err.Error(), prompt) {
		t.Errorf("%v", err)
	}
	code, body = http.StatusOK, `{"tokens":"`+prompt+`"}`
	if err = c.PostJSON(t.Context(), "/tokenize", map[string]string{"prompt": prompt}, &v); err == nil || strings.Contains(err.Error(), "secret") {
		t.Errorf("%v", err)
	}
	// Of questions without a prompt the engine's own words help.
	code, body = http.StatusNotFound, "no such route"
	if err = c.GetJSON(t.Context(), "/x", &v); !Missing(err) || !strings.Contains(err.Error(), body) {
		t.Errorf("%v", err)
	}
}

// Python writes what is no number into JSON: one of them spoils itself only.
func TestNoNumbersInJSON(t *testing.T) {
	c, _ := serve(t, func(w http.ResponseWriter, _ *http.Request) {
		io.WriteString(w, `{"a":NaN,"b":-Infinity,"c":Infinity,"d":"NaN \" Infinity","e":5,"f":[NaN]}`)
	})
	var v struct {
		A, B, C, E float64
		D          string
		F          []float64
	}
	if err := c.GetJSON(t.Context(), "/", &v); err != nil || v.A != -1 || v.B != -1 || v.C != -1 || v.D != `NaN " Infinity` || v.E != 5 || v.F[0] != -1 {
		t.Errorf("%v %+v", err, v)
	}
}

// A value that its field cannot have is left out, and the rest of the answer
// counts; of token ids none may be left out.
func TestOddValuesSpoilThemselvesOnly(t *testing.T) {
	body := `{"a":9223372036854775808,"list":[1,-1e400,3],"b":7,"deep":{"c":"x","d":5}}`
	c, _ := serve(t, func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, body) })
	var v struct {
		A, B int
		List []int
		Deep struct{ C, D int }
	}
	if err := c.GetJSON(t.Context(), "/", &v); err != nil || v.A != 0 || v.B != 7 || v.Deep.C != 0 || v.Deep.D != 5 || len(v.List) != 3 || v.List[1] != 0 {
		t.Errorf("%v %+v", err, v)
	}
	if n := c.Odd(); n != 1 {
		t.Errorf("%d odd answers", n)
	}
	body = `{"a":1}`
	if err := c.GetJSON(t.Context(), "/", &v); err != nil || c.Odd() != 0 {
		t.Errorf("a good answer: %v", err)
	}
	body = `[1]`
	if err := c.GetJSON(t.Context(), "/", &v); err == nil {
		t.Error("an answer of another kind was taken")
	}
	body = `{"tokens":[1,4294967296,3]}`
	if ids, err := c.TokenIDs(t.Context(), 1); err == nil {
		t.Errorf("token ids with one left out: %v", ids)
	}
}

func TestNewRefuses(t *testing.T) {
	for _, u := range []string{"", "127.0.0.1:8000", "ftp://x", "http://", "://"} {
		if _, err := New(Options{URL: u}); err == nil {
			t.Errorf("URL %q was accepted", u)
		}
	}
}

// Empty members of a list take a hundred times their bytes once they are read.
func TestListsWithoutEnd(t *testing.T) {
	many := func(open, member, end string) []byte {
		return []byte(open + strings.Repeat(member+",", MaxMembers) + member + end)
	}
	for name, page := range map[string][]byte{
		"a list": many("[", "0", "]"), "of objects": many("[", "{}", "]"), "an object": many("{", `"a":0`, "}"),
		"within": many(`{"text":"]}\\\"]","n":[1,2],"list":[`, "[]", "]}"), "without an end": many("[", "0", ""),
		"deep": bytes.Repeat([]byte("["), maxNesting+1),
	} {
		c, _ := serve(t, func(w http.ResponseWriter, _ *http.Request) { w.Write(page) })
		var into struct {
			List []struct{ A, B, C, D, E, F int }
		}
		var list []struct{ A, B, C, D, E, F int }
		var v any = &into
		if page[0] == '[' {
			v = &list
		}
		if err := c.GetJSON(t.Context(), "/x", v); !errors.Is(err, ErrTooMany) || !strings.HasPrefix(err.Error(), "/x: ") || len(list)+len(into.List) > 0 {
			t.Errorf("%s: %d read, error %v", name, len(list)+len(into.List), err)
		}
	}
	most := append(bytes.Repeat([]byte("0,"), MaxMembers-1), '0')
	page := slices.Concat([]byte(`[{"a":",,,,"},[`), most, []byte("],["), most, []byte("]]"))
	if err := Widest(page, MaxMembers); err != nil {
		t.Errorf("lists of %d: %v", MaxMembers, err)
	}
}

// What an engine answers to a question with a prompt stands in no error: the
// transport quotes an answer that is not HTTP, and engines quote the prompt.
func TestErrorsQuoteNoAnswerToAPrompt(t *testing.T) {
	const secret = "secret"
	for _, answer := range []string{
		"secret secret\r\n\r\n", "HTTP/1.1 200 OK\r\nsecret secret\r\n\r\n", "HTTP/1.1 secret OK\r\n\r\n", "HTTP/1.1 200 OK\r\nContent-Length: secret\r\n\r\n",
		"HTTP/1.1 200 OK\r\nTransfer-Encoding: secret\r\n\r\n", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nsecret secret\r\n\r\n",
		"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nsecret", "HTTP/1.1 400 Bad\r\nContent-Length: 6\r\n\r\nsecret", "HTTP/1.1 307 secret\r\nLocation: http://secret:1/secret\r\n\r\n",
		"HTTP/1.1 200 OK\r\nContent-Encoding: secret\r\nContent-Length: 6\r\n\r\nsecret",
	} {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		done := make(chan struct{})
		go func() {
			defer close(done)
			for {
				nc, err := l.Accept()
				if err != nil {
					return
				}
				if r, err := http.ReadRequest(bufio.NewReader(nc)); err == nil {
					io.Copy(io.Discard, r.Body)
					io.WriteString(nc, answer)
				}
				nc.Close()
			}
		}()
		c, err := New(Options{URL: "http://" + l.Addr().String()})
		if err != nil {
			t.Fatal(err)
		}
		var v []int
		var buf bytes.Buffer
		for _, err := range []error{
			c.PostJSON(t.Context(), "/tokenize", map[string]string{"prompt": secret}, &v),
			func() error {
				_, err := c.Ask(t.Context(), Question{Method: http.MethodPost, Path: "/events"}, &buf)
				return err
			}(),
		} {
			if err == nil {
				if v == nil && !strings.HasSuffix(answer, "\nsecret") {
					t.Errorf("%q was read", answer)
				}
				continue
			}
			if strings.Contains(err.Error(), secret) || !strings.Contains(err.Error(), "/tokenize") && !strings.Contains(err.Error(), "/events") {
				t.Errorf("%q: error %q", answer, err)
			}
		}
		c.Close()
		l.Close()
		<-done
		// Why an engine is not reached is told.
		if err := c.PostJSON(t.Context(), "/tokenize", 1, &v); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("error %v", err)
		}
	}
}

// A short text has no millions of tokens; a long one has as many as it has bytes.
func TestTokensOfAText(t *testing.T) {
	for _, n := range []int{1, 4 << 20} {
		c, _ := serve(t, func(w http.ResponseWriter, _ *http.Request) {
			io.WriteString(w, `{"tokens":[`+strings.Repeat("3,", 1<<20)+"3]}")
		})
		ids, err := c.TokenIDs(t.Context(), map[string]string{"prompt": strings.Repeat("x", n)})
		if n == 1 && !errors.Is(err, ErrTooLarge) || n > 1 && (err != nil || len(ids) != 1<<20+1) {
			t.Errorf("%d ids of %d bytes, error %v", len(ids), n, err)
		}
	}
}
