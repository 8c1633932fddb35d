package identity

import (
	"crypto/tls"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestWriteDevCerts(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "pki")
	written, err := WriteDevCerts(dir, []string{"gpu-01=10.0.0.11", "gpu-02"}, []string{"c-gpu-01"})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, w := range written {
		got = append(got, filepath.Base(w.Path))
		info, err := os.Stat(w.Path)
		if err != nil {
			t.Fatal(err)
		}
		want := os.FileMode(0o644)
		if strings.HasSuffix(w.Path, ".key") {
			want = 0o600
		}
		if info.Mode().Perm() != want {
			t.Errorf("%s has mode %o, want %o", w.Path, info.Mode().Perm(), want)
		}
		if w.What == "" {
			t.Errorf("%s is not explained", w.Path)
		}
	}
	slices.Sort(got)
	want := []string{
		"admin.key", "admin.pem", "agent-gpu-01.key", "agent-gpu-01.pem", "agent-gpu-02.key", "agent-gpu-02.pem",
		"ca.key", "ca.pem", "coordinator-c-gpu-01.key", "coordinator-c-gpu-01.pem", "mesh.key", "operator.key", "operator.pem",
		"placer.key", "placer.pem", "prefix.key", "viewer.key", "viewer.pem",
	}
	if !slices.Equal(got, want) {
		t.Errorf("wrote %v\nwant  %v", got, want)
	}

	s, err := Open(Options{Files: Files{CA: filepath.Join(dir, "ca.pem"), Cert: filepath.Join(dir, "agent-gpu-01.pem"), Key: filepath.Join(dir, "agent-gpu-01.key")}})
	if err != nil {
		t.Fatal(err)
	}
	if s.Role() != RoleAgent || s.Name() != "gpu-01" {
		t.Errorf("certificate names %s/%s", s.Role(), s.Name())
	}
	leaf := s.current.Load().cert.Leaf
	for _, host := range []string{"gpu-01", "localhost", "127.0.0.1", "10.0.0.11"} {
		if err := leaf.VerifyHostname(host); err != nil {
			t.Errorf("address %s: %v", host, err)
		}
	}

	mesh, err := os.ReadFile(filepath.Join(dir, "mesh.key"))
	if err != nil {
		t.Fatal(err)
	}
	if key, err := base64.StdEncoding.DecodeString(strings.TrimSpace(string(mesh))); err != nil || len(key) != 32 {
		t.Errorf("mesh.key decodes to %d bytes, %v", len(key), err)
	}
	prefix, err := os.ReadFile(filepath.Join(dir, "prefix.key"))
	if err != nil {
		t.Fatal(err)
	}
	if key, err := hex.DecodeString(strings.TrimSpace(string(prefix))); err != nil || len(key) != 16 {
		t.Errorf("prefix.key decodes to %d bytes, %v", len(key), err)
	}

	// Whoever keeps ca.key can issue more with it.
	if _, err := tls.LoadX509KeyPair(filepath.Join(dir, "ca.pem"), filepath.Join(dir, "ca.key")); err != nil {
		t.Errorf("ca.key does not belong to ca.pem: %v", err)
	}
}

func TestWriteDevCertsOverwritesNothing(t *testing.T) {
	dir := t.TempDir()
	keep := filepath.Join(dir, "prefix.key") // the last file of the set
	if err := os.WriteFile(keep, []byte("mine"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := WriteDevCerts(dir, []string{"a"}, nil); !errors.Is(err, ErrExists) || !strings.Contains(err.Error(), keep) {
		t.Errorf("error %v, want %v naming %s", err, ErrExists, keep)
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	if len(entries) != 1 {
		t.Errorf("%d files after a refusal, want only the one that was there", len(entries))
	}
	if data, _ := os.ReadFile(keep); string(data) != "mine" {
		t.Errorf("file now holds %q", data)
	}
}

func TestWriteDevCertsRefusesBadNames(t *testing.T) {
	for _, tt := range []struct {
		hosts, coordinators []string
		want                string
	}{
		{nil, nil, "no host and no coordinator"},
		{[]string{"../../etc/passwd"}, nil, "character '.'"},
		{[]string{"a/b"}, nil, "character '/'"},
		{[]string{"a", "a"}, nil, "would both be"},
		{[]string{"a=300.1.1.1/8"}, nil, "neither an IP address nor a DNS name"},
		{make([]string, maxDevNames+1), nil, "at most"},
	} {
		dir := filepath.Join(t.TempDir(), "pki")
		if _, err := WriteDevCerts(dir, tt.hosts, tt.coordinators); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("WriteDevCerts(%.40q, %q) = %v, want %q", tt.hosts, tt.coordinators, err, tt.want)
		}
		if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("folder was made though the names are bad")
		}
	}
}

func TestWritePairRemovesHalfAPair(t *testing.T) {
	f := newFleet(t)
	cert := filepath.Join(f.dir, "x.pem")
	err := WritePair(f.issue(RoleAgent, "a"), cert, filepath.Join(f.dir, "missing", "x.key"))
	if err == nil {
		t.Fatal("no error")
	}
	if _, err := os.Stat(cert); !errors.Is(err, os.ErrNotExist) {
		t.Error("certificate stayed though its key could not be written")
	}
}

func TestWriteFileNeverOverwrites(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.key")
	if err := WriteFile(path, []byte("first"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := WriteFile(path, []byte("second"), 0o600); !errors.Is(err, ErrExists) {
		t.Errorf("WriteFile over a file: %v", err)
	}
	if data, _ := os.ReadFile(path); string(data) != "first" {
		t.Errorf("file now holds %q", data)
	}
}
