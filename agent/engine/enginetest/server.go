package enginetest

import (
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
)

// Server is the HTTP side of an engine.
type Server struct {
	// URL is where it serves, also after it came back.
	URL string

	t       testing.TB
	handler http.Handler
	mu      sync.Mutex
	http    *httptest.Server
}

// Host is the address on loopback that servers and publishers of this test program
// listen at. No other one uses it: nobody is given a port there that is closed for
// a moment.
var Host = fmt.Sprintf("127.%d.%d.%d", 1+rand.IntN(254), rand.IntN(256), 1+rand.IntN(254))

// AnyPort is any port of Host.
func AnyPort() string { return Host + ":0" }

// FreeAddress is one of Host where nobody listens.
func FreeAddress(t testing.TB) string {
	t.Helper()
	ln, err := net.Listen("tcp", AnyPort())
	if err != nil {
		t.Fatal(err)
	}
	if err := ln.Close(); err != nil {
		t.Fatal(err)
	}
	return ln.Addr().String()
}

// NewServer serves until the test ends.
func NewServer(t testing.TB, h http.HandlerFunc) *Server {
	s := &Server{t: t, handler: h}
	s.serve(AnyPort())
	t.Cleanup(s.Stop)
	return s
}

func (s *Server) serve(address string) {
	ln, err := net.Listen("tcp", address)
	if err != nil {
		s.t.Fatal(err)
	}
	h := httptest.NewUnstartedServer(s.handler)
	h.Listener.Close()
	h.Listener = ln
	h.Start()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.http, s.URL = h, h.URL
}

// Stop ends the server, as a kill of its process does.
func (s *Server) Stop() {
	s.mu.Lock()
	h := s.http
	s.http = nil
	s.mu.Unlock()
	if h != nil {
		h.CloseClientConnections()
		h.Close()
	}
}

// Again serves again at the same address.
func (s *Server) Again() { s.serve(strings.TrimPrefix(s.URL, "http://")) }
