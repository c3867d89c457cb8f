//! What the client's error codes mean: the one place where they are judged.

use rdkafka::error::{KafkaError, RDKafkaErrorCode as Code};

use crate::broker::{FailureScope, Health, PublishOutcome, RejectionScope, Stored};
use crate::error::{Error, ErrorKind};

/// What an error code says about one record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// The record itself is refused.
    Message,
    /// The record, or only another one in its batch: known once it was sent alone.
    Suspect,
    /// Its topic is missing or forbidden.
    Destination,
    /// Not stored, for a reason that passes.
    NotStored,
    /// Perhaps stored.
    Unknown,
}

/// The verdict on a record that never entered the client's queue.
pub(super) fn verdict_on_enqueue(error: &KafkaError) -> Verdict {
    match error {
        KafkaError::Nul(_) | KafkaError::MessageProduction(Code::MessageSizeTooLarge) => {
            Verdict::Message
        }
        KafkaError::MessageProduction(code) => match verdict(*code) {
            Verdict::Destination => Verdict::Destination,
            _ => Verdict::NotStored,
        },
        _ => Verdict::NotStored,
    }
}

/// The verdict on a record that was in the client's queue.
pub(super) fn verdict_on_delivery(error: &KafkaError) -> Verdict {
    match error {
        KafkaError::MessageProduction(code) => verdict(*code),
        _ => Verdict::Unknown,
    }
}

const fn verdict(code: Code) -> Verdict {
    match code {
        // The broker refuses a batch as a whole.
        Code::MessageSizeTooLarge
        | Code::MessageBatchTooLarge
        | Code::InvalidRecord
        | Code::InvalidTimestamp
        | Code::InvalidMessageSize => Verdict::Suspect,
        Code::UnknownTopic
        | Code::UnknownTopicOrPartition
        | Code::UnknownPartition
        | Code::InvalidTopic
        | Code::TopicAuthorizationFailed
        | Code::PolicyViolation => Verdict::Destination,
        // Never sent, or refused with its batch before anything of that was stored. Not what was purged from the queue:
        // it may be there for another try, after one whose answer was lost.
        Code::QueueFull | Code::InvalidDifferentRecord => Verdict::NotStored,
        _ => Verdict::Unknown,
    }
}

/// Whether a partition has no leader at the moment, or the one that was asked does not know that it is.
pub(super) fn awaits_leader(error: &KafkaError) -> bool {
    matches!(
        error.rdkafka_error_code(),
        Some(Code::NotLeaderForPartition | Code::LeaderNotAvailable)
    )
}

/// Why no broker serves a client at all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Trouble {
    Unreachable,
    Authentication,
    Tls,
}

impl Trouble {
    /// In words without any of the client's own, which may hold what a server answered.
    pub(super) const fn detail(self) -> &'static str {
        match self {
            Self::Unreachable => "no broker can be reached",
            Self::Authentication => "authentication failed: the brokers refuse the credentials",
            Self::Tls => "no TLS connection could be made",
        }
    }
}

/// Trouble as it is shown.
pub(super) fn health(trouble: Option<Trouble>) -> Health {
    trouble.map_or(Health::up(), |trouble| Health::down(trouble.detail()))
}

/// What a code says about the connection to the cluster, if it is about that rather than about one request.
pub(super) const fn trouble(code: Code) -> Option<Trouble> {
    match code {
        Code::AllBrokersDown => Some(Trouble::Unreachable),
        Code::Authentication | Code::SaslAuthenticationFailed => Some(Trouble::Authentication),
        Code::SSL => Some(Trouble::Tls),
        _ => None,
    }
}

/// The error of one record or one question, with the client's as its source.
pub(super) fn mapped(operation: &'static str, detail: &str, source: KafkaError) -> Error {
    let kind = match source.rdkafka_error_code() {
        Some(
            Code::UnknownTopic
            | Code::UnknownTopicOrPartition
            | Code::UnknownPartition
            | Code::UnknownGroup,
        ) => ErrorKind::NotFound,
        Some(
            Code::MessageSizeTooLarge
            | Code::MessageBatchTooLarge
            | Code::InvalidMessageSize
            | Code::InvalidRecord
            | Code::InvalidTimestamp
            | Code::InvalidTopic
            | Code::TopicAuthorizationFailed
            | Code::GroupAuthorizationFailed
            | Code::ClusterAuthorizationFailed
            | Code::PolicyViolation,
        ) => ErrorKind::Rejected,
        Some(
            Code::OperationTimedOut
            | Code::RequestTimedOut
            | Code::MessageTimedOut
            | Code::TimedOutQueue,
        ) => ErrorKind::Timeout,
        _ if matches!(source, KafkaError::Nul(_)) => ErrorKind::Rejected,
        _ => ErrorKind::Unavailable,
    };
    Error::new(kind, operation, format!("{detail}: {source}")).with_source(source)
}

/// Wraps an error as the outcome of one message.
pub(super) fn rejected(scope: RejectionScope, error: Error) -> PublishOutcome {
    PublishOutcome::Rejected { scope, error }
}

/// Wraps an error as the outcome of one message.
pub(super) fn failed(scope: FailureScope, stored: Stored, error: Error) -> PublishOutcome {
    PublishOutcome::Failed {
        scope,
        stored,
        error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn production(code: Code) -> KafkaError {
        KafkaError::MessageProduction(code)
    }

    #[test]
    fn a_record_too_large_for_the_client_is_the_messages_fault_and_for_the_broker_a_suspicion() {
        let error = production(Code::MessageSizeTooLarge);
        assert_eq!(verdict_on_enqueue(&error), Verdict::Message);
        assert_eq!(verdict_on_delivery(&error), Verdict::Suspect);
        assert_eq!(
            verdict_on_delivery(&production(Code::InvalidDifferentRecord)),
            Verdict::NotStored
        );
    }

    #[test]
    fn missing_and_forbidden_topics_are_the_destinations_fault() {
        for code in [
            Code::UnknownTopic,
            Code::UnknownTopicOrPartition,
            Code::UnknownPartition,
            Code::InvalidTopic,
            Code::TopicAuthorizationFailed,
        ] {
            assert_eq!(verdict_on_enqueue(&production(code)), Verdict::Destination);
            assert_eq!(verdict_on_delivery(&production(code)), Verdict::Destination);
        }
    }

    #[test]
    fn only_what_never_left_is_certainly_not_stored() {
        assert_eq!(
            verdict_on_enqueue(&production(Code::QueueFull)),
            Verdict::NotStored
        );
        for code in [
            Code::PurgeQueue,
            Code::PurgeInflight,
            Code::NotEnoughReplicas,
            Code::MessageTimedOut,
            Code::RequestTimedOut,
            Code::NotEnoughReplicasAfterAppend,
            Code::BrokerTransportFailure,
            Code::OutOfOrderSequenceNumber,
            Code::Fatal,
            Code::Unknown,
        ] {
            assert_eq!(verdict_on_delivery(&production(code)), Verdict::Unknown);
        }
    }

    #[test]
    fn a_change_of_leader_is_waited_for_and_a_missing_topic_is_not() {
        let fetched = KafkaError::MetadataFetch;
        assert!(awaits_leader(&fetched(Code::NotLeaderForPartition)));
        assert!(awaits_leader(&fetched(Code::LeaderNotAvailable)));
        assert!(!awaits_leader(&fetched(Code::UnknownTopicOrPartition)));
        assert!(!awaits_leader(&fetched(Code::AllBrokersDown)));
    }

    #[test]
    fn an_unreachable_broker_is_transient() {
        let error = mapped("publish", "x", production(Code::AllBrokersDown));
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        let error = mapped("publish", "x", production(Code::OperationTimedOut));
        assert_eq!(error.kind(), ErrorKind::Timeout);
    }
}
