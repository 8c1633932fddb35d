package daemon

import (
	"errors"
	"os"
	"path/filepath"
)

// ReplaceFile replaces a file of an existing folder at once and for good: after
// a crash or a power cut it holds what it held or data, whole. Only its owner
// can read it.
func ReplaceFile(file string, data []byte) error {
	folder := filepath.Dir(file)
	tmp, err := os.CreateTemp(folder, "."+filepath.Base(file)+".*")
	if err != nil {
		return err
	}
	_, err = tmp.Write(data)
	err = errors.Join(err, tmp.Sync(), tmp.Close())
	if err == nil {
		err = os.Rename(tmp.Name(), file)
	}
	if err != nil {
		return errors.Join(err, os.Remove(tmp.Name()))
	}
	d, err := os.Open(folder)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
