//! Members of a scene's consumer: started, killed, started again.

use std::fs::File;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};

use relaybox::testing::eventually;

use super::{DEADLINE, Scene};

const SIGABRT: i32 = 6;

/// The program `tests/fragile_process`; killed when a test ends early.
pub struct Member {
    name: &'static str,
    child: Child,
}

impl Member {
    /// SIGKILL.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Whether it has ended by `abort`. Any other end is a failure of the test.
    pub fn has_died(&mut self) -> bool {
        let Some(status) = self.child.try_wait().unwrap() else {
            return false;
        };
        assert_eq!(status.signal(), Some(SIGABRT), "{}: {status}", self.name);
        true
    }

    /// SIGTERM, and a good end or one by `abort`; whether it was the latter.
    async fn stop(mut self) -> bool {
        let pid = self.child.id().to_string();
        // It may have died in between.
        let _ = Command::new("kill").args(["-TERM", &pid]).status();
        let status = self.ended().await;
        assert!(
            status.success() || status.signal() == Some(SIGABRT),
            "{}: {status}",
            self.name
        );
        !status.success()
    }

    async fn ended(&mut self) -> ExitStatus {
        let mut status = None;
        eventually(DEADLINE, "the member ends", || {
            status = self.child.try_wait().unwrap();
            let ended = status.is_some();
            async move { ended }
        })
        .await;
        status.unwrap()
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Scene {
    /// A member, which dies at a point if one is given.
    pub fn start(&self, name: &'static str, crash: Option<&str>) -> Member {
        let journal = File::create(self.next_journal()).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_fragile_process"));
        command
            .arg(self.place.product.name())
            .args([&self.topic, &self.consumer])
            .args([self.database.address(), name])
            .args(crash.map(|_| "--crash").into_iter().chain(crash))
            .env(self.place.product.variable(), &self.place.address)
            .env("PGAPPNAME", "fragile")
            .env("RUST_LOG", "error")
            .stdin(Stdio::piped())
            .stdout(journal);
        let child = command.spawn().unwrap();
        Member { name, child }
    }

    /// Lets a member die at a point.
    pub async fn die_at(&self, point: &str) {
        let mut member = self.start("a", Some(point));
        let mut died = false;
        let awaited = format!("{}: it dies at {point}", self.name);
        eventually(DEADLINE, &awaited, || {
            died = member.has_died();
            async move { died }
        })
        .await;
    }

    /// Runs members of these names until every message came to its end, and starts those again that die, at most so often.
    /// Returns how many did.
    pub async fn run_to_the_end(&self, names: &[&'static str], deaths_max: usize) -> usize {
        let mut deaths = 0;
        loop {
            let started = names.iter().map(|name| self.start(name, None));
            let mut members: Vec<Member> = started.collect();
            let awaited = format!("{}: every message came to its end", self.name);
            eventually(DEADLINE, &awaited, || {
                for member in &mut members {
                    if member.has_died() {
                        deaths += 1;
                        assert!(deaths <= deaths_max, "{}: too many deaths", self.name);
                        *member = self.start(member.name, None);
                    }
                }
                self.is_over()
            })
            .await;
            for member in members {
                deaths += usize::from(member.stop().await);
            }
            // What they still held would be back now.
            if self.nothing_waits().await {
                return deaths;
            }
        }
    }
}
