package replica

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"waypost/systemd/daemon"
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
	if err := daemon.ReplaceFile(path, []byte(wanted+"\n")); err != nil {
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
