//! Certificates and their key, from PEM files.

use std::{path::Path, sync::Arc};

use carrel_proto::problem::{Code, Problem};
use tokio_rustls::{
    TlsAcceptor,
    rustls::{
        ServerConfig,
        crypto::ring,
        pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
    },
};

/// For the TCP doors, if both files are named.
pub(super) fn acceptor(cert: Option<&Path>, key: Option<&Path>) -> Result<Option<TlsAcceptor>, Problem> {
    let (cert, key) = match (cert, key) {
        (None, None) => return Ok(None),
        (Some(cert), Some(key)) => (cert, key),
        _ => {
            return Err(Problem::new(Code::InvalidArgument, "TLS needs a certificate and its key")
                .hint("give both --tls-cert and --tls-key"));
        }
    };
    let bad = |path: &Path, why: String| {
        Problem::new(Code::InvalidArgument, format!("{}: {why}", path.display()))
            .hint("PEM files are needed: a chain of certificates, and the key of the first one")
    };
    let chain = CertificateDer::pem_file_iter(cert)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(|error| bad(cert, error.to_string()))?;
    if chain.is_empty() {
        return Err(bad(cert, "there is no certificate in it".to_owned()));
    }
    let secret = PrivateKeyDer::from_pem_file(key).map_err(|error| bad(key, error.to_string()))?;
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(Problem::internal)?
        .with_no_client_auth()
        .with_single_cert(chain, secret)
        .map_err(|error| bad(key, error.to_string()))?;
    Ok(Some(TlsAcceptor::from(Arc::new(config))))
}
