//! A mover that dies at each point, and another that goes on.

use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::AtomicUsize;

use futures_util::future::BoxFuture;
use relaybox::ErrorKind;
use relaybox::backoff::DelayPolicy;
use relaybox::broker::{
    FailureScope, Health, PublishOutcome, Publisher, PublisherCapabilities, Stored,
};
use relaybox::dlq::redrive::Order;
use relaybox::store::RunState;

use super::*;

const SIGABRT: i32 = 6;

over_each_broker! {
    a_mover_that_dies_at_any_point_loses_and_doubles_nothing
    a_collector_that_dies_at_any_point_loses_and_doubles_nothing
    a_target_that_refuses_and_a_mover_killed_at_sixty_percent_lose_nothing
}

/// The program `tests/redrive_process`; killed when a test ends early.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Scene {
    /// Runs the program until it dies at this point.
    async fn die(&self, verb: &[&str], point: &str) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_redrive_process"));
        command
            .arg(self.place.product.name())
            .args([&self.topic, &self.consumer, &self.url])
            .args(verb)
            .args(["--crash", point])
            .env(self.place.product.variable(), &self.place.address)
            .env("RUST_LOG", "error")
            .stdin(Stdio::piped())
            .stdout(Stdio::null());
        let mut process = Process(command.spawn().unwrap());
        let mut status = None;
        eventually(DEADLINE, &format!("{verb:?} dies at {point}"), || {
            status = process.0.try_wait().unwrap();
            let ended = status.is_some();
            async move { ended }
        })
        .await;
        assert_eq!(
            status.unwrap().signal(),
            Some(SIGABRT),
            "{verb:?} at {point}"
        );
    }

    /// A consumer has run once, so that everything of its own is there.
    async fn settle_in(&self) {
        let running = self.start();
        self.until_quiet().await;
        running.stop().await;
    }
}

async fn a_mover_that_dies_at_any_point_loses_and_doubles_nothing(product: Product) {
    const COUNT: usize = 12;
    let scene = Scene::new(product).await;
    scene.settle_in().await;
    scene.repair();
    let points = [
        ("take:1", 0),
        ("taken:1", 0),
        ("hand:2", 4),
        ("handed:2", 4),
        ("publish:2", 4),
        ("published:2", 4),
        ("settle:2", 4),
        ("settled:2", 8),
        ("end:1", 12),
        ("ended:1", 12),
    ];
    for (point, left) in points {
        // Each time other messages: a stream drops what looks like a repetition.
        let name = point.split(':').next().unwrap_or_default();
        scene.bury(name, COUNT).await;
        let desk = scene.desk();
        let planned = desk
            .plan("ann", &Order::of(LetterFilter::all()))
            .await
            .unwrap();
        let id = planned.row.id.to_string();
        scene.die(&["run", &id], point).await;
        let entries = COUNT as u64 - scene.entries().await;
        assert_eq!(entries, left, "{point}: what was not settled stays");
        let done = match point {
            "take:1" => desk.run("bea", planned.row.id, |_| {}).await.unwrap().row,
            "ended:1" => desk.runs(None, 1).await.unwrap().remove(0),
            _ => {
                desk.resume("bea", planned.row.id, |_| {})
                    .await
                    .unwrap()
                    .row
            }
        };
        assert_eq!(
            (done.state, done.sent),
            (RunState::Done, COUNT as u64),
            "{point}"
        );
        assert_eq!(scene.entries().await, 0, "{point}");
        let audit = desk.audit(0, 1_000).await.unwrap();
        let of_run = audit
            .iter()
            .filter(|entry| entry.run == Some(planned.row.id));
        assert_eq!(of_run.count(), COUNT, "{point}");
        let running = scene.start();
        scene.until_effects(COUNT).await;
        scene.until_quiet().await;
        running.stop().await;
        assert_eq!(
            scene.effects(&scene.consumer).await,
            ids(name, COUNT),
            "{point}"
        );
        for table in ["effect", "relaybox_inbox", "relaybox_redrive_audit"] {
            let sql = sqlx::AssertSqlSafe(format!("DELETE FROM {table}"));
            scene.store.pool().execute(sql).await.unwrap();
        }
    }
}

async fn a_collector_that_dies_at_any_point_loses_and_doubles_nothing(product: Product) {
    const COUNT: usize = 8;
    let scene = Scene::new(product).await;
    scene.settle_in().await;
    for (round, point) in ["store:3", "stored:3", "acknowledge:3", "acknowledged:3"]
        .into_iter()
        .enumerate()
    {
        let letters = (0..COUNT).map(|n| {
            let mut letter = Outgoing::from(
                Message::new(scene.dead_letters(), "Order")
                    .with_id(format!("r{round}-{n}"))
                    .with_payload(format!("{n}")),
            );
            letter.story.consumer = Some(scene.consumer.clone());
            letter.story.reason = Some(Reason::new(Reason::PERMANENT));
            letter
        });
        let letters: Vec<Outgoing> = letters.collect();
        for outcome in scene.broker.publish(&letters).await {
            assert!(outcome.is_confirmed());
        }
        scene.die(&["collect"], point).await;
        scene.collect(((round + 1) * COUNT) as u64).await;
        let mut all: Vec<String> = scene
            .list()
            .await
            .iter()
            .map(|e| e.message_id.to_string())
            .collect();
        all.sort();
        all.dedup();
        assert_eq!(all.len(), (round + 1) * COUNT, "{point}");
    }
}

/// Takes so many, and then nothing.
struct Full {
    inner: Arc<dyn Broker>,
    left: AtomicUsize,
}

impl Publisher for Full {
    fn capabilities(&self) -> PublisherCapabilities {
        Publisher::capabilities(&self.inner)
    }

    fn publish<'a>(&'a self, batch: &'a [Outgoing]) -> BoxFuture<'a, Vec<PublishOutcome>> {
        Box::pin(async move {
            let mut outcomes = Vec::new();
            for message in batch {
                let taken = self
                    .left
                    .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| {
                        left.checked_sub(1)
                    });
                if taken.is_ok() {
                    outcomes.append(&mut self.inner.publish(std::slice::from_ref(message)).await);
                } else {
                    outcomes.push(PublishOutcome::Failed {
                        scope: FailureScope::Destination,
                        stored: Stored::No,
                        error: relaybox::Error::new(ErrorKind::Busy, "publish", "full"),
                    });
                }
            }
            outcomes
        })
    }

    fn health(&self) -> Health {
        Publisher::health(&self.inner)
    }

    fn check<'a>(&'a self, destinations: &'a [String]) -> BoxFuture<'a, relaybox::Result<()>> {
        self.inner.check(destinations)
    }

    fn close(&self, deadline: Duration) -> BoxFuture<'_, relaybox::Result<()>> {
        self.inner.close(deadline)
    }
}

async fn a_target_that_refuses_and_a_mover_killed_at_sixty_percent_lose_nothing(product: Product) {
    let scene = Scene::new(product).await;
    scene.settle_in().await;
    scene.repair();
    scene.bury("m", 100).await;
    let full = Full {
        inner: scene.broker.clone(),
        left: AtomicUsize::new(40),
    };
    let config = RedriveConfig::default()
        .with_rate_max(10_000)
        .with_batch_max(7)
        .with_attempts_max(2)
        .with_backoff(DelayPolicy::fixed(Duration::from_millis(1)));
    let desk =
        Redrive::new(&scene.consumer, &scene.topic, full, scene.store.clone()).with_config(config);
    let planned = desk
        .plan("ann", &Order::of(LetterFilter::all()))
        .await
        .unwrap();
    let error = desk.run("ann", planned.row.id, |_| {}).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy);
    assert!(error.to_string().contains(".redrive: "), "{error}");
    assert_eq!(scene.entries().await, 60);
    // 36 of 60 confirmed in batches of 4, the last of them not settled.
    let id = planned.row.id.to_string();
    scene.die(&["resume", &id], "published:9").await;
    assert_eq!(scene.entries().await, 60 - 32);
    let done = scene
        .desk()
        .resume("bea", planned.row.id, |_| {})
        .await
        .unwrap();
    assert_eq!((done.row.state, done.row.sent), (RunState::Done, 100));
    assert_eq!(scene.entries().await, 0);
    let running = scene.start();
    scene.until_effects(100).await;
    scene.until_quiet().await;
    running.stop().await;
    assert_eq!(scene.effects(&scene.consumer).await, ids("m", 100));
}
