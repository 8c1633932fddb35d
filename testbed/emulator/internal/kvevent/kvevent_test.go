package kvevent

import (
	"bytes"
	"encoding/hex"
	"io/fs"
	"testing"

	"waypost/testbed/emulator/core"
	"waypost/testbed/emulator/internal/recording"
)

// hashOf is a digest whose last 8 bytes are low.
func hashOf(low uint64) (h core.Hash) {
	for i := range 8 {
		h[31-i] = byte(low >> (8 * i))
	}
	return h
}

// The expected bytes were made by vLLM's own kv_events module of the release
// with that layout: one store of two blocks of two tokens, one removal, one
// clear.
func TestLayouts(t *testing.T) {
	a, b := hashOf(0x1122334455667788), hashOf(0xdab7c1f200112233)
	events := []core.Event{
		{Op: core.OpStored, Hashes: []core.Hash{a, b}, Tokens: []uint32{1, 128000, 17, 65536}},
		{Op: core.OpRemoved, Hashes: []core.Hash{a}},
		{Op: core.OpCleared},
	}
	for _, test := range []struct {
		name string
		form Form
		want string
	}{
		{"0.23 arrays", FormArray, "93cb41da22faa02000009" +
			"39cab426c6f636b53746f72656492cf1122334455667788cfdab7c1f200112233c09401ce0001f40011ce0001000002c0a3475055c092c0c000ae66756c6c5f617474656e74696f6ec0" +
			"94ac426c6f636b52656d6f76656491cf1122334455667788a34750550091b0416c6c426c6f636b73436c656172656400"},
		{"0.9.0", FormUnranked, "92cb41da22faa02000009396ab426c6f636b53746f72656492cf1122334455667788cfdab7c1f200112233c09401ce0001f40011ce0001000002c092ac426c6f636b52656d6f76656491cf112233445566778891b0416c6c426c6f636b73436c6561726564"},
		{"0.9.1", FormArray6, "93cb41da22faa02000009396ab426c6f636b53746f72656492cf1122334455667788cfdab7c1f200112233c09401ce0001f40011ce0001000002c092ac426c6f636b52656d6f76656491cf112233445566778891b0416c6c426c6f636b73436c656172656400"},
		{"0.10.2", FormArray7, "93cb41da22faa02000009397ab426c6f636b53746f72656492cf1122334455667788cfdab7c1f200112233c09401ce0001f40011ce0001000002c0a347505593ac426c6f636b52656d6f76656491cf1122334455667788a347505591b0416c6c426c6f636b73436c656172656400"},
		{"0.14", FormArray8, "93cb41da22faa02000009398ab426c6f636b53746f72656492cf1122334455667788cfdab7c1f200112233c09401ce0001f40011ce0001000002c0a3475055c093ac426c6f636b52656d6f76656491cf1122334455667788a347505591b0416c6c426c6f636b73436c656172656400"},
		{"0.17", FormArray9, "93cb41da22faa02000009399ab426c6f636b53746f72656492cf1122334455667788cfdab7c1f200112233c09401ce0001f40011ce0001000002c0a3475055c092c0c093ac426c6f636b52656d6f76656491cf1122334455667788a347505591b0416c6c426c6f636b73436c656172656400"},
		{"0.20", FormArray10, "93cb41da22faa0200000939aab426c6f636b53746f72656492cf1122334455667788cfdab7c1f200112233c09401ce0001f40011ce0001000002c0a3475055c092c0c00094ac426c6f636b52656d6f76656491cf1122334455667788a34750550091b0416c6c426c6f636b73436c656172656400"},
		{"0.24 maps", FormMap, "93cb41da22faa0200000938ba474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392cf1122334455667788cfdab7c1f200112233" +
			"b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f6964739401ce0001f40011ce00010000aa626c6f636b5f73697a6502a76c6f72615f6964c0a66d656469756da3475055" +
			"a96c6f72615f6e616d65c0aa65787472615f6b65797392c0c0a967726f75705f69647800" +
			"b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6e84a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391cf1122334455667788" +
			"a66d656469756da3475055a967726f75705f6964780081a474797065b0416c6c426c6f636b73436c656172656400"},
	} {
		t.Run(test.name, func(t *testing.T) {
			got := hex.EncodeToString(Encoder{Form: test.form, BlockTokens: 2}.Append(nil, events, 1754000000.5, 0))
			if got != test.want {
				t.Errorf("encoded\n%s, want\n%s", got, test.want)
			}
		})
	}
}

// Whole payloads of the real engine, time stamp and hashes included: the core
// hashes blocks as the engine does.
func TestRecordedPayloads(t *testing.T) {
	testPayloads(t, recording.Sample(), recording.SampleNames)
}

func TestRecordedPayloadsFull(t *testing.T) {
	dir, err := recording.Full(".")
	if err != nil {
		t.Skip(err)
	}
	testPayloads(t, dir, recording.SequentialNames)
}

func testPayloads(t *testing.T, dir fs.FS, names []string) {
	for _, name := range names {
		t.Run(name, func(t *testing.T) {
			done, err := recording.Run(dir, name, nil)
			if err != nil {
				t.Fatal(err)
			}
			encoder := Encoder{BlockTokens: recording.EngineOptions(name).BlockTokens, Bytes: recording.SendsDigests(name)}
			payloads := 0
			for _, e := range done {
				if len(e.Batches) != len(e.Recorded) {
					t.Fatalf("request %d: %d batches, the engine sent %d", e.Request.N, len(e.Batches), len(e.Recorded))
				}
				for i, b := range e.Recorded {
					if got := encoder.Append(nil, e.Batches[i], b.Time, b.Rank); !bytes.Equal(got, b.Payload) {
						t.Fatalf("request %d: payload\n%x, the engine sent\n%x", e.Request.N, got, b.Payload)
					}
					payloads++
				}
			}
			if payloads == 0 {
				t.Fatal("the recording has no event batch")
			}
		})
	}
}
