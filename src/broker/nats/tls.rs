//! TLS settings, with a provider of cryptography of our own choice.
//!
//! The client would take the process's default, and panics where two are linked and none was chosen.

use std::path::Path;
use std::sync::Arc;

use async_nats::rustls::crypto::ring;
use async_nats::rustls::pki_types::pem::PemObject as _;
use async_nats::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use async_nats::rustls::{ClientConfig, RootCertStore};

use super::config::NatsConfig;
use crate::error::{Error, ErrorKind, Result};

const CERTIFICATES: &str = "a PEM file with certificates";
const KEY: &str = "a PEM file with the private key of the certificate";

/// Given to the client also where TLS was not asked for: the server may ask for it.
pub(super) async fn client_config(config: &NatsConfig) -> Result<ClientConfig> {
    let config = config.clone();
    // Reads files.
    let made = tokio::task::spawn_blocking(move || build(&config)).await;
    made.unwrap_or_else(|_| Err(Error::new(ErrorKind::Closed, "connect", "shutting down")))
}

fn build(config: &NatsConfig) -> Result<ClientConfig> {
    let mut roots = RootCertStore::empty();
    match &config.ca_file {
        Some(path) => {
            for certificate in certificates("ca_file", path)? {
                let added = roots.add(certificate);
                added.map_err(|error| refused("ca_file", CERTIFICATES, path).with_source(error))?;
            }
        }
        None => {
            let native = rustls_native_certs::load_native_certs().certs;
            let (_added, _ignored) = roots.add_parsable_certificates(native);
        }
    }
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| Error::new(ErrorKind::Other, "connect", "no TLS").with_source(error))?
        .with_root_certificates(roots);
    let Some((certificate, key)) = &config.client_certificate else {
        return Ok(builder.with_no_client_auth());
    };
    const FIELD: &str = "client_certificate";
    let chain = certificates(FIELD, certificate)?;
    let private = PrivateKeyDer::from_pem_file(key).map_err(|_| refused(FIELD, KEY, key))?;
    builder
        .with_client_auth_cert(chain, private)
        .map_err(|error| refused(FIELD, KEY, key).with_source(error))
}

fn certificates(field: &'static str, path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let read = CertificateDer::pem_file_iter(path).and_then(Iterator::collect);
    match read {
        Ok(certificates) => {
            let certificates: Vec<_> = certificates;
            if certificates.is_empty() {
                return Err(refused(field, CERTIFICATES, path));
            }
            Ok(certificates)
        }
        Err(error) => Err(refused(field, CERTIFICATES, path).with_source(error)),
    }
}

fn refused(field: &'static str, what: &str, path: &Path) -> Error {
    Error::configuration(field, what, path.to_string_lossy())
}
