//! Listeners with passwords and with TLS, for a local process.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::local::run;

const SETTINGS: &str = include_str!("security.properties");
const USER: &str = "alice";
const PASSWORD: &str = "wonderland";
const KEYSTORE: &str = "broker.p12";
const CERTIFICATE: &str = "broker.pem";

/// Where a secured Kafka listens.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ports {
    pub(super) sasl: u16,
    pub(super) tls: u16,
}

/// What a client needs to get in where passwords or TLS are asked for.
#[derive(Clone, Debug)]
pub struct KafkaSecurity {
    /// The bootstrap servers of the listener that takes SASL/PLAIN and SCRAM-SHA-256, without TLS.
    pub sasl_brokers: String,
    /// The bootstrap servers of the listener with TLS.
    pub tls_brokers: String,
    /// A user that may do what no rule forbids.
    pub user: &'static str,
    /// The user's password.
    pub password: &'static str,
    /// The broker's certificate, which signs itself, as PEM.
    pub certificate: PathBuf,
}

impl KafkaSecurity {
    pub(super) fn new(ports: Ports, directory: &Path) -> Self {
        Self {
            sasl_brokers: format!("127.0.0.1:{}", ports.sasl),
            tls_brokers: format!("127.0.0.1:{}", ports.tls),
            user: USER,
            password: PASSWORD,
            certificate: directory.join(CERTIFICATE),
        }
    }
}

/// The user as the formatting tool takes it.
pub(super) fn scram() -> String {
    format!("SCRAM-SHA-256=[name={USER},password={PASSWORD}]")
}

/// Makes key and certificate with the tool beside `java`, and returns the settings that name them.
pub(super) fn prepare(java: &Path, directory: &Path) -> io::Result<String> {
    // On the PATH java is a link into the directory that has its tools.
    let java = java.canonicalize()?;
    let keytool = java.with_file_name("keytool");
    let keystore = directory.join(KEYSTORE);
    let common = |command: &mut Command| {
        command.args(["-alias", "broker", "-storepass", PASSWORD, "-keystore"]);
        command.arg(&keystore);
    };
    let mut pair = Command::new(&keytool);
    pair.args(["-genkeypair", "-keyalg", "RSA", "-storetype", "PKCS12"])
        .args(["-dname", "CN=127.0.0.1", "-ext", "SAN=ip:127.0.0.1"])
        .args(["-validity", "3650"]);
    common(&mut pair);
    run("making a key", &mut pair)?;
    let mut export = Command::new(&keytool);
    export.args(["-exportcert", "-rfc", "-file"]);
    export.arg(directory.join(CERTIFICATE));
    common(&mut export);
    run("exporting the certificate", &mut export)?;
    Ok(SETTINGS
        .replace("{user}", USER)
        .replace("{password}", PASSWORD)
        .replace("{keystore}", &keystore.to_string_lossy()))
}
