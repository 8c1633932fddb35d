package coordinator

import (
	"waypost/gossip/summary"
	waypostv1 "waypost/proto/waypost/v1"
)

// prefixFormats are the versions of the prefix frame format understood here.
var prefixFormats = summary.OwnTerms("").Reads

// agree checks what must agree before a word of the stream is believed.
func (h *lanes) agree(hello *waypostv1.AgentHello) error {
	return summary.Agree(
		summary.Terms{Side: "host " + hello.GetHost(), Writes: hello.GetPrefixFormat(), KeyIDs: hello.GetPrefixKeyIds()},
		summary.OwnTerms("coordinator "+h.c.name, h.c.prefixKey.ID()),
	)
}
