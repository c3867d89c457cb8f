//! Passwords, nkeys and TLS: what a client is let in by, and what it says where it is not.

use std::path::Path;
use std::process::Command;

use relaybox::ErrorKind;

use super::*;

/// The pair of the protocol's own documentation: it protects nothing.
const NKEY: &str = "UDXU4RCSJNZOIQHZNWXHXORDPRTGNJAHAHFRGZNEEJCPQTT2M7NLCNF4";
const NKEY_SEED: &str = "SUACSSL3UAHUDXKFSNVUZRF5UHPMWZ6BFDTJ7M6USDXIEDNPPQYYYCU3VY";

/// A certificate that signs itself, and its key.
fn certificate(directory: &Path, name: &str) {
    let status = Command::new("openssl")
        .current_dir(directory)
        .args(["req", "-x509", "-nodes", "-days", "2", "-newkey", "ec"])
        .args(["-pkeyopt", "ec_paramgen_curve:prime256v1"])
        .args([
            "-subj",
            "/CN=relaybox",
            "-addext",
            "subjectAltName=IP:127.0.0.1",
        ])
        .args(["-addext", "basicConstraints=critical,CA:FALSE"])
        .args([
            "-keyout",
            &format!("{name}.key"),
            "-out",
            &format!("{name}.pem"),
        ])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&status.stderr);
    assert!(status.status.success(), "{said}");
}

/// Whoever shows nothing is let in too: the readiness check, and the tests where they look at the server.
async fn secured(directory: &Path) -> relaybox_testcontainers::Nats {
    certificate(directory, "server");
    certificate(directory, "client");
    let path = |name: &str| directory.join(name).to_string_lossy().into_owned();
    server(&format!(
        r#"
        no_auth_user: anybody
        authorization {{
            users: [
                {{ user: anybody, password: x }}
                {{ user: writer, password: wonderland }}
                {{ nkey: {NKEY} }}
            ]
        }}
        allow_non_tls: true
        tls {{
            cert_file: "{}"
            key_file: "{}"
            ca_file: "{}"
            verify: true
        }}"#,
        path("server.pem"),
        path("server.key"),
        path("client.pem"),
    ))
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_pass_by_password_by_nkey_and_by_tls() {
    let directory = tempfile::tempdir().unwrap();
    let server = secured(directory.path()).await;
    let file = |name: &str| directory.path().join(name);
    let base = || config(server.url());
    for config in [
        base().with_user("writer", "wonderland"),
        base().with_nkey_seed(NKEY_SEED),
        base()
            .with_user("writer", "wonderland")
            .with_ca_file(file("server.pem"))
            .with_client_certificate(file("client.pem"), file("client.key")),
    ] {
        let nats = Nats::connect(config).await.unwrap();
        let name = unique_name("secured");
        nats.create_stream(&name, [&name]).await.unwrap();
        publish_all(&nats, &numbered(&name, 0..3)).await;
        let mut subscription = subscribe(&nats, request("secured", &name)).await;
        let received = receive(&mut subscription, 3).await;
        assert_eq!(texts(&received), ["0", "1", "2"]);
        drop(received);
        subscription.close(DEADLINE).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_is_not_let_in_is_told_why_and_no_secret() {
    let directory = tempfile::tempdir().unwrap();
    let server = secured(directory.path()).await;
    let file = |name: &str| directory.path().join(name);
    let base = || config(server.url());
    let with_password = server.url().replace("nats://", "nats://writer:hunter2@");
    for (config, kind) in [
        (base().with_user("writer", "hunter2"), ErrorKind::Rejected),
        (NatsConfig::new(with_password), ErrorKind::Configuration),
        (base().with_nkey_seed("hunter2"), ErrorKind::Rejected),
        (base().with_credentials("hunter2"), ErrorKind::Configuration),
        // The server's certificate is not one of those that the system trusts.
        (base().with_tls(), ErrorKind::Unavailable),
        // It asks for one in turn.
        (
            base().with_ca_file(file("server.pem")),
            ErrorKind::Unavailable,
        ),
        (
            base().with_ca_file(file("nowhere.pem")),
            ErrorKind::Configuration,
        ),
    ] {
        let shown = format!("{config:?}");
        let connecting = within("an answer", Nats::connect(config)).await;
        let Err(error) = connecting.map(drop) else {
            panic!("let in: {shown}, {kind:?}");
        };
        let shown = format!("{error} {error:?} {shown}");
        assert_eq!(error.kind(), kind, "{shown}");
        assert!(!shown.contains("hunter2"), "{shown}");
    }
}
