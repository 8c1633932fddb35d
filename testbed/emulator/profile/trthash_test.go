package profile

import (
	"fmt"
	"testing"
)

// The vectors were computed with the engine's own module of hashes.
func TestTensorRTHashes(t *testing.T) {
	var tokens []uint32
	for i := range uint32(64) {
		tokens = append(tokens, i)
	}
	for _, test := range []struct {
		hash TRTHash
		salt string
		want []string
	}{
		{TRTBlockKey, "", []string{"17461474797406555673", "949730894463544763"}},
		{TRTBlockKey, "tenant-7", []string{"13243687588945487389"}},
		{TRTSHA256, "", []string{"a75df711d2fb0436d4b242fdb989e4927e91b02b85b2f18414ecdd265127efaf", "3d6d38d54c5e8be0a1a66889ae464a2f9e821063b48229f31bb561ed5822817b"}},
	} {
		var prev *digest
		for i, want := range test.want {
			d := test.hash.page()(prev, test.salt, tokens[32*i:32*i+32])
			got := fmt.Sprintf("%x", d)
			if test.hash == TRTBlockKey {
				got = fmt.Sprint(uint64(d.first64()))
			}
			if got != want {
				t.Errorf("%s, salt %q, block %d: %s, want %s", test.hash, test.salt, i, got, want)
			}
			prev = &d
		}
	}
}
