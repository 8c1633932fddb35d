package ledger

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// errBinary is wrapped by errors about kept steps or waiting work.
var errBinary = errors.New("bad binary form")

// keptSteps is the binary form of Steps, before the name of the model's source.
type keptSteps struct {
	P0Ms, P1MsPerToken, QMsPerToken2, P2MsPerToken2 float64
	D0Ms, D1MsPerRequest, D2MsPerToken, D3Ms        float64
	DecodeMs                                        float64
	BudgetTokens                                    int64
}

// keptWaiting is the binary form of Waiting.
type keptWaiting struct {
	F, S                 float64
	K                    int64
	BuiltMs, AttentionMs float64
}

// MarshalBinary implements encoding.BinaryMarshaler, for decision records.
func (s Steps) MarshalBinary() ([]byte, error) {
	m := &s.model
	b, err := binary.Append(nil, binary.LittleEndian, keptSteps{
		m.P0Ms, m.P1MsPerToken, m.QMsPerToken2, m.P2MsPerToken2, m.D0Ms, m.D1MsPerRequest, m.D2MsPerToken, m.D3Ms, s.decodeMs, int64(s.budget),
	})
	return append(b, m.Source...), err
}

// maxSourceBytes bounds the name of a model's source.
const maxSourceBytes = 32

// UnmarshalBinary implements encoding.BinaryUnmarshaler.
func (s *Steps) UnmarshalBinary(b []byte) error {
	var k keptSteps
	n, err := binary.Decode(b, binary.LittleEndian, &k)
	if err != nil || len(b)-n > maxSourceBytes {
		return fmt.Errorf("%w: steps of %d bytes", errBinary, len(b))
	}
	m := StepModel{k.P0Ms, k.P1MsPerToken, k.QMsPerToken2, k.P2MsPerToken2, k.D0Ms, k.D1MsPerRequest, k.D2MsPerToken, k.D3Ms, Source(b[n:])}
	if k.BudgetTokens == 0 {
		*s = Steps{model: m, decodeMs: k.DecodeMs}
		return nil
	}
	*s = NewSteps(m, int(min(k.BudgetTokens, MaxTokens)), k.DecodeMs)
	return nil
}

// MarshalBinary implements encoding.BinaryMarshaler, for decision records.
func (w Waiting) MarshalBinary() ([]byte, error) {
	return binary.Append(nil, binary.LittleEndian, keptWaiting{w.F, w.S, int64(w.K), w.builtMs, w.attentionMs})
}

// UnmarshalBinary implements encoding.BinaryUnmarshaler.
func (w *Waiting) UnmarshalBinary(b []byte) error {
	var k keptWaiting
	if n, err := binary.Decode(b, binary.LittleEndian, &k); err != nil || n != len(b) {
		return fmt.Errorf("%w: waiting work of %d bytes", errBinary, len(b))
	}
	*w = Waiting{F: k.F, S: k.S, K: int(k.K), builtMs: k.BuiltMs, attentionMs: k.AttentionMs}
	return nil
}
