package identity

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"
)

// Role is what a certificate allows its owner to be.
type Role string

// The roles. A coordinator speaks with its peers under the coordinator role.
const (
	RoleAgent       Role = "agent"
	RoleCoordinator Role = "coordinator"
	RoleAdmin       Role = "admin"
	RoleOperator    Role = "operator"
	RolePlacer      Role = "placer"
	RoleViewer      Role = "viewer"
)

// Sentinel errors of this package.
var (
	// ErrNoPeerCertificate: the other side showed no certificate.
	ErrNoPeerCertificate = errors.New("peer showed no certificate")
	// ErrNotWaypost: the certificate carries no waypost URI, or a malformed one.
	ErrNotWaypost = errors.New("certificate does not name a waypost role")
	// ErrRole: the certificate is valid but names a role that is not accepted here.
	ErrRole = errors.New("certificate has the wrong role")
	// ErrName: the certificate is valid but names someone else.
	ErrName = errors.New("certificate has the wrong name")
	// ErrExists: a file to be written is there already.
	ErrExists = errors.New("file exists and is not overwritten")
)

const (
	uriScheme = "waypost"
	// maxNameBytes is the longest name a certificate may carry: a DNS label and
	// a half, so that "c-" + host name of a fully qualified host fits.
	maxNameBytes = 128
)

var allRoles = []Role{RoleAgent, RoleCoordinator, RoleAdmin, RoleOperator, RolePlacer, RoleViewer}

// Valid says whether r is one of the known roles.
func (r Role) Valid() bool { return slices.Contains(allRoles, r) }

// serves says whether the role's owner listens for connections.
func (r Role) serves() bool { return r == RoleAgent || r == RoleCoordinator }

// CheckName returns an error unless name may stand in a certificate: 1 to 128
// letters, digits, dots, dashes and underscores, beginning with a letter or digit.
func CheckName(name string) error {
	if name == "" {
		return errors.New("name is empty")
	}
	if len(name) > maxNameBytes {
		return fmt.Errorf("name has %d bytes, at most %d are allowed", len(name), maxNameBytes)
	}
	for i := 0; i < len(name); i++ {
		c := name[i]
		alnum := c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9'
		if !alnum && (i == 0 || !strings.ContainsRune("._-", rune(c))) {
			return fmt.Errorf("name %q: character %q at %d is not allowed (letters, digits, and after the first also . _ -)", name, c, i)
		}
	}
	return nil
}

func identityURI(role Role, name string) *url.URL {
	return &url.URL{Scheme: uriScheme, Host: string(role), Path: "/" + name}
}

// PeerOf returns the role and name that the other side of a finished handshake
// proved. The state must come from a configuration of a [Source], which has
// verified the chain; PeerOf itself only reads the leaf.
func PeerOf(state tls.ConnectionState) (role Role, name string, err error) {
	if len(state.PeerCertificates) == 0 {
		return "", "", ErrNoPeerCertificate
	}
	return Of(state.PeerCertificates[0])
}

// Of returns the role and name that a certificate states. The certificate must
// carry exactly one waypost URI.
func Of(cert *x509.Certificate) (role Role, name string, err error) {
	var found *url.URL
	for _, u := range cert.URIs {
		if u.Scheme != uriScheme {
			continue
		}
		if found != nil {
			return "", "", fmt.Errorf("%w: it names two: %s and %s", ErrNotWaypost, found, u)
		}
		found = u
	}
	if found == nil {
		return "", "", fmt.Errorf("%w: subject %q has no %s:// URI", ErrNotWaypost, cert.Subject.CommonName, uriScheme)
	}
	role = Role(found.Host)
	if !role.Valid() {
		return "", "", fmt.Errorf("%w: unknown role in %s", ErrNotWaypost, found)
	}
	name, ok := strings.CutPrefix(found.Path, "/")
	if !ok || found.User != nil || found.RawQuery != "" || found.Fragment != "" {
		return "", "", fmt.Errorf("%w: malformed URI %s", ErrNotWaypost, found)
	}
	if err := CheckName(name); err != nil {
		return "", "", fmt.Errorf("%w: %s: %w", ErrNotWaypost, found, err)
	}
	return role, name, nil
}
