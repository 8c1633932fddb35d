//go:build !linux

package daemon

// DropStartPages does nothing on this system.
func DropStartPages() error { return nil }
