//go:build !linux

package daemon

// DropFilePages does nothing on this system.
func DropFilePages() error { return nil }
