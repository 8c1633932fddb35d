package replica

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// idFile holds the identity of the replica in its state directory.
const idFile = "id"

// identity returns the id kept in dir. The first time it keeps the wanted one,
// or makes one if none is wanted.
func identity(dir, wanted string) (string, error) {
	path := filepath.Join(dir, idFile)
	kept, err := os.ReadFile(path)
	switch id := strings.TrimSpace(string(kept)); {
	case err == nil && id == "":
		return "", fmt.Errorf("%w: %s is empty; if this coordinator is gone from the cluster, remove %s and join again", ErrDamaged, path, dir)
	case err == nil && wanted != "" && wanted != id:
		return "", fmt.Errorf("%s belongs to coordinator %s, not to %s", dir, id, wanted)
	case err == nil:
		return id, nil
	case !errors.Is(err, fs.ErrNotExist):
		return "", fmt.Errorf("read identity: %w", err)
	}
	if wanted == "" {
		wanted = newUUID()
	}
	if err := writeFileDurably(path, []byte(wanted+"\n")); err != nil {
		return "", fmt.Errorf("keep identity: %w", err)
	}
	return wanted, nil
}

// newUUID is a random (version 4) UUID.
func newUUID() string {
	var b [16]byte
	rand.Read(b[:])
	b[6] = b[6]&0x0f | 0x40
	b[8] = b[8]&0x3f | 0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}

// writeFileDurably replaces a file so that it is whole after a power cut.
func writeFileDurably(path string, data []byte) error {
	tmp := path + ".new"
	f, err := os.OpenFile(tmp, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	err = errors.Join(err, f.Sync(), f.Close())
	if err != nil {
		return err
	}
	if err := os.Rename(tmp, path); err != nil {
		return err
	}
	d, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
