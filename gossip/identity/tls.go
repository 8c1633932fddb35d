package identity

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"slices"
)

// ServerOptions say whom a server accepts.
type ServerOptions struct {
	// Accept lists the roles a client may have.
	Accept []Role
	// Anonymous also accepts clients that show no certificate; one that is shown
	// is still verified.
	Anonymous bool
	// Protocols are the application protocols offered, preferred first.
	Protocols []string
}

// ClientOptions say which server a client accepts.
type ClientOptions struct {
	// Accept lists the roles the server may have.
	Accept []Role
	// Name is the name the server must have; empty: any.
	Name string
	// Protocols are the application protocols offered, preferred first.
	Protocols []string
}

// Server returns a TLS configuration for listening. It follows changes of the files.
func (s *Source) Server(o ServerOptions) *tls.Config {
	auth := tls.RequireAnyClientCert
	if o.Anonymous {
		auth = tls.RequestClientCert
	}
	return &tls.Config{
		MinVersion: tls.VersionTLS13,
		NextProtos: slices.Clone(o.Protocols),
		// Chains are verified in VerifyConnection, against the CA files of the
		// moment: ClientCAs would freeze those of the start.
		ClientAuth:             auth,
		SessionTicketsDisabled: true,
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
			return s.now().cert, nil
		},
		VerifyConnection: func(state tls.ConnectionState) error {
			if o.Anonymous && len(state.PeerCertificates) == 0 {
				return nil
			}
			return s.verifyPeer(state, x509.ExtKeyUsageClientAuth, o.Accept, "")
		},
	}
}

// Client returns a TLS configuration for dialling. It follows changes of the files.
func (s *Source) Client(o ClientOptions) *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13,
		NextProtos: slices.Clone(o.Protocols),
		// Go's own check compares host names, which say nothing about the role;
		// VerifyConnection checks chain, role and name instead, on every handshake.
		InsecureSkipVerify: true,
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			return s.now().cert, nil
		},
		VerifyConnection: func(state tls.ConnectionState) error {
			return s.verifyPeer(state, x509.ExtKeyUsageServerAuth, o.Accept, o.Name)
		},
	}
}

func (s *Source) verifyPeer(state tls.ConnectionState, usage x509.ExtKeyUsage, accept []Role, wantName string) error {
	if len(state.PeerCertificates) == 0 {
		return ErrNoPeerCertificate
	}
	leaf := state.PeerCertificates[0]
	if err := verifyChain(s.now().roots, leaf, state.PeerCertificates[1:], usage); err != nil {
		return fmt.Errorf("certificate of the peer (%s): %w", leaf.Subject.CommonName, err)
	}
	role, name, err := Of(leaf)
	if err != nil {
		return err
	}
	if !slices.Contains(accept, role) {
		return fmt.Errorf("%w: it is %s/%s, accepted here: %v", ErrRole, role, name, accept)
	}
	if wantName != "" && name != wantName {
		return fmt.Errorf("%w: it is %s/%s, want %s", ErrName, role, name, wantName)
	}
	return nil
}
