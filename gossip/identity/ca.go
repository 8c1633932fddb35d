package identity

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"net/url"
	"time"
)

const (
	// backdate makes a new certificate valid on hosts whose clock is behind.
	backdate = time.Hour
	// MaxValidity bounds what a CA issues: longer lives need revocation lists,
	// which fleets of this size replace by short certificates.
	MaxValidity = 10 * 365 * 24 * time.Hour

	pemCertificate = "CERTIFICATE"
	pemKey         = "PRIVATE KEY"
)

// CA signs the certificates of one fleet.
type CA struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

// Pair is a certificate and its key, both PEM.
type Pair struct {
	CertPEM []byte
	KeyPEM  []byte
}

// NewCA makes a CA with a fresh ECDSA P-256 key. The fleet's name becomes part
// of its subject.
func NewCA(fleet string, validity time.Duration) (*CA, error) {
	if err := CheckName(fleet); err != nil {
		return nil, fmt.Errorf("new CA: fleet %w", err)
	}
	if err := checkValidity(validity); err != nil {
		return nil, fmt.Errorf("new CA: %w", err)
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("new CA: %w", err)
	}
	template, err := newTemplate("waypost fleet "+fleet, validity)
	if err != nil {
		return nil, fmt.Errorf("new CA: %w", err)
	}
	template.IsCA = true
	template.BasicConstraintsValid = true
	template.MaxPathLenZero = true
	template.KeyUsage = x509.KeyUsageCertSign | x509.KeyUsageCRLSign
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("new CA: %w", err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("new CA: %w", err)
	}
	return &CA{cert: cert, key: key}, nil
}

// CertPEM returns the CA's certificate.
func (ca *CA) CertPEM() []byte { return encodePEM(pemCertificate, ca.cert.Raw) }

// KeyPEM returns the CA's private key.
func (ca *CA) KeyPEM() ([]byte, error) { return encodeKey(ca.key) }

// Issue makes a certificate with a fresh key for the owner of a role. Addresses
// are IP addresses and DNS names under which clients that check host names may
// reach it. The certificate ends no later than the CA's.
func (ca *CA) Issue(role Role, name string, addresses []string, validity time.Duration) (*Pair, error) {
	if !role.Valid() {
		return nil, fmt.Errorf("issue certificate: unknown role %q, want one of %v", role, allRoles)
	}
	if err := CheckName(name); err != nil {
		return nil, fmt.Errorf("issue certificate: %w", err)
	}
	if err := checkValidity(validity); err != nil {
		return nil, fmt.Errorf("issue certificate: %w", err)
	}
	template, err := newTemplate(string(role)+" "+name, validity)
	if err != nil {
		return nil, fmt.Errorf("issue certificate: %w", err)
	}
	if template.NotAfter.After(ca.cert.NotAfter) {
		template.NotAfter = ca.cert.NotAfter
	}
	template.KeyUsage = x509.KeyUsageDigitalSignature
	template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	if role.serves() {
		template.ExtKeyUsage = append(template.ExtKeyUsage, x509.ExtKeyUsageServerAuth)
	}
	template.URIs = []*url.URL{identityURI(role, name)}
	for _, a := range addresses {
		if ip := net.ParseIP(a); ip != nil {
			template.IPAddresses = append(template.IPAddresses, ip)
		} else if err := CheckName(a); err != nil {
			return nil, fmt.Errorf("issue certificate: address %q is neither an IP address nor a DNS name", a)
		} else {
			template.DNSNames = append(template.DNSNames, a)
		}
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("issue certificate: %w", err)
	}
	der, err := x509.CreateCertificate(rand.Reader, template, ca.cert, key.Public(), ca.key)
	if err != nil {
		return nil, fmt.Errorf("issue certificate: %w", err)
	}
	keyPEM, err := encodeKey(key)
	if err != nil {
		return nil, fmt.Errorf("issue certificate: %w", err)
	}
	return &Pair{CertPEM: encodePEM(pemCertificate, der), KeyPEM: keyPEM}, nil
}

func checkValidity(validity time.Duration) error {
	if validity <= 0 || validity > MaxValidity {
		return fmt.Errorf("validity %v is outside 0 to %v", validity, MaxValidity)
	}
	return nil
}

func newTemplate(commonName string, validity time.Duration) (*x509.Certificate, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return nil, err
	}
	now := time.Now()
	return &x509.Certificate{
		SerialNumber: serial.Add(serial, big.NewInt(1)),
		Subject:      pkix.Name{CommonName: commonName},
		NotBefore:    now.Add(-backdate),
		NotAfter:     now.Add(validity),
	}, nil
}

func encodePEM(kind string, der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
}

func encodeKey(key *ecdsa.PrivateKey) ([]byte, error) {
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, err
	}
	return encodePEM(pemKey, der), nil
}

// parseCertificates reads every certificate of a PEM file.
func parseCertificates(data []byte) ([]*x509.Certificate, error) {
	var certs []*x509.Certificate
	for {
		var block *pem.Block
		block, data = pem.Decode(data)
		if block == nil {
			break
		}
		if block.Type != pemCertificate {
			return nil, fmt.Errorf("holds a PEM block %q, want %s", block.Type, pemCertificate)
		}
		cert, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, fmt.Errorf("certificate %d: %w", len(certs)+1, err)
		}
		certs = append(certs, cert)
	}
	if len(certs) == 0 {
		return nil, errors.New("holds no PEM certificate")
	}
	return certs, nil
}
