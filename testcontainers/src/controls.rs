//! What can be done to a service that is a local process: the same for each, so written once.

/// Gives a handle its controls. The module has `SERVICE`, `READY_WITHIN` and `SHUT_DOWN_WITHIN`; the handle a `server` and
/// `ready`. The signal is the one by which the server ends in order.
macro_rules! local_controls {
    ($handle:ident, $end_signal:literal) => {
        impl $handle {
            /// Shuts the server down in order and starts it again on the same data and port. Local process only.
            ///
            /// # Errors
            ///
            /// [`ServiceError::NotLocal`]; or the server is not running or does not come back.
            pub async fn restart(&self) -> Result<(), ServiceError> {
                self.server
                    .on_local(SERVICE, "restart", |local| {
                        local.shut_down($end_signal, SHUT_DOWN_WITHIN)
                    })
                    .await?;
                self.start_again().await
            }

            /// SIGKILL to the server and its children; returns when they are gone. Local process only.
            ///
            /// # Errors
            ///
            /// [`ServiceError::NotLocal`], or the server is not running.
            pub async fn kill(&self) -> Result<(), ServiceError> {
                self.server
                    .on_local(SERVICE, "kill", |local| local.kill())
                    .await
            }

            /// Starts a server that was killed, on the same data and port; returns when it answers. Local process only.
            ///
            /// # Errors
            ///
            /// [`ServiceError::NotLocal`]; or the server is still running or does not come back.
            pub async fn start_again(&self) -> Result<(), ServiceError> {
                self.server
                    .on_local(SERVICE, "start again", |local| local.start())
                    .await?;
                self.ready(READY_WITHIN).await
            }

            /// SIGSTOP to the server: connections are accepted and nobody answers. Local process only.
            ///
            /// # Errors
            ///
            /// [`ServiceError::NotLocal`], or the server is not running.
            pub async fn stop(&self) -> Result<(), ServiceError> {
                self.server
                    .on_local(SERVICE, "stop", |local| local.stop())
                    .await
            }

            /// SIGCONT after [`stop`](Self::stop). Local process only.
            ///
            /// # Errors
            ///
            /// [`ServiceError::NotLocal`], or the server is not running.
            pub async fn cont(&self) -> Result<(), ServiceError> {
                self.server
                    .on_local(SERVICE, "cont", |local| local.cont())
                    .await
            }

            /// The process id of a running local server.
            #[must_use]
            pub fn pid(&self) -> Option<u32> {
                self.server.local(SERVICE, "pid").ok()?.pid()
            }

            /// The directory of a local server: data, settings and log. It goes with the server.
            #[must_use]
            pub fn directory(&self) -> Option<&Path> {
                let local = self.server.local(SERVICE, "directory").ok()?;
                Some(local.directory())
            }
        }
    };
}
pub(crate) use local_controls;
