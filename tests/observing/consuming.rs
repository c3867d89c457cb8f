//! What a consumer tells.

use std::collections::HashSet;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use futures_util::future::BoxFuture;
use opentelemetry::trace::SpanId;
use opentelemetry_sdk::trace::SpanData;
use relaybox::broker::memory::MemoryBroker;
use relaybox::broker::{
    Backlog, Health, PublishOutcome, Publisher, PublisherCapabilities, Retention, Subscriber,
    SubscriberCapabilities, Subscription, SubscriptionRequest,
};
use relaybox::envelope::Outgoing;
use relaybox::readiness::NotReady;
use relaybox::store::sqlite::SqliteStore;
use relaybox::testing::eventually;
use relaybox::{
    Consumer, Failure, Incoming, Message, Outbox, Outcome, Result, TraceContext, handler_fn,
};
use sqlx::SqliteConnection;
use tracing::{Instrument, info_span};

use crate::house;
use crate::measuring::{recorded, shown};
use crate::readiness::{ready, stalled};
use crate::spans::{Exporter, as_in_the_table, context, linked, parent, relayed};
use crate::support::{DEADLINE, House, Running, numbered, quick, run};

/// Does what the event type says.
async fn obey(_: &(), _: &mut SqliteConnection, incoming: &Incoming) -> Outcome {
    match incoming.message.event_type.as_str() {
        "skip" => Outcome::Skip,
        "retry" => Outcome::Retry(Failure::new("not today")),
        "permanent" => Outcome::Permanent(Failure::new("never")),
        "panic" => panic!("as told"),
        _ => Outcome::Done,
    }
}

fn told(event_type: &str) -> Message {
    Message::new("orders", event_type).with_id(event_type)
}

/// Enqueues in a span of its own; returns it as `traceparent` tells it, and its id.
async fn requested(house: &House, messages: &[Message]) -> (TraceContext, SpanId) {
    let request = info_span!("request");
    let enqueuing = house.enqueue(messages);
    enqueuing.instrument(request.clone()).await;
    let context = context(&request);
    let trace = TraceContext {
        parent: parent(&context),
        state: None,
    };
    (trace, context.span_id())
}

fn handled(request: SpanId) -> Vec<SpanData> {
    Exporter::of_process().spans(|span| span.name == "handle" && span.parent_span_id == request)
}

fn field(span: &SpanData, name: &str) -> String {
    let mut fields = span.attributes.iter();
    let field = fields.find(|field| field.key.as_str() == name);
    field
        .map(|field| field.value.to_string())
        .unwrap_or_default()
}

#[tokio::test]
async fn each_attempt_is_a_child_of_the_enqueuing_span_and_dead_letters_keep_it() {
    let house = house().await;
    let (trace, request) = requested(&house, &[told("retry")]).await;
    relayed(&house, "continuing").await;
    let consumer = house.consume("billing", handler_fn((), obey));
    eventually(DEADLINE, "it is dead", || async {
        house.dead("billing").len() == 1
    })
    .await;
    consumer.stop().await.unwrap();
    let copies = ["orders.billing.retry.50ms", "orders.billing.retry.100ms"];
    for topic in copies.into_iter().chain(["orders", "orders.billing.DLQ"]) {
        let [copy] = &house.broker.log(topic)[..] else {
            panic!("one message on {topic}")
        };
        assert_eq!(copy.message.trace.as_ref(), Some(&trace), "{topic}");
    }
    let handled = handled(request);
    handled.iter().for_each(as_in_the_table);
    let mut attempts: Vec<_> = handled
        .iter()
        .map(|span| (field(span, "attempt"), field(span, "outcome")))
        .collect();
    attempts.sort();
    let expected = [("1", "retried"), ("2", "retried"), ("3", "dead")];
    assert_eq!(
        attempts,
        expected.map(|(n, word)| (n.to_owned(), word.to_owned()))
    );
}

#[tokio::test]
async fn what_a_handler_enqueues_goes_on_with_the_trace() {
    async fn answer(
        outbox: &Outbox<SqliteStore>,
        db: &mut SqliteConnection,
        incoming: &Incoming,
    ) -> Result<Outcome> {
        if incoming.message.event_type == "Question" {
            outbox
                .enqueue(db, Message::new("answers", "Answer"))
                .await?;
        }
        Ok(Outcome::Done)
    }
    let house = house().await;
    house.broker.create_topic("answers", 1).unwrap();
    let (_, request) = requested(&house, &[told("Question")]).await;
    relayed(&house, "asking").await;
    let outbox = Outbox::new(house.store.clone());
    let consumer = house.consume("oracle", handler_fn(outbox, answer));
    house.consumed("oracle", "orders").await;
    consumer.stop().await.unwrap();
    relayed(&house, "answering").await;
    let [handle] = &handled(request)[..] else {
        panic!("one attempt")
    };
    let [answered] = &house.broker.log("answers")[..] else {
        panic!("one answer")
    };
    let trace = answered
        .message
        .trace
        .as_ref()
        .map(|trace| trace.parent.clone());
    assert_eq!(trace, Some(parent(&handle.span_context)));
}

#[tokio::test]
async fn a_batch_links_to_the_span_of_each_message() {
    async fn all(_: &(), _: &mut SqliteConnection, _: &[&Incoming]) -> Outcome {
        Outcome::Done
    }
    let house = house().await;
    let mut requests = HashSet::new();
    for message in numbered("k", "m", 5) {
        requests.insert(requested(&house, &[message]).await.1);
    }
    relayed(&house, "gathering").await;
    let batches = house.consumer("batches");
    let batches = Running::start(|stop| batches.run_batches_until(10, handler_fn((), all), stop));
    house.consumed("batches", "orders").await;
    batches.stop().await.unwrap();
    let ours = |span: &SpanData| {
        let of_ours = field(span, "messaging.consumer.group.name") == "batches";
        of_ours && span.name == "handle batch"
    };
    let spans = Exporter::of_process().spans(ours);
    let alone = requests
        .iter()
        .map(|request| handled(*request).len())
        .sum::<usize>();
    let in_batches = linked(&spans);
    assert_eq!(in_batches.len() + alone, requests.len(), "each once");
    assert!(in_batches.is_subset(&requests) && !spans.is_empty());
}

#[test]
fn outcomes_attempts_duplicates_dead_letters_lag_and_latency_are_told() {
    recorded(async |handle| {
        let house = house().await;
        let kinds = ["done", "skip", "retry", "permanent", "panic", "done"];
        house.publish(&kinds.map(told)).await;
        let config = quick().with_sample_interval(Duration::from_millis(10));
        let consumer = house.consumer("telling").with_config(config);
        let running = run(consumer, handler_fn((), obey));
        for (metric, labels, value) in [
            ("consumer_attempts_total", r#",outcome="done""#, 1),
            ("consumer_attempts_total", r#",outcome="skip""#, 1),
            ("consumer_attempts_total", r#",outcome="duplicate""#, 1),
            ("consumer_attempts_total", r#",outcome="permanent""#, 1),
            ("consumer_attempts_total", r#",outcome="retry""#, 3),
            ("consumer_attempts_total", r#",outcome="panic""#, 3),
            ("consumer_messages_total", r#",outcome="handled""#, 2),
            ("consumer_messages_total", r#",outcome="duplicate""#, 1),
            ("consumer_messages_total", r#",outcome="retried""#, 4),
            ("consumer_messages_total", r#",outcome="dead""#, 3),
            ("consumer_dead_letters_total", r#",reason="permanent""#, 1),
            (
                "consumer_dead_letters_total",
                r#",reason="retries-exhausted""#,
                2,
            ),
            ("dead_letters", r#",destination="orders.telling.DLQ""#, 3),
            ("consumer_lag_messages", r#",source="orders""#, 0),
            (
                "consumer_lag_messages",
                r#",source="orders.telling.retry.50ms""#,
                0,
            ),
            ("consumer_lag_seconds", r#",source="orders""#, 0),
            ("consumer_end_to_end_seconds_count", "", 2),
            ("consumer_retry_late_seconds_count", "", 4),
        ] {
            let line = format!(r#"relaybox_{metric}{{consumer="telling"{labels}}} {value}"#);
            shown(&handle, &line).await;
        }
        running.stop().await.unwrap();
        assert!(!handle.render().contains("not today"));
    });
}

async fn never(_: &(), _: &mut SqliteConnection, _: &Incoming) -> Outcome {
    std::future::pending().await
}

#[test]
fn lag_is_told_while_nothing_is_handled() {
    recorded(async |handle| {
        let house = house().await;
        house.publish(&numbered("k", "m", 7)).await;
        let config = quick().with_sample_interval(Duration::from_millis(10));
        let consumer = house.consumer("lagging").with_config(config);
        let running = Running::start(|stop| consumer.run_until(handler_fn((), never), stop));
        let line = r#"relaybox_consumer_lag_messages{consumer="lagging",source="orders"} 7"#;
        shown(&handle, line).await;
        running.kill().await;
    });
}

#[tokio::test]
async fn a_consumer_is_ready_while_it_runs_and_its_broker_answers() {
    let house = house().await;
    let consumer = house.consumer("ready");
    let probe = consumer.probe();
    assert_eq!(probe.readiness().reasons, [NotReady::NotStarted]);
    let running = run(consumer, handler_fn((), obey));
    ready(&probe).await;
    house.broker.set_available(false);
    eventually(DEADLINE, "the broker is missed", || async {
        let reasons = probe.readiness().reasons;
        matches!(&reasons[..], [NotReady::BrokerDown(_)])
    })
    .await;
    house.broker.set_available(true);
    ready(&probe).await;
    running.stop().await.unwrap();
    assert_eq!(probe.readiness().reasons, [NotReady::Stopped]);
}

#[tokio::test]
async fn a_consumer_whose_database_is_away_is_not_ready() {
    let house = house().await;
    let consumer = house.consumer("shut");
    let probe = consumer.probe();
    let running = run(consumer, handler_fn((), obey));
    ready(&probe).await;
    house.store.pool().close().await;
    house.publish(&numbered("k", "m", 1)).await;
    eventually(DEADLINE, "the database is missed", || async {
        let reasons = probe.readiness().reasons;
        matches!(&reasons[..], [NotReady::DatabaseDown(_)])
    })
    .await;
    running.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_subscription_that_blocks_its_thread_stalls_the_consumer() {
    let house = house().await;
    let shut = Arc::new((Mutex::new(false), Condvar::new()));
    let broker = Blocking {
        inner: house.broker.clone(),
        shut: shut.clone(),
    };
    let consumer = Consumer::new("blocked", "orders", broker, house.store.clone())
        .with_config(quick().with_silence_max(Duration::from_millis(500)));
    let probe = consumer.probe();
    let running = run(consumer, handler_fn((), obey));
    ready(&probe).await;
    *shut.0.lock().unwrap() = true;
    stalled(&probe, "deliveries").await;
    *shut.0.lock().unwrap() = false;
    shut.1.notify_all();
    ready(&probe).await;
    running.stop().await.unwrap();
}

type Shut = Arc<(Mutex<bool>, Condvar)>;

/// A broker that blocks the thread of whoever asks it for deliveries, while it is shut.
struct Blocking {
    inner: MemoryBroker,
    shut: Shut,
}

struct BlockingSubscription {
    inner: Box<dyn Subscription>,
    shut: Shut,
}

impl Subscription for BlockingSubscription {
    fn receive(
        &mut self,
        count_max: usize,
    ) -> BoxFuture<'_, Result<Vec<relaybox::broker::Delivery>>> {
        let (shut, opened) = &*self.shut;
        // Not for ever: a test that fails has to end.
        drop(opened.wait_timeout_while(shut.lock().unwrap(), 2 * DEADLINE, |shut| *shut));
        self.inner.receive(count_max)
    }

    fn health(&self) -> Health {
        self.inner.health()
    }

    fn close(self: Box<Self>, deadline: Duration) -> BoxFuture<'static, Result<()>> {
        self.inner.close(deadline)
    }
}

impl Subscriber for Blocking {
    fn capabilities(&self) -> SubscriberCapabilities {
        Subscriber::capabilities(&self.inner)
    }

    fn subscribe(
        &self,
        request: SubscriptionRequest,
    ) -> BoxFuture<'_, Result<Box<dyn Subscription>>> {
        Box::pin(async move {
            let inner = self.inner.subscribe(request).await?;
            let shut = self.shut.clone();
            Ok(Box::new(BlockingSubscription { inner, shut }) as Box<dyn Subscription>)
        })
    }

    fn key_affinity(&self, source: &str) -> bool {
        self.inner.key_affinity(source)
    }

    fn depth<'a>(&'a self, destination: &'a str) -> BoxFuture<'a, Result<Backlog>> {
        self.inner.depth(destination)
    }

    fn lag<'a>(&'a self, consumer: &'a str, source: &'a str) -> BoxFuture<'a, Result<Backlog>> {
        self.inner.lag(consumer, source)
    }

    fn destinations<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<String>>> {
        self.inner.destinations(prefix)
    }

    fn retention<'a>(&'a self, source: &'a str) -> BoxFuture<'a, Result<Retention>> {
        self.inner.retention(source)
    }
}

impl Publisher for Blocking {
    fn capabilities(&self) -> PublisherCapabilities {
        Publisher::capabilities(&self.inner)
    }

    fn publish<'a>(&'a self, batch: &'a [Outgoing]) -> BoxFuture<'a, Vec<PublishOutcome>> {
        self.inner.publish(batch)
    }

    fn health(&self) -> Health {
        Publisher::health(&self.inner)
    }

    fn check<'a>(&'a self, destinations: &'a [String]) -> BoxFuture<'a, Result<()>> {
        self.inner.check(destinations)
    }

    fn close(&self, deadline: Duration) -> BoxFuture<'_, Result<()>> {
        Publisher::close(&self.inner, deadline)
    }
}
