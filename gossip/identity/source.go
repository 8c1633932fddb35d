package identity

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

const (
	defaultCheckEvery = 2 * time.Second
	// maxFileBytes bounds what is read from a certificate or key file.
	maxFileBytes = 1 << 20
	// maxChain bounds the certificates a peer may send along.
	maxChain = 8
)

// Files are the paths of a process's certificate, its key and the fleet's CA.
type Files struct {
	CA   string // certificates of the CAs to trust, PEM, one or more
	Cert string // certificate of this process, PEM, followed by intermediates if any
	Key  string // its private key, PEM
}

// Options of a [Source].
type Options struct {
	Files Files
	// CheckEvery is how often the files may be looked at for changes; a look
	// happens during handshakes, and when metrics are read. Zero means 2 s.
	CheckEvery time.Duration
	// Logger takes one line when files were read again and one when that begins
	// to fail. Nil discards.
	Logger *slog.Logger
}

// Source is the identity of this process, kept equal to its files. It starts no
// goroutine: changes are noticed by the next handshake, or when metrics are
// read. A set of files that
// does not fit together keeps the old one in force, so that certificate and
// key may be replaced one after the other.
//
// A Source is a [prometheus.Collector] of certificate expiry and reloads.
type Source struct {
	opts    Options
	log     *slog.Logger
	current atomic.Pointer[material]

	mu         sync.Mutex // guards the fields below and serialises reloads
	checkedAt  time.Time
	lastErr    error
	reloaded   uint64
	reloadFail uint64
}

// material is one consistent reading of the files.
type material struct {
	cert       *tls.Certificate
	roots      *x509.CertPool
	role       Role
	name       string
	caNotAfter time.Time
	stamps     [3]fileStamp
}

// fileStamp tells whether a file changed without reading it.
type fileStamp struct {
	info os.FileInfo
}

func (a fileStamp) equal(b fileStamp) bool {
	return a.info.ModTime().Equal(b.info.ModTime()) && a.info.Size() == b.info.Size() && os.SameFile(a.info, b.info)
}

// Open reads the files. It fails when one is missing or malformed, when the key
// does not belong to the certificate, when the CA did not sign it, when it is
// not valid now, or when it names no role; the error says which file.
func Open(opts Options) (*Source, error) {
	if opts.CheckEvery == 0 {
		opts.CheckEvery = defaultCheckEvery
	}
	log := opts.Logger
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	m, err := load(opts.Files)
	if err != nil {
		return nil, err
	}
	if info := m.stamps[2].info; info.Mode().Perm()&0o007 != 0 {
		log.Warn("private key is accessible to every user of this host", "file", opts.Files.Key, "mode", info.Mode().Perm(), "fix", "chmod 0600 "+opts.Files.Key)
	}
	s := &Source{opts: opts, log: log, checkedAt: time.Now()}
	s.current.Store(m)
	return s, nil
}

// Role returns the role this process has by its certificate.
func (s *Source) Role() Role { return s.current.Load().role }

// Name returns the name this process has by its certificate.
func (s *Source) Name() string { return s.current.Load().name }

// NotAfter returns when the certificate of this process ends.
func (s *Source) NotAfter() time.Time { return s.current.Load().cert.Leaf.NotAfter }

// Reload looks at the files now and reads them if one changed. The error of an
// earlier failure is returned again as long as it lasts.
func (s *Source) Reload() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.reloadLocked()
	return s.lastErr
}

// now returns the material in force, after a look at the files if one is due.
func (s *Source) now() *material {
	// A handshake never waits for another one's reload.
	if s.mu.TryLock() {
		if time.Since(s.checkedAt) >= s.opts.CheckEvery {
			s.reloadLocked()
		}
		s.mu.Unlock()
	}
	return s.current.Load()
}

func (s *Source) reloadLocked() {
	s.checkedAt = time.Now()
	old := s.current.Load()
	stamps, err := stat(s.opts.Files)
	if err == nil && stamps[0].equal(old.stamps[0]) && stamps[1].equal(old.stamps[1]) && stamps[2].equal(old.stamps[2]) {
		s.lastErr = nil
		return
	}
	var m *material
	if err == nil {
		m, err = load(s.opts.Files)
	}
	if err == nil && (m.role != old.role || m.name != old.name) {
		// A process cannot become someone else while its lanes are up.
		err = fmt.Errorf("cert_file %s now names %s/%s, this process is %s/%s: restart it to change who it is", s.opts.Files.Cert, m.role, m.name, old.role, old.name)
	}
	if err != nil {
		s.reloadFail++
		if s.lastErr == nil || s.lastErr.Error() != err.Error() {
			s.log.Warn("certificate files cannot be used, the old ones stay in force", "error", err)
		}
		s.lastErr = err
		return
	}
	s.lastErr = nil
	s.reloaded++
	s.current.Store(m)
	s.log.Info("certificate files read again", "role", m.role, "name", m.name, "not_after", m.cert.Leaf.NotAfter.UTC().Format(time.RFC3339))
}

func stat(f Files) (stamps [3]fileStamp, err error) {
	for i, file := range []struct{ field, path string }{{"ca_file", f.CA}, {"cert_file", f.Cert}, {"key_file", f.Key}} {
		if file.path == "" {
			return stamps, fmt.Errorf("%s is not set", file.field)
		}
		info, err := os.Stat(file.path)
		if err != nil {
			return stamps, fmt.Errorf("%s: %w", file.field, err)
		}
		if info.Size() > maxFileBytes {
			return stamps, fmt.Errorf("%s %s: %d bytes, at most %d are read", file.field, file.path, info.Size(), maxFileBytes)
		}
		stamps[i] = fileStamp{info}
	}
	return stamps, nil
}

func load(f Files) (*material, error) {
	stamps, err := stat(f)
	if err != nil {
		return nil, err
	}
	caPEM, err := os.ReadFile(f.CA)
	if err != nil {
		return nil, fmt.Errorf("ca_file: %w", err)
	}
	cas, err := parseCertificates(caPEM)
	if err != nil {
		return nil, fmt.Errorf("ca_file %s: %w", f.CA, err)
	}
	m := &material{roots: x509.NewCertPool(), stamps: stamps}
	for i, ca := range cas {
		if !ca.IsCA {
			return nil, fmt.Errorf("ca_file %s: certificate %d (%s) is not a CA", f.CA, i+1, ca.Subject.CommonName)
		}
		m.roots.AddCert(ca)
		// The last CA to end decides: during a rotation the older one may end first.
		if ca.NotAfter.After(m.caNotAfter) {
			m.caNotAfter = ca.NotAfter
		}
	}
	if m.cert, err = loadPair(f); err != nil {
		return nil, err
	}
	if err := verifyChain(m.roots, m.cert.Leaf, intermediates(m.cert), x509.ExtKeyUsageClientAuth); err != nil {
		return nil, fmt.Errorf("cert_file %s: %w (ca_file %s)", f.Cert, err, f.CA)
	}
	if m.role, m.name, err = Of(m.cert.Leaf); err != nil {
		return nil, fmt.Errorf("cert_file %s: %w", f.Cert, err)
	}
	return m, nil
}

func loadPair(f Files) (*tls.Certificate, error) {
	certPEM, err := os.ReadFile(f.Cert)
	if err != nil {
		return nil, fmt.Errorf("cert_file: %w", err)
	}
	if _, err := parseCertificates(certPEM); err != nil {
		return nil, fmt.Errorf("cert_file %s: %w", f.Cert, err)
	}
	keyPEM, err := os.ReadFile(f.Key)
	if err != nil {
		return nil, fmt.Errorf("key_file: %w", err)
	}
	cert, err := tls.X509KeyPair(certPEM, keyPEM)
	if err != nil {
		return nil, fmt.Errorf("key_file %s with cert_file %s: %w", f.Key, f.Cert, err)
	}
	return &cert, nil
}

func intermediates(c *tls.Certificate) []*x509.Certificate {
	var out []*x509.Certificate
	for _, der := range c.Certificate[1:] {
		if cert, err := x509.ParseCertificate(der); err == nil {
			out = append(out, cert)
		}
	}
	return out
}

func verifyChain(roots *x509.CertPool, leaf *x509.Certificate, rest []*x509.Certificate, usage x509.ExtKeyUsage) error {
	if len(rest) >= maxChain {
		return fmt.Errorf("chain of %d certificates, at most %d are looked at", len(rest)+1, maxChain)
	}
	pool := x509.NewCertPool()
	for _, c := range rest {
		pool.AddCert(c)
	}
	_, err := leaf.Verify(x509.VerifyOptions{Roots: roots, Intermediates: pool, KeyUsages: []x509.ExtKeyUsage{usage}})
	var invalid x509.CertificateInvalidError
	if errors.As(err, &invalid) && invalid.Reason == x509.Expired {
		if now := time.Now(); now.Before(leaf.NotBefore) {
			return fmt.Errorf("valid only from %s, the clock here says %s: %w", leaf.NotBefore.UTC().Format(time.RFC3339), now.UTC().Format(time.RFC3339), err)
		}
		return fmt.Errorf("ended on %s: %w", leaf.NotAfter.UTC().Format(time.RFC3339), err)
	}
	return err
}

var (
	expiryDesc = prometheus.NewDesc("waypost_certificate_expiry_seconds",
		"Seconds until the certificate ends; negative once it has ended.", []string{"kind"}, nil)
	reloadDesc = prometheus.NewDesc("waypost_certificate_reloads_total",
		"Readings of changed certificate files by result.", []string{"result"}, nil)
)

// Describe implements [prometheus.Collector].
func (s *Source) Describe(ch chan<- *prometheus.Desc) {
	ch <- expiryDesc
	ch <- reloadDesc
}

// Collect implements [prometheus.Collector]. It looks at the files, as a process
// whose lanes stay up has no handshakes.
func (s *Source) Collect(ch chan<- prometheus.Metric) {
	m := s.now()
	ch <- prometheus.MustNewConstMetric(expiryDesc, prometheus.GaugeValue, time.Until(m.caNotAfter).Seconds(), "ca")
	ch <- prometheus.MustNewConstMetric(expiryDesc, prometheus.GaugeValue, time.Until(m.cert.Leaf.NotAfter).Seconds(), "leaf")
	s.mu.Lock()
	ok, failed := s.reloaded, s.reloadFail
	s.mu.Unlock()
	ch <- prometheus.MustNewConstMetric(reloadDesc, prometheus.CounterValue, float64(ok), "ok")
	ch <- prometheus.MustNewConstMetric(reloadDesc, prometheus.CounterValue, float64(failed), "failed")
}
