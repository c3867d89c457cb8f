//! For how long a stream may deliver a message again.

use async_nats::jetstream::stream::{self, RetentionPolicy};

use super::config::NatsConfig;
use super::link::Link;
use super::streams::{stream_by_subject, stream_info};
use super::topology::feed_of;
use crate::broker::Retention;
use crate::error::{Error, ErrorKind, Result};

const OPERATION: &str = "read retention";

/// Of a source by its name, or of the stream that holds a rung's or dead letters' subject.
pub(super) async fn of_source(config: &NatsConfig, link: &Link, source: &str) -> Result<Retention> {
    let feed = feed_of(config, "", source, 0);
    let mut found = stream_info(link, OPERATION, &feed.stream).await?;
    if found.is_none()
        && let Some(stream) = stream_by_subject(link, OPERATION, source).await?
    {
        found = stream_info(link, OPERATION, &stream).await?;
    }
    found.map(|info| of_stream(&info.config)).ok_or_else(|| {
        let detail = format!("no such stream: {source}");
        Error::new(ErrorKind::NotFound, OPERATION, detail)
    })
}

fn of_stream(settings: &stream::Config) -> Retention {
    match settings.retention {
        // What goes when it is acknowledged goes no later for an age beside it.
        RetentionPolicy::WorkQueue | RetentionPolicy::Interest => Retention::UntilSettled,
        RetentionPolicy::Limits if settings.max_age.is_zero() => Retention::Unbounded,
        RetentionPolicy::Limits => Retention::Bounded(settings.max_age),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::streams::unlimited;
    use super::*;

    #[test]
    fn age_bounds_a_stream_of_limits_and_acknowledgement_the_others() {
        let day = Duration::from_secs(86_400);
        let of = |retention, max_age| {
            of_stream(&stream::Config {
                retention,
                max_age,
                ..unlimited()
            })
        };
        let limits = RetentionPolicy::Limits;
        assert_eq!(of(limits, Duration::ZERO), Retention::Unbounded);
        assert_eq!(of(limits, day), Retention::Bounded(day));
        for retention in [RetentionPolicy::WorkQueue, RetentionPolicy::Interest] {
            for max_age in [Duration::ZERO, day] {
                assert_eq!(of(retention, max_age), Retention::UntilSettled);
            }
        }
    }
}
