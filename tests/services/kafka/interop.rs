//! Java's own console programs beside this crate: what one writes the other reads, and keys meet at one partition.

use std::collections::BTreeMap;

use relaybox::broker::Subscriber;
use relaybox::envelope::Outgoing;

use super::*;

const CONSUMER: &str = "org.apache.kafka.tools.consumer.ConsoleConsumer";
const PRODUCER: &str = "org.apache.kafka.tools.ConsoleProducer";

/// Lines of properties as the console programs take them.
fn options<'a>(flag: &'static str, settings: &[&'a str]) -> Vec<&'a str> {
    settings.iter().flat_map(|s| [flag, *s]).collect()
}

async fn read_by_java(topic: &str, count: usize, settings: &[&str]) -> Vec<String> {
    let count = count.to_string();
    let mut arguments = vec![
        "--topic",
        topic,
        "--from-beginning",
        "--max-messages",
        &count,
    ];
    arguments.extend(options("--formatter-property", settings));
    let output = shared_kafka()
        .await
        .run_tool(CONSUMER, &arguments, b"")
        .await
        .unwrap();
    let output = String::from_utf8(output).unwrap();
    output.lines().map(str::to_owned).collect()
}

async fn write_by_java(topic: &str, settings: &[&str], lines: &str) {
    let mut arguments = vec!["--topic", topic];
    arguments.extend(options("--reader-property", settings));
    shared_kafka()
        .await
        .run_tool(PRODUCER, &arguments, lines.as_bytes())
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn java_reads_what_is_sent_here() {
    let kafka = connect().await;
    let topic = topic("to_java", 1).await;
    let full = Message::new(&topic, "OrderPlaced")
        .with_id("m-1")
        .with_key("cart-7")
        .with_payload(r#"{"total":1}"#)
        .with_content_type("application/json")
        .with_header("a", "1")
        .with_header("a", "2");
    let tombstone = Message::new(&topic, "OrderDeleted")
        .with_id("m-2")
        .with_key("cart-8");
    publish_all(&kafka, &[full.into(), tombstone.into()]).await;
    let lines = read_by_java(
        &topic,
        2,
        &[
            "print.key=true",
            "print.headers=true",
            "print.partition=true",
            "key.separator=|",
            "headers.separator=;",
            "null.literal=<null>",
        ],
    )
    .await;
    let fields: Vec<Vec<&str>> = lines.iter().map(|line| line.split('|').collect()).collect();
    assert_eq!(fields.len(), 2, "{lines:?}");
    for (fields, (key, payload)) in fields
        .iter()
        .zip([("cart-7", r#"{"total":1}"#), ("cart-8", "<null>")])
    {
        let [partition, _, found_key, found_payload] = fields[..] else {
            panic!("{lines:?}");
        };
        assert_eq!(
            (partition, found_key, found_payload),
            ("Partition:0", key, payload)
        );
    }
    let headers: Vec<&str> = fields[0][1].split(';').collect();
    for expected in [
        "x-message-id:m-1",
        "x-event-type:OrderPlaced",
        "content-type:application/json",
    ] {
        assert!(headers.contains(&expected), "{headers:?}");
    }
    assert_eq!(
        headers[headers.len() - 2..],
        ["a:1", "a:2"],
        "in their order"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_java_sends_is_read_here() {
    let topic = topic("from_java", 1).await;
    let settings = [
        "parse.key=true",
        "parse.headers=true",
        "headers.delimiter=|",
        "key.separator=|",
        "null.marker=<null>",
    ];
    let lines = "x-message-id:j-1,a:1,a:2|cart-7|plain\n\
        a:<null>|cart-8|<null>\n\
        a:é||schön\n";
    write_by_java(&topic, &settings, lines).await;
    let kafka = connect().await;
    let mut subscription = kafka.subscribe(request("from_java", &topic)).await.unwrap();
    let received = receive(&mut subscription, 3).await;
    let of = |at: usize| &received[at].incoming.message;
    let headers = |at: usize| -> Vec<(String, Option<String>)> {
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
        of(at)
            .headers
            .iter()
            .map(|h| (h.name.to_string(), h.value.as_deref().map(text)))
            .collect()
    };
    let header = |value: &str| ("a".to_owned(), Some(value.to_owned()));
    assert_eq!(of(0).id.as_str(), "j-1");
    assert_eq!(of(0).key.as_deref(), Some(&b"cart-7"[..]));
    assert_eq!(of(0).payload.as_deref(), Some(&b"plain"[..]));
    assert_eq!(headers(0), [header("1"), header("2")]);
    assert!(received[1].incoming.id_missing);
    assert_eq!(of(1).id.as_str(), format!("{topic}/0/1"));
    assert_eq!(
        (of(1).key.as_deref(), of(1).payload.as_deref()),
        (Some(&b"cart-8"[..]), None)
    );
    assert_eq!(of(2).key.as_deref(), Some(&b""[..]));
    assert_eq!(text(&received[2]), "schön");
    assert_eq!(headers(2), [header("é")]);
    drop(received);
    subscription.close(10 * SECOND).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn java_and_this_crate_send_a_key_to_the_same_partition() {
    let kafka = connect().await;
    let (ours, javas) = (topic("ours", 15).await, topic("javas", 15).await);
    let keys: Vec<String> = (0..150)
        .map(|n| format!("cart-{}", "x".repeat(n % 9) + &n.to_string()))
        .chain(["é", "🚀", ""].map(str::to_owned))
        .collect();
    let batch: Vec<Outgoing> = keys.iter().map(|key| message(&ours, key, "x")).collect();
    publish_all(&kafka, &batch).await;
    let lines: String = keys.iter().map(|key| format!("{key}|x\n")).collect();
    write_by_java(&javas, &["parse.key=true", "key.separator=|"], &lines).await;
    let mut places = Vec::new();
    for topic in [ours, javas] {
        let log = log(shared_kafka().await.brokers(), topic).await;
        let places_of: BTreeMap<String, i32> = log
            .into_iter()
            .flat_map(|(partition, records)| records.into_iter().map(move |r| (r.0, partition)))
            .collect();
        assert_eq!(places_of.len(), keys.len());
        places.push(places_of);
    }
    assert_eq!(places[0], places[1]);
}
