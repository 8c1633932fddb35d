package agent

import (
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	waypostv1 "waypost/proto/waypost/v1"
)

// A wish outlives its agent, is kept by its id, and ends when a leader has that
// very one on record.
func TestDrainWishIsKept(t *testing.T) {
	dir, kicks := t.TempDir(), 0
	open := func() *drainWish {
		d := newDrainWish(dir, slog.New(slog.DiscardHandler), func() { kicks++ })
		if err := d.read(); err != nil {
			t.Fatal(err)
		}
		return d
	}
	d := open()
	if d.proto() != nil {
		t.Error("a wish from nowhere")
	}
	if err := d.set("fan"); err != nil {
		t.Fatal(err)
	}
	id := d.proto().GetId()
	if err := d.set("fan, again"); err != nil {
		t.Fatal(err)
	}
	d = open()
	if w := d.proto(); w.GetId() != id || len(id) != 16 || w.GetReason() != "fan, again" {
		t.Errorf("%v, was %s", w, id)
	}
	d.recorded("")
	d.recorded("0123456789abcdef")
	if d.proto() == nil {
		t.Error("another's record ended it")
	}
	d.recorded(id)
	if d.proto() != nil || open().proto() != nil {
		t.Error("it is on record, and wished for still")
	}
	if had, err := d.clear(); had || err != nil || kicks != 3 {
		t.Errorf("%v %v, told %d times", had, err, kicks)
	}
	if err := d.set("other"); err != nil || d.proto().GetId() == id {
		t.Errorf("%v: the next wish has the id of the former", err)
	}
}

func TestDrainWishFileIsChecked(t *testing.T) {
	for text, want := range map[string]string{
		"{":                       "unexpected end",
		`{"id":"x","reason":"r"}`: "16 hex digits",
		`{"id":"0123456789abcdef","reason":"` + strings.Repeat("r", 513) + `"}`: "at most 512",
		"{}": "16 hex digits",
	} {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, wishFile), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		d := newDrainWish(dir, slog.New(slog.DiscardHandler), func() {})
		if err := d.read(); err == nil || !strings.Contains(err.Error(), want) || d.proto() != nil {
			t.Errorf("%.40s: %v, want %s", text, err, want)
		}
	}
	// What cannot be kept is not said.
	d := newDrainWish(filepath.Join(t.TempDir(), "none"), slog.New(slog.DiscardHandler), func() { t.Error("told") })
	if err := d.set("x"); err == nil || d.proto() != nil {
		t.Errorf("%v", err)
	}
}

// Each report says the wish until a leader has made a drain of it, and of this
// one: what is recorded of a former wish changes nothing.
func TestWishIsToldUntilItIsRecorded(t *testing.T) {
	a := newAgent(t, newKey)
	if w := a.lanes.load(nil).GetDrainWish(); w != nil {
		t.Errorf("no wish is told as %v", w)
	}
	if err := a.wish.set("fans"); err != nil {
		t.Fatal(err)
	}
	told := a.lanes.load(nil).GetDrainWish()
	if told.GetId() == "" || told.GetReason() != "fans" {
		t.Fatalf("told as %v", told)
	}
	a.lanes.takePolicy(&waypostv1.PolicyPush{RecordedDrainWish: new("0123456789abcdef")})
	if w := a.lanes.load(nil).GetDrainWish(); w.GetId() != told.GetId() {
		t.Errorf("after word of another wish: %v", w)
	}
	a.lanes.takePolicy(&waypostv1.PolicyPush{RecordedDrainWish: told.Id})
	if w := a.lanes.load(nil).GetDrainWish(); w != nil {
		t.Errorf("after it is recorded: %v", w)
	}
}
