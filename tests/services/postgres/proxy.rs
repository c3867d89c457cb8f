//! Stands between client and server, and loses what a test wants lost.

use std::pin::pin;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use relaybox::store::postgres::PostgresStore;
use sqlx::postgres::{PgConnectOptions, PgPool};
use tokio::io::{AsyncReadExt, AsyncWriteExt, Result};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use super::Postgres;

const NOTIFICATION: u8 = b'A';

/// Ends when dropped, and its connections with it.
pub struct Proxy {
    options: PgConnectOptions,
    shared: Arc<Shared>,
    task: tokio::task::JoinHandle<()>,
}

struct Shared {
    /// Notifications do not reach the client, as behind a transaction pooler.
    deaf: AtomicBool,
    /// Connections end as soon as they are made.
    closed: AtomicBool,
    /// Connections of earlier ages end.
    cut: watch::Sender<u64>,
    /// Connections of earlier ages carry nothing any more, and stay open.
    frozen: watch::Sender<u64>,
    connections: AtomicU64,
}

impl Proxy {
    pub async fn start(h: &Postgres) -> Self {
        let server = PgConnectOptions::from_str(&h.url).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let options = server.clone().host("127.0.0.1").port(port);
        let shared = Arc::new(Shared {
            deaf: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            cut: watch::Sender::new(0),
            frozen: watch::Sender::new(0),
            connections: AtomicU64::new(0),
        });
        let accepting = shared.clone();
        let target = (server.get_host().to_owned(), server.get_port());
        let task = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                accepting.connections.fetch_add(1, Ordering::SeqCst);
                if accepting.closed.load(Ordering::SeqCst) {
                    continue;
                }
                let server = TcpStream::connect(target.clone()).await.unwrap();
                tokio::spawn(carry(accepting.clone(), client, server));
            }
        });
        Self {
            options,
            shared,
            task,
        }
    }

    /// A store that reaches its server through here.
    pub async fn store(&self) -> PostgresStore {
        let pool = PgPool::connect_with(self.options.clone());
        PostgresStore::new(pool.await.unwrap())
    }

    pub fn swallow_notifications(&self) {
        self.shared.deaf.store(true, Ordering::SeqCst);
    }

    /// Ends all connections, and new ones as they come.
    pub fn cut(&self) {
        self.shared.closed.store(true, Ordering::SeqCst);
        self.shared.cut.send_modify(|age| *age += 1);
    }

    pub fn mend(&self) {
        self.shared.closed.store(false, Ordering::SeqCst);
    }

    /// From now on nothing passes on the connections there are.
    pub fn freeze(&self) {
        self.shared.frozen.send_modify(|age| *age += 1);
    }

    /// Connections tried so far.
    pub fn connections(&self) -> u64 {
        self.shared.connections.load(Ordering::SeqCst)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.cut();
        self.task.abort();
    }
}

async fn carry(shared: Arc<Shared>, client: TcpStream, server: TcpStream) {
    let (mut cut, mut frozen) = (shared.cut.subscribe(), shared.frozen.subscribe());
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    // Pinned out here, because whoever drops them closes the connection, and a frozen one stays open.
    let mut asked = pin!(asked(from_client, to_server));
    let mut answered = pin!(answered(&shared, from_server, to_client));
    let carried = async {
        tokio::select! {
            _ = &mut asked => {}
            _ = &mut answered => {}
            _ = frozen.changed() => std::future::pending().await,
        }
    };
    tokio::select! {
        () = carried => {}
        _ = cut.changed() => {}
    }
}

async fn asked(mut from: OwnedReadHalf, mut to: OwnedWriteHalf) -> Result<u64> {
    tokio::io::copy(&mut from, &mut to).await
}

/// Message by message: a byte of type, four of length, which count themselves.
async fn answered(shared: &Shared, mut from: OwnedReadHalf, mut to: OwnedWriteHalf) -> Result<()> {
    loop {
        let mut head = [0; 5];
        from.read_exact(&mut head).await?;
        let length = u32::from_be_bytes([head[1], head[2], head[3], head[4]]);
        let mut body = vec![0; length as usize - 4];
        from.read_exact(&mut body).await?;
        if head[0] == NOTIFICATION && shared.deaf.load(Ordering::SeqCst) {
            continue;
        }
        to.write_all(&head).await?;
        to.write_all(&body).await?;
    }
}
