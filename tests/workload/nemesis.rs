//! The trouble: seeded plans of what is killed, frozen and restarted, and the hands that do it.
//!
//! Relays, consumers, the writer, the servers and the topic each have a plan of their own, carried out side by side, so that
//! troubles meet. Every action undoes itself: at the end of a plan everything runs.

use std::time::{Duration, Instant};

use relaybox::store::OutboxAdmin;
use relaybox_testcontainers::Postgres;

use super::bank::mixed;
use super::broker::SESSION;
use super::history::Disturbed;
use super::processes::Fleet;
use super::server::Server;
use super::world::{Anyhow, LEASE, World};

/// What is in trouble.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    Relays,
    Consumers,
    Writer,
    Servers,
    /// Nothing is broken: an operator has second thoughts about the destination.
    Destination,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// SIGKILL, and a new process after a while.
    Kill {
        member: usize,
        down: Duration,
    },
    /// SIGSTOP and SIGCONT, often for longer than the lease or the session.
    Freeze {
        member: usize,
        time: Duration,
    },
    /// SIGKILL to all, and new ones in the same instant.
    KillAll {
        down: Duration,
    },
    Postgres(Blow),
    Broker(Blow),
    /// Nothing may go to the topic.
    Pause {
        time: Duration,
    },
    /// Only so many messages a second.
    Limit {
        rate_max: u32,
        time: Duration,
    },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Blow {
    Kill {
        down: Duration,
    },
    /// In order.
    Restart,
    /// Connections are accepted and nobody answers.
    Freeze {
        time: Duration,
    },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// Time in peace since the step before was over.
    pub after: Duration,
    pub action: Action,
}

/// What is done to a target in at most `time`, the same for the same seed. The servers take turns.
pub fn plan(seed: u64, target: Target, members: usize, time: Duration) -> Vec<Step> {
    let mut random = fastrand::Rng::with_seed(mixed(&format!("nemesis {seed} {target:?}")));
    // Long enough for work between two troubles: a joining consumer and a waiting lane are idle for seconds.
    let (first, peace) = match target {
        Target::Relays => (1_000, 4_000..10_000),
        Target::Consumers => (2_000, 6_000..14_000),
        Target::Writer => (7_000, 8_000..20_000),
        Target::Servers => (3_000, 4_000..10_000),
        Target::Destination => (2_000, 6_000..12_000),
    };
    let broker_first = random.bool();
    let mut after = Duration::from_millis(random.u64(first..first + 3_000));
    let mut at = after;
    let mut steps = Vec::new();
    while at < time {
        let action = match target {
            Target::Servers => blow(&mut random, steps.len().is_multiple_of(2) == broker_first),
            Target::Destination => second_thoughts(&mut random),
            _ => misfortune(&mut random, target, members),
        };
        steps.push(Step { after, action });
        after = Duration::from_millis(random.u64(peace.clone()));
        at += after;
    }
    steps
}

fn misfortune(random: &mut fastrand::Rng, target: Target, members: usize) -> Action {
    let member = random.usize(0..members);
    let down = Duration::from_millis(random.u64(0..3_000));
    let grace = match target {
        Target::Consumers => SESSION,
        _ => LEASE,
    };
    let beyond = grace + Duration::from_millis(random.u64(500..6_000));
    match random.u8(0..10) {
        0..5 => Action::Kill { member, down },
        5..7 => Action::Freeze {
            member,
            time: beyond,
        },
        7 | 8 => Action::Freeze { member, time: down },
        _ => Action::KillAll { down },
    }
}

fn second_thoughts(random: &mut fastrand::Rng) -> Action {
    let time = Duration::from_millis(random.u64(500..4_000));
    match random.u8(0..3) {
        0 => Action::Limit {
            rate_max: random.u32(16..64),
            time,
        },
        _ => Action::Pause { time },
    }
}

fn blow(random: &mut fastrand::Rng, broker: bool) -> Action {
    let down = Duration::from_millis(random.u64(0..4_000));
    let blow = match random.u8(0..4) {
        0 | 1 => Blow::Kill { down },
        2 => Blow::Restart,
        _ => Blow::Freeze {
            time: down + Duration::from_secs(1),
        },
    };
    match broker {
        true => Action::Broker(blow),
        false => Action::Postgres(blow),
    }
}

/// Prints what happens, with the time since the start.
#[derive(Debug, Clone, Copy)]
pub struct Diary(Instant);

impl Diary {
    pub fn new() -> Self {
        Self(Instant::now())
    }

    pub fn note(&self, text: impl std::fmt::Display) {
        println!("{:8.3} {text}", self.0.elapsed().as_secs_f64());
    }
}

/// Waits for the time of a step. One that would begin too late is left out.
async fn in_time(start: Instant, step: &Step, time: Duration) -> bool {
    let left = time.saturating_sub(start.elapsed());
    tokio::time::sleep(step.after.min(left)).await;
    step.after < left
}

/// Carries out a plan on processes; returns how often one of them was disturbed.
pub async fn trouble_processes(
    fleet: &mut Fleet,
    plan: Vec<Step>,
    time: Duration,
    diary: Diary,
) -> Anyhow<u64> {
    let start = Instant::now();
    let mut disturbed = 0;
    for step in plan {
        if !in_time(start, &step, time).await {
            break;
        }
        match step.action {
            Action::Kill { member, down } => {
                diary.note(format!(
                    "{}: SIGKILL, again in {down:?}",
                    fleet.name(member)
                ));
                fleet.kill(member)?;
                tokio::time::sleep(down).await;
                fleet.start_missing()?;
                disturbed += 1;
            }
            Action::KillAll { down } => {
                diary.note(format!(
                    "{} and all others: SIGKILL, again in {down:?}",
                    fleet.name(0)
                ));
                for member in 0..fleet.len() {
                    fleet.kill(member)?;
                    disturbed += 1;
                }
                tokio::time::sleep(down).await;
                fleet.start_missing()?;
            }
            Action::Freeze { member, time } => {
                diary.note(format!("{}: SIGSTOP for {time:?}", fleet.name(member)));
                fleet.freeze(member, time).await?;
                diary.note(format!("{}: SIGCONT", fleet.name(member)));
                disturbed += 1;
            }
            _ => return Err("this cannot be done to a process".into()),
        }
    }
    Ok(disturbed)
}

/// Carries out a plan on the servers; returns how often one of them was disturbed.
pub async fn trouble_servers(
    postgres: &Postgres,
    broker: &Server,
    plan: Vec<Step>,
    time: Duration,
    diary: Diary,
) -> Anyhow<u64> {
    let start = Instant::now();
    let mut disturbed = 0;
    for step in plan {
        if !in_time(start, &step, time).await {
            break;
        }
        disturbed += 1;
        diary.note(format!("{:?}", step.action));
        let name = match step.action {
            Action::Postgres(blow) => {
                match blow {
                    Blow::Kill { down } => {
                        postgres.kill().await?;
                        tokio::time::sleep(down).await;
                        postgres.start_again().await?;
                    }
                    Blow::Restart => postgres.restart().await?,
                    Blow::Freeze { time } => {
                        postgres.stop().await?;
                        tokio::time::sleep(time).await;
                        postgres.cont().await?;
                    }
                }
                "PostgreSQL"
            }
            Action::Broker(blow) => {
                match blow {
                    Blow::Kill { down } => {
                        broker.kill().await?;
                        tokio::time::sleep(down).await;
                        broker.start_again().await?;
                    }
                    Blow::Restart => broker.restart().await?,
                    Blow::Freeze { time } => {
                        broker.stop().await?;
                        tokio::time::sleep(time).await;
                        broker.cont().await?;
                    }
                }
                "the broker"
            }
            _ => return Err("this cannot be done to a server".into()),
        };
        diary.note(format!("{name} is back"));
    }
    Ok(disturbed)
}

/// Carries out a plan on the topic, through an operator's calls.
pub async fn trouble_destination(
    world: &World,
    plan: Vec<Step>,
    time: Duration,
    diary: Diary,
) -> Anyhow<()> {
    let (bank, name) = (&world.bank, &*world.destination());
    let start = Instant::now();
    for step in plan {
        if !in_time(start, &step, time).await {
            break;
        }
        diary.note(format!("{name}: {:?}", step.action));
        match step.action {
            Action::Pause { time } => {
                insist(async || bank.pause(name, "nemesis").await).await?;
                tokio::time::sleep(time).await;
                insist(async || bank.resume(name).await).await?;
            }
            Action::Limit { rate_max, time } => {
                insist(async || bank.limit(name, Some(rate_max), "nemesis").await).await?;
                tokio::time::sleep(time).await;
                insist(async || bank.limit(name, None, "nemesis").await).await?;
            }
            _ => return Err("this cannot be done to a destination".into()),
        }
        diary.note(format!("{name} is free"));
    }
    Ok(())
}

/// The database may be in trouble of its own.
async fn insist(call: impl AsyncFn() -> relaybox::Result<()>) -> Anyhow<()> {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        match call().await {
            Err(error) if error.is_transient() && Instant::now() < deadline => {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            ended => return Ok(ended?),
        }
    }
}

impl Disturbed {
    /// What a run without trouble begins with.
    pub fn by_nobody(relay_count: usize, batch: usize) -> Self {
        let count = |n: usize| u64::try_from(n).unwrap_or(u64::MAX);
        Self {
            relay_count: count(relay_count),
            batch: count(batch),
            ..Self::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIME: Duration = Duration::from_secs(600);

    #[test]
    fn a_seed_plans_the_same_trouble_and_another_seed_other_trouble() {
        for target in [
            Target::Relays,
            Target::Consumers,
            Target::Writer,
            Target::Servers,
            Target::Destination,
        ] {
            let planned = plan(7, target, 3, TIME);
            assert_eq!(planned, plan(7, target, 3, TIME));
            assert_ne!(planned, plan(8, target, 3, TIME));
            assert!(planned.len() > 10, "{target:?}: {}", planned.len());
            // A longer run begins like a shorter one.
            assert!(planned.starts_with(&plan(7, target, 3, TIME / 2)));
        }
    }

    #[test]
    fn every_kind_of_trouble_is_planned() {
        let mut kinds: Vec<_> = [Target::Relays, Target::Servers, Target::Destination]
            .into_iter()
            .flat_map(|target| plan(7, target, 3, TIME))
            .map(|step| match step.action {
                Action::Postgres(blow) => format!("p{:?}", std::mem::discriminant(&blow)),
                Action::Broker(blow) => format!("b{:?}", std::mem::discriminant(&blow)),
                action => format!("{:?}", std::mem::discriminant(&action)),
            })
            .collect();
        kinds.sort();
        kinds.dedup();
        assert_eq!(kinds.len(), 3 + 2 * 3 + 2, "{kinds:?}");
    }
}
