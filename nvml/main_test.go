package nvml

import (
	"os"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		if buildFolder != "" {
			_ = os.RemoveAll(buildFolder)
		}
		os.Exit(code)
	}))
}

// buildFolder holds what tests built; empty: nothing was.
var buildFolder string
