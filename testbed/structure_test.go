package testbed

import (
	"bytes"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const module = "waypost/"

// pure lists the packages that decide. They run the same in production and in
// the simulator, so they may not know the time, the network or the log.
var pure = []string{
	"agent/blocktable", "agent/engine/llamacpp/slots", "agent/queue",
	"gossip/prefix", "gossip/boundary", "gossip/summary", "gossip/ledger", "gossip/accuracy",
	"coordinator/prefixindex", "coordinator/pull", "coordinator/group", "coordinator/fleet", "coordinator/placement", "coordinator/registry", "coordinator/transfers", "coordinator/outcome", "coordinator/memo",
}

// pureLibraries are the libraries outside the standard library that pure
// packages may use, and who may use them.
var pureLibraries = map[string][]string{
	"github.com/zeebo/xxh3":                    {"gossip/prefix", "gossip/summary", "coordinator/prefixindex", "coordinator/placement"},
	"github.com/dchest/siphash":                {"gossip/prefix", "coordinator/memo"},
	"github.com/pelletier/go-toml/v2":          {"coordinator/registry"},
	"github.com/pelletier/go-toml/v2/unstable": {"coordinator/registry"},
}

// impureStd are parts of the standard library that do I/O or know the time.
var impureStd = []string{"os", "net", "net/http", "io/fs", "log", "log/slog", "os/exec", "os/signal", "syscall", "sync/errgroup"}

// rule forbids imports, with the reason that a reader of a failure needs.
type rule struct {
	in     func(pkg string) bool
	forbid func(imp string) bool
	why    string
}

func under(dirs ...string) func(string) bool {
	return func(p string) bool {
		for _, d := range dirs {
			if p == d || strings.HasPrefix(p, d+"/") {
				return true
			}
		}
		return false
	}
}

func not(f func(string) bool) func(string) bool { return func(p string) bool { return !f(p) } }

func ours(dirs ...string) func(string) bool {
	in := under(dirs...)
	return func(imp string) bool {
		p, ok := strings.CutPrefix(imp, module)
		return ok && in(p)
	}
}

func library(prefix string) func(string) bool {
	return func(imp string) bool { return imp == prefix || strings.HasPrefix(imp, prefix+"/") }
}

var rules = []rule{
	{under("agent"), ours("coordinator"), "an agent must live through any coordinator; what both need is in gossip"},
	{under("agent", "coordinator", "gossip", "nvml", "systemd", "proto"), ours("testbed"), "production never depends on its tests"},
	{under("coordinator"), ours("agent"), "a coordinator knows agents by what they say on mesh and lane only"},
	{under("gossip"), ours("agent", "coordinator", "nvml"), "gossip is what the two sides agree on; it stands below both"},
	{under("nvml"), ours("agent", "coordinator", "gossip"), "the NVML child must not be able to take anything else along"},
	{under("systemd"), ours("agent", "coordinator", "gossip", "nvml"), "daemon plumbing stands below the daemons"},
	{under("proto"), ours("agent", "coordinator", "gossip", "nvml", "systemd"), "messages depend on nothing"},
	{under("testbed/emulator"), ours("agent", "coordinator", "gossip"), "an emulator that shares our code agrees with us by construction"},
	{not(under("coordinator/replica")), library("github.com/hashicorp/raft"), "Raft stays behind coordinator/replica"},
	{not(under("coordinator/replica")), library("github.com/hashicorp/raft-boltdb"), "the log store stays behind coordinator/replica"},
	{not(under("gossip/mesh")), library("github.com/hashicorp/memberlist"), "memberlist stays behind gossip/mesh"},
	{not(under("nvml")), library("github.com/NVIDIA/go-nvml"), "NVML lives in the child process only"},
	{not(under("agent/host")), library("github.com/shirou/gopsutil/v4"), "host facts are read in agent/host only"},
	{under("agent/engine/zmtp"), ours("agent", "gossip", "coordinator", "proto"), "the ZeroMQ client is a library of its own"},
	{not(under("agent/engine/enginetest")), ours("agent/engine/enginetest"), "what adapters are tested with is no part of them"},
}

// file is one parsed Go file.
type file struct {
	pkg, name string
	test      bool
	ast       *ast.File
	lines     int
}

func parseAll(t *testing.T) (*token.FileSet, []file) {
	t.Helper()
	fset := token.NewFileSet()
	var files []file
	err := filepath.WalkDir("..", func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if n := d.Name(); p != ".." && (strings.HasPrefix(n, ".") || n == "testdata") {
				return filepath.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(p, ".go") {
			return nil
		}
		src, err := os.ReadFile(p)
		if err != nil {
			return err
		}
		f, err := parser.ParseFile(fset, p, src, parser.ParseComments)
		if err != nil {
			return err
		}
		rel := filepath.ToSlash(strings.TrimPrefix(p, ".."+string(filepath.Separator)))
		files = append(files, file{pkg: path.Dir(rel), name: rel, test: strings.HasSuffix(rel, "_test.go"), ast: f, lines: bytes.Count(src, []byte("\n"))})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(files) < 20 {
		t.Fatalf("only %d Go files found: the walk is wrong", len(files))
	}
	return fset, files
}

func imports(t *testing.T, f file) []string {
	t.Helper()
	var out []string
	for _, i := range f.ast.Imports {
		p, err := strconv.Unquote(i.Path.Value)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, p)
	}
	return out
}

func TestImportDirection(t *testing.T) {
	_, files := parseAll(t)
	for _, f := range files {
		for _, imp := range imports(t, f) {
			for _, r := range rules {
				// Tests may drive a package with what it must not depend on,
				// except where independence of the test itself is the point.
				if f.test && !under("testbed/emulator")(f.pkg) {
					continue
				}
				if r.in(f.pkg) && r.forbid(imp) {
					t.Errorf("%s imports %s: %s", f.name, imp, r.why)
				}
			}
		}
	}
}

func TestPurePackages(t *testing.T) {
	fset, files := parseAll(t)
	isPure := map[string]bool{}
	for _, p := range pure {
		isPure[p] = true
	}
	seen := map[string]bool{}
	for _, f := range files {
		if !isPure[f.pkg] || f.test {
			continue
		}
		seen[f.pkg] = true
		for _, imp := range imports(t, f) {
			switch p, own := strings.CutPrefix(imp, module); {
			case own && !isPure[p]:
				t.Errorf("%s imports %s: a pure package imports pure packages only", f.name, imp)
			case own:
			case slices.Contains(impureStd, imp):
				t.Errorf("%s imports %s: a pure package does no I/O and logs nothing", f.name, imp)
			case strings.Contains(imp, ".") && !slices.Contains(pureLibraries[imp], f.pkg):
				t.Errorf("%s imports %s: not among the libraries of pure packages", f.name, imp)
			}
		}
		ast.Inspect(f.ast, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.GoStmt:
				t.Errorf("%s: a pure package starts no goroutine", fset.Position(n.Pos()))
			case *ast.SelectorExpr:
				if id, ok := n.X.(*ast.Ident); ok && id.Name == "time" && id.Obj == nil &&
					slices.Contains([]string{"Now", "Since", "Until", "Sleep", "After", "AfterFunc", "NewTimer", "NewTicker", "Tick"}, n.Sel.Name) {
					t.Errorf("%s: time.%s: a pure package is told the time", fset.Position(n.Pos()), n.Sel.Name)
				}
			}
			return true
		})
	}
	for _, p := range pure {
		if !seen[p] {
			t.Errorf("pure package %s has no files: the list is out of date", p)
		}
	}
}

func TestNVMLBindingInOneFile(t *testing.T) {
	_, files := parseAll(t)
	var with []string
	for _, f := range files {
		if slices.ContainsFunc(imports(t, f), library("github.com/NVIDIA/go-nvml")) {
			with = append(with, f.name)
		}
	}
	if len(with) != 1 {
		t.Errorf("go-nvml is imported by %v, want exactly one guarded file: a call it does not guard kills the process", with)
	}
}

// Engines are asked with bounds: by the one client that has them.
func TestEnginesAreAskedByOneClient(t *testing.T) {
	fset, files := parseAll(t)
	found := false
	for _, f := range files {
		if f.test || !under("agent/engine")(f.pkg) || under("agent/engine/enginetest")(f.pkg) {
			continue
		}
		ast.Inspect(f.ast, func(n ast.Node) bool {
			s, ok := n.(*ast.SelectorExpr)
			if !ok {
				return true
			}
			id, ok := s.X.(*ast.Ident)
			if ok && id.Name == "http" && slices.Contains([]string{"Client", "DefaultClient", "Get", "Head", "Post", "PostForm", "Transport", "DefaultTransport"}, s.Sel.Name) {
				if f.pkg != "agent/engine/enginehttp" {
					t.Errorf("%s: http.%s: ask engines through agent/engine/enginehttp, which bounds what they can cost", fset.Position(n.Pos()), s.Sel.Name)
				}
				found = true
			}
			return true
		})
	}
	if !found {
		t.Error("nobody asks engines: the test looks at the wrong folder")
	}
}

func TestTopLevel(t *testing.T) {
	want := []string{"LICENSE", "README.md", "agent", "coordinator", "go.mod", "go.sum", "gossip", "main.go", "nvml", "proto", "systemd", "testbed"}
	entries, err := os.ReadDir("..")
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), ".") && e.Name() != "waypost" {
			got = append(got, e.Name())
		}
	}
	if !slices.Equal(got, want) {
		t.Errorf("top level is %v, want exactly %v", got, want)
	}
}

func TestShape(t *testing.T) {
	const maxLines, maxTestLines = 620, 820
	_, files := parseAll(t)
	documented, packages := map[string]bool{}, map[string]bool{}
	for _, f := range files {
		generated := ast.IsGenerated(f.ast)
		limit := maxLines
		if f.test {
			limit = maxTestLines
		}
		if f.lines > limit && !generated {
			t.Errorf("%s has %d lines: split it by what it is about (limit %d)", f.name, f.lines, limit)
		}
		if !f.test {
			packages[f.pkg] = true
			documented[f.pkg] = documented[f.pkg] || f.ast.Doc != nil || generated
		}
	}
	for p := range packages {
		if !documented[p] && p != "." {
			t.Errorf("package %s has no package comment", p)
		}
	}
}
