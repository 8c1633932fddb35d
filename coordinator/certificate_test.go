package coordinator

import (
	"path/filepath"
	"testing"

	"waypost/gossip/identity"
)

// Whoever watches the metrics sees a certificate end before it does.
func TestCertificateExpiryIsInTheMetrics(t *testing.T) {
	certs := filepath.Join(t.TempDir(), "certs")
	if _, err := identity.WriteDevCerts(certs, nil, []string{"c-1"}); err != nil {
		t.Fatal(err)
	}
	o := startOne(t, func(cfg *Config) {
		cfg.TLS.CAFile, cfg.TLS.CertFile, cfg.TLS.KeyFile = filepath.Join(certs, "ca.pem"), filepath.Join(certs, "coordinator-c-1.pem"), filepath.Join(certs, "coordinator-c-1.key")
	})
	for _, kind := range []string{"ca", "leaf"} {
		if left := o.metric(t, "waypost_certificate_expiry_seconds{"+kind+"}"); !(left > 3600) {
			t.Errorf("%s: %v s are left", kind, left)
		}
	}
}
