package emulator

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"time"

	"waypost/testbed/emulator/core"
)

// Transfer is an engine's offloading connector: it hands blocks to peers and
// reads theirs when a request names one in kv_transfer_params. Nothing but the
// hashes crosses the wire; the bytes take their time.
type Transfer struct {
	// Address is the side channel of rank 0; rank r uses the port + r. Default
	// "127.0.0.1:0".
	Address string
	// Role is the connector's: kv_both (the default), kv_producer, kv_consumer.
	Role string
	// BytesPerToken is the KV of one token; default 131,072, an 8B model's.
	BytesPerToken float64
	// BytesPerSec is what the engine reads of a peer; default 12.5e9.
	BytesPerSec float64
	// Deaf accepts the parameters and reads nothing, as an engine does whose
	// connector cannot reach its peer.
	Deaf bool
}

// connector is the name of what is emulated.
const connector = "OffloadingConnector"

// peerTimeout bounds a question to a peer, maxHashes what it may ask.
const (
	peerTimeout = 5 * time.Second
	maxHashes   = 1 << 20
)

func (t *Transfer) withDefaults() *Transfer {
	if t == nil {
		return nil
	}
	c := *t
	orDefault(&c.Address, defaultAddress)
	orDefault(&c.Role, "kv_both")
	orDefault(&c.BytesPerToken, 131072)
	orDefault(&c.BytesPerSec, 12.5e9)
	return &c
}

func (t *Transfer) validate() error {
	if t == nil {
		return nil
	}
	switch t.Role {
	case "kv_both", "kv_producer", "kv_consumer":
	default:
		return fmt.Errorf("Transfer.Role is %q: want kv_both, kv_producer or kv_consumer", t.Role)
	}
	if !(t.BytesPerToken > 0 && t.BytesPerToken < 1e9) || !(t.BytesPerSec > 0 && t.BytesPerSec < 1e15) {
		return fmt.Errorf("Transfer.BytesPerToken is %v, BytesPerSec %v: want more than 0", t.BytesPerToken, t.BytesPerSec)
	}
	if _, _, err := splitAddress(t.Address); err != nil {
		return fmt.Errorf("Transfer.Address: %w", err)
	}
	return nil
}

// transferParams are a request's kv_transfer_params.
type transferParams struct {
	Source    *transferSource `json:"remote_kv_source"`
	Prefiller *transferSource `json:"remote_prefiller"`
	Decoder   *struct {
		RequestID string `json:"kv_request_id"`
	} `json:"remote_decoder"`
}

type transferSource struct {
	RequestID string `json:"kv_request_id"`
	Host      string `json:"remote_host"`
	Port      int    `json:"remote_port"`
}

// check refuses what the connector would.
func (p *transferParams) check() error {
	if p == nil {
		return nil
	}
	if p.Prefiller != nil && (p.Source != nil || p.Decoder != nil) {
		return badRequest("kv_transfer_params", "remote_prefiller cannot be combined with remote_decoder or remote_kv_source.")
	}
	for _, s := range []*transferSource{p.Source, p.Prefiller} {
		if s != nil && (s.RequestID == "" || s.Host == "" || s.Port < 1 || s.Port > 65535) {
			return badRequest("kv_transfer_params", "kv_request_id, remote_host and remote_port must be set.")
		}
	}
	return nil
}

// from is who is asked; nil: nobody.
func (p *transferParams) from() *transferSource {
	switch {
	case p == nil:
		return nil
	case p.Source != nil:
		return p.Source
	}
	return p.Prefiller
}

// pull reads what a peer holds of the prompts and this rank does not. What
// goes wrong is not the request's fault: it computes instead.
func (l *life) pull(ctx context.Context, g *generation, requests []core.Request) {
	source := g.common.KVTransferParams.from()
	t := l.opts.Transfer
	if source == nil || t == nil || t.Deaf {
		return
	}
	// The choices of one prompt are next to each other and alike.
	for i := 0; i < len(requests); i += g.samples {
		if err := l.pullPrompt(ctx, g.rank, source, requests[i]); err != nil {
			l.opts.Logger.Warn("pull failed", "peer", source.Host, "port", source.Port, "error", err)
			return
		}
	}
}

func (l *life) pullPrompt(ctx context.Context, r *rank, source *transferSource, q core.Request) error {
	var hashes []core.Hash
	held := 0
	if err := r.call(ctx, func() {
		hashes = r.core.Prefix(q)
		held = r.core.Held(hashes)
	}); err != nil {
		return err
	}
	theirs, err := l.askHeld(ctx, source, hashes)
	if err != nil || theirs <= held {
		return err
	}
	t := l.opts.Transfer
	bytes := float64((theirs-held)*l.opts.BlockTokens) * t.BytesPerToken
	took := time.Duration(bytes / t.BytesPerSec / l.opts.Speed * float64(time.Second))
	l.opts.Clock.SleepUntil(ctx, l.opts.Clock.Now().Add(took))
	l.pulledBlocks.Add(int64(theirs - held))
	return r.call(ctx, func() { r.core.Load(q, theirs) })
}

// askHeld asks a peer how many of the leading hashes it holds.
func (l *life) askHeld(ctx context.Context, source *transferSource, hashes []core.Hash) (int, error) {
	body := make([]byte, 0, len(hashes)*len(core.Hash{}))
	for _, h := range hashes {
		body = append(body, h[:]...)
	}
	ctx, cancel := context.WithTimeout(ctx, peerTimeout)
	defer cancel()
	address := net.JoinHostPort(source.Host, strconv.Itoa(source.Port))
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+address+"/held", bytes.NewReader(body))
	if err != nil {
		return 0, err
	}
	transport := &http.Transport{DisableKeepAlives: true}
	defer transport.CloseIdleConnections()
	resp, err := transport.RoundTrip(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	var answer [4]byte
	if _, err := io.ReadFull(resp.Body, answer[:]); err != nil || resp.StatusCode != http.StatusOK {
		return 0, fmt.Errorf("%s answered %s: %w", address, resp.Status, err)
	}
	return min(int(binary.BigEndian.Uint32(answer[:])), len(hashes)), nil
}

// sideChannel answers peers about a rank.
func (l *life) sideChannel(r *rank) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /held", func(w http.ResponseWriter, q *http.Request) {
		var h core.Hash
		body, err := io.ReadAll(http.MaxBytesReader(w, q.Body, maxHashes*int64(len(h))))
		if err != nil || len(body)%len(h) != 0 {
			http.Error(w, "want hashes of 32 bytes", http.StatusBadRequest)
			return
		}
		hashes := make([]core.Hash, len(body)/len(h))
		for i := range hashes {
			copy(hashes[i][:], body[i*len(h):])
		}
		held := 0
		if r.call(q.Context(), func() { held = r.core.Held(hashes) }) != nil {
			http.Error(w, "the engine is down", http.StatusServiceUnavailable)
			return
		}
		_, _ = w.Write(binary.BigEndian.AppendUint32(nil, uint32(held)))
	})
	return mux
}

// serveSides opens the side channels of a life.
func (l *life) serveSides(lns []net.Listener) {
	for i, ln := range lns {
		s := &http.Server{Handler: l.sideChannel(l.ranks[i]), ReadHeaderTimeout: 30 * time.Second}
		l.sides = append(l.sides, s)
		l.wg.Go(func() { _ = s.Serve(ln) })
	}
}

// describeTransfer adds the connector to what /server_info says.
func (l *life) describeTransfer(info, config, cache map[string]any) {
	t := l.opts.Transfer
	if t == nil {
		return
	}
	config["kv_transfer_config"] = map[string]any{
		"kv_connector": connector, "kv_role": t.Role,
		"kv_connector_extra_config": map[string]any{"spec_name": "TieringOffloadingSpec", "secondary_tiers": []any{map[string]any{"type": "p2p"}}},
	}
	cache["kv_cache_memory_bytes"] = json.Number(strconv.FormatFloat(t.BytesPerToken*float64(l.opts.PoolBlocks*l.opts.BlockTokens), 'f', 0, 64))
	host, port, _ := splitAddress(l.ports.sides[0])
	info["vllm_env"] = map[string]any{"VLLM_P2P_SIDE_CHANNEL_HOST": host, "VLLM_P2P_SIDE_CHANNEL_PORT": port}
}

// SideChannel is the host and port where peers read the blocks of rank 0;
// empty without a connector.
func (e *Engine) SideChannel() string {
	if len(e.ports.sides) == 0 {
		return ""
	}
	return e.ports.sides[0]
}

// PulledBlocks counts the blocks that the current life read of peers.
func (e *Engine) PulledBlocks() int64 {
	if l := e.current(); l != nil {
		return l.pulledBlocks.Load()
	}
	return 0
}
