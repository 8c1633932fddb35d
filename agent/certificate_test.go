package agent

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"waypost/gossip/identity"
)

// Whoever watches the metrics sees a certificate end before it does.
func TestCertificateExpiryIsInTheMetrics(t *testing.T) {
	dir := t.TempDir()
	certs, key := filepath.Join(dir, "certs"), filepath.Join(dir, "prefix.key")
	if _, err := identity.WriteDevCerts(certs, []string{"gpu-01"}, nil); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(key, fmt.Appendf(nil, "%032x\n", 7), 0o600); err != nil {
		t.Fatal(err)
	}
	cfg := DefaultConfig()
	cfg.Name, cfg.StateDir, cfg.RunDir, cfg.Prefix.KeyFile, cfg.GPU.Enabled = "gpu-01", dir, "", key, "off"
	cfg.Discover.Enabled = false
	cfg.Mesh.Listen, cfg.Metrics.Listen = "127.0.0.1:0", ""
	cfg.TLS.CAFile, cfg.TLS.CertFile, cfg.TLS.KeyFile = filepath.Join(certs, "ca.pem"), filepath.Join(certs, "agent-gpu-01.pem"), filepath.Join(certs, "agent-gpu-01.key")
	reg := prometheus.NewRegistry()
	a, err := New(Options{Config: cfg, Version: "test", Registerer: reg, Gatherer: reg})
	if err != nil {
		t.Fatal(err)
	}
	if n, err := testutil.GatherAndCount(reg, "waypost_certificate_expiry_seconds"); n != 2 || err != nil {
		t.Errorf("%d series of certificates, want those of the CA and of the leaf: %v", n, err)
	}
	// A reload reads the certificate as well, and says what is wrong with it.
	if err := a.reloadKeys(); err != nil {
		t.Error(err)
	}
	if err := os.WriteFile(cfg.TLS.KeyFile, []byte("half"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := a.reloadKeys(); err == nil || !strings.Contains(err.Error(), cfg.TLS.KeyFile) {
		t.Errorf("a damaged key: %v", err)
	}
}
