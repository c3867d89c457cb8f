//! NATS JetStream under the broker contract.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use relaybox::broker::nats::{Nats, NatsConfig};
use relaybox::broker::{Publisher, Subscriber};
use relaybox::conformance::{Fixture, Line};
use relaybox_testcontainers::{Proxy, shared_nats, unique_name};

struct Broker {
    /// Through a line that can be broken.
    nats: Nats,
    direct: Nats,
    proxy: Arc<Proxy>,
}

/// Quick to see trouble: the cases wait for what follows from it.
fn config(url: String) -> NatsConfig {
    NatsConfig::new(url)
        .with_ping_interval(Duration::from_secs(1))
        .with_publish_deadline(Duration::from_secs(3))
        .with_heartbeat(Duration::from_millis(500))
        .with_ack_wait(Duration::from_secs(5))
}

impl Broker {
    async fn new() -> Self {
        let url = shared_nats().await.url();
        let target = url.strip_prefix("nats://").unwrap().to_owned();
        let proxy = Proxy::start(target).await.unwrap();
        let through = format!("nats://{}", proxy.address());
        Self {
            nats: Nats::connect(config(through)).await.unwrap(),
            direct: Nats::connect(config(url)).await.unwrap(),
            proxy: Arc::new(proxy),
        }
    }
}

impl Fixture for Broker {
    fn topic(&self, _partitions: usize) -> BoxFuture<'_, String> {
        Box::pin(async move {
            let name = unique_name("contract");
            self.direct.create_stream(&name, [&name]).await.unwrap();
            name
        })
    }

    fn publisher(&self) -> Arc<dyn Publisher> {
        Arc::new(self.nats.clone())
    }

    fn subscriber(&self) -> Arc<dyn Subscriber> {
        Arc::new(self.nats.clone())
    }

    fn line(&self) -> Option<Arc<dyn Line>> {
        Some(Arc::new(ProxyLine(Arc::clone(&self.proxy))))
    }
}

struct ProxyLine(Arc<Proxy>);

impl Line for ProxyLine {
    fn pass(&self) -> BoxFuture<'_, ()> {
        self.0.pass();
        Box::pin(std::future::ready(()))
    }

    fn cut(&self) -> BoxFuture<'_, ()> {
        self.0.cut();
        Box::pin(std::future::ready(()))
    }

    fn silence(&self) -> BoxFuture<'_, ()> {
        self.0.blackhole();
        Box::pin(std::future::ready(()))
    }
}

relaybox::broker_tests!(Broker::new().await);
