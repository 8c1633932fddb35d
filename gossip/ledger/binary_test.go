package ledger

import (
	"encoding"
	"errors"
	"testing"

	"pgregory.net/rapid"
)

// What is kept prices and waits as before.
func TestBinaryFormsComeBack(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		ms := rapid.Float64Range(0, 50)
		m := StepModel{
			P0Ms: ms.Draw(t, "p0"), P1MsPerToken: ms.Draw(t, "p1"), QMsPerToken2: rapid.Float64Range(0, 1).Draw(t, "q"), P2MsPerToken2: rapid.Float64Range(0, 1).Draw(t, "p2"),
			D0Ms: ms.Draw(t, "d0"), D1MsPerRequest: ms.Draw(t, "d1"), D2MsPerToken: ms.Draw(t, "d2"), D3Ms: -ms.Draw(t, "d3"),
			Source: rapid.SampledFrom([]Source{"", "prior", "learnt"}).Draw(t, "source"),
		}
		steps := NewSteps(m, rapid.IntRange(0, 100_000).Draw(t, "budget"), ms.Draw(t, "decode"))
		waiting := AtLoad(&steps, 1000, rapid.Float64Range(0, 1e5).Draw(t, "queue"), rapid.IntRange(0, 1e5).Draw(t, "open"))
		for range rapid.IntRange(0, 5).Draw(t, "claims") {
			waiting.Fold(&steps, 1000+rapid.Float64Range(0, 1e5).Draw(t, "made"), rapid.IntRange(0, 1e5).Draw(t, "reused"), rapid.IntRange(1, 1e5).Draw(t, "tokens"))
		}
		var gotSteps Steps
		var gotWaiting Waiting
		again(t, steps, &gotSteps)
		again(t, waiting, &gotWaiting)
		if gotSteps != steps || gotWaiting != waiting {
			t.Fatalf("kept %+v %+v, read %+v %+v", steps, waiting, gotSteps, gotWaiting)
		}
		var zero Steps
		again(t, zero, &gotSteps)
		if gotSteps != zero {
			t.Fatalf("the zero value came back as %+v", gotSteps)
		}
	})
}

func again(t *rapid.T, from encoding.BinaryMarshaler, to encoding.BinaryUnmarshaler) {
	b, err := from.MarshalBinary()
	if err == nil {
		err = to.UnmarshalBinary(b)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func TestBadBinaryFormsAreRefused(t *testing.T) {
	var s Steps
	var w Waiting
	steps, _ := NewSteps(StepModel{}, 1, 1).MarshalBinary()
	for _, b := range [][]byte{nil, {1}, steps[:len(steps)-1], append(steps, make([]byte, maxSourceBytes+1)...)} {
		if err := s.UnmarshalBinary(b); !errors.Is(err, errBinary) {
			t.Errorf("steps of %d bytes: %v", len(b), err)
		}
		if err := w.UnmarshalBinary(b); !errors.Is(err, errBinary) {
			t.Errorf("waiting work of %d bytes: %v", len(b), err)
		}
	}
}
