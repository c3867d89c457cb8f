//! Kafka's own Java tools, from the jars of the pinned version.

use std::process::Stdio;
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::process::Command;

use super::{Kafka, SERVICE, local};
use crate::ServiceError;

/// A Java process alone takes seconds on a busy machine.
const TOOL_WITHIN: Duration = Duration::from_secs(120);

impl Kafka {
    /// Runs a tool of Kafka's with `--bootstrap-server` set, feeds it the input, and returns what it wrote to its
    /// output. For example `org.apache.kafka.tools.ConsoleConsumer`.
    ///
    /// # Errors
    ///
    /// When there is no Java or no jar, or the tool fails or takes too long; with what it wrote.
    pub async fn run_tool(
        &self,
        class: &str,
        arguments: &[&str],
        input: &[u8],
    ) -> Result<Vec<u8>, ServiceError> {
        let failed = |error: String| ServiceError::failed(SERVICE, "run tool", error);
        let io_failed = |error: std::io::Error| failed(error.to_string());
        let mut child = Command::new(local::java().map_err(failed)?)
            .args(["-Xmx256m", "-XX:TieredStopAtLevel=1", "-cp"])
            .arg(local::libraries().map_err(failed)?.join("*"))
            .args([class, "--bootstrap-server", &self.brokers])
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .map_err(io_failed)?;
        let mut stdin = child.stdin.take();
        let fed = async {
            if let Some(mut stdin) = stdin.take() {
                stdin.write_all(input).await?;
                stdin.shutdown().await?;
            }
            Ok(())
        };
        let both = async { tokio::join!(fed, child.wait_with_output()) };
        let (fed, output) = tokio::time::timeout(TOOL_WITHIN, both)
            .await
            .map_err(|_| failed(format!("{class} did not end within {TOOL_WITHIN:?}")))?;
        let output = output.map_err(io_failed)?;
        if output.status.success() {
            return fed.map(|()| output.stdout).map_err(io_failed);
        }
        Err(failed(format!(
            "{class}: {}: {}{}",
            output.status,
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr).trim_end()
        )))
    }
}
