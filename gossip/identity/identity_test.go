package identity

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
)

// fleet is a CA and a folder for its files.
type fleet struct {
	t   *testing.T
	ca  *CA
	dir string
}

func newFleet(t *testing.T) *fleet {
	t.Helper()
	ca, err := NewCA("test", time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	return &fleet{t: t, ca: ca, dir: t.TempDir()}
}

func (f *fleet) issue(role Role, name string) *Pair {
	f.t.Helper()
	p, err := f.ca.Issue(role, name, []string{"localhost", "127.0.0.1"}, time.Hour)
	if err != nil {
		f.t.Fatal(err)
	}
	return p
}

// put replaces a file by rename, as configuration management does.
func (f *fleet) put(path string, data []byte) {
	f.t.Helper()
	tmp := path + ".new"
	if err := os.WriteFile(tmp, data, 0o600); err != nil {
		f.t.Fatal(err)
	}
	if err := os.Rename(tmp, path); err != nil {
		f.t.Fatal(err)
	}
}

func (f *fleet) files(base string, p *Pair) Files {
	f.t.Helper()
	files := Files{CA: filepath.Join(f.dir, base+"-ca.pem"), Cert: filepath.Join(f.dir, base+".pem"), Key: filepath.Join(f.dir, base+".key")}
	f.put(files.CA, f.ca.CertPEM())
	f.put(files.Cert, p.CertPEM)
	f.put(files.Key, p.KeyPEM)
	return files
}

func (f *fleet) source(role Role, name string) *Source {
	f.t.Helper()
	s, err := Open(Options{Files: f.files(string(role)+"-"+name, f.issue(role, name)), CheckEvery: time.Nanosecond})
	if err != nil {
		f.t.Fatal(err)
	}
	return s
}

// handshake runs both sides over a real socket and returns what each saw.
func handshake(t *testing.T, server, client *tls.Config) (atServer, atClient tls.ConnectionState, serverErr, clientErr error) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	done := make(chan struct{})
	go func() {
		defer close(done)
		raw, err := ln.Accept()
		if err != nil {
			serverErr = err
			return
		}
		defer raw.Close()
		c := tls.Server(raw, server)
		if serverErr = c.Handshake(); serverErr == nil {
			atServer = c.ConnectionState()
			_, serverErr = c.Write([]byte("k"))
		}
	}()
	raw, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer raw.Close()
	c := tls.Client(raw, client)
	if clientErr = c.Handshake(); clientErr == nil {
		atClient = c.ConnectionState()
		// With TLS 1.3 a client learns that it was refused with its first read.
		_, clientErr = c.Read(make([]byte, 1))
	}
	raw.Close()
	<-done
	return atServer, atClient, serverErr, clientErr
}

func TestHandshakeProvesRoleAndName(t *testing.T) {
	f := newFleet(t)
	server := f.source(RoleCoordinator, "c-gpu-01").Server(ServerOptions{Accept: []Role{RoleAgent}})
	client := f.source(RoleAgent, "gpu-01").Client(ClientOptions{Accept: []Role{RoleCoordinator}})
	atServer, atClient, serverErr, clientErr := handshake(t, server, client)
	if serverErr != nil || clientErr != nil {
		t.Fatalf("handshake: server %v, client %v", serverErr, clientErr)
	}
	for _, side := range []struct {
		state tls.ConnectionState
		role  Role
		name  string
	}{{atServer, RoleAgent, "gpu-01"}, {atClient, RoleCoordinator, "c-gpu-01"}} {
		role, name, err := PeerOf(side.state)
		if err != nil || role != side.role || name != side.name {
			t.Errorf("PeerOf = %s/%s, %v; want %s/%s", role, name, err, side.role, side.name)
		}
		if side.state.Version != tls.VersionTLS13 {
			t.Errorf("version %x, want TLS 1.3", side.state.Version)
		}
		if side.state.DidResume {
			t.Error("session was resumed")
		}
	}
}

func TestHandshakeRefusals(t *testing.T) {
	f, foreign := newFleet(t), newFleet(t)
	acceptAgents := ServerOptions{Accept: []Role{RoleAgent}}
	wantCoordinator := ClientOptions{Accept: []Role{RoleCoordinator}}
	tests := []struct {
		name      string
		server    *tls.Config
		client    *tls.Config
		serverErr error  // found in the server's error
		clientErr error  // found in the client's error
		text      string // found in either
	}{
		{
			"viewer dials a lane", f.source(RoleCoordinator, "c").Server(acceptAgents),
			f.source(RoleViewer, "v").Client(wantCoordinator), ErrRole, nil, "it is viewer/v, accepted here: [agent]",
		},
		{
			"agent poses as coordinator", f.source(RoleAgent, "a").Server(acceptAgents),
			f.source(RoleAgent, "b").Client(wantCoordinator), nil, ErrRole, "it is agent/a, accepted here: [coordinator]",
		},
		{
			"another coordinator answers", f.source(RoleCoordinator, "c1").Server(acceptAgents),
			f.source(RoleAgent, "a").Client(ClientOptions{Accept: []Role{RoleCoordinator}, Name: "c2"}), nil, ErrName, "want c2",
		},
		{
			"client of another fleet", f.source(RoleCoordinator, "c").Server(acceptAgents),
			foreign.source(RoleAgent, "a").Client(ClientOptions{Accept: []Role{RoleCoordinator}}), nil, nil, "unknown authority",
		},
		{
			"client without certificate", f.source(RoleCoordinator, "c").Server(acceptAgents),
			&tls.Config{InsecureSkipVerify: true}, nil, nil, "certificate",
		},
		{
			"TLS 1.2", f.source(RoleCoordinator, "c").Server(acceptAgents),
			func() *tls.Config {
				c := f.source(RoleAgent, "a").Client(wantCoordinator)
				c.MinVersion, c.MaxVersion = tls.VersionTLS12, tls.VersionTLS12
				return c
			}(), nil, nil, "version",
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, _, serverErr, clientErr := handshake(t, tt.server, tt.client)
			if serverErr == nil && clientErr == nil {
				t.Fatal("handshake succeeded")
			}
			if tt.serverErr != nil && !errors.Is(serverErr, tt.serverErr) {
				t.Errorf("server error %v, want %v", serverErr, tt.serverErr)
			}
			if tt.clientErr != nil && !errors.Is(clientErr, tt.clientErr) {
				t.Errorf("client error %v, want %v", clientErr, tt.clientErr)
			}
			if both := errors.Join(serverErr, clientErr).Error(); !strings.Contains(both, tt.text) {
				t.Errorf("errors %q do not say %q", both, tt.text)
			}
		})
	}
}

func TestServerForeignClientIsVerifiedByServer(t *testing.T) {
	// The client accepts anything, so that only the server's check stands.
	f, foreign := newFleet(t), newFleet(t)
	client := foreign.source(RoleAgent, "gpu-01").Client(ClientOptions{})
	client.VerifyConnection = nil
	server := f.source(RoleCoordinator, "c").Server(ServerOptions{Accept: []Role{RoleAgent}, Anonymous: true})
	if _, _, serverErr, _ := handshake(t, server, client); serverErr == nil || !strings.Contains(serverErr.Error(), "unknown authority") {
		t.Errorf("server error %v, want unknown authority", serverErr)
	}
}

func TestAnonymousClientIsLetInWithoutIdentity(t *testing.T) {
	f := newFleet(t)
	server := f.source(RoleCoordinator, "c").Server(ServerOptions{Accept: []Role{RoleViewer}, Anonymous: true})
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(f.ca.CertPEM())
	atServer, _, serverErr, clientErr := handshake(t, server, &tls.Config{RootCAs: roots, ServerName: "localhost"})
	if serverErr != nil || clientErr != nil {
		t.Fatalf("handshake: server %v, client %v", serverErr, clientErr)
	}
	if _, _, err := PeerOf(atServer); !errors.Is(err, ErrNoPeerCertificate) {
		t.Errorf("PeerOf error %v, want %v", err, ErrNoPeerCertificate)
	}
}

func TestReloadFollowsCertificateAndCA(t *testing.T) {
	f := newFleet(t)
	serverSource := f.source(RoleCoordinator, "c")
	clientSource := f.source(RoleAgent, "a")
	server := serverSource.Server(ServerOptions{Accept: []Role{RoleAgent}})
	client := clientSource.Client(ClientOptions{Accept: []Role{RoleCoordinator}})
	serial := func() string {
		t.Helper()
		_, atClient, serverErr, clientErr := handshake(t, server, client)
		if serverErr != nil || clientErr != nil {
			t.Fatalf("handshake: server %v, client %v", serverErr, clientErr)
		}
		return atClient.PeerCertificates[0].SerialNumber.String()
	}
	first := serial()
	serverFiles := serverSource.opts.Files

	// A certificate without its key keeps the old pair in force.
	renewed := f.issue(RoleCoordinator, "c")
	f.put(serverFiles.Cert, renewed.CertPEM)
	if got := serial(); got != first {
		t.Error("half a pair was taken into use")
	}
	if err := serverSource.Reload(); err == nil || !strings.Contains(err.Error(), serverFiles.Key) {
		t.Errorf("Reload = %v, want an error that names %s", err, serverFiles.Key)
	}
	f.put(serverFiles.Key, renewed.KeyPEM)
	if got := serial(); got == first {
		t.Error("renewed certificate was not taken into use")
	}
	if err := serverSource.Reload(); err != nil {
		t.Errorf("Reload after the key came: %v", err)
	}

	// A new CA on the client's side ends trust in the old fleet, both ways.
	other := newFleet(t)
	f.put(clientSource.opts.Files.CA, append(other.ca.CertPEM(), f.ca.CertPEM()...))
	_ = serial() // both CAs are trusted during a rotation
	f.put(clientSource.opts.Files.CA, other.ca.CertPEM())
	moved := other.issue(RoleAgent, "a")
	f.put(clientSource.opts.Files.Cert, moved.CertPEM)
	f.put(clientSource.opts.Files.Key, moved.KeyPEM)
	if _, _, _, err := handshake(t, server, client); err == nil || !strings.Contains(err.Error(), "unknown authority") {
		t.Errorf("client error %v, want unknown authority after its CA file changed", err)
	}

	// A process does not become someone else.
	someone := f.issue(RoleCoordinator, "other")
	f.put(serverFiles.Cert, someone.CertPEM)
	f.put(serverFiles.Key, someone.KeyPEM)
	if err := serverSource.Reload(); err == nil || !strings.Contains(err.Error(), "now names coordinator/other") {
		t.Errorf("Reload = %v, want a refusal to change the name", err)
	}
	if serverSource.Name() != "c" {
		t.Errorf("name %q after a refused reload", serverSource.Name())
	}
	reg := prometheus.NewRegistry()
	reg.MustRegister(serverSource)
	if n, err := testutil.GatherAndCount(reg, "waypost_certificate_expiry_seconds"); err != nil || n != 2 {
		t.Errorf("expiry metrics: %d, %v", n, err)
	}
}

// A process whose lanes stay up shakes no hands: its metrics tell of the files all
// the same.
func TestMetricsFollowTheFiles(t *testing.T) {
	f := newFleet(t)
	s := f.source(RoleAgent, "a")
	reg := prometheus.NewRegistry()
	reg.MustRegister(s)
	left := func() float64 {
		t.Helper()
		families, err := reg.Gather()
		if err != nil {
			t.Fatal(err)
		}
		for _, family := range families {
			for _, m := range family.GetMetric() {
				if family.GetName() == "waypost_certificate_expiry_seconds" && m.GetLabel()[0].GetValue() == "leaf" {
					return m.GetGauge().GetValue()
				}
			}
		}
		t.Fatal("no expiry of the leaf")
		return 0
	}
	before := left()
	renewed, err := f.ca.Issue(RoleAgent, "a", nil, time.Minute) // not one that lasts longer: the CA ends
	if err != nil {
		t.Fatal(err)
	}
	f.put(s.opts.Files.Cert, renewed.CertPEM)
	f.put(s.opts.Files.Key, renewed.KeyPEM)
	if after := left(); after > before-1000 {
		t.Errorf("%v s are left by the metrics after the certificate was replaced by one for a minute, %v s before", after, before)
	}
}

func TestOpenErrorsNameTheFile(t *testing.T) {
	f := newFleet(t)
	good := f.issue(RoleAgent, "a")
	other := f.issue(RoleAgent, "b")
	foreign := newFleet(t)
	shortLived, err := f.ca.Issue(RoleAgent, "a", nil, time.Nanosecond)
	if err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		name string
		edit func(*Files)
		want []string
	}{
		{"no ca_file", func(x *Files) { x.CA = "" }, []string{"ca_file is not set"}},
		{"missing cert_file", func(x *Files) { os.Remove(x.Cert) }, []string{"cert_file", "no such file"}},
		{"ca_file is text", func(x *Files) { f.put(x.CA, []byte("hello\n")) }, []string{"ca_file", "holds no PEM certificate"}},
		{"ca_file is a leaf", func(x *Files) { f.put(x.CA, good.CertPEM) }, []string{"ca_file", "is not a CA"}},
		{"key in cert_file", func(x *Files) { f.put(x.Cert, good.KeyPEM) }, []string{"cert_file", `PEM block "PRIVATE KEY"`}},
		{"other key", func(x *Files) { f.put(x.Key, other.KeyPEM) }, []string{"key_file", "does not match"}},
		{"other CA", func(x *Files) { f.put(x.CA, foreign.ca.CertPEM()) }, []string{"cert_file", "unknown authority", "ca_file"}},
		{"ended", func(x *Files) { f.put(x.Cert, shortLived.CertPEM); f.put(x.Key, shortLived.KeyPEM) }, []string{"cert_file", "ended on"}},
		{"huge", func(x *Files) { f.put(x.Cert, make([]byte, maxFileBytes+1)) }, []string{"cert_file", "at most"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			files := f.files("x", good)
			tt.edit(&files)
			_, err := Open(Options{Files: files})
			if err == nil {
				t.Fatal("no error")
			}
			for _, want := range tt.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error %q does not say %q", err, want)
				}
			}
		})
	}
}

func TestOfRejectsOddCertificates(t *testing.T) {
	uri := func(s string) *url.URL {
		u, err := url.Parse(s)
		if err != nil {
			t.Fatal(err)
		}
		return u
	}
	for _, uris := range [][]string{
		nil,
		{"spiffe://fleet/agent/a"},
		{"waypost://agent/a", "waypost://coordinator/a"},
		{"waypost://root/a"},
		{"waypost://agent/"},
		{"waypost://agent"},
		{"waypost://agent/a/b"},
		{"waypost://agent/a?x=1"},
		{"waypost://user@agent/a"},
		{"waypost://agent/-a"},
		{"waypost://agent/" + strings.Repeat("a", maxNameBytes+1)},
	} {
		cert := &x509.Certificate{}
		for _, s := range uris {
			cert.URIs = append(cert.URIs, uri(s))
		}
		if role, name, err := Of(cert); !errors.Is(err, ErrNotWaypost) {
			t.Errorf("Of(%v) = %s/%s, %v; want ErrNotWaypost", uris, role, name, err)
		}
	}
	cert := &x509.Certificate{URIs: []*url.URL{uri("spiffe://x/y"), uri("waypost://agent/gpu-01.lan")}}
	if role, name, err := Of(cert); role != RoleAgent || name != "gpu-01.lan" || err != nil {
		t.Errorf("Of = %s/%s, %v", role, name, err)
	}
}

func TestIssueRefusesBadInput(t *testing.T) {
	f := newFleet(t)
	for _, tt := range []struct {
		role      Role
		name      string
		addresses []string
		validity  time.Duration
		want      string
	}{
		{"root", "a", nil, time.Hour, `unknown role "root"`},
		{RoleAgent, "", nil, time.Hour, "name is empty"},
		{RoleAgent, "a b", nil, time.Hour, `character ' '`},
		{RoleAgent, "a", []string{"10.0.0.300/8"}, time.Hour, `address "10.0.0.300/8"`},
		{RoleAgent, "a", nil, 0, "validity"},
		{RoleAgent, "a", nil, MaxValidity + 1, "validity"},
	} {
		if _, err := f.ca.Issue(tt.role, tt.name, tt.addresses, tt.validity); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("Issue(%q, %q, %v, %v) = %v, want %q", tt.role, tt.name, tt.addresses, tt.validity, err, tt.want)
		}
	}
	// Nothing outlives its CA.
	p, err := f.ca.Issue(RoleAgent, "a", nil, 48*time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	certs, err := parseCertificates(p.CertPEM)
	if err != nil {
		t.Fatal(err)
	}
	if certs[0].NotAfter.After(f.ca.cert.NotAfter) {
		t.Errorf("certificate ends %v, CA ends %v", certs[0].NotAfter, f.ca.cert.NotAfter)
	}
}
