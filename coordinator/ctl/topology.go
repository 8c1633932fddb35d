package ctl

import (
	"fmt"

	waypostv1 "waypost/proto/waypost/v1"
)

// transferText says how a worker's saved KV may travel.
func transferText(t *waypostv1.TransferFacts) string {
	if t == nil || t.GetConnector() == "" {
		return "none"
	}
	exports := "exports nothing"
	if t.GetExportedTier() != "" {
		exports = "exports " + t.GetExportedTier() + " memory"
	}
	perToken := unknown
	if t.KvBytesPerToken != nil {
		perToken = size(t.KvBytesPerToken)
	}
	return fmt.Sprintf("%s at %s, %s, %s per token, fingerprint %s", t.GetConnector(), orUnknown(t.GetSideChannel()), exports, perToken, orUnknown(t.GetFingerprint()))
}

func orUnknown(s string) string {
	if s == "" {
		return unknown
	}
	return s
}
