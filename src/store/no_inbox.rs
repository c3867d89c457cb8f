//! No inbox: for consumers without a database, whose work bears repetition.

use std::error::Error as StdError;
use std::time::Duration;

use super::inbox::{InboxStore, Recorded};
use crate::error::{ErrorKind, Result};

/// Remembers nothing: every delivery is handled, duplicates too.
///
/// Delivery stays at least once, and ladder and dead letters work. What needs a memory does not: effects are not protected
/// from duplicates, and a message that ends its process is not found. Its connection is `()`.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoInbox;

impl InboxStore for NoInbox {
    type Connection = ();
    type Transaction = ();

    fn name(&self) -> &'static str {
        "none"
    }

    fn remembers(&self) -> bool {
        false
    }

    async fn check(&self) -> Result<()> {
        Ok(())
    }

    async fn begin(&self) -> Result<()> {
        Ok(())
    }

    fn connection(transaction: &mut ()) -> &mut () {
        transaction
    }

    async fn record(&self, (): &mut (), _: &str, keys: &[&str]) -> Result<Vec<Recorded>> {
        Ok(vec![Recorded::First; keys.len()])
    }

    async fn is_recorded(&self, _: &str, _: &str) -> Result<bool> {
        Ok(false)
    }

    async fn note_start(&self, _: &str, _: &str, _: &str) -> Result<bool> {
        Ok(false)
    }

    async fn forget_start(&self, _: &str, _: &str) -> Result<()> {
        Ok(())
    }

    async fn commit(&self, (): ()) -> Result<()> {
        Ok(())
    }

    async fn rollback(&self, (): ()) -> Result<()> {
        Ok(())
    }

    fn kind_of(&self, _: &(dyn StdError + 'static)) -> Option<ErrorKind> {
        None
    }

    async fn clean_up(&self, _: &str, _: Duration, _: usize) -> Result<u64> {
        Ok(0)
    }
}
