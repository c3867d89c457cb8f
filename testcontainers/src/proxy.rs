//! A TCP line between a client and a server that a test breaks: cut, silent, slow, or cut after an answer was on its way.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// How long a proxy that was dropped may keep its port.
const LEFT_WITHIN: Duration = Duration::from_secs(10);
const BUFFER_BYTES: usize = 16 * 1024;

/// What happens to bytes and connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Pass,
    /// Each piece arrives this much later, in both directions.
    Delay(Duration),
    Cut,
    Blackhole,
    /// Passes until the server has sent so many more bytes over all connections; then the connection that carried the last
    /// of them is cut, as all later ones are, without passing that piece on: the server acted, the client never hears.
    CutAfterFromServer,
}

/// A proxy on a port of its own. Dropping it ends its connections.
///
/// What is set holds for the connections there are and for new ones.
pub struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
    accepting: JoinHandle<()>,
}

struct Shared {
    mode: watch::Sender<Mode>,
    /// Bytes that the server may still send.
    left_from_server: AtomicU64,
    connections: AtomicU64,
}

impl Proxy {
    /// Begins to pass connections on to `target`, which is asked for at each of them.
    ///
    /// # Errors
    ///
    /// When no port can be had.
    pub async fn start(target: impl Into<String>) -> io::Result<Self> {
        Self::on(TcpListener::bind("127.0.0.1:0").await?, target.into())
    }

    /// The same at a port of the caller's choice, which another proxy may just have left.
    ///
    /// # Errors
    ///
    /// When the port stays taken.
    pub async fn start_at(port: u16, target: impl Into<String>) -> io::Result<Self> {
        let until = Instant::now() + LEFT_WITHIN;
        loop {
            match TcpListener::bind(("127.0.0.1", port)).await {
                Ok(listener) => return Self::on(listener, target.into()),
                Err(error) if Instant::now() >= until => return Err(error),
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        }
    }

    fn on(listener: TcpListener, target: String) -> io::Result<Self> {
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared {
            mode: watch::Sender::new(Mode::Pass),
            left_from_server: AtomicU64::new(0),
            connections: AtomicU64::new(0),
        });
        let accepting = tokio::spawn(accept(listener, target, Arc::clone(&shared)));
        Ok(Self {
            address,
            shared,
            accepting,
        })
    }

    /// Where clients connect: `host:port`.
    #[must_use]
    pub fn address(&self) -> String {
        self.address.to_string()
    }

    /// The port of [`address`](Self::address).
    #[must_use]
    pub fn port(&self) -> u16 {
        self.address.port()
    }

    /// Everything passes.
    pub fn pass(&self) {
        self.shared.mode.send_replace(Mode::Pass);
    }

    /// Connections are reset, and new ones as soon as they are made.
    pub fn cut(&self) {
        self.shared.mode.send_replace(Mode::Cut);
    }

    /// Connections stay open, new ones too, and nothing passes in either direction. What was swallowed is gone: after
    /// [`pass`](Self::pass) the connections of before are reset.
    pub fn blackhole(&self) {
        self.shared.mode.send_replace(Mode::Blackhole);
    }

    /// Every piece takes so much longer, each way.
    pub fn delay(&self, delay: Duration) {
        self.shared.mode.send_replace(Mode::Delay(delay));
    }

    /// Cuts once the server has sent `bytes` more, counted over all connections: those bytes pass, the next do not. With 0 the
    /// next answer is lost. So the server has stored, and the client is not told.
    pub fn cut_after_from_server(&self, bytes: u64) {
        self.shared.left_from_server.store(bytes, Ordering::SeqCst);
        self.shared.mode.send_replace(Mode::CutAfterFromServer);
    }

    /// Connections made so far.
    #[must_use]
    pub fn connections(&self) -> u64 {
        self.shared.connections.load(Ordering::SeqCst)
    }

    /// Whether [`cut_after_from_server`](Self::cut_after_from_server) has cut.
    #[must_use]
    pub fn has_cut(&self) -> bool {
        *self.shared.mode.borrow() == Mode::Cut
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.cut();
        self.accepting.abort();
    }
}

async fn accept(listener: TcpListener, target: String, shared: Arc<Shared>) {
    loop {
        let Ok((client, _)) = listener.accept().await else {
            return;
        };
        shared.connections.fetch_add(1, Ordering::SeqCst);
        tokio::spawn(carry(client, target.clone(), Arc::clone(&shared)));
    }
}

async fn carry(client: TcpStream, target: String, shared: Arc<Shared>) {
    let mut mode = shared.mode.subscribe();
    // What ends here ends by a reset, as when a machine goes away.
    let reset = |stream: &TcpStream| drop(stream.set_zero_linger());
    reset(&client);
    // A connection that is made while nothing passes is accepted and never served.
    if mode
        .wait_for(|mode| *mode != Mode::Blackhole)
        .await
        .is_err()
    {
        return;
    }
    if *shared.mode.borrow() == Mode::Cut {
        return;
    }
    let Ok(server) = TcpStream::connect(&target).await else {
        return;
    };
    reset(&server);
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let asked = async {
        let mut buffer = vec![0; BUFFER_BYTES];
        while let Ok(read @ 1..) = from_client.read(&mut buffer).await {
            if !shared.passes(0).await || to_server.write_all(&buffer[..read]).await.is_err() {
                return;
            }
        }
    };
    let answered = async {
        let mut buffer = vec![0; BUFFER_BYTES];
        while let Ok(read @ 1..) = from_server.read(&mut buffer).await {
            if !shared.passes(read).await || to_client.write_all(&buffer[..read]).await.is_err() {
                return;
            }
        }
    };
    tokio::select! {
        () = asked => {}
        () = answered => {}
        () = shared.cut() => {}
    }
}

impl Shared {
    /// Waits as the mode says. Whether the piece, of this many bytes if it is the server's, passes.
    async fn passes(&self, from_server: usize) -> bool {
        let mode = *self.mode.borrow();
        match mode {
            Mode::Pass => true,
            Mode::Delay(delay) => {
                tokio::time::sleep(delay).await;
                *self.mode.borrow() != Mode::Cut
            }
            Mode::Cut => false,
            Mode::Blackhole => {
                let mut mode = self.mode.subscribe();
                let _ = mode.wait_for(|mode| *mode != Mode::Blackhole).await;
                false
            }
            Mode::CutAfterFromServer => {
                let bytes = from_server as u64;
                let left = &self.left_from_server;
                let enough = left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| {
                    left.checked_sub(bytes)
                });
                if enough.is_err() {
                    self.mode.send_replace(Mode::Cut);
                }
                enough.is_ok()
            }
        }
    }

    async fn cut(&self) {
        let _ = self
            .mode
            .subscribe()
            .wait_for(|mode| *mode == Mode::Cut)
            .await;
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests fail by panicking")]
mod tests {
    use super::*;

    const DEADLINE: Duration = Duration::from_secs(30);

    /// A server that answers each byte with the same one.
    async fn echo() -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                tokio::spawn(async move {
                    let (mut from, mut to) = stream.split();
                    tokio::io::copy(&mut from, &mut to).await
                });
            }
        });
        address
    }

    async fn asks(stream: &mut TcpStream) -> io::Result<u8> {
        stream.write_u8(7).await?;
        tokio::time::timeout(DEADLINE, stream.read_u8()).await?
    }

    async fn connected(proxy: &Proxy) -> TcpStream {
        TcpStream::connect(proxy.address()).await.unwrap()
    }

    #[tokio::test]
    async fn it_passes_cuts_and_passes_again() {
        let proxy = Proxy::start(echo().await).await.unwrap();
        let mut stream = connected(&proxy).await;
        assert_eq!(asks(&mut stream).await.unwrap(), 7);
        proxy.cut();
        assert!(asks(&mut stream).await.is_err());
        assert!(asks(&mut connected(&proxy).await).await.is_err());
        proxy.pass();
        assert_eq!(asks(&mut connected(&proxy).await).await.unwrap(), 7);
        assert_eq!(proxy.connections(), 3);
    }

    #[tokio::test]
    async fn in_a_blackhole_connections_stay_and_nothing_comes_back() {
        let proxy = Proxy::start(echo().await).await.unwrap();
        let mut old = connected(&proxy).await;
        assert_eq!(asks(&mut old).await.unwrap(), 7);
        proxy.blackhole();
        let mut new = connected(&proxy).await;
        for stream in [&mut old, &mut new] {
            stream.write_u8(7).await.unwrap();
            let answer = tokio::time::timeout(Duration::from_millis(200), stream.read_u8()).await;
            assert!(answer.is_err(), "{answer:?}");
        }
        proxy.pass();
        assert!(old.read_u8().await.is_err(), "its bytes are gone");
        assert_eq!(new.read_u8().await.unwrap(), 7);
    }

    #[tokio::test]
    async fn an_answer_is_lost_after_so_many_bytes() {
        let proxy = Proxy::start(echo().await).await.unwrap();
        let mut stream = connected(&proxy).await;
        proxy.cut_after_from_server(2);
        assert_eq!(asks(&mut stream).await.unwrap(), 7);
        assert_eq!(asks(&mut stream).await.unwrap(), 7);
        assert!(!proxy.has_cut());
        assert!(asks(&mut stream).await.is_err());
        assert!(proxy.has_cut());
    }

    #[tokio::test]
    async fn a_delay_delays() {
        let proxy = Proxy::start(echo().await).await.unwrap();
        let mut stream = connected(&proxy).await;
        proxy.delay(Duration::from_millis(100));
        let started = std::time::Instant::now();
        assert_eq!(asks(&mut stream).await.unwrap(), 7);
        assert!(started.elapsed() >= Duration::from_millis(200));
    }
}
