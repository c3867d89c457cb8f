//! The role `run`: prepares, starts everything, lets the nemesis loose, heals, drains, stops and checks.

use std::path::Path;
use std::time::{Duration, Instant};

use relaybox_testcontainers::{Postgres, PostgresOptions};

use super::arguments::Arguments;
use super::checker::check;
use super::history::{Disturbed, Facts, Left};
use super::nemesis::{
    Diary, Step, Target, plan, trouble_destination, trouble_processes, trouble_servers,
};
use super::processes::{self, Fleet, Setting};
use super::server::Server;
use super::verdict::Verdict;
use super::world::{Anyhow, World};

/// Violations that are printed.
const PRINTED_MAX: usize = 20;
/// How long everything may take to come to its end once nobody disturbs it.
const DRAIN_WITHIN: Duration = Duration::from_secs(240);

/// Whether all promises were kept.
pub async fn run(arguments: &Arguments) -> Anyhow<bool> {
    let directory = processes::directory(arguments.seed)?;
    println!("seed {}, logs in {}", arguments.seed, directory.display());
    let facts = record(arguments, &directory).await?;
    let verdict = check(&facts);
    if verdict.violations.is_empty() {
        processes::remove(&directory);
    } else {
        let file = directory.join("history.json");
        std::fs::write(&file, serde_json::to_vec(&facts)?)?;
        println!("the history is in {}", file.display());
    }
    Ok(print(&verdict))
}

/// Judges a history again that a failed run has kept.
pub fn check_file(file: &Path) -> Anyhow<bool> {
    let facts: Facts = serde_json::from_slice(&std::fs::read(file)?)?;
    Ok(print(&check(&facts)))
}

fn print(verdict: &Verdict) -> bool {
    let violations = &verdict.violations;
    for violation in violations.iter().take(PRINTED_MAX) {
        println!("{:?}: {}", violation.rule, violation.text);
    }
    if violations.len() > PRINTED_MAX {
        println!("... and {} more", violations.len() - PRINTED_MAX);
    }
    println!("{verdict}");
    violations.is_empty()
}

/// The services and processes of a run.
struct Stage {
    postgres: Postgres,
    broker: Server,
    world: World,
    relays: Fleet,
    consumers: Fleet,
    writer: Fleet,
    diary: Diary,
}

async fn record(arguments: &Arguments, directory: &Path) -> Anyhow<Facts> {
    let mut stage = Stage::set(arguments, directory).await?;
    let mut disturbed = Disturbed::by_nobody(arguments.relays, super::BATCH);
    if arguments.calm {
        tokio::time::sleep(arguments.time).await;
    } else {
        stage.trouble(arguments, &mut disturbed).await?;
    }
    stage.end(arguments.seed, disturbed).await
}

impl Stage {
    async fn set(arguments: &Arguments, directory: &Path) -> Anyhow<Self> {
        let postgres = PostgresOptions::default()
            .with_durable()
            .with_local_process();
        let (postgres, broker) = tokio::try_join!(
            Postgres::start_with(postgres),
            Server::start(arguments.product)
        )?;
        let setting = Setting {
            url: postgres.create_database("workload").await?,
            product: arguments.product,
            address: broker.address(),
            seed: arguments.seed,
            directory: directory.to_owned(),
        };
        let world = World::new(&setting.url, setting.product, &setting.address)?;
        world.prepare().await?;
        let stage = Self {
            relays: Fleet::start("relay", arguments.relays, &setting)?,
            consumers: Fleet::start("consume", arguments.consumers, &setting)?,
            writer: Fleet::start("write", 1, &setting)?,
            diary: Diary::new(),
            postgres,
            broker,
            world,
        };
        stage.diary.note("everything runs");
        Ok(stage)
    }

    /// Every action undoes itself, so that everything runs again at the end.
    async fn trouble(&mut self, arguments: &Arguments, disturbed: &mut Disturbed) -> Anyhow<()> {
        let (time, diary) = (arguments.time, self.diary);
        let plan = |target, members| -> Vec<Step> { plan(arguments.seed, target, members, time) };
        let relays = plan(Target::Relays, self.relays.len());
        let consumers = plan(Target::Consumers, self.consumers.len());
        let writer = plan(Target::Writer, self.writer.len());
        let servers = plan(Target::Servers, 0);
        let destination = plan(Target::Destination, 0);
        let (relays, _, _, servers, (), ()) = tokio::try_join!(
            trouble_processes(&mut self.relays, relays, time, diary),
            trouble_processes(&mut self.consumers, consumers, time, diary),
            trouble_processes(&mut self.writer, writer, time, diary),
            trouble_servers(&self.postgres, &self.broker, servers, time, diary),
            trouble_destination(&self.world, destination, time, diary),
            async {
                tokio::time::sleep(time).await;
                Ok(())
            },
        )?;
        (disturbed.relays, disturbed.servers) = (relays, servers);
        diary.note(format!(
            "the trouble is over: relays disturbed {relays} times, servers {servers} times"
        ));
        Ok(())
    }

    /// Lets everything come to its end, stops, and reads what happened.
    async fn end(mut self, seed: u64, disturbed: Disturbed) -> Anyhow<Facts> {
        for fleet in [&mut self.relays, &mut self.consumers, &mut self.writer] {
            fleet.start_missing()?;
        }
        self.writer.stop().await?;
        self.diary.note("the writer has stopped");
        let left = self.drain().await?;
        self.diary.note(format!("{left:?}"));
        for fleet in [&mut self.relays, &mut self.consumers] {
            fleet.stop().await?;
        }
        let mut faults = Vec::new();
        for fleet in [&mut self.relays, &mut self.consumers, &mut self.writer] {
            faults.append(&mut fleet.faults);
        }
        let facts = Facts::read(&self.world, seed, disturbed, faults).await?;
        self.diary.note("the history is read");
        Ok(facts)
    }

    /// Waits until nothing is left, or the time is over: then the checker sees what is.
    async fn drain(&self) -> Anyhow<Left> {
        let broker = self.world.broker().await?;
        let deadline = Instant::now() + DRAIN_WITHIN;
        let mut noted = Instant::now();
        loop {
            let left = Left::now(&self.world, &*broker).await;
            if Instant::now() > deadline || left.as_ref().is_ok_and(Left::is_nothing) {
                return left;
            }
            if noted.elapsed() > Duration::from_secs(5) {
                noted = Instant::now();
                self.diary.note(format!("still {left:?}"));
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }
}
