//! RabbitMQ under the broker contract: ordinary queues, and queues with shards.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::future::BoxFuture;
use relaybox::broker::rabbitmq::{QueueKind, RabbitMq, RabbitMqConfig};
use relaybox::broker::{Publisher, Subscriber};
use relaybox::conformance::{Fixture, Line};
use relaybox_testcontainers::{Proxy, shared_rabbitmq, unique_name};

struct Broker {
    direct: RabbitMq,
    through: RabbitMq,
    line: Arc<Breakable>,
    sharded: Option<String>,
    made: AtomicUsize,
}

struct Breakable(Proxy);

fn config(url: String) -> RabbitMqConfig {
    RabbitMqConfig::new(url)
        .with_heartbeat(Duration::from_secs(2))
        .with_publish_deadline(Duration::from_secs(8))
        .with_answer_deadline(Duration::from_secs(5))
        .with_drain_deadline(Duration::from_secs(1))
}

impl Broker {
    async fn new() -> Self {
        Self::with(None).await
    }

    /// Every topic of this one has shards: a fixture serves one case, and no case needs more than two.
    async fn sharded() -> Self {
        Self::with(Some(unique_name("sharded"))).await
    }

    async fn with(sharded: Option<String>) -> Self {
        let rabbitmq = shared_rabbitmq().await;
        let proxy = Proxy::start(rabbitmq.address()).await.unwrap();
        let connect = |url: String| {
            let config = (0..4).fold(config(url), |config, number| match &sharded {
                Some(prefix) => config.with_shards(format!("{prefix}-{number}"), 4),
                None => config,
            });
            RabbitMq::connect(config)
        };
        Self {
            direct: connect(rabbitmq.url()).await.unwrap(),
            through: connect(rabbitmq.url_by(&proxy.address())).await.unwrap(),
            line: Arc::new(Breakable(proxy)),
            sharded,
            made: AtomicUsize::new(0),
        }
    }
}

impl Fixture for Broker {
    fn topic(&self, _partitions: usize) -> BoxFuture<'_, String> {
        Box::pin(async move {
            let name = match &self.sharded {
                Some(prefix) => {
                    format!("{prefix}-{}", self.made.fetch_add(1, Ordering::Relaxed))
                }
                None => unique_name("contract"),
            };
            self.direct
                .declare_queue(&name, QueueKind::Quorum)
                .await
                .unwrap();
            name
        })
    }

    fn publisher(&self) -> Arc<dyn Publisher> {
        Arc::new(self.through.clone())
    }

    fn subscriber(&self) -> Arc<dyn Subscriber> {
        Arc::new(self.through.clone())
    }

    fn line(&self) -> Option<Arc<dyn Line>> {
        Some(Arc::clone(&self.line) as Arc<dyn Line>)
    }
}

impl Line for Breakable {
    fn pass(&self) -> BoxFuture<'_, ()> {
        self.0.pass();
        Box::pin(async {})
    }

    fn cut(&self) -> BoxFuture<'_, ()> {
        self.0.cut();
        Box::pin(async {})
    }

    fn silence(&self) -> BoxFuture<'_, ()> {
        self.0.blackhole();
        Box::pin(async {})
    }
}

relaybox::broker_tests!(Broker::new().await);

mod sharded {
    use super::Broker;

    relaybox::broker_tests!(Broker::sharded().await);
}
