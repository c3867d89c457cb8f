//! Subscribing: one thread per subscription that always polls, whatever its receiver does.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;
use rdkafka::Message as _;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::{KafkaError, RDKafkaErrorCode as Code};
use tokio::sync::oneshot;

use super::committer;
use super::config::KafkaConfig;
use super::context::Context;
use super::control::{Control, create_with};
use super::desk::Desk;
use super::error::{health, mapped};
use super::member::Member;
use super::{record, topology};
use crate::broker::{Delivery, Health, Subscription, SubscriptionRequest};
use crate::clock::at_most_a_day;
use crate::error::{Error, ErrorKind, Result};

/// Longest sleep of the polling thread: how late a due message or a wish to close is noticed.
const TURN: Duration = Duration::from_millis(50);
/// The same while everything is paused or in work.
const SHORT_TURN: Duration = Duration::from_millis(20);
/// How long no room is taken for a short spell, before pausing throws away what was fetched ahead.
const PATIENCE: Duration = Duration::from_millis(500);
/// How often due messages and pauses are looked at, at most.
const TEND_INTERVAL: Duration = Duration::from_millis(5);
/// Between two warnings about the same trouble.
const WARN_INTERVAL: Duration = Duration::from_secs(10);

/// A running membership.
struct Membership {
    desk: Arc<Desk>,
    context: Context,
    done: Option<oneshot::Receiver<Result<()>>>,
}

pub(super) async fn subscribe(
    config: &KafkaConfig,
    control: &Arc<Control>,
    request: SubscriptionRequest,
) -> Result<Box<dyn Subscription>> {
    topology::prepare(config, control, &request).await?;
    let rungs = request.rungs.into_iter().chain(request.earlier_rungs);
    let rungs: HashSet<String> = rungs.map(|rung| rung.destination).collect();
    let topics: HashSet<&str> = request
        .sources
        .iter()
        .chain(&rungs)
        .map(String::as_str)
        .collect();
    let topics: Vec<&str> = topics.into_iter().collect();
    let desk = Desk::new(request.in_flight_max);
    let member = Member::new(Arc::clone(&desk), rungs.clone(), config);
    let context = member.context.clone();
    let consumer: BaseConsumer<Member> = create_with(&config.consumer(&request.consumer), member)?;
    let started = consumer
        .subscribe(&topics)
        .map_err(|source| mapped("subscribe", "the subscription was refused", source));
    let (finished, done) = oneshot::channel();
    let thread = Arc::clone(&desk);
    std::thread::Builder::new()
        .name("relaybox-kafka-poll".into())
        .spawn(move || run(consumer, &thread, finished))
        .map_err(no_thread)?;
    let membership = Membership {
        desk,
        context,
        done: Some(done),
    };
    // Checked only here, so that the client ends on its own thread: that may take long.
    started?;
    Ok(Box::new(membership))
}

impl Subscription for Membership {
    fn receive(&mut self, count_max: usize) -> BoxFuture<'_, Result<Vec<Delivery>>> {
        Box::pin(self.desk.receive(count_max))
    }

    fn health(&self) -> Health {
        if self.desk.has_ended() {
            return Health::closed();
        }
        health(self.context.trouble())
    }

    fn close(mut self: Box<Self>, deadline: Duration) -> BoxFuture<'static, Result<()>> {
        self.desk
            .ask_to_close(Instant::now() + at_most_a_day(deadline));
        let done = self.done.take();
        Box::pin(async move {
            let Some(done) = done else { return Ok(()) };
            match tokio::time::timeout(deadline, done).await {
                Ok(Ok(result)) => result,
                Ok(Err(_gone)) => Err(Error::new(
                    ErrorKind::Closed,
                    "close",
                    "the polling thread ended early",
                )),
                // The thread goes on in the background; what it commits still counts.
                Err(_elapsed) => Err(not_in_time(deadline)),
            }
        })
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        self.desk.ask_to_close(Instant::now());
    }
}

fn not_in_time(deadline: Duration) -> Error {
    Error::new(
        ErrorKind::Timeout,
        "close",
        format!("the broker did not confirm commit and leave within {deadline:?}"),
    )
}

/// Tells the receiver even if the thread panics.
struct AtEnd<'a>(&'a Desk);

impl Drop for AtEnd<'_> {
    fn drop(&mut self) {
        self.0.over();
    }
}

/// Ends the committer even if the thread that polls panics.
struct NoMoreCommits<'a>(&'a Member);

impl Drop for NoMoreCommits<'_> {
    fn drop(&mut self) {
        self.0.no_more_commits();
    }
}

fn no_thread(source: std::io::Error) -> Error {
    let detail = "no thread to poll or to commit on";
    Error::new(ErrorKind::Unavailable, "subscribe", detail).with_source(source)
}

fn run(consumer: BaseConsumer<Member>, desk: &Desk, finished: oneshot::Sender<Result<()>>) {
    let _at_end = AtEnd(desk);
    std::thread::scope(|scope| {
        let committing = std::thread::Builder::new()
            .name("relaybox-kafka-commit".into())
            .spawn_scoped(scope, || committer::run(&consumer));
        let _no_more_commits = NoMoreCommits(consumer.client().context());
        let fatal = match committing {
            Ok(_) => poll_until_closed(&consumer, desk),
            Err(source) => Some(no_thread(source)),
        };
        if let Some(fatal) = fatal {
            desk.fail(fatal);
        }
    });
    let result = commit_and_leave(&consumer, desk);
    // Leaves the group, which is when others get the partitions. With the broker away this takes long.
    drop(consumer);
    // Nobody listens after the deadline.
    let _ = finished.send(result);
}

/// Polls until somebody wants to close. The error of a client that is beyond help ends it too.
fn poll_until_closed(consumer: &BaseConsumer<Member>, desk: &Desk) -> Option<Error> {
    let member = consumer.client().context();
    let mut full_since: Option<Instant> = None;
    let mut warned: Option<(Code, Instant)> = None;
    // Tending looks at every partition, so it is not done for every message.
    let mut tend_at = Instant::now();
    while !desk.is_closing() {
        desk.bring_back();
        let waits = member.is_waiting();
        let room = desk.has_room() && !waits;
        if room {
            full_since = None;
            if member.is_halted() && desk.has_ample_room() {
                member.halt(false);
                tend_at = Instant::now();
            }
        } else if full_since.get_or_insert_with(Instant::now).elapsed() > PATIENCE
            && !member.is_halted()
        {
            member.halt(true);
            tend_at = Instant::now();
        }
        if waits || Instant::now() >= tend_at {
            member.tend(consumer);
            tend_at = Instant::now() + TEND_INTERVAL;
        }
        if !member.is_halted() && member.is_waiting() {
            desk.wait_for_commit(SHORT_TURN);
            continue;
        }
        if !room && !member.is_halted() {
            // What the client fetched ahead stays; a settlement ends the wait at once.
            desk.wait_for_settlement(SHORT_TURN);
            continue;
        }
        // With all paused there comes no message, but the membership is kept and rebalances are served.
        // Delivering may have filled the room meanwhile.
        if !member.is_halted() && !desk.has_room() {
            continue;
        }
        let turn = if member.is_halted() { SHORT_TURN } else { TURN };
        match consumer.poll(turn) {
            None => {}
            Some(Ok(message)) => {
                member.context.succeeded();
                let held = member.arrived(
                    message.topic(),
                    message.partition(),
                    message.offset(),
                    record::received(&message),
                );
                if held {
                    tend_at = Instant::now();
                }
            }
            Some(Err(error)) => match fatal(&error, member) {
                Some(fatal) => return Some(fatal),
                None => report(desk, error, &mut warned),
            },
        }
    }
    None
}

/// The error with which the subscription ends, if the client or the group cannot be helped.
fn fatal(error: &KafkaError, member: &Member) -> Option<Error> {
    if let Some(refused) = error
        .rdkafka_error_code()
        .and_then(|code| member.refused(code))
    {
        return Some(refused.with_source(error.clone()));
    }
    let KafkaError::MessageConsumptionFatal(_) = error else {
        return None;
    };
    let detail = "the client gave up";
    let source = mapped("receive", detail, error.clone());
    Some(Error::new(ErrorKind::Other, "receive", detail).with_source(source))
}

/// The client mends most troubles itself, so this is for people to read: rarely, and as a transient error.
fn report(desk: &Desk, error: KafkaError, warned: &mut Option<(Code, Instant)>) {
    let code = error.rdkafka_error_code().unwrap_or(Code::Unknown);
    if warned.is_some_and(|(last, at)| last == code && at.elapsed() < WARN_INTERVAL) {
        return;
    }
    *warned = Some((code, Instant::now()));
    tracing::warn!(%error, "receiving is in trouble and goes on trying");
    let detail = "receiving is in trouble and goes on trying";
    desk.report(Error::new(ErrorKind::Unavailable, "receive", detail).with_source(error));
}

/// Commits the finished prefixes and gives the partitions back, as far as the deadline allows.
fn commit_and_leave(consumer: &BaseConsumer<Member>, desk: &Desk) -> Result<()> {
    let started = Instant::now();
    // After a fatal error nobody waits.
    let by = desk.close_by().unwrap_or(started);
    let member = consumer.client().context();
    // Nobody is handed anything any more; what is queued was in nobody's work.
    member.take_all_back();
    // Blocks until the broker answers, at worst until the client gives up on it; our caller waits no longer than its
    // deadline. An asynchronous commit would tell nobody what became of it.
    let mut committed = false;
    while !committed {
        match committer::commit(consumer, &member.at_end()) {
            Ok(()) => committed = true,
            Err(error) if Instant::now() >= by => {
                tracing::warn!(%error, "the last commit failed; what it covered comes again");
                break;
            }
            // A rebalance is under way, or the coordinator moved. Nothing polled here is delivered: whatever comes is
            // read again by the next owner.
            Err(_) => drop(consumer.poll(SHORT_TURN)),
        }
    }
    // A static member keeps its partitions; to unsubscribe gives them away, if the end does not come first.
    if member.instance_id().is_some() {
        return match committed {
            true => Ok(()),
            false => Err(not_in_time(by.saturating_duration_since(started))),
        };
    }
    consumer.unsubscribe();
    while !member.is_empty() && Instant::now() < by {
        drop(consumer.poll(SHORT_TURN));
    }
    if committed && member.is_empty() {
        return Ok(());
    }
    Err(not_in_time(by.saturating_duration_since(started)))
}
