package discover

import (
	"fmt"
	"io/fs"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"
)

// table is a process table under construction.
type table struct {
	fstest.MapFS
	hidden map[string]bool
	inode  int
	own    string
}

func newTable() *table {
	return &table{MapFS: fstest.MapFS{}, hidden: map[string]bool{}, inode: 100}
}

// fake is one process of a table.
type fake struct {
	pid, parent, uid int
	args             string // separated by spaces
	cgroup           string
	listens          []string // hexadecimal address:port
	away             string   // listens there in a namespace of its own
}

const header = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"

func socketLine(address string, uid, inode int) string {
	return fmt.Sprintf("   0: %s 00000000:0000 0A 00000000:00000000 00:00000000 00000000 %5d        0 %d 1 0000000000000000 100 0 0 10 0\n", address, uid, inode)
}

func (tb *table) add(p fake) {
	dir := fmt.Sprint(p.pid)
	put := func(name, text string) { tb.MapFS[dir+"/"+name] = &fstest.MapFile{Data: []byte(text)} }
	put("cmdline", strings.ReplaceAll(p.args, " ", "\x00")+"\x00")
	put("status", fmt.Sprintf("Name:\tx\nPPid:\t%d\nUid:\t%d\t%d\t%d\t%d\nNSpid:\t%d\t1\n", p.parent, p.uid, p.uid, p.uid, p.uid, p.pid))
	put("stat", fmt.Sprintf("%d (a) b) S %d %s 4711 0 0", p.pid, p.parent, strings.Repeat("0 ", 17)))
	put("cgroup", "0::"+p.cgroup+"\n")
	put("fd/0", "")
	theirs := header
	for _, address := range p.listens {
		tb.inode++
		line := socketLine(address, p.uid, tb.inode)
		tb.own += line
		tb.link(dir, tb.inode)
	}
	if p.away != "" {
		tb.inode++
		theirs += socketLine(p.away, p.uid, tb.inode)
		tb.link(dir, tb.inode)
		put("net/tcp", theirs)
	}
}

func (tb *table) link(dir string, inode int) {
	tb.MapFS[fmt.Sprintf("%s/fd/%d", dir, inode)] = &fstest.MapFile{Mode: fs.ModeSymlink, Data: fmt.Appendf(nil, "socket:[%d]", inode)}
}

// scan finishes the table and looks at it.
func (tb *table) scan(t *testing.T) Result {
	t.Helper()
	tb.finish()
	r, err := New(Options{Proc: tb}).Scan()
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func (tb *table) finish() {
	tb.MapFS["net/tcp"] = &fstest.MapFile{Data: []byte(header + tb.own)}
	dirs := map[string]bool{}
	for name := range tb.MapFS {
		dir, _, _ := strings.Cut(name, "/")
		dirs[dir] = true
	}
	for dir := range dirs {
		if _, own := tb.MapFS[dir+"/net/tcp"]; !own && dir != "net" {
			tb.MapFS[dir+"/net/tcp"] = tb.MapFS["net/tcp"]
		}
	}
}

// Open and the rest let a table hide what another user may not see.
func (tb *table) Open(name string) (fs.File, error) {
	if tb.hidden[name] {
		return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrPermission}
	}
	return tb.MapFS.Open(name)
}

func (tb *table) ReadDir(name string) ([]fs.DirEntry, error) {
	if tb.hidden[name] {
		return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrPermission}
	}
	return tb.MapFS.ReadDir(name)
}

const (
	all8000   = "00000000:1F40"
	loop8000  = "0100007F:1F40"
	loop8001  = "0100007F:1F41"
	all30000  = "00000000:7530"
	all5557   = "00000000:15B5"
	anyIP8080 = "00000000000000000000000000000000:1F90"
)

// short is an engine in one line.
func short(e *Engine) string {
	s := fmt.Sprintf("%s pid=%d %s %s", e.Name(), e.PID, e.Place, e.URL())
	for _, f := range []struct {
		on   bool
		text string
	}{
		{e.Trusted, "trusted"},
		{e.Container, "container"},
		{e.ByPort, "by-port"},
		{e.Orphan, fmt.Sprintf("orphan%v", e.Ports)},
		{e.Model != "", "model=" + e.Model},
	} {
		if f.on {
			s += " " + f.text
		}
	}
	if e.Group != nil {
		s += fmt.Sprintf(" group=%+v", *e.Group)
	}
	return s
}

func shorts(r Result) []string {
	var out []string
	for i := range r.Engines {
		out = append(out, short(&r.Engines[i]))
	}
	return out
}

func TestEnginesAreFound(t *testing.T) {
	for _, c := range []struct {
		name string
		add  []fake
		want []string
	}{
		{
			"vLLM by its script",
			[]fake{{pid: 41, uid: 0, args: "/usr/bin/python3 /usr/local/bin/vllm serve Qwen/Qwen3-32B --port 8000", listens: []string{all8000, all5557}}},
			[]string{"vllm-8000 pid=41 here http://127.0.0.1:8000 trusted model=Qwen/Qwen3-32B"},
		},
		{
			"vLLM by its module, on the default port",
			[]fake{{pid: 41, uid: 990, args: "python -u -X dev -m vllm.entrypoints.openai.api_server --model=m --served_model_name q", listens: []string{all8000}}},
			[]string{"vllm-8000 pid=41 here http://127.0.0.1:8000 trusted model=q"},
		},
		{
			"SGLang",
			[]fake{{pid: 41, uid: 0, args: "python3 -m sglang.launch_server --model-path m", listens: []string{all30000}}},
			[]string{"sglang-30000 pid=41 here http://127.0.0.1:30000 trusted model=m"},
		},
		{
			"TensorRT-LLM",
			[]fake{{pid: 41, uid: 0, args: "/usr/bin/python /usr/local/bin/trtllm-serve m --port 8001", listens: []string{loop8001}}},
			[]string{"trtllm-8001 pid=41 here http://127.0.0.1:8001 trusted model=m"},
		},
		{"TensorRT-LLM's router serves nothing itself", []fake{{pid: 41, uid: 0, args: "trtllm-serve disaggregated -c f --port 8001", listens: []string{loop8001}}}, nil},
		{
			"llama.cpp on both families",
			[]fake{{pid: 41, uid: 0, args: "./llama-server -m x.gguf --host ::", listens: []string{anyIP8080}}},
			[]string{"llamacpp-8080 pid=41 here http://[::1]:8080 trusted model=x.gguf"},
		},
		{
			"a port that the command line does not name",
			[]fake{{pid: 41, uid: 0, args: "llama-server -m x.gguf", listens: []string{loop8001}}},
			[]string{"llamacpp-8001 pid=41 here http://127.0.0.1:8001 trusted model=x.gguf"},
		},
		{
			"it does not listen yet",
			[]fake{{pid: 41, uid: 0, args: "vllm serve m --port 8000", listens: []string{all5557}}},
			[]string{"vllm-8000 pid=41 nowhere http://127.0.0.1:8000 trusted model=m"},
		},
		{"other programs are none, also if they name one", []fake{
			{pid: 41, uid: 0, args: "bash -c vllm serve m", listens: []string{all8000}},
			{pid: 42, uid: 0, args: "docker run vllm/vllm-openai vllm serve"},
			{pid: 43, uid: 0, args: "vllm bench serve"},
			{pid: 44, uid: 0, args: "vim /usr/local/bin/vllm"},
			{pid: 45, uid: 0, args: "python3 -c vllm serve"},
		}, nil},
		{"its children are not engines of their own", []fake{
			{pid: 41, uid: 0, args: "vllm serve m", listens: []string{all8000}},
			{pid: 42, parent: 41, uid: 0, args: "vllm serve m"},
			{pid: 43, parent: 42, uid: 0, args: "VLLM::EngineCore", listens: []string{all5557}},
			{pid: 44, parent: 43, uid: 0, args: "VLLM::Worker_TP0"},
		}, []string{"vllm-8000 pid=41 here http://127.0.0.1:8000 trusted model=m"}},
		{"two engines of one parent", []fake{
			{pid: 40, uid: 0, args: "vllm serve a --port 8001", listens: []string{loop8001}},
			{pid: 41, parent: 40, uid: 0, args: "vllm serve b", listens: []string{all8000}},
		}, []string{"vllm-8001 pid=40 here http://127.0.0.1:8001 trusted model=a", "vllm-8000 pid=41 here http://127.0.0.1:8000 trusted model=b"}},
		{"a part whose engine is gone holds its ports", []fake{
			{pid: 43, parent: 1, uid: 0, args: "VLLM::EngineCore", listens: []string{all5557}},
			{pid: 44, parent: 43, uid: 0, args: "VLLM::Worker_TP0"},
			{pid: 50, parent: 1, uid: 0, args: "VLLM::Worker_TP1"},
		}, []string{"vllm-8000 pid=43 nowhere http://127.0.0.1:8000 trusted orphan[5557]"}},
		{
			"a member of an engine that spans hosts",
			[]fake{{pid: 41, uid: 0, args: "python3 -m sglang.launch_server --model-path m --nnodes 2 --node-rank 1 --dist-init-addr 10.0.0.1:20000"}},
			[]string{"sglang-30000 pid=41 nowhere http://127.0.0.1:30000 trusted model=m group={Meeting:10.0.0.1:20000 Node:1 Nodes:2 FirstRank:0 LocalRanks:0 Ranks:0 Uncounted:false Front:false}"},
		},
		{
			"its front",
			[]fake{{pid: 41, uid: 0, args: "vllm serve m --nnodes=2 --node-rank=0 --master-addr=10.0.0.1", listens: []string{all8000}}},
			[]string{"vllm-8000 pid=41 here http://127.0.0.1:8000 trusted model=m group={Meeting:10.0.0.1:29501 Node:0 Nodes:2 FirstRank:0 LocalRanks:0 Ranks:0 Uncounted:false Front:true}"},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			tb := newTable()
			for _, p := range c.add {
				tb.add(p)
			}
			if diff := cmp.Diff(c.want, shorts(tb.scan(t))); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestWhoIsServedUnasked(t *testing.T) {
	for _, c := range []struct {
		uid    int
		cgroup string
		want   bool
	}{
		{0, "/user.slice/user-0.slice/session-1.scope", true},
		{990, "/system.slice/vllm.service", true},
		{61200, "/system.slice/vllm.service", true},
		{1000, "/user.slice/user-1000.slice/session-1.scope", false},
		{65534, "/", false},
		{1000, "/system.slice/docker-0a1b2c.scope", true},
		{1000, "/docker/0a1b2c", true},
		{1000, "/kubepods.slice/kubepods-pod1.slice/cri-containerd-0a1b.scope", true},
		{1000, "/system.slice/containerd.service/kubepods-besteffort-pod1.slice:cri-containerd:0a1b", true},
		{1000, "/machine.slice/libpod-0a1b.scope", true},
		// Users name groups of their own as they like.
		{1000, "/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-0a1b.scope", false},
		{1000, "/user.slice/user-1000.slice/user@1000.service/docker/0a1b", false},
		{1000, "/system.slice/docker.service", false},
	} {
		tb := newTable()
		tb.add(fake{pid: 41, uid: c.uid, args: "vllm serve m", cgroup: c.cgroup, listens: []string{all8000}})
		e := tb.scan(t).Engines
		if len(e) != 1 || e[0].Trusted != c.want {
			t.Errorf("uid %d in %s: trusted is not %v: %+v", c.uid, c.cgroup, c.want, e)
		}
	}
}

// Process ids of containers collide: both engines are process 1 in their own.
func TestDSC03TwoContainersBothProcessOne(t *testing.T) {
	tb := newTable()
	tb.add(fake{pid: 7713, uid: 0, args: "vllm serve m", cgroup: "/docker/a", listens: []string{all8000}})
	tb.add(fake{pid: 7800, uid: 0, args: "vllm serve m --port 8001", cgroup: "/docker/b", listens: []string{loop8001}})
	want := []string{
		"vllm-8000 pid=7713 here http://127.0.0.1:8000 trusted container model=m",
		"vllm-8001 pid=7800 here http://127.0.0.1:8001 trusted container model=m",
	}
	if diff := cmp.Diff(want, shorts(tb.scan(t))); diff != "" {
		t.Error(diff)
	}
}

func TestOtherNetworkNamespace(t *testing.T) {
	tb := newTable()
	tb.add(fake{pid: 41, uid: 0, args: "vllm serve a", listens: []string{all8000}})
	tb.add(fake{pid: 7713, uid: 0, args: "vllm serve m", cgroup: "/docker/a", away: all8000})
	want := []string{
		"vllm-8000 pid=41 here http://127.0.0.1:8000 trusted model=a",
		"vllm-8000 pid=7713 elsewhere http://127.0.0.1:8000 trusted container model=m",
	}
	if diff := cmp.Diff(want, shorts(tb.scan(t))); diff != "" {
		t.Error(diff)
	}
}

// Without the right to look at other users' processes engines are still told
// apart, and the result says what it rests on.
func TestUnprivileged(t *testing.T) {
	tb := newTable()
	tb.add(fake{pid: 41, uid: 0, args: "vllm serve a", listens: []string{all8000}})
	tb.add(fake{pid: 7713, uid: 0, args: "vllm serve m --port 8001", cgroup: "/docker/a", away: loop8001})
	// Somebody else listens where an engine of root's will.
	tb.add(fake{pid: 50, uid: 0, args: "llama-server -m x"})
	tb.add(fake{pid: 51, uid: 1000, args: "nc -l 8080", listens: []string{"00000000:1F90"}})
	for name := range tb.MapFS {
		if dir, _, ok := strings.Cut(name, "/fd/"); ok {
			tb.hidden[dir+"/fd"] = true
		}
	}
	r := tb.scan(t)
	want := []string{
		"vllm-8000 pid=41 here http://127.0.0.1:8000 trusted by-port model=a",
		"llamacpp-8080 pid=50 nowhere http://127.0.0.1:8080 trusted by-port model=x",
		"vllm-8001 pid=7713 elsewhere http://127.0.0.1:8001 trusted container by-port model=m",
	}
	if diff := cmp.Diff(want, shorts(r)); diff != "" {
		t.Error(diff)
	}
	if !strings.Contains(r.Limited, "CAP_SYS_PTRACE") {
		t.Errorf("limited is %q", r.Limited)
	}
}

// Of an engine whose command line names no port, those that its events are
// published at are not its server's.
func TestEventPortsAreNoServers(t *testing.T) {
	tb := newTable()
	tb.add(fake{pid: 41, uid: 0, args: `vllm serve m --kv-events-config {"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557"}`, listens: []string{all5557, "00000000:2328"}})
	if diff := cmp.Diff([]string{"vllm-9000 pid=41 here http://127.0.0.1:9000 trusted model=m"}, shorts(tb.scan(t))); diff != "" {
		t.Error(diff)
	}
}

// A table that hides other users' processes, in either way that the kernel has,
// says so: engines among them are not found.
func TestHiddenProcesses(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*table)
		want   bool
	}{
		"all are seen":          {func(*table) {}, false},
		"hidepid=1":             {func(tb *table) { tb.hidden["1/cmdline"] = true }, true},
		"hidepid=2":             {func(tb *table) { delete(tb.MapFS, "1/cmdline") }, true},
		"no table of a kernel":  {func(tb *table) { delete(tb.MapFS, "self"); delete(tb.MapFS, "1/cmdline") }, false},
		"the first one is gone": {func(tb *table) { tb.MapFS["1/cmdline"].Data = nil }, false},
	} {
		tb := newTable()
		tb.MapFS["self"], tb.MapFS["1/cmdline"] = &fstest.MapFile{}, &fstest.MapFile{Data: []byte("init\x00")}
		c.change(tb)
		if r := tb.scan(t); r.Hidden != c.want {
			t.Errorf("%s: hidden is %v", name, r.Hidden)
		}
	}
}

// A process that becomes an engine, by exec, is found; one that ends is gone in
// the next scan.
func TestScansFollowTheProcessTable(t *testing.T) {
	tb := newTable()
	tb.add(fake{pid: 41, uid: 0, args: "bash start.sh"})
	tb.finish()
	s := New(Options{Proc: tb})
	if r, err := s.Scan(); err != nil || len(r.Engines) != 0 {
		t.Fatalf("%v, %v", r, err)
	}
	tb.add(fake{pid: 41, uid: 0, args: "vllm serve m", listens: []string{all8000}})
	tb.add(fake{pid: 42, uid: 0, args: "vllm serve m --port 8001", listens: []string{loop8001}})
	tb.finish()
	var seen []int
	for range lookAgain + 1 {
		r, err := s.Scan()
		if err != nil {
			t.Fatal(err)
		}
		seen = append(seen, len(r.Engines))
	}
	if seen[0] < 1 || seen[lookAgain] != 2 {
		t.Errorf("engines by scan are %v, want the new process at once and the other after %d scans", seen, lookAgain)
	}
	for name := range tb.MapFS {
		if strings.HasPrefix(name, "41/") {
			delete(tb.MapFS, name)
		}
	}
	if r, err := s.Scan(); err != nil || len(r.Engines) != 1 {
		t.Errorf("%v, %v, want the one that is left", r, err)
	}
}

func TestScanIsBounded(t *testing.T) {
	tb := newTable()
	for i := range MaxEngines + 3 {
		tb.add(fake{pid: 100 + i, uid: 0, args: fmt.Sprintf("vllm serve m --port %d", 8000+i)})
	}
	if r := tb.scan(t); len(r.Engines) != MaxEngines || r.Over != 3 {
		t.Errorf("%d engines, %d over", len(r.Engines), r.Over)
	}
	if _, err := New(Options{Proc: fstest.MapFS{}}).Scan(); err == nil {
		t.Error("a table without sockets is no empty host")
	}
}

func FuzzScan(f *testing.F) {
	f.Add("vllm\x00serve\x00m\x00--port\x008000", "PPid:\t1\nUid:\t0\t0\t0\t0\n", "0::/docker/a\n", header+socketLine(all8000, 0, 7))
	f.Add("python\x00-m\x00sglang.launch_server\x00--kv-events-config\x00{}", "", "", "")
	f.Fuzz(func(t *testing.T, args, status, cgroup, tcp string) {
		fsys := fstest.MapFS{
			"41/cmdline": {Data: []byte(args)}, "41/status": {Data: []byte(status)}, "41/cgroup": {Data: []byte(cgroup)}, "41/stat": {Data: []byte(args)},
			"net/tcp": {Data: []byte(tcp)},
		}
		r, err := New(Options{Proc: fsys}).Scan()
		if err != nil {
			return
		}
		for i := range r.Engines {
			e := &r.Engines[i]
			if e.Port < 1 || e.Port > 65535 {
				t.Errorf("port %d", e.Port)
			}
			for _, version := range []string{"", "0.8.5", "0.11.0", args} {
				e.Advise(Known{Version: version})
			}
			e.Events()
		}
	})
}
