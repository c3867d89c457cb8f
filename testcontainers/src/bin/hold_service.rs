//! Starts a service, prints its address, process id and directory on one line, and holds it until it is killed.
//!
//! Run by hand it serves to try things against a real server: `cargo run -p relaybox-testcontainers --bin hold_service
//! postgres`. It ends by Ctrl-C or when stdin closes.

use std::error::Error;
use std::io::{Read, Write};

use relaybox_testcontainers::{shared_kafka, shared_nats, shared_postgres, shared_rabbitmq};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    // The shared handles are statics that are never dropped: the harder case for the clean-up.
    let (address, pid, directory) = match std::env::args().nth(1).as_deref() {
        Some("postgres") => {
            let postgres = shared_postgres().await;
            (postgres.url(), postgres.pid(), postgres.directory())
        }
        Some("kafka") => {
            let kafka = shared_kafka().await;
            (kafka.brokers(), kafka.pid(), kafka.directory())
        }
        Some("rabbitmq") => {
            let rabbitmq = shared_rabbitmq().await;
            (rabbitmq.url(), rabbitmq.pid(), rabbitmq.directory())
        }
        Some("nats") => {
            let nats = shared_nats().await;
            (nats.url(), nats.pid(), nats.directory())
        }
        _ => return Err("usage: hold_service postgres|kafka|rabbitmq|nats".into()),
    };
    let pid = pid.map_or_else(|| "-".to_owned(), |pid| pid.to_string());
    let directory = directory.map_or_else(|| "-".into(), |path| path.to_string_lossy());
    println!("{address} {pid} {directory}");
    std::io::stdout().flush()?;
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}
