//! Spans, and how they hang together over the outbox.
//!
//! A message carries the span that it was enqueued in (`Message::trace`), unchanged. The relay publishes many messages
//! of many traces at once, so its span *links* to each. A handler works on one of them for whoever enqueued it, so its
//! span is a *child*: one trace then shows a message's whole life, each rung included. A batch of several links again.

use tracing::{Span, field, info_span};

use crate::envelope::{Incoming, Outgoing};
use crate::message::{Message, TraceContext};

/// Links of a publish span at most: what OpenTelemetry's SDK keeps of them unless it is told otherwise.
const LINKS_MAX: usize = 128;

/// The trace context that an enqueue would give to a message now: of the current `tracing` span, or of OpenTelemetry's own
/// current span. `None` where there is none, and always without feature `opentelemetry`.
///
/// For messages whose rows are written by others ([`Outbox::statement`](crate::Outbox::statement)): set it as
/// [`Message::trace`].
#[must_use]
pub fn current_trace() -> Option<TraceContext> {
    joined::current()
}

/// The span of an enqueue.
pub(crate) fn enqueue_span(messages: &[Message]) -> Span {
    let first = messages.first().map_or("", |message| &message.destination);
    let span = info_span!(
        "enqueue",
        otel.kind = "producer",
        messaging.destination.name = field::Empty,
        messaging.batch.message_count = messages.len(),
    );
    if messages.iter().all(|message| message.destination == first) {
        span.record("messaging.destination.name", first);
    }
    span
}

/// The span of a page that a worker of the relay read.
pub(crate) fn page_span(relay: &str, worker: usize, messages: usize) -> Span {
    info_span!(parent: None, "relay", relay, worker, messaging.batch.message_count = messages)
}

/// The spans of a publish: one for every 128 messages, so that no link is dropped.
pub(crate) struct PublishSpans {
    spans: Vec<Span>,
}

impl PublishSpans {
    pub(crate) fn of(scope: &str, messages: &[Outgoing]) -> Self {
        let spans = messages.chunks(LINKS_MAX).map_while(|part| {
            let span = info_span!(
                "publish",
                otel.kind = "producer",
                otel.status_code = field::Empty,
                messaging.destination.name = scope,
                messaging.batch.message_count = part.len(),
                confirmed = field::Empty,
                traceparent = field::Empty,
            );
            let traces = part.iter().map(|sent| sent.message.trace.as_ref());
            link(&span, traces)
        });
        Self {
            spans: spans.collect(),
        }
    }

    /// The first of them, to work in.
    pub(crate) fn span(&self) -> Span {
        self.spans.first().cloned().unwrap_or_else(Span::none)
    }

    /// Tells how it ended: of each message, in their order, whether it was confirmed.
    pub(crate) fn end(self, confirmed: impl Iterator<Item = bool>) {
        if self.spans.is_empty() {
            return;
        }
        let confirmed: Vec<bool> = confirmed.collect();
        for (span, part) in self.spans.iter().zip(confirmed.chunks(LINKS_MAX)) {
            let count = part.iter().filter(|confirmed| **confirmed).count();
            span.record("confirmed", count);
            if count < part.len() {
                span.record("otel.status_code", "ERROR");
            }
        }
    }
}

/// The span of a delivery, from its start to its settlement: a child of the span that the message was enqueued in.
pub(crate) fn handle_span(consumer: &str, source: &str, incoming: &Incoming) -> Span {
    let span = info_span!(
        parent: None,
        "handle",
        otel.kind = "consumer",
        otel.status_code = field::Empty,
        messaging.consumer.group.name = consumer,
        messaging.destination.name = source,
        messaging.message.id = incoming.message.id.as_str(),
        attempt = incoming.story.retry_count.saturating_add(1),
        outcome = field::Empty,
        traceparent = field::Empty,
    );
    if let (Some(trace), false) = (&incoming.message.trace, span.is_disabled()) {
        span.record("traceparent", trace.parent.as_str());
        joined::follow(&span, trace);
    }
    span
}

/// The span of several deliveries in one transaction, linked to the span that each message was enqueued in.
pub(crate) fn handle_batch_span<'a>(
    consumer: &str,
    traces: impl ExactSizeIterator<Item = Option<&'a TraceContext>> + Clone,
) -> Span {
    let span = info_span!(
        parent: None,
        "handle batch",
        otel.kind = "consumer",
        otel.status_code = field::Empty,
        messaging.consumer.group.name = consumer,
        messaging.batch.message_count = traces.len(),
        outcome = field::Empty,
        traceparent = field::Empty,
    );
    link(&span, traces).unwrap_or_else(Span::none)
}

/// Tells how a delivery, or several, ended.
pub(crate) fn handled(span: &Span, outcome: &'static str, failed: bool) {
    span.record("outcome", outcome);
    if failed {
        span.record("otel.status_code", "ERROR");
    }
}

/// Links a span to all these; names the trace where they share it. `None` where nobody looks at the span.
fn link<'a>(
    span: &Span,
    mut traces: impl Iterator<Item = Option<&'a TraceContext>> + Clone,
) -> Option<Span> {
    if span.is_disabled() {
        return None;
    }
    joined::link(span, traces.clone().flatten());
    if let Some(Some(first)) = traces.next()
        && traces.all(|trace| trace == Some(first))
    {
        span.record("traceparent", first.parent.as_str());
    }
    Some(span.clone())
}

/// Without OpenTelemetry nothing joins spans but their field `traceparent`.
#[cfg(not(feature = "opentelemetry"))]
mod joined {
    use super::{Span, TraceContext};

    pub(super) const fn current() -> Option<TraceContext> {
        None
    }

    pub(super) fn link<'a>(_: &Span, _: impl Iterator<Item = &'a TraceContext>) {}

    pub(super) const fn follow(_: &Span, _: &TraceContext) {}
}

#[cfg(feature = "opentelemetry")]
mod joined {
    use opentelemetry::Context;
    use opentelemetry::trace::{
        SpanContext, SpanId, TraceContextExt, TraceFlags, TraceId, TraceState,
    };
    use tracing_opentelemetry::OpenTelemetrySpanExt;

    use super::{Span, TraceContext};

    /// Longest `tracestate` that a message may carry.
    const STATE_BYTES_MAX: usize = 512;

    pub(super) fn current() -> Option<TraceContext> {
        written(Span::current().context().span().span_context())
            .or_else(|| written(Context::current().span().span_context()))
    }

    pub(super) fn link<'a>(span: &Span, traces: impl Iterator<Item = &'a TraceContext>) {
        // Messages of one transaction share their span: it is linked once.
        let mut last = None;
        for context in traces.filter_map(read) {
            let same = Some((context.trace_id(), context.span_id()));
            if last != same {
                last = same;
                span.add_link(context);
            }
        }
    }

    pub(super) fn follow(span: &Span, trace: &TraceContext) {
        if let Some(context) = read(trace) {
            // It fails where no OpenTelemetry layer listens: then there is no trace to continue.
            let _ = span.set_parent(Context::new().with_remote_span_context(context));
        }
    }

    /// A context as W3C headers; `None` for one that is no span's.
    fn written(context: &SpanContext) -> Option<TraceContext> {
        let flags = context.trace_flags().to_u8();
        let parent = format!(
            "00-{}-{}-{flags:02x}",
            context.trace_id(),
            context.span_id()
        );
        let state = context.trace_state().header();
        context.is_valid().then_some(TraceContext {
            parent,
            // A list that is cut would be another one: better none.
            state: Some(state).filter(|state| !state.is_empty() && state.len() <= STATE_BYTES_MAX),
        })
    }

    /// Reads W3C headers; `None` for what does not keep to the standard, which any sender may send.
    fn read(trace: &TraceContext) -> Option<SpanContext> {
        let fields: Vec<&str> = trace.parent.split('-').collect();
        let [version, trace_id, span_id, flags, rest @ ..] = &fields[..] else {
            return None;
        };
        // Later versions may add fields.
        let as_today = *version != "ff" && (*version != "00" || rest.is_empty());
        let hex = |b: u8| matches!(b, b'0'..=b'9' | b'a'..=b'f');
        let well_formed = [(version, 2), (trace_id, 32), (span_id, 16), (flags, 2)]
            .into_iter()
            .all(|(field, bytes)| field.len() == bytes && field.bytes().all(hex));
        if !(as_today && well_formed) {
            return None;
        }
        let state = trace.state.as_deref().map(str::parse::<TraceState>);
        let context = SpanContext::new(
            TraceId::from_hex(trace_id).ok()?,
            SpanId::from_hex(span_id).ok()?,
            TraceFlags::new(u8::from_str_radix(flags, 16).ok()?),
            true,
            state.and_then(Result::ok).unwrap_or_default(),
        );
        context.is_valid().then_some(context)
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        const PARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

        fn trace(parent: &str, state: Option<&str>) -> TraceContext {
            TraceContext {
                parent: parent.into(),
                state: state.map(str::to_owned),
            }
        }

        #[test]
        fn a_context_reads_back_as_it_was_written() {
            for state in [None, Some("a=1,b=2")] {
                let told = trace(PARENT, state);
                let context = read(&told);
                assert!(context.as_ref().is_some_and(SpanContext::is_remote));
                assert_eq!(context.as_ref().and_then(written), Some(told));
            }
        }

        #[test]
        fn what_keeps_to_no_standard_is_no_context() {
            let zeros = format!("00-{}-b7ad6b7169203331-01", "0".repeat(32));
            let bad = [
                "",
                "00",
                "00-aa-bb-01",
                "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
                "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
                "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more",
                "00-+af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
                "00-\u{e9}af7651916cd43dd8448eb211c80319-b7ad6b7169203331-01",
                &zeros,
            ];
            for parent in bad {
                assert_eq!(read(&trace(parent, None)), None, "{parent}");
            }
            let later = "01-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more";
            assert!(read(&trace(later, None)).is_some());
            let broken = read(&trace(PARENT, Some("no list \u{1}")));
            assert!(broken.is_some(), "a broken state costs no trace");
        }

        #[test]
        fn a_state_too_long_for_a_message_is_left_out() {
            let long = format!("a={}", "x".repeat(STATE_BYTES_MAX));
            let context = read(&trace(PARENT, Some(&long)));
            let told = context.as_ref().and_then(written);
            assert_eq!(told, Some(trace(PARENT, None)));
        }
    }
}
