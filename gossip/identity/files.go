package identity

import (
	"crypto/rand"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"
)

const (
	modeSecret = 0o600
	modePublic = 0o644

	gossipKeyBytes = 32 // AES-256
	prefixKeyBytes = 16 // SipHash-2-4

	devValidity   = 365 * 24 * time.Hour
	devCAValidity = 2 * devValidity
	// maxDevNames bounds one call of WriteDevCerts; a typing error should not
	// make thousands of files.
	maxDevNames = 1000
)

// Written is one file that was made.
type Written struct {
	Path string
	What string // for people, "certificate of agent gpu-01" for example
}

type newFile struct {
	Written
	mode fs.FileMode
	data []byte
}

// WriteFile writes a new file with the given permissions; it never overwrites.
func WriteFile(path string, data []byte, mode fs.FileMode) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
	if errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("%s: %w", path, ErrExists)
	}
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err == nil {
		err = f.Sync()
	}
	if closeErr := f.Close(); err == nil {
		err = closeErr
	}
	if err != nil {
		return errors.Join(fmt.Errorf("write %s: %w", path, err), os.Remove(path))
	}
	return nil
}

// WritePair writes a certificate and its key (mode 0600) to new files.
func WritePair(p *Pair, certFile, keyFile string) error {
	return writeAll([]newFile{
		{Written{Path: certFile}, modePublic, p.CertPEM},
		{Written{Path: keyFile}, modeSecret, p.KeyPEM},
	})
}

// NewGossipKey returns a new mesh key file: 32 random bytes in base64 and a newline.
func NewGossipKey() []byte {
	var k [gossipKeyBytes]byte
	_, _ = rand.Read(k[:]) // never fails, ends the program instead
	return []byte(base64.StdEncoding.EncodeToString(k[:]) + "\n")
}

// NewPrefixKey returns a new prefix key file: 32 hex digits and a newline.
func NewPrefixKey() []byte {
	var k [prefixKeyBytes]byte
	_, _ = rand.Read(k[:]) // never fails, ends the program instead
	return []byte(hex.EncodeToString(k[:]) + "\n")
}

// WriteDevCerts makes everything a fleet needs to talk to itself: a CA, a
// certificate for each host's agent and each coordinator, one for each client
// role, a mesh key and a prefix key. It makes the folder if need be, overwrites
// nothing, and leaves nothing behind when it fails.
//
// Hosts and coordinators are names, each optionally followed by "=" and
// comma-separated addresses: "gpu-01" or "gpu-01=10.0.0.11,gpu-01.lan". The
// name itself and the loopback addresses are always among the addresses.
func WriteDevCerts(dir string, hosts, coordinators []string) ([]Written, error) {
	if len(hosts)+len(coordinators) == 0 {
		return nil, errors.New("write certificates: no host and no coordinator is named")
	}
	if n := len(hosts) + len(coordinators); n > maxDevNames {
		return nil, fmt.Errorf("write certificates: %d names, at most %d", n, maxDevNames)
	}
	files, err := devFiles(dir, hosts, coordinators)
	if err != nil {
		return nil, fmt.Errorf("write certificates: %w", err)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("write certificates: %w", err)
	}
	if err := writeAll(files); err != nil {
		return nil, fmt.Errorf("write certificates: %w", err)
	}
	written := make([]Written, len(files))
	for i, f := range files {
		written[i] = f.Written
	}
	return written, nil
}

func devFiles(dir string, hosts, coordinators []string) ([]newFile, error) {
	ca, err := NewCA("dev", devCAValidity)
	if err != nil {
		return nil, err
	}
	caKey, err := ca.KeyPEM()
	if err != nil {
		return nil, err
	}
	files := []newFile{
		{Written{filepath.Join(dir, "ca.pem"), "CA certificate (ca_file everywhere)"}, modePublic, ca.CertPEM()},
		{Written{filepath.Join(dir, "ca.key"), "CA key (keep it off the hosts)"}, modeSecret, caKey},
	}
	seen := map[string]string{}
	pair := func(role Role, base, spec string) error {
		name, list, _ := strings.Cut(spec, "=")
		addresses := []string{name, "localhost", "127.0.0.1", "::1"}
		if list != "" {
			addresses = append(addresses, strings.Split(list, ",")...)
		}
		if !role.serves() {
			addresses = nil
		}
		p, err := ca.Issue(role, name, addresses, devValidity)
		if err != nil {
			return fmt.Errorf("%s %q: %w", role, spec, err)
		}
		if base == "" {
			base = string(role) + "-" + name
		}
		what := string(role) + " " + name
		if other, dup := seen[base]; dup {
			return fmt.Errorf("%s and %s would both be %s.pem", other, what, base)
		}
		seen[base] = what
		files = append(files,
			newFile{Written{filepath.Join(dir, base+".pem"), "certificate of " + what}, modePublic, p.CertPEM},
			newFile{Written{filepath.Join(dir, base+".key"), "key of " + what}, modeSecret, p.KeyPEM})
		return nil
	}
	for _, h := range hosts {
		if err := pair(RoleAgent, "", h); err != nil {
			return nil, err
		}
	}
	for _, c := range coordinators {
		if err := pair(RoleCoordinator, "", c); err != nil {
			return nil, err
		}
	}
	for _, r := range []Role{RoleAdmin, RoleOperator, RolePlacer, RoleViewer} {
		if err := pair(r, string(r), string(r)); err != nil {
			return nil, err
		}
	}
	return append(files,
		newFile{Written{filepath.Join(dir, "mesh.key"), "gossip key ([mesh] key_file everywhere)"}, modeSecret, NewGossipKey()},
		newFile{Written{filepath.Join(dir, "prefix.key"), "prefix key ([prefix] key_file everywhere)"}, modeSecret, NewPrefixKey()}), nil
}

// writeAll writes every file or none.
func writeAll(files []newFile) error {
	for _, f := range files {
		if _, err := os.Lstat(f.Path); err == nil {
			return fmt.Errorf("%s: %w", f.Path, ErrExists)
		}
	}
	for i, f := range files {
		if err := WriteFile(f.Path, f.data, f.mode); err != nil {
			for _, done := range files[:i] {
				err = errors.Join(err, os.Remove(done.Path))
			}
			return err
		}
	}
	return nil
}
