package emulator

import (
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"net/http"
	"strconv"
	"strings"
)

const maxBodyBytes = 64 << 20

func (l *life) routes() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/", notFound)
	mux.HandleFunc("POST /v1/completions", l.authorized(l.serveCompletion))
	mux.HandleFunc("POST /v1/chat/completions", l.authorized(l.serveChat))
	mux.HandleFunc("GET /v1/models", l.authorized(l.serveModels))
	mux.HandleFunc("POST /tokenize", l.serveTokenize)
	mux.HandleFunc("POST /detokenize", l.serveDetokenize)
	mux.HandleFunc("GET /metrics", l.serveMetrics)
	mux.HandleFunc("GET /health", ok)
	mux.HandleFunc("/ping", ok)
	mux.HandleFunc("GET /version", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, map[string]string{"version": l.opts.Version})
	})
	mux.HandleFunc("GET /load", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, map[string]int{"server_load": 0}) // as without --enable-server-load-tracking
	})
	mux.HandleFunc("GET /kv_event_sources", l.serveSources)
	if !l.opts.HideServerInfo {
		l.developmentRoutes(mux)
	}
	if l.opts.AdminPath {
		mux.HandleFunc("POST /emulator/fault", l.engine.serveFault)
	}
	return mux
}

func ok(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) }

func notFound(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusNotFound)
	_, _ = io.WriteString(w, `{"detail":"Not Found"}`)
}

func (l *life) authorized(next http.HandlerFunc) http.HandlerFunc {
	if l.opts.APIKey == "" {
		return next
	}
	return func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer "+l.opts.APIKey {
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(http.StatusUnauthorized)
			_, _ = io.WriteString(w, `{"error":"Unauthorized"}`)
			return
		}
		next(w, r)
	}
}

// apiError is an answer other than 200.
type apiError struct {
	status  int
	kind    string
	param   string
	message string
}

func (e *apiError) Error() string { return e.message }

func badRequest(param, format string, args ...any) *apiError {
	return &apiError{http.StatusBadRequest, "BadRequestError", param, fmt.Sprintf(format, args...)}
}

func writeError(w http.ResponseWriter, err error) {
	var e *apiError
	if !errors.As(err, &e) {
		e = badRequest("", "%v", err)
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(e.status)
	_ = json.NewEncoder(w).Encode(e.body())
}

type errorBody struct {
	Error errorDetail `json:"error"`
}

type errorDetail struct {
	Message string  `json:"message"`
	Type    string  `json:"type"`
	Param   *string `json:"param"`
	Code    int     `json:"code"`
}

func (e *apiError) body() errorBody {
	d := errorDetail{Message: e.message, Type: e.kind, Code: e.status}
	if e.param != "" {
		d.Param = &e.param
	}
	return errorBody{d}
}

func writeJSON(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(v)
}

// readBody decodes a request's body into v.
func readBody(w http.ResponseWriter, r *http.Request, v any) error {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBodyBytes))
	if err != nil {
		return &apiError{http.StatusRequestEntityTooLarge, "BadRequestError", "", fmt.Sprintf("the body is not readable or longer than %d bytes", maxBodyBytes)}
	}
	return decodeBody(body, v)
}

func decodeBody(body []byte, v any) error {
	err := json.Unmarshal(body, v)
	var wrongType *json.UnmarshalTypeError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &wrongType):
		param := "body." + wrongType.Field
		return &apiError{http.StatusBadRequest, "Bad Request", param, fmt.Sprintf("1 validation error:\n  {'loc': '%s', 'msg': 'a JSON %s is not valid here'}", param, wrongType.Value)}
	}
	var e *apiError
	if errors.As(err, &e) {
		return e
	}
	return &apiError{http.StatusBadRequest, "Bad Request", "", fmt.Sprintf("1 validation error:\n  {'type': 'json_invalid', 'msg': '%v'}", err)}
}

// model checks a request's model and returns the number of its adapter, or -1
// for the base model. Empty is the base model.
func (l *life) model(name string) (int, error) {
	if name == "" || name == l.opts.Model {
		return -1, nil
	}
	names := []string{l.opts.Model}
	for i, a := range l.opts.Adapters {
		if a.Name == name {
			return i, nil
		}
		names = append(names, a.Name)
	}
	return 0, &apiError{http.StatusNotFound, "NotFoundError", "model", fmt.Sprintf("The model `%s` does not exist. Valid aliases: %s.", name, strings.Join(names, ", "))}
}

// chooseRank obeys the rank header, or takes the rank with the least to do.
func (l *life) chooseRank(r *http.Request) (*rank, error) {
	if h := r.Header.Get("X-data-parallel-rank"); h != "" {
		// What is no integer is ignored, as by the engine.
		if i, err := strconv.Atoi(strings.TrimSpace(h)); err == nil {
			if i < 0 || i >= len(l.ranks) {
				return nil, badRequest("", "data_parallel_rank %d is out of range [0, %d).", i, len(l.ranks))
			}
			return l.ranks[i], nil
		}
	}
	best, least := l.ranks[0], l.ranks[0].load()
	for _, r := range l.ranks[1:] {
		if n := r.load(); n < least {
			best, least = r, n
		}
	}
	return best, nil
}

// fingerprint names the configuration; it survives a restart.
func (l *life) fingerprint() string {
	h := fnv.New32a()
	fmt.Fprint(h, l.opts.Model, l.opts.coreOptions(), l.opts.Adapters, l.opts.Ranks)
	return fmt.Sprintf("vllm-%s-%08x", l.opts.Version, h.Sum32())
}

// requestID is the client's header, or a number of our own.
func (l *life) requestID(r *http.Request, body string) string {
	if body != "" {
		return body
	}
	if id := r.Header.Get("X-Request-Id"); id != "" {
		return id
	}
	return fmt.Sprintf("%016x", mix(uint64(l.began.UnixNano())+l.requests.Add(1)))
}
