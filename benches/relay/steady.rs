//! From commit to the broker's confirm at a steady 1,000 messages a second, with the relay's default settings.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rdkafka::producer::FutureRecord;
use relaybox::broker::Publisher;
use relaybox::broker::kafka::{Kafka as Broker, KafkaConfig};
use relaybox::relay::Relay;
use relaybox::store::postgres::PostgresStore;
use relaybox_testcontainers::Kafka;
use tokio::time::{MissedTickBehavior, interval};

use super::Size;
use super::backlog::{Backlog, PAYLOAD_BYTES, TOPIC};
use super::checked::Checked;
use super::drain::{Noop, when_done};
use super::kafka::producer;
use super::report::{Report, quantile};
use super::writers::{Load, Times, Watched, write};

const MESSAGES_A_SECOND: u32 = 1_000;

pub async fn measure(report: &mut Report, backlog: &Backlog, kafka: &Kafka, size: Size) {
    let load = Load {
        messages_a_second: MESSAGES_A_SECOND,
        messages_a_transaction: 1,
        lasts: size.steady,
    };
    let to_noop = relay_once(backlog, Noop::default(), TOPIC, load).await;
    line(report, "commit to confirm, no-op publisher", &to_noop);
    let topic = kafka.create_topic("bench", 3).await.unwrap();
    let config = KafkaConfig::new(kafka.brokers());
    let broker = Arc::new(Broker::connect(config).await.unwrap());
    let to_kafka = relay_once(backlog, broker.clone(), &topic, load).await;
    broker.close(Duration::from_secs(10)).await.unwrap();
    let stored: i64 = kafka.topic_end_offsets(&topic).await.unwrap().iter().sum();
    assert_eq!(stored, i64::from(load.messages()), "nothing twice");
    line(report, "commit to confirm, Kafka", &to_kafka);
    let alone = client_once(kafka, load).await;
    line(report, "send to confirm, Kafka's client alone", &alone);
    let alone = quantile(&alone, 0.99);
    report.line(format!(
        "  the goal for Kafka's p99: {:?} with a wake-up, {:?} at an idle poll of 200 ms",
        Duration::from_millis(10) + alone.mul_f64(1.5),
        Duration::from_millis(200) + alone.mul_f64(1.5),
    ));
}

/// Without the beginning, when connections are made.
fn steady(mut delays: Vec<Duration>) -> Vec<Duration> {
    delays.split_off(delays.len() / 6)
}

fn line(report: &mut Report, what: &str, delays: &[Duration]) {
    report.line(format!(
        "{what}, {MESSAGES_A_SECOND}/s, {} messages: p50 {:?}, p99 {:?}, longest {:?}",
        delays.len(),
        quantile(delays, 0.5),
        quantile(delays, 0.99),
        quantile(delays, 1.0),
    ));
}

async fn relay_once(
    backlog: &Backlog,
    publisher: impl Publisher,
    destination: &str,
    load: Load,
) -> Vec<Duration> {
    let url = backlog.migrated().await;
    let store = PostgresStore::connect(&url).await.unwrap();
    let checked = Arc::new(Checked::new(load.messages()));
    let times = Times::new(load.messages());
    let watched = Watched {
        inner: publisher,
        checked: checked.clone(),
        times: times.clone(),
    };
    let relay = Relay::new(store, watched).run_until(when_done(&checked));
    let (relayed, ()) = tokio::join!(relay, write(&url, destination, load, &times));
    relayed.unwrap();
    assert!(checked.is_complete());
    steady(times.delays())
}

/// The same records at the same pace.
async fn client_once(kafka: &Kafka, load: Load) -> Vec<Duration> {
    let topic = kafka.create_topic("bench", 3).await.unwrap();
    let producer = producer(kafka);
    let payload = vec![0xab; PAYLOAD_BYTES];
    let mut ticks = interval(Duration::from_secs(1) / load.messages_a_second);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
    let mut waiting = tokio::task::JoinSet::new();
    for number in 0..load.messages() {
        ticks.tick().await;
        let key = format!("key-{}", number % super::backlog::KEYS);
        let record = FutureRecord::to(&topic).key(&key).payload(&payload);
        let sent = Instant::now();
        let delivery = producer
            .send_result(record)
            .map_err(|(error, _)| error)
            .unwrap();
        waiting.spawn(async move {
            delivery.await.unwrap().unwrap();
            sent.elapsed()
        });
    }
    steady(waiting.join_all().await)
}
