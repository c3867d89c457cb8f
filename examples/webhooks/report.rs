//! The end of the story: counts, a look at every dead letter, and a verdict.

use std::collections::HashSet;

use super::broker::{Records, read};
use super::expected_reason;
use super::story::{Tally, out_of_order};
use super::world::{Anyhow, World};

/// Prints what happened; whether all went well.
pub async fn print(world: &World) -> Anyhow<bool> {
    // Read once: from a queue an auditor takes away what it reads.
    let letters = read(&*world.broker, &world.dead_letters()).await?;
    let mut complaints = wrong_bytes(world).await?;
    complaints.extend(wrong_dead_letters(world, &letters));
    let tally = tally(world, &letters).await?;
    if tally.doubled > 0 {
        complaints.push(format!("{} effects happened twice", tally.doubled));
    }
    if tally.out_of_order > 0 {
        complaints.push(format!(
            "{} first attempts were out of order",
            tally.out_of_order
        ));
    }
    for complaint in &complaints {
        println!("WRONG: {complaint}");
    }
    println!("{tally}");
    Ok(complaints.is_empty() && tally.is_good())
}

/// Effects whose payload is not, byte for byte, the one that was committed.
async fn wrong_bytes(world: &World) -> Anyhow<Vec<String>> {
    let changed = world
        .count(
            "SELECT count(*) FROM {schema}.effect e LEFT JOIN {schema}.fact f USING (number)
             WHERE f.digest IS DISTINCT FROM e.digest OR f.key IS DISTINCT FROM e.key",
        )
        .await?;
    Ok((changed > 0)
        .then(|| format!("{changed} payloads or keys arrived changed"))
        .into_iter()
        .collect())
}

/// Dead letters that lack a part of their story, or should not be one.
fn wrong_dead_letters(world: &World, letters: &Records) -> Vec<String> {
    let mut wrong = Vec::new();
    for letter in letters.values() {
        let message = &letter.message;
        let story = &letter.story;
        let number = message.version.unwrap_or_default();
        let reason = story.reason.as_ref().map(|reason| reason.as_str());
        let origin = story.origin.as_ref();
        let checks = [
            ("id", !letter.id_missing),
            ("event type", !message.event_type.is_empty()),
            (
                "content type",
                message.content_type.as_deref() == Some("application/json"),
            ),
            ("action", message.headers.get("action").is_some()),
            ("trace", message.trace.is_some()),
            ("payload", message.payload.is_some()),
            (
                "reason",
                reason.is_some() && reason == expected_reason(number),
            ),
            (
                "consumer",
                story.consumer.as_deref() == Some(super::world::CONSUMER),
            ),
            (
                "origin",
                origin.is_some_and(|o| o.topic == world.destination() && o.partition.is_some()),
            ),
            (
                "error",
                story
                    .last_error
                    .as_deref()
                    .is_some_and(|error| error.starts_with("handler: ")),
            ),
            (
                "count",
                story.retry_count == if number % 97 == 13 { 1 } else { 3 },
            ),
            (
                "times",
                story.first_failed_at.is_some() && story.first_failed_at <= story.last_failed_at,
            ),
        ];
        wrong.extend(
            checks
                .iter()
                .filter(|(_, good)| !good)
                .map(|(part, _)| format!("dead letter {number}: {part} is wrong ({story:?})")),
        );
    }
    wrong
}

async fn tally(world: &World, letters: &Records) -> Anyhow<Tally> {
    let attempts: Vec<(String, i64)> =
        sqlx::query_as(world.sql("SELECT key, number FROM {schema}.attempt ORDER BY n"))
            .fetch_all(&world.notebook)
            .await?;
    let effects = world.count("SELECT count(*) FROM {schema}.effect").await?;
    let affected = world
        .count("SELECT count(DISTINCT message_id) FROM {schema}.effect")
        .await?;
    let retried = "SELECT count(DISTINCT number) FROM {schema}.attempt WHERE retries > 0";
    let wire = read(&*world.broker, &world.wire()).await?;
    let published = distinct(&wire);
    // Without key affinity nobody promises that first attempts are in order.
    let ordered = world.broker.key_affinity(&world.topic);
    Ok(Tally {
        committed: world.count("SELECT count(*) FROM {schema}.fact").await?,
        published,
        delivered: attempts.len() as u64,
        duplicates: wire.len() as u64 - published,
        effects: affected,
        retried: world.count(retried).await?,
        dead: distinct(letters),
        doubled: effects - affected,
        out_of_order: if ordered { out_of_order(attempts) } else { 0 },
    })
}

/// Distinct message ids.
fn distinct(records: &Records) -> u64 {
    let ids: HashSet<_> = records.values().map(|record| &record.message.id).collect();
    ids.len() as u64
}
