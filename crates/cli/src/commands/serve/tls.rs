//! Certificates and their key, from PEM files.

use std::{
    path::{Path, PathBuf},
    sync::{Arc, PoisonError, RwLock},
};

use carrel_proto::problem::{Code, Problem};
use tokio_rustls::{
    TlsAcceptor,
    rustls::{
        ServerConfig,
        crypto::ring,
        pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
        server::{ClientHello, ResolvesServerCert},
        sign::CertifiedKey,
    },
};

/// What the TCP doors show. Connections that are there keep what they began with.
#[derive(Debug)]
pub(super) struct Tls {
    files: Files,
    shown: Arc<Shown>,
    config: Arc<ServerConfig>,
}

#[derive(Debug)]
struct Files {
    cert: PathBuf,
    key: PathBuf,
}

/// The certificates of now.
#[derive(Debug)]
struct Shown(RwLock<Arc<CertifiedKey>>);

impl ResolvesServerCert for Shown {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner)))
    }
}

impl Tls {
    /// For the TCP doors, if both files are named.
    pub(super) fn open(cert: Option<&Path>, key: Option<&Path>) -> Result<Option<Self>, Problem> {
        let files = match (cert, key) {
            (None, None) => return Ok(None),
            (Some(cert), Some(key)) => Files { cert: cert.to_path_buf(), key: key.to_path_buf() },
            _ => {
                return Err(Problem::new(Code::InvalidArgument, "TLS needs a certificate and its key")
                    .hint("give both --tls-cert and --tls-key"));
            }
        };
        let shown = Arc::new(Shown(RwLock::new(Arc::new(files.read()?))));
        let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(Problem::internal)?
            .with_no_client_auth()
            .with_cert_resolver(Arc::clone(&shown) as Arc<dyn ResolvesServerCert>);
        Ok(Some(Self { files, shown, config: Arc::new(config) }))
    }

    pub(super) fn acceptor(&self) -> TlsAcceptor {
        TlsAcceptor::from(Arc::clone(&self.config))
    }

    /// For the connections to come: certificates are renewed more often than daemons are started. Files with a mistake change nothing.
    pub(super) fn read_again(&self) -> Result<(), Problem> {
        let read = Arc::new(self.files.read()?);
        *self.shown.0.write().unwrap_or_else(PoisonError::into_inner) = read;
        Ok(())
    }
}

impl Files {
    fn read(&self) -> Result<CertifiedKey, Problem> {
        let Self { cert, key } = self;
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
        let made = CertifiedKey::from_der(chain, secret, &ring::default_provider());
        made.map_err(|error| bad(key, error.to_string()))
    }
}
