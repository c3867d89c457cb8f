//! For how long a topic may deliver a message again.

use std::sync::Arc;
use std::time::Duration;

use rdkafka::admin::{AdminOptions, ConfigResource};
use rdkafka::error::{KafkaError, RDKafkaErrorCode as Code};
use tokio::time::timeout;

use super::control::Control;
use super::error::mapped;
use crate::broker::Retention;
use crate::error::{Error, ErrorKind, Result};

const OPERATION: &str = "retention";
/// How often brokers look for what is too old unless they are set otherwise, which a topic does not tell.
const CHECK_INTERVAL: Duration = Duration::from_secs(300);

/// By the topic's settings, the cluster's defaults among them.
pub(super) async fn of_topic(control: &Arc<Control>, topic: &str) -> Result<Retention> {
    let names = [topic.to_owned()];
    // Asked first: a topic that is not there has settings of its own in no answer.
    control.all_exist(OPERATION, &names).await?;
    let admin = control.admin()?;
    let options = AdminOptions::new().request_timeout(Some(control.deadline));
    let asked = admin.describe_topics(&names, &options);
    let answer = match timeout(control.deadline, asked).await {
        Ok(answer) => answer.map_err(|source| mapped(OPERATION, topic, source))?,
        Err(_elapsed) => {
            let detail = format!("no answer within {:?}", control.deadline);
            return Err(Error::new(ErrorKind::Unavailable, OPERATION, detail));
        }
    };
    match answer.into_iter().next() {
        Some(Ok(settings)) => Ok(of_settings(|name| setting(&settings, name))),
        Some(Err(Code::TopicAuthorizationFailed | Code::ClusterAuthorizationFailed)) | None => {
            Ok(Retention::Unknown)
        }
        Some(Err(code)) => Err(mapped(OPERATION, topic, KafkaError::AdminOp(code))),
    }
}

fn setting<'a>(settings: &'a ConfigResource, name: &str) -> Option<&'a str> {
    settings.get(name)?.value.as_deref()
}

/// `retention.bytes` only shortens what `retention.ms` allows.
fn of_settings<'a>(setting: impl Fn(&str) -> Option<&'a str>) -> Retention {
    let Some(policy) = setting("cleanup.policy") else {
        return Retention::Unknown;
    };
    if !policy.split(',').any(|word| word.trim() == "delete") {
        return Retention::Unbounded;
    }
    let millis = |name| setting(name).and_then(|text| text.parse::<i64>().ok());
    let (Some(kept), Some(segment)) = (millis("retention.ms"), millis("segment.ms")) else {
        return Retention::Unknown;
    };
    let Ok(kept) = u64::try_from(kept) else {
        return Retention::Unbounded;
    };
    let whole = kept.saturating_add(u64::try_from(segment).unwrap_or(0));
    Retention::Bounded(Duration::from_millis(whole).saturating_add(CHECK_INTERVAL))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR_MILLIS: &str = "3600000";

    fn of(policy: &str, kept: &str) -> Retention {
        of_settings(|name| match name {
            "cleanup.policy" => Some(policy),
            "retention.ms" => Some(kept),
            "segment.ms" => Some(HOUR_MILLIS),
            _ => None,
        })
    }

    #[test]
    fn a_message_goes_with_its_segment() {
        let bound = Duration::from_secs(60 + 3_600).saturating_add(CHECK_INTERVAL);
        for policy in ["delete", "compact,delete", "delete, compact"] {
            assert_eq!(of(policy, "60000"), Retention::Bounded(bound), "{policy}");
        }
        assert_eq!(of_settings(|_| None), Retention::Unknown);
        assert_eq!(of("delete", "soon"), Retention::Unknown);
    }

    #[test]
    fn what_no_age_ends_is_unbounded() {
        assert_eq!(of("delete", "-1"), Retention::Unbounded);
        assert_eq!(of("compact", HOUR_MILLIS), Retention::Unbounded);
        assert_eq!(of("", HOUR_MILLIS), Retention::Unbounded);
        // The largest bound is one, and no overflow.
        let largest = of("delete", &i64::MAX.to_string());
        assert!(matches!(largest, Retention::Bounded(_)), "{largest:?}");
    }
}
