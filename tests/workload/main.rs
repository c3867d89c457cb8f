//! A bank under trouble: the workload that shows losses, doubled effects and broken order, and its checker.
//!
//! Transfers between accounts are written to PostgreSQL, each with one message per changed account in the same
//! transaction. Relays move the messages to a broker (`--broker`, Kafka if not named), consumers apply them to a replica with an effect that is *not*
//! idempotent. Meanwhile processes are killed and frozen and both servers restarted. At the end everything must have
//! come to its end, and the checker judges what database and topic tell.
//!
//! ```sh
//! cargo run --release -p relaybox-testcontainers --bin workload -- --seconds 1800 --seed 7
//! ```
//!
//! The last line printed is the verdict; the exit code is 1 when anything is wrong, and then the history and the logs
//! of all processes are kept. `--check FILE` judges a kept history again. The same seed plans the same transfers, the
//! same failures of handlers and the same trouble; how they meet in time differs from run to run. `--calm` leaves out
//! the trouble: then the topic must hold no message twice.
//!
//! Both servers are local processes of the run. With `--role` the same program is each of the run's processes.

mod arguments;
mod bank;
#[path = "../../examples/webhooks/broker.rs"]
mod broker;
mod checker;
mod consumer;
mod history;
mod nemesis;
mod processes;
mod run;
mod server;
mod verdict;
mod world;
mod writer;

use std::process::ExitCode;
use std::time::Duration;

use relaybox::relay::{Relay, RelayConfig};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use arguments::{Arguments, Role};
use world::{Anyhow, World};

/// Rows in a relay's batch: what a disturbed relay sends twice at most.
const BATCH: usize = 100;
/// Between two tries of a role to start while a server is away.
const START_PAUSE: Duration = Duration::from_millis(300);

#[tokio::main]
async fn main() -> ExitCode {
    match run().await {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("workload failed: {error}");
            let mut cause = error.source();
            while let Some(error) = cause {
                eprintln!("  because: {error}");
                cause = error.source();
            }
            ExitCode::from(2)
        }
    }
}

async fn run() -> Anyhow<bool> {
    let arguments = Arguments::parse(std::env::args().skip(1))?;
    if let Some(file) = &arguments.check {
        return run::check_file(file);
    }
    if arguments.role == Role::Run {
        return run::run(&arguments).await;
    }
    processes::end_with_parent();
    let filter = tracing_subscriber::EnvFilter::try_from_default_env();
    tracing_subscriber::fmt()
        .with_env_filter(filter.unwrap_or_else(|_| "info".into()))
        .with_ansi(false)
        .init();
    let stop = terminated()?;
    let world = World::from_environment(arguments.product)?;
    if arguments.role == Role::Write {
        return writer::write(&world, arguments.seed, stop)
            .await
            .map(|()| true);
    }
    loop {
        let ended = match arguments.role {
            Role::Relay => relay(&world, told(stop.clone())).await,
            _ => consumer::consume(&world, told(stop.clone())).await,
        };
        match ended {
            // A role that cannot start yet is started again, as a service manager would.
            Err(error) if error.is_transient() && !*stop.borrow() => {
                eprintln!("not started: {error}");
                tokio::time::sleep(START_PAUSE).await;
            }
            Err(error) if *stop.borrow() && error.is_transient() => return Ok(true),
            ended => return Ok(ended.map(|()| true)?),
        }
    }
}

async fn relay(world: &World, stop: impl Future<Output = ()> + Send) -> relaybox::Result<()> {
    let config = RelayConfig::default()
        .with_batch_rows_max(BATCH)
        .with_lease(world::LEASE);
    let relay = Relay::new(world.bank.clone(), world.broker().await?).with_config(config);
    relay.run_until(stop).await
}

/// True after SIGTERM.
fn terminated() -> Anyhow<watch::Receiver<bool>> {
    let mut term = signal(SignalKind::terminate())?;
    let (stop, stopped) = watch::channel(false);
    tokio::spawn(async move {
        term.recv().await;
        stop.send_replace(true);
        // Kept, so that a receiver never sees it gone.
        std::future::pending::<()>().await;
    });
    Ok(stopped)
}

async fn told(mut stop: watch::Receiver<bool>) {
    // An error means that the sender is gone: stop as well.
    let _ = stop.wait_for(|stop| *stop).await;
}
