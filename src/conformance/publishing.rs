//! Cases about `Publisher`.

use std::time::Duration;

use crate::broker::{PublishOutcome, RejectionScope, SubscriptionRequest};
use crate::envelope::Outgoing;
use crate::story::{Origin, Reason, Story};
use crate::{ErrorKind, Message, headers};

use super::{
    DEADLINE, Fixture, acknowledge, close, fresh, numbered, numbers, publish, publish_all,
    receive_count, subscribe, within,
};

/// Publisher rule 4: null, empty, repeated and non-UTF-8 stay what they are, and so does the story.
pub(super) async fn every_byte_arrives(fixture: &dyn Fixture) {
    let topic = fixture.topic(1).await;
    let mut full = Message::new(&topic, "OrderPlaced")
        .with_key([0, 0xff, b'\n'])
        .with_payload(vec![0xfe, 0, b'\r'])
        .with_content_type("application/octet-stream")
        .with_version(i64::MIN)
        .with_trace(
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            Some("vendor=1".into()),
        )
        .with_header("repeated", "1")
        .with_header("between", " leading and trailing ")
        .with_header("repeated", vec![0xff, 0, 0xfe])
        .with_header("repeated", "")
        .with_header("Case", "line\r\nbreak")
        .with_header("n".repeat(255), "long name");
    full.headers.push_optional("null", None);
    let plain = || Message::new(&topic, "T");
    let at = full.occurred_at;
    let origin = Origin {
        topic: "elsewhere".into(),
        partition: Some("7".into()),
        offset: Some("99".into()),
    };
    let story = Story::default().failed("billing", &origin, "handler", "no stock €", at);
    let sent: Vec<Outgoing> = vec![
        full.into(),
        plain().into(),
        plain().with_key("").with_payload("").into(),
        plain().with_key("k").into(),
        plain().with_payload("p").into(),
        plain().with_id("not a uuid: ключ").into(),
        Outgoing {
            message: plain().with_header("user", "kept"),
            story: story.clone().due(at),
        },
        Outgoing {
            message: plain().with_payload("dead"),
            story: story.dead(Reason::new(Reason::PERMANENT)),
        },
    ];
    publish_all(&*fixture.publisher(), &sent).await;

    let request = SubscriptionRequest::new(fresh("consumer"), vec![topic.clone()]);
    let mut subscription = subscribe(fixture, request).await;
    for delivery in receive_count(&mut *subscription, sent.len()).await {
        let incoming = &delivery.incoming;
        let outgoing = sent
            .iter()
            .find(|outgoing| outgoing.message.id == incoming.message.id)
            .expect("a message that was sent");
        assert_eq!(incoming.message, outgoing.message);
        assert_eq!(incoming.message.headers, outgoing.message.headers);
        assert_eq!(incoming.message.payload, outgoing.message.payload);
        assert_eq!(incoming.story, outgoing.story);
        assert!(!incoming.id_missing);
        assert_eq!(delivery.source, topic);
        acknowledge(delivery).await;
    }
    close(subscription).await;
}

/// Publisher rules 1 and 2.
pub(super) async fn a_batch_has_one_outcome_per_message(fixture: &dyn Fixture) {
    let publisher = fixture.publisher();
    assert!(publish(&*publisher, &[]).await.is_empty());
    let topics = [fixture.topic(2).await, fixture.topic(1).await];
    let batch: Vec<_> = (0..100)
        .map(|n| numbered(&topics[n % 2], &format!("key-{}", n % 7), n))
        .collect();
    publish_all(&*publisher, &batch).await;

    let request = SubscriptionRequest::new(fresh("consumer"), topics.to_vec());
    let mut subscription = subscribe(fixture, request).await;
    let mut all = numbers(&receive_count(&mut *subscription, 100).await);
    all.sort_unstable();
    assert_eq!(all, (0..100).collect::<Vec<_>>());
}

/// Publisher rule 3, and `Rejected` with scope `Destination`.
pub(super) async fn an_unknown_destination_rejects_only_itself(fixture: &dyn Fixture) {
    let topic = fixture.topic(1).await;
    let missing = fresh("missing");
    let batch = [
        numbered(&topic, "a", 0),
        numbered(&missing, "a", 1),
        numbered(&topic, "a", 2),
    ];
    let outcomes = publish(&*fixture.publisher(), &batch).await;
    assert!(outcomes[0].is_confirmed(), "{outcomes:?}");
    assert!(
        matches!(
            &outcomes[1],
            PublishOutcome::Rejected {
                scope: RejectionScope::Destination,
                error
            } if !error.is_transient()
        ),
        "{outcomes:?}"
    );
    assert!(outcomes[2].is_confirmed(), "{outcomes:?}");
}

/// Publisher rule 3, and `Rejected` with scope `Message`.
pub(super) async fn an_oversized_message_rejects_only_itself(fixture: &dyn Fixture) {
    let topic = fixture.topic(1).await;
    let publisher = fixture.publisher();
    let bytes = publisher.capabilities().limits.message_bytes_max + 4 * 1_024 * 1_024;
    let large = Message::new(&topic, "Large")
        .with_key("large")
        .with_payload(vec![b'x'; bytes]);
    let batch = [
        numbered(&topic, "a", 0),
        large.into(),
        numbered(&topic, "b", 2),
    ];
    let outcomes = publish(&*publisher, &batch).await;
    assert!(outcomes[0].is_confirmed(), "{outcomes:?}");
    assert!(
        matches!(
            &outcomes[1],
            PublishOutcome::Rejected {
                scope: RejectionScope::Message,
                ..
            }
        ),
        "{outcomes:?}"
    );
    assert!(outcomes[2].is_confirmed(), "{outcomes:?}");
}

/// Publisher rule 7: whatever becomes of odd ones, each has an outcome and the good ones go through.
pub(super) async fn no_message_makes_it_panic(fixture: &dyn Fixture) {
    let topic = fixture.topic(1).await;
    let plain = || Message::new(&topic, "T");
    let odd = [
        Message::new("", "T"),
        Message::new("no\0name", "T"),
        Message::new("spaces and / slashes\r\n", "T"),
        Message::new("x".repeat(10_000), "T"),
        plain().with_id(""),
        plain().with_id("\0"),
        plain().with_header("", "no name"),
        plain().with_header("no\0name", "v"),
        plain().with_header("line\r\nbreak", "v"),
        plain().with_header(headers::MESSAGE_ID, "not mine"),
        plain().with_header("名", "v"),
    ];
    let publisher = fixture.publisher();
    for message in odd {
        let destination_is_good = message.destination == topic;
        let batch = [
            numbered(&topic, "before", 0),
            message.into(),
            numbered(&topic, "after", 1),
        ];
        let outcomes = publish(&*publisher, &batch).await;
        assert!(outcomes[0].is_confirmed(), "{batch:?}: {outcomes:?}");
        assert!(
            destination_is_good || !outcomes[1].is_confirmed(),
            "{batch:?}: {outcomes:?}"
        );
        assert!(outcomes[2].is_confirmed(), "{batch:?}: {outcomes:?}");
    }
}

pub(super) async fn check_names_every_missing_destination(fixture: &dyn Fixture) {
    let publisher = fixture.publisher();
    let topic = fixture.topic(1).await;
    let present = [topic.clone()];
    within("a check", publisher.check(&present)).await.unwrap();
    let missing = [fresh("missing"), fresh("missing")];
    let asked = [missing[0].clone(), topic.clone(), missing[1].clone()];
    let error = within("a check", publisher.check(&asked))
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    let text = error.to_string();
    assert!(missing.iter().all(|name| text.contains(name)), "{text}");
    assert!(!text.contains(&topic), "{text}");
}

pub(super) async fn closing_twice_is_harmless(fixture: &dyn Fixture) {
    let topic = fixture.topic(1).await;
    let publisher = fixture.publisher();
    publish_all(&*publisher, &[numbered(&topic, "a", 0)]).await;
    for deadline in [DEADLINE, Duration::from_secs(1)] {
        within("a close", publisher.close(deadline)).await.unwrap();
    }
}

/// A resend is the same message: whether the broker stores it once or twice, it is confirmed.
pub(super) async fn a_message_sent_again_is_confirmed_again(fixture: &dyn Fixture) {
    let topic = fixture.topic(1).await;
    let publisher = fixture.publisher();
    let sent = numbered(&topic, "a", 0);
    for _ in 0..3 {
        publish_all(&*publisher, std::slice::from_ref(&sent)).await;
    }
    publish_all(&*publisher, &[sent.clone(), sent]).await;
}

/// Senders repeat ids. Of what fails nothing may go, whatever its id.
pub(super) async fn copies_of_two_messages_of_one_id_both_arrive(fixture: &dyn Fixture) {
    let topic = fixture.topic(1).await;
    let (first, mut second) = (numbered(&topic, "a", 0), numbered(&topic, "a", 1));
    second.message.id = first.message.id.clone();
    let origin = Origin {
        topic: "elsewhere".into(),
        partition: None,
        offset: None,
    };
    let at = first.message.occurred_at;
    let story = Story::default().failed("billing", &origin, "handler", "no stock", at);
    let copies = [first.message, second.message].map(|message| Outgoing {
        message,
        story: story.clone(),
    });
    for copy in &copies {
        publish_all(&*fixture.publisher(), std::slice::from_ref(copy)).await;
    }
    let request = SubscriptionRequest::new(fresh("consumer"), vec![topic]);
    let mut subscription = subscribe(fixture, request).await;
    let deliveries = receive_count(&mut *subscription, 2).await;
    assert_eq!(numbers(&deliveries), [0, 1]);
}

/// A retry, dead letter or redrive has the id of its original; a broker that drops repeated ids must not drop these.
pub(super) async fn a_copy_with_another_story_is_a_message_of_its_own(fixture: &dyn Fixture) {
    let topic = fixture.topic(1).await;
    let original = numbered(&topic, "a", 0);
    let origin = Origin {
        topic: "elsewhere".into(),
        partition: None,
        offset: None,
    };
    let at = original.message.occurred_at;
    let failed = |story: &Story| story.failed("billing", &origin, "handler", "no stock", at);
    let once = failed(&Story::default());
    let twice = failed(&once);
    let redriven = Story {
        redrive_count: 1,
        ..Story::default()
    };
    let stories = [
        Story::default(),
        once,
        twice.clone(),
        redriven,
        twice.dead(Reason::new("x")),
    ];
    let copies = stories.map(|story| Outgoing {
        message: original.message.clone(),
        story,
    });
    for copy in &copies {
        publish_all(&*fixture.publisher(), std::slice::from_ref(copy)).await;
    }
    let request = SubscriptionRequest::new(fresh("consumer"), vec![topic]);
    let mut subscription = subscribe(fixture, request).await;
    let mut seen = Vec::new();
    for delivery in receive_count(&mut *subscription, copies.len()).await {
        seen.push(delivery.incoming.story.clone());
        acknowledge(delivery).await;
    }
    for Outgoing { story, .. } in &copies {
        assert!(seen.contains(story), "{story:?} is not in {seen:?}");
    }
}

/// Publisher rule 8, as far as it shows without trouble.
pub(super) async fn calls_at_the_same_time_keep_their_own_outcomes(fixture: &dyn Fixture) {
    let topics = [fixture.topic(1).await, fixture.topic(1).await];
    let missing = fresh("missing");
    let publisher = fixture.publisher();
    let calls = (0..12).map(|call| {
        let (publisher, topic, missing) = (&publisher, &topics[call % 2], &missing);
        async move {
            let key = format!("key-{call}");
            let batch: Vec<_> = (0..20)
                .map(|n| numbered(if n == 7 { missing } else { topic }, &key, call * 100 + n))
                .collect();
            let outcomes = publish(&**publisher, &batch).await;
            for (n, outcome) in outcomes.iter().enumerate() {
                assert_eq!(outcome.is_confirmed(), n != 7, "{n}: {outcome:?}");
            }
        }
    });
    futures_util::future::join_all(calls).await;
    let request = SubscriptionRequest::new(fresh("consumer"), topics.to_vec());
    let mut subscription = subscribe(fixture, request).await;
    let mut seen = Vec::new();
    for delivery in receive_count(&mut *subscription, 12 * 19).await {
        seen.push(super::number(&delivery));
        acknowledge(delivery).await;
    }
    for call in 0..12 {
        let of_call: Vec<_> = seen.iter().copied().filter(|n| n / 100 == call).collect();
        let sent: Vec<_> = (0..20)
            .filter(|n| *n != 7)
            .map(|n| call * 100 + n)
            .collect();
        assert_eq!(of_call, sent);
    }
}

/// Cancel safety: what was dropped may or may not be stored; what follows is served as ever.
pub(super) async fn an_abandoned_call_harms_no_later_one(fixture: &dyn Fixture) {
    let topic = fixture.topic(1).await;
    let publisher = fixture.publisher();
    let batch: Vec<_> = (0..50).map(|n| numbered(&topic, "a", n)).collect();
    for patience in [0, 100, 500, 2_000, 10_000] {
        let call = publisher.publish(&batch);
        drop(tokio::time::timeout(Duration::from_micros(patience), call).await);
    }
    publish_all(&*publisher, &[numbered(&topic, "a", 99)]).await;
    let request = SubscriptionRequest::new(fresh("consumer"), vec![topic]);
    let mut subscription = subscribe(fixture, request).await;
    let mut seen = Vec::new();
    while !seen.contains(&99) {
        for delivery in receive_count(&mut *subscription, 1).await {
            seen.push(super::number(&delivery));
            acknowledge(delivery).await;
        }
    }
}
