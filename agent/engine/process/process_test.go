package process

import (
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"testing"
)

func TestListening(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("needs /proc")
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	at := l.Addr().(*net.TCPAddr).AddrPort()
	p, ok := Listening("", at)
	if !ok || !slices.Equal(p.Args, os.Args) || p.Env["PATH"] != os.Getenv("PATH") {
		t.Fatalf("%v %q", ok, p.Args)
	}
	name := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(name, []byte("here"), 0o600); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(p.Path(name)); err != nil || string(b) != "here" {
		t.Errorf("%q %v", b, err)
	}
	if _, err := os.Stat(p.Path("process_test.go")); err != nil {
		t.Errorf("by its working directory: %v", err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if _, ok := Listening("", at); ok {
		t.Error("nobody listens any more")
	}
}

// write makes a proc file system of one process with one socket.
func write(t *testing.T, files map[string]string) string {
	t.Helper()
	proc := t.TempDir()
	for name, text := range files {
		name = filepath.Join(proc, name)
		if err := os.MkdirAll(filepath.Dir(name), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return proc
}

func TestTables(t *testing.T) {
	const table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
	const listens = table + "   0: 00000000000000000000000000000000:1F90 00000000000000000000000000000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 77 1\n"
	const connected = table + "   0: 0100007F:1F90 0100007F:9C40 01 00000000:00000000 00:00000000 00000000     0        0 77 1\n"
	for name, c := range map[string]struct {
		files map[string]string
		pids  []int
		want  string // args[0]; empty: not found
	}{
		"by tcp6, the lowest id":    {map[string]string{"net/tcp6": listens, "9/cmdline": "b\x00", "10/cmdline": "a\x00-x\x00"}, []int{10, 9}, "b"},
		"a connection is no server": {map[string]string{"net/tcp": connected, "9/cmdline": "b\x00"}, []int{9}, ""},
		"nobody holds it":           {map[string]string{"net/tcp6": listens, "9/cmdline": "b\x00"}, nil, ""},
		"a kernel thread":           {map[string]string{"net/tcp6": listens, "9/cmdline": ""}, []int{9}, ""},
		"no tables":                 {nil, nil, ""},
	} {
		t.Run(name, func(t *testing.T) {
			proc := write(t, c.files)
			for _, pid := range c.pids {
				fd := filepath.Join(proc, strconv.Itoa(pid), "fd")
				if err := os.MkdirAll(fd, 0o700); err != nil {
					t.Fatal(err)
				}
				if err := os.Symlink("socket:[77]", filepath.Join(fd, "3")); err != nil {
					t.Fatal(err)
				}
			}
			p, ok := Listening(proc, loopback(8080))
			if ok != (c.want != "") || ok && p.Args[0] != c.want {
				t.Errorf("%v %q, want %q", ok, p.Args, c.want)
			}
			if ok && p.Env != nil {
				t.Errorf("an environment that cannot be read: %v", p.Env)
			}
		})
	}
}

func TestLocal(t *testing.T) {
	for u, want := range map[string]string{
		"http://127.0.0.1:8000/": "127.0.0.1:8000", "http://localhost": "invalid AddrPort", "https://[::1]": "[::1]:443",
		"http://[::1]:8001": "[::1]:8001", "http://[::ffff:127.0.0.1]:8001": "127.0.0.1:8001", "http://127.8.0.1:8000": "127.8.0.1:8000", "::": "",
		"http://192.0.2.1:8000": "", "http://gpu-7:8000": "", "http://127.0.0.1:0": "", "http://127.0.0.1:99999": "", ":": "", "ftp://127.0.0.1": "",
	} {
		if at, ok := Local(u); ok != (want != "") || ok && at.String() != want {
			t.Errorf("%s: %v %v, want %s", u, at, ok, want)
		}
	}
	if at, ok := Local("https://localhost"); !ok || at.Port() != 443 {
		t.Errorf("%v %v", at, ok)
	}
}
