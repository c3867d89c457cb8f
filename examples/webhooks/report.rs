//! The end of the story: counts, a look at every dead letter, and a verdict.

use std::collections::HashSet;

use super::expected_reason;
use super::story::{Tally, out_of_order};
use super::world::{Anyhow, World};

/// Prints what happened; whether all went well.
pub async fn print(world: &World) -> Anyhow<bool> {
    let mut complaints = wrong_bytes(world).await?;
    complaints.extend(wrong_dead_letters(world).await?);
    let tally = tally(world).await?;
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
async fn wrong_dead_letters(world: &World) -> Anyhow<Vec<String>> {
    let mut wrong = Vec::new();
    for letter in world.read(&world.dead_letters()).await? {
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
                origin.is_some_and(|o| {
                    o.topic == world.topic && o.partition.is_some() && o.offset.is_some()
                }),
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
    Ok(wrong)
}

async fn tally(world: &World) -> Anyhow<Tally> {
    let attempts: Vec<(String, i64)> =
        sqlx::query_as(world.sql("SELECT key, number FROM {schema}.attempt ORDER BY n"))
            .fetch_all(&world.notebook)
            .await?;
    let effects = world.count("SELECT count(*) FROM {schema}.effect").await?;
    let affected = world
        .count("SELECT count(DISTINCT message_id) FROM {schema}.effect")
        .await?;
    let mut delivered = world.depth(&world.topic).await?;
    for rung in world.rungs() {
        delivered += world.depth(&rung).await?;
    }
    Ok(Tally {
        committed: world.count("SELECT count(*) FROM {schema}.fact").await?,
        published: distinct(world, std::slice::from_ref(&world.topic)).await?,
        delivered,
        // Every record was delivered; what did not come to the handler was suppressed.
        duplicates: delivered.saturating_sub(attempts.len() as u64),
        effects: affected,
        retried: distinct(world, &world.rungs()).await?,
        dead: distinct(world, &[world.dead_letters()]).await?,
        doubled: effects - affected,
        out_of_order: out_of_order(attempts),
    })
}

/// Distinct message ids on topics.
async fn distinct(world: &World, topics: &[String]) -> Anyhow<u64> {
    let mut ids = HashSet::new();
    for topic in topics {
        for record in world.read(topic).await? {
            ids.insert(record.message.id);
        }
    }
    Ok(ids.len() as u64)
}
