//! Suspects: messages that may have ended the process that handled them. See decision 0013.

use std::collections::HashSet;
use std::future::Future;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tracing::warn;

use crate::error::{Error, ErrorKind};
use crate::inbox::Inbox;
use crate::message::MessageId;
use crate::store::{InboxStore, Recorded};

use super::form::Form;
use super::job::{Job, Lot};
use super::pauses::Pauses;
use super::process::{Leave, Processor};

/// How long a stop may take to note that it cut work off.
const CUT_OFF_MAX: Duration = Duration::from_secs(2);
/// Keys of messages that were put off, at most; beyond that one more is examined when it comes again.
const PUT_OFF_MAX: usize = 10_000;

/// What one run of a consumer knows about its own doings.
#[derive(Default)]
pub(super) struct Memory {
    /// Names this run where it notes that work begins.
    run: String,
    /// The start that is noted, one at a time.
    noted: Mutex<Option<String>>,
    /// Keys of messages that were put off: they come again as redelivered, and are no suspects for that.
    put_off: Mutex<HashSet<String>>,
}

impl Memory {
    pub(super) fn new() -> Self {
        Self {
            run: MessageId::generate().as_str().to_owned(),
            ..Self::default()
        }
    }

    /// A note that is to stay, however this run ends.
    pub(super) fn keep_the_note(&self) {
        self.noted().take();
    }

    pub(super) fn remember_put_off(&self, key: &str) {
        let mut put_off = self.put_off();
        if put_off.len() < PUT_OFF_MAX {
            put_off.insert(key.to_owned());
        }
    }

    fn noted(&self) -> MutexGuard<'_, Option<String>> {
        self.noted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put_off(&self) -> MutexGuard<'_, HashSet<String>> {
        self.put_off.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How it stands with a suspect.
pub(super) enum Standing {
    /// Nobody works on it, and nobody has.
    Free,
    Done,
    InWork,
}

impl<S, F> Processor<S, F>
where
    S: InboxStore,
    F: Form<S>,
{
    /// What a delivery is to this run: one that it put off itself is no suspect.
    pub(super) fn recognise(&self, job: &mut Job) {
        if job.lot == Lot::Suspect && self.memory.put_off().remove(&job.message.key) {
            job.lot = Lot::Work;
        }
    }

    /// Asks until the database answers; `None` when the message is no longer ours, or the consumer stops.
    pub(super) async fn patiently<T, A>(
        &self,
        job: &Job,
        leave: &mut Leave<S::Transaction>,
        ask: impl Fn() -> A,
    ) -> Option<T>
    where
        A: Future<Output = Result<T, Error>>,
    {
        self.ask_while(|| job.receipt.is_current(), leave, ask)
            .await
    }

    /// The same, as long as something holds.
    pub(super) async fn ask_while<T, A>(
        &self,
        holds: impl Fn() -> bool,
        leave: &mut Leave<S::Transaction>,
        ask: impl Fn() -> A,
    ) -> Option<T>
    where
        A: Future<Output = Result<T, Error>>,
    {
        let mut pauses = Pauses::new(&self.config);
        while holds() {
            match ask().await {
                Ok(answer) => return Some(answer),
                Err(error) => {
                    let pause = self.patient(&mut pauses, &error);
                    if self.wait_while(&holds, pause, leave).await {
                        break;
                    }
                }
            }
        }
        None
    }

    /// Whoever works on a message holds its key.
    pub(super) async fn standing(&self, job: &Job) -> Result<Standing, Error> {
        let Inbox {
            store, consumer, ..
        } = &self.inbox;
        let keys = [&*job.message.key];
        let mut transaction = store.begin().await?;
        let recorded = store.record(&mut transaction, consumer, &keys).await;
        let rolled_back = store.rollback(transaction).await;
        match recorded {
            Err(error) if error.kind() == ErrorKind::Busy => Ok(Standing::InWork),
            Err(error) => Err(error),
            Ok(recorded) if recorded.first() == Some(&Recorded::Duplicate) => Ok(Standing::Done),
            Ok(_) => rolled_back.map(|()| Standing::Free),
        }
    }

    /// Notes that the work begins, and tells whether that of another run never came to its end.
    pub(super) async fn begin(&self, job: &Job) -> Result<bool, Error> {
        let Inbox {
            store, consumer, ..
        } = &self.inbox;
        let start = start_of(job);
        *self.memory.noted() = Some(start.clone());
        store.note_start(consumer, &start, &self.memory.run).await
    }

    /// The work has come to an end, also where the message went to another member meanwhile: forgets its start. Whether that
    /// was done before the consumer had to stop.
    pub(super) async fn end(&self, job: &Job, leave: &mut Leave<S::Transaction>) -> bool {
        if !matches!(job.lot, Lot::Suspect | Lot::Watched) {
            return true;
        }
        let Inbox {
            store, consumer, ..
        } = &self.inbox;
        let start = start_of(job);
        let forget = || store.forget_start(consumer, &start);
        let forgotten = self.ask_while(|| true, leave, forget).await.is_some();
        if forgotten {
            self.memory.noted().take_if(|noted| *noted == start);
        }
        forgotten
    }

    /// Work that was cut off by the deadline of a stop has ended no process.
    pub(super) async fn forget_what_was_cut_off(&self) {
        let Some(start) = self.memory.noted().take() else {
            return;
        };
        let forgotten = self.inbox.store.forget_start(&self.inbox.consumer, &start);
        if !matches!(
            tokio::time::timeout(CUT_OFF_MAX, forgotten).await,
            Ok(Ok(()))
        ) {
            warn!(
                consumer = self.inbox.consumer,
                "a message that was cut off by the stop will look as if it had ended the process"
            );
        }
    }
}

/// What the start of this attempt is noted by: its copy on the next rung is another one, and so is one that an operator sent
/// back.
fn start_of(job: &Job) -> String {
    let story = &job.message.incoming.story;
    let (redrives, failures) = (story.redrive_count, story.retry_count);
    format!("{}#{redrives}.{failures}", job.message.key)
}
