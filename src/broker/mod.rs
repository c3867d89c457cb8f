//! The broker contracts, and one adapter per product.
//!
//! Engines know only [`Publisher`], [`Subscriber`] and [`Delivery`]. An adapter implements them and promises every
//! sentence of their documentation; nothing else passes between the two.

mod health;
mod publisher;
mod subscriber;

pub use health::{Backlog, ConnectionState, Health};
pub use publisher::{
    FailureScope, PublishOutcome, Publisher, PublisherCapabilities, PublisherOrder, RejectionScope,
    Stored,
};
pub use subscriber::{
    DESTINATIONS_MAX, Delivery, Receipt, Retention, Rung, Settlement, Subscriber,
    SubscriberCapabilities, Subscription, SubscriptionRequest, TopologyMode,
};

/// Both halves of an adapter, for programs that choose the product at run time: an `Arc<dyn Broker>` publishes and
/// subscribes like the adapter in it.
pub trait Broker: Publisher + Subscriber {}

impl<B: Publisher + Subscriber> Broker for B {}

#[cfg(feature = "kafka")]
pub mod kafka;
#[cfg(feature = "memory")]
pub mod memory;
#[cfg(feature = "nats")]
pub mod nats;
#[cfg(feature = "rabbitmq")]
pub mod rabbitmq;
