//! What a consumer asks of its broker, and what it must not ask.

use crate::broker::{Rung, SubscriptionRequest};
use crate::error::{Error, Result};
use crate::store::InboxStore;

use super::Consumer;

impl<S: InboxStore> Consumer<S> {
    pub(super) fn request(&self) -> SubscriptionRequest {
        let mut request = SubscriptionRequest::new(&self.name, self.sources.clone());
        request.rungs = self.rungs();
        request.dead_letters = self.dead_letter_destinations();
        request.topology = self.config.topology;
        request.in_flight_max = self.config.in_flight_max;
        request
    }

    /// The rungs of the ladder, and the ways back from the dead letters.
    pub(super) fn rungs(&self) -> Vec<Rung> {
        let of = |source: &String| {
            let mut rungs = self.ladder.rungs_of(source, &self.name);
            rungs.push(self.dead_letters.way_back(source, &self.name));
            rungs
        };
        self.sources.iter().flat_map(of).collect()
    }

    fn dead_letter_destinations(&self) -> Vec<String> {
        self.sources
            .iter()
            .filter_map(|source| self.dead_letters.destination(source, &self.name))
            .collect()
    }

    /// Refuses a ladder whose messages have nowhere to wait, or whose order the broker undoes.
    pub(super) fn can_wait(&self) -> Result<()> {
        if self.ladder.needs_room() && self.room.is_none() {
            let limit = "set (with_waiting_room) for a ladder that is stored, by key or in place";
            return Err(Error::configuration("waiting_room", limit, "none"));
        }
        let mixed = |source: &&String| !self.subscriber.key_affinity(source);
        if self.ladder.needs_affinity()
            && let Some(source) = self.sources.iter().find(mixed)
        {
            let limit =
                "one without order, where messages of one key may go to several members at a time";
            let value = format!("by key or in place, on source {source}");
            return Err(Error::configuration("ladder mode", limit, value));
        }
        Ok(())
    }
}

fn rung_names(request: &SubscriptionRequest) -> impl Iterator<Item = &String> {
    request.rungs.iter().map(|rung| &rung.destination)
}

/// Refuses names by which a message would come round again without end.
pub(super) fn no_circle(request: &SubscriptionRequest) -> Result<()> {
    let is_source = |name: &String| request.sources.contains(name);
    if let Some(rung) = rung_names(request).find(|name| is_source(name)) {
        let limit = "a name that no source has";
        return Err(Error::configuration("ladder template", limit, rung));
    }
    let delayed = |name: &String| {
        let named = request
            .rungs
            .iter()
            .filter(|rung| rung.destination == *name);
        named.fold([false; 2], |[back, waits], rung| {
            let zero = rung.delay.is_zero();
            [back || zero, waits || !zero]
        })
    };
    if let Some(both) = rung_names(request).find(|name| delayed(name) == [true; 2]) {
        let limit = "a name that no rung has";
        return Err(Error::configuration("way back template", limit, both));
    }
    let read = |name: &&String| is_source(name) || rung_names(request).any(|rung| rung == *name);
    if let Some(dead) = request.dead_letters.iter().find(read) {
        let limit = "a name that no source and no rung has";
        return Err(Error::configuration("dead letter template", limit, dead));
    }
    Ok(())
}
