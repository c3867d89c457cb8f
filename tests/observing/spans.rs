//! Spans, as an exporter of OpenTelemetry sees them.

use std::collections::HashSet;
use std::sync::OnceLock;

use opentelemetry::KeyValue;
use opentelemetry::trace::{SpanContext, SpanId, TraceContextExt, TracerProvider};
use opentelemetry_sdk::trace::{InMemorySpanExporter, SdkTracerProvider, SpanData};
use relaybox::broker::Publisher;
use relaybox::broker::memory::{MemoryBroker, MemoryConfig};
use relaybox::event::{SPANS, current_trace};

use relaybox::testing::eventually;
use relaybox::{Message, Outbox, TraceContext};
use tracing::{Instrument, Span, info_span};
use tracing_opentelemetry::OpenTelemetrySpanExt;
use tracing_subscriber::layer::SubscriberExt;

use crate::house;
use crate::support::{DEADLINE, House, brisk, numbered};

/// Exports the spans of the process. Not of a thread: the driver of the database passes spans to threads of its own.
pub struct Exporter {
    spans: InMemorySpanExporter,
    _provider: SdkTracerProvider,
}

impl Exporter {
    /// To be called before anything else sets a subscriber.
    pub fn of_process() -> &'static Self {
        static EXPORTER: OnceLock<Exporter> = OnceLock::new();
        EXPORTER.get_or_init(|| {
            let spans = InMemorySpanExporter::default();
            let provider = SdkTracerProvider::builder()
                .with_simple_exporter(spans.clone())
                .build();
            // Nothing but the fields of the span.
            let layer = tracing_opentelemetry::layer()
                .with_tracer(provider.tracer("test"))
                .with_location(false)
                .with_threads(false)
                .with_target(false)
                .with_level(false)
                .with_tracked_inactivity(false);
            let subscriber = tracing_subscriber::registry().with(layer);
            tracing::subscriber::set_global_default(subscriber).unwrap();
            Self {
                spans,
                _provider: provider,
            }
        })
    }

    pub fn spans(&self, wanted: impl Fn(&SpanData) -> bool) -> Vec<SpanData> {
        let all = self.spans.get_finished_spans().unwrap().into_iter();
        all.filter(|span| wanted(span)).collect()
    }

    /// Pages of the relay of this name.
    fn pages(&self, relay: &str) -> Vec<SpanData> {
        let named =
            |field: &KeyValue| field.key.as_str() == "relay" && field.value.as_str() == relay;
        self.spans(|span| span.name == "relay" && span.attributes.iter().any(named))
    }

    /// Spans right below these.
    pub fn below(&self, above: &[SpanData]) -> Vec<SpanData> {
        let above = above.iter().map(|span| span.span_context.span_id());
        let above: HashSet<_> = above.collect();
        self.spans(|span| above.contains(&span.parent_span_id))
    }
}

/// All fields that the table names, and no other.
pub fn as_in_the_table(span: &SpanData) {
    let row = SPANS.iter().find(|row| row.name == span.name).unwrap();
    let fields: HashSet<_> = span
        .attributes
        .iter()
        .map(|field| field.key.as_str())
        .collect();
    assert_eq!(fields, row.fields.iter().copied().collect(), "{}", row.name);
}

pub fn context(span: &Span) -> SpanContext {
    span.context().span().span_context().clone()
}

/// As `traceparent` says it.
pub fn parent(context: &SpanContext) -> String {
    format!("00-{}-{}-01", context.trace_id(), context.span_id())
}

pub fn linked(spans: &[SpanData]) -> HashSet<SpanId> {
    let links = spans.iter().flat_map(|span| span.links.iter());
    links.map(|link| link.span_context.span_id()).collect()
}

/// The pages of a relay, and what it published in them.
pub async fn relayed(house: &House, name: &str) -> (Vec<SpanData>, Vec<SpanData>) {
    let relay = house.relay(house.broker.clone(), brisk().with_name(name));
    house.drained().await;
    relay.stop().await.unwrap();
    let exporter = Exporter::of_process();
    let pages = exporter.pages(name);
    let publishes = exporter.below(&pages);
    (pages, publishes)
}

fn traces(house: &House) -> Vec<Option<TraceContext>> {
    let log = house.broker.log("orders").into_iter();
    log.map(|record| record.message.trace).collect()
}

#[tokio::test]
async fn a_message_carries_the_span_it_was_enqueued_in_and_the_relay_links_to_it() {
    let (house, exporter) = (house().await, Exporter::of_process());
    let request = info_span!("request");
    let messages = numbered("k", "m", 2);
    let enqueuing = house.enqueue(&messages);
    enqueuing.instrument(request.clone()).await;
    let of_request = context(&request);
    drop(request);
    let (pages, publishes) = relayed(&house, "linking").await;

    let carried = TraceContext {
        parent: parent(&of_request),
        state: None,
    };
    assert_eq!(traces(&house), vec![Some(carried); 2]);
    let below = exporter.spans(|span| span.parent_span_id == of_request.span_id());
    let enqueues: Vec<_> = below.iter().filter(|span| span.name == "enqueue").collect();
    assert_eq!(enqueues.len(), 1);
    assert_eq!(linked(&publishes), HashSet::from([of_request.span_id()]));
    for publish in &publishes {
        assert_eq!(publish.name, "publish");
        assert_ne!(publish.span_context.trace_id(), of_request.trace_id());
        assert!(
            publish
                .links
                .iter()
                .all(|link| link.span_context.is_remote())
        );
    }
    let all = enqueues.into_iter().chain(&pages).chain(&publishes);
    all.for_each(as_in_the_table);
}

#[tokio::test]
async fn no_message_of_a_large_batch_goes_without_its_link() {
    const MESSAGES: usize = 300;
    let house = house().await;
    let mut wanted = HashSet::new();
    for (n, message) in numbered("k", "m", MESSAGES).into_iter().enumerate() {
        // Of many keys, so that many lanes bring them in one page.
        let message = message.with_key(n.to_string());
        let request = info_span!("request");
        let enqueuing = house.enqueue(std::slice::from_ref(&message));
        enqueuing.instrument(request.clone()).await;
        wanted.insert(context(&request).span_id());
    }
    assert_eq!(wanted.len(), MESSAGES);
    let (_, publishes) = relayed(&house, "batching").await;
    assert_eq!(linked(&publishes), wanted);
    assert!(publishes.iter().all(|span| span.links.dropped_count == 0));
}

#[tokio::test]
async fn a_trace_context_of_the_users_own_stays_as_it_is() {
    let house = house().await;
    let own = |n: usize| ["00-aa-bb-01", "nonsense"][n].to_owned();
    let messages = numbered("k", "m", 2).into_iter().enumerate();
    let messages: Vec<_> = messages
        .map(|(n, message)| message.with_trace(own(n), Some("v=1".into())))
        .collect();
    let enqueuing = house.enqueue(&messages);
    enqueuing.instrument(info_span!("request")).await;
    let (_, publishes) = relayed(&house, "foreign").await;
    let carried = traces(&house).into_iter().flatten();
    let carried: Vec<_> = carried.map(|trace| trace.parent).collect();
    assert_eq!(carried, [own(0), own(1)]);
    assert_eq!(linked(&publishes), HashSet::new());
}

#[tokio::test]
async fn without_a_span_a_message_has_no_trace() {
    let house = house().await;
    house.enqueue(&numbered("k", "m", 1)).await;
    relayed(&house, "untraced").await;
    assert_eq!(traces(&house), [None]);
    assert_eq!(current_trace(), None);
}

#[tokio::test]
async fn a_message_that_has_no_room_for_a_trace_goes_without_it() {
    let house = house().await;
    let narrow = MemoryConfig::default().with_record_bytes_max(16 * 1_024);
    let narrow = MemoryBroker::with_config(narrow).unwrap();
    let bytes_max = narrow.capabilities().limits.message_bytes_max;
    let outbox = Outbox::new(house.store.clone()).with_rules_of(&narrow);
    let small = Message::new("orders", "T").with_id("small");
    let large = Message::new("orders", "T").with_id("large");
    let room = bytes_max - large.bytes();
    let large = large.with_payload(vec![7; room]);
    let messages = [large.clone(), small];
    async {
        let mut tx = house.store.pool().begin().await.unwrap();
        outbox.enqueue_all(&mut tx, &messages).await.unwrap();
        outbox.enqueue(&mut tx, large).await.unwrap();
        tx.commit().await.unwrap();
    }
    .instrument(info_span!("request"))
    .await;
    relayed(&house, "narrow").await;
    let carried = house.broker.log("orders").into_iter();
    let mut carried: Vec<_> = carried
        .map(|record| {
            (
                record.message.id.to_string(),
                record.message.trace.is_some(),
            )
        })
        .collect();
    carried.sort();
    let expected = [("large", false), ("large", false), ("small", true)];
    assert_eq!(
        carried,
        expected.map(|(id, traced)| (id.to_owned(), traced))
    );
}

#[tokio::test]
async fn a_relay_that_finds_nothing_makes_no_spans() {
    let house = house().await;
    let relay = house.relay(house.broker.clone(), brisk().with_name("idle"));
    eventually(DEADLINE, "the lanes are held", || async {
        let held = "SELECT count(*) FROM relaybox_outbox_lane WHERE owner IS NOT NULL";
        let held: i64 = sqlx::query_scalar(held)
            .fetch_one(house.store.pool())
            .await
            .unwrap();
        held == 16
    })
    .await;
    relay.stop().await.unwrap();
    assert_eq!(Exporter::of_process().pages("idle").len(), 0);
}
