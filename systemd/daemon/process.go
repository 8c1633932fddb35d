package daemon

import (
	"strconv"
	"strings"

	"github.com/zeebo/xxh3"
)

// hashMark hashes parts so that no two lists of parts run together.
func hashMark(parts []string) uint64 {
	var b strings.Builder
	for _, p := range parts {
		b.WriteString(strconv.Itoa(len(p)))
		b.WriteByte(':')
		b.WriteString(p)
	}
	if h := xxh3.HashString(b.String()); h != 0 {
		return h
	}
	return 1
}
