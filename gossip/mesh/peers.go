package mesh

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"waypost/systemd/daemon"
)

const (
	maxPeers         = 256
	maxPeerFileBytes = 1 << 20
)

// peer is a member worth trying after a restart.
type peer struct {
	Name    string `json:"name"`
	Address string `json:"address"`
	Role    Role   `json:"role"`
}

type peerFile struct {
	Version int    `json:"version"`
	Peers   []peer `json:"peers"`
}

// readPeers reads the remembered peers. A file that is missing is empty; one
// that cannot be read is an error that the caller logs and forgets, as the file
// only speeds things up.
func readPeers(file string) ([]peer, error) {
	info, err := os.Stat(file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if info.Size() > maxPeerFileBytes {
		return nil, fmt.Errorf("%s: %d bytes, at most %d", file, info.Size(), maxPeerFileBytes)
	}
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	return parsePeers(data)
}

func parsePeers(data []byte) ([]peer, error) {
	var f peerFile
	if err := json.Unmarshal(data, &f); err != nil {
		return nil, fmt.Errorf("peers file: %w", err)
	}
	if f.Version != 1 {
		return nil, fmt.Errorf("peers file: version %d, this process reads 1", f.Version)
	}
	var good []peer
	for _, p := range f.Peers {
		if checkHostPort(p.Address) == nil && len(good) < maxPeers {
			good = append(good, p)
		}
	}
	return good, nil
}

// writePeers replaces the file at once, so that a crash leaves the old or the new one.
func writePeers(file string, peers []peer) error {
	data, err := json.MarshalIndent(peerFile{Version: 1, Peers: peers}, "", " ")
	if err != nil {
		return err
	}
	return daemon.ReplaceFile(file, append(data, '\n'))
}
