package mesh

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"os"
	"strings"
)

const (
	maxKeys         = 8
	maxKeyFileBytes = 4096
)

// readKeys reads a key file: one base64 key of 16, 24 or 32 bytes per line, the
// first encrypts, all decrypt. Empty lines and lines that begin with # are skipped.
func readKeys(file string) ([][]byte, error) {
	info, err := os.Stat(file)
	if err != nil {
		return nil, fmt.Errorf("mesh.key_file: %w", err)
	}
	if info.Size() > maxKeyFileBytes {
		return nil, fmt.Errorf("mesh.key_file %s: %d bytes, at most %d", file, info.Size(), maxKeyFileBytes)
	}
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("mesh.key_file: %w", err)
	}
	keys, err := parseKeys(data)
	if err != nil {
		return nil, fmt.Errorf("mesh.key_file %s: %w", file, err)
	}
	return keys, nil
}

func parseKeys(data []byte) ([][]byte, error) {
	var keys [][]byte
	for i, line := range strings.Split(string(data), "\n") {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		key, err := base64.StdEncoding.DecodeString(line)
		if err != nil {
			// The line itself is a secret and is not shown.
			return nil, fmt.Errorf("line %d is not base64: %w", i+1, err)
		}
		if n := len(key); n != 16 && n != 24 && n != 32 {
			return nil, fmt.Errorf("line %d: key of %d bytes, want 16, 24 or 32", i+1, n)
		}
		for _, k := range keys {
			if bytes.Equal(k, key) {
				return nil, fmt.Errorf("line %d repeats an earlier key", i+1)
			}
		}
		keys = append(keys, key)
		if len(keys) > maxKeys {
			return nil, fmt.Errorf("more than %d keys", maxKeys)
		}
	}
	if len(keys) == 0 {
		return nil, fmt.Errorf("holds no key")
	}
	return keys, nil
}

// fingerprint returns the 4 hex digits that name a key in public.
func fingerprint(key []byte) string {
	sum := sha256.Sum256(key)
	return fmt.Sprintf("%04x", sum[:2])
}
