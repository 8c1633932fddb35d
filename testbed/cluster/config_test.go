package cluster

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"

	"waypost/gossip/identity"
)

// TestBadConfiguration plays the transcripts in testdata/badconfig through the
// built program. A command is "agent" or "coordinator" with flags, its input is
// the configuration file; $CERTS is a directory with valid certificates and
// keys of the host gpu-01 and the coordinator c-01.
func TestBadConfiguration(t *testing.T) {
	t.Parallel()
	program(t)
	certs := filepath.Join(t.TempDir(), "certs")
	if _, err := identity.WriteDevCerts(certs, []string{"gpu-01"}, []string{"c-01"}); err != nil {
		t.Fatal(err)
	}
	datadriven.Walk(t, "testdata/badconfig", func(t *testing.T, path string) {
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			file := filepath.Join(t.TempDir(), d.Cmd+".toml")
			if err := os.WriteFile(file, []byte(strings.ReplaceAll(d.Input, "$CERTS", certs)), 0o600); err != nil {
				t.Fatal(err)
			}
			args := []string{d.Cmd, "--config", file}
			var env []string
			for _, a := range d.CmdArgs {
				if value := strings.Join(a.Vals, ","); strings.HasPrefix(a.Key, "WAYPOST_") {
					env = append(env, a.Key+"="+value)
				} else {
					args = append(args, "--"+a.Key+"="+value)
				}
			}
			r := runWith(t, env, args...)
			said := strings.NewReplacer(file, d.Cmd+".toml", certs, "$CERTS").Replace(r.out + r.errOut)
			return fmt.Sprintf("exit %d\n%s", r.code, said)
		})
	})
}
