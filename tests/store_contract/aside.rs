//! What is set aside: what may go, in which order, and who lets it go.

use relaybox::Message;
use relaybox::lane::lane_of;
use relaybox::store::{AsideFilter, FetchRequest, Lease, Mode, OutboxReader, OutboxStore, Place};

use super::*;

/// A lane with messages of the key `k`, and a reader of it.
struct Lane {
    leases: Vec<Lease>,
    reader: Box<dyn OutboxReader>,
}

/// `(id, destination, key)`
fn message((id, destination, key): (&str, &str, &str)) -> Message {
    Message::new(destination, "T").with_id(id).with_key(key)
}

impl Lane {
    async fn of<H: Harness>(store: &H::Store, messages: &[(&str, &str, &str)]) -> Self {
        let messages: Vec<_> = messages.iter().copied().map(message).collect();
        enqueue::<H>(store, &messages).await;
        Self {
            leases: lease_all(store).await,
            reader: store.reader(),
        }
    }

    async fn fetch(&mut self, closed: &[&str]) -> Page {
        let request = FetchRequest {
            closed: closed.iter().map(|name| (*name).to_owned()).collect(),
            ..request(&self.leases)
        };
        self.reader.fetch(&request).await.unwrap()
    }

    /// Ids of what may go now, with a mark at those set aside.
    async fn read(&mut self, closed: &[&str]) -> Vec<String> {
        let page = self.fetch(closed).await;
        let name = |row: &relaybox::store::PendingMessage| {
            let mark = if row.place.is_aside() { "aside " } else { "" };
            format!("{mark}{}", row.message.id)
        };
        page.rows.iter().map(name).collect()
    }

    /// Sets pending rows aside, by id, in the scope that ends at the dot of their destination.
    async fn set_aside(&mut self, rows: &[(&str, AsideState)]) {
        let page = self.fetch(&[]).await;
        let verdicts = rows.iter().map(|(id, state)| {
            let mut rows = page.rows.iter();
            let row = rows.find(|row| row.message.id.as_str() == *id).unwrap();
            let destination = &row.message.destination;
            let scope = destination.split_once('.').map_or(&**destination, |s| s.0);
            let Verdict::SetAside(mut aside) = set_aside_as(*state, "test", "") else {
                unreachable!()
            };
            scope.clone_into(&mut aside.scope);
            (row.place, Verdict::SetAside(aside))
        });
        let batch = SettlementBatch {
            leases: self.leases.clone(),
            verdicts: verdicts.collect(),
        };
        let settled = self.reader.settle(&batch).await.unwrap();
        assert_eq!((settled.applied, settled.fenced), (rows.len(), 0));
    }

    async fn confirm_all(&mut self) -> usize {
        let page = self.fetch(&[]).await;
        let batch = confirm(&self.leases, &page);
        let settled = self.reader.settle(&batch).await.unwrap();
        assert_eq!(settled.fenced, 0);
        settled.applied
    }
}

pub async fn what_waits_comes_back_in_front_of_what_is_pending<H: Harness>() {
    let h = H::start().await;
    let store = h.store();
    let messages = ["1", "2", "3", "4"].map(|id| (id, "orders", "k"));
    let mut lane = Lane::of::<H>(&store, &messages).await;
    lane.set_aside(&[("1", AsideState::Waiting), ("2", AsideState::Waiting)])
        .await;
    assert_eq!(store.aside(10).await.unwrap(), 2);
    let page = lane.fetch(&[]).await;
    let ids: Vec<_> = page
        .rows
        .iter()
        .map(|row| row.message.id.as_str())
        .collect();
    assert_eq!(ids, ["1", "2", "3", "4"]);
    assert!(page.rows[1].place.is_aside() && !page.rows[2].place.is_aside());
    assert_eq!(page.rows[1].ahead, []);
    let ahead = &page.rows[2].ahead[0];
    assert_eq!((&*ahead.scope, ahead.blocked), ("orders", false));
    assert_eq!(ahead.last, page.rows[1].place.position);
    assert_eq!(
        page.rows[0].message,
        message(messages[0]).with_occurred_at(page.rows[0].message.occurred_at)
    );
    assert_eq!(lane.confirm_all().await, 4);
    assert_eq!(store.aside(10).await.unwrap(), 0);
    assert_eq!(store.pending(10).await.unwrap(), 0);
    assert!(lane.read(&[]).await.is_empty());
}

pub async fn a_closed_destination_is_passed_over_only_where_it_is_set_aside<H: Harness>() {
    let h = H::start().await;
    let store = h.store();
    let messages = [("1", "shut", "k"), ("2", "open", "k"), ("3", "shut", "k")];
    let mut lane = Lane::of::<H>(&store, &messages).await;
    lane.set_aside(&[("1", AsideState::Waiting), ("2", AsideState::Waiting)])
        .await;
    assert_eq!(lane.read(&["other", "shut"]).await, ["aside 2", "3"]);
    assert_eq!(lane.read(&["open"]).await, ["aside 1", "3"]);
    // A reader that knows nothing of the lane finds them too.
    lane.reader = store.reader();
    assert_eq!(lane.read(&[]).await, ["aside 1", "aside 2", "3"]);
}

pub async fn a_blocked_key_waits_for_an_operator_and_then_goes_in_order<H: Harness>() {
    let h = H::start().await;
    let store = h.store();
    let messages = ["1", "2", "3", "4"].map(|id| (id, "orders", "k"));
    let mut lane = Lane::of::<H>(&store, &messages).await;
    // The third was set aside by somebody who did not know of the block yet.
    lane.set_aside(&[
        ("1", AsideState::Blocking),
        ("2", AsideState::Held),
        ("3", AsideState::Waiting),
    ])
    .await;
    let page = lane.fetch(&[]).await;
    assert_eq!(ids(&page), ["4"]);
    lane.set_aside(&[("4", AsideState::Held)]).await;
    let later = ("5", "orders", "k");
    enqueue::<H>(&store, &[message(later), message(("x", "orders", "j"))]).await;
    let page = lane.fetch(&[]).await;
    let behind = page.rows.iter().find(|row| row.message.id.as_str() == "5");
    assert!(behind.unwrap().ahead[0].blocked);
    let filter = AsideFilter::all().with_key("k");
    assert_eq!(store.requeue(&filter, Mode::DryRun).await.unwrap(), 1);
    assert_eq!(store.requeue(&filter, Mode::Apply).await.unwrap(), 1);
    assert_eq!(store.pending(10).await.unwrap(), 2, "it keeps its place");
    let released = ["aside 1", "aside 2", "aside 3", "aside 4", "5", "x"];
    let mut read = lane_read(&store, &lane.leases).await;
    read.sort_by_key(|name| released.iter().position(|r| r == name));
    assert_eq!(read, released);
    let rows = lane.fetch(&[]).await.rows;
    let of_key: Vec<_> = rows
        .iter()
        .filter(|row| row.message.key.as_deref() == Some(b"k"))
        .collect();
    assert!(of_key.windows(2).all(|two| two[0].place < two[1].place));
}

async fn lane_read<S: OutboxStore>(store: &S, leases: &[Lease]) -> Vec<String> {
    let mut lane = Lane {
        leases: leases.to_vec(),
        reader: store.reader(),
    };
    lane.read(&[]).await;
    // The first look finds what is blocked, the next one what no longer is.
    lane.read(&[]).await
}

pub async fn a_discarded_head_lets_its_key_go_on<H: Harness>() {
    let h = H::start().await;
    let store = h.store();
    let messages = [
        ("1", "orders", "k"),
        ("2", "orders", "k"),
        ("3", "mail", "k"),
    ];
    let mut lane = Lane::of::<H>(&store, &messages).await;
    lane.set_aside(&[("1", AsideState::Blocking), ("2", AsideState::Held)])
        .await;
    assert_eq!(
        lane.read(&[]).await,
        ["3"],
        "another scope is not concerned"
    );
    assert!(
        lane.fetch(&[]).await.rows[0]
            .ahead
            .iter()
            .all(|ahead| ahead.scope != "mail")
    );
    let gone = store
        .discard(&AsideFilter::all(), "a test", Mode::Apply)
        .await;
    assert_eq!(gone.unwrap(), 1, "what is held has an owner");
    assert_eq!(lane_read(&store, &lane.leases).await, ["aside 2", "3"]);
}

/// A lane of which every page sets something aside has no idle moment in which to look.
pub async fn a_key_that_nothing_blocks_goes_on_however_busy_its_lane_is<H: Harness>() {
    let h = H::start().await;
    let store = h.store();
    let messages = ["1", "2"].map(|id| (id, "orders", "k"));
    let mut lane = Lane::of::<H>(&store, &messages).await;
    lane.set_aside(&[("1", AsideState::Blocking), ("2", AsideState::Held)])
        .await;
    let all = AsideFilter::all();
    store.discard(&all, "a test", Mode::Apply).await.unwrap();
    lane.reader = store.reader();
    let mut read = Vec::new();
    for id in ["a", "b", "c", "d"] {
        enqueue::<H>(&store, &[message((id, "mail", "k"))]).await;
        let page = lane.fetch(&["mail"]).await;
        read = ids(&page).into_iter().map(str::to_owned).collect();
        let pending = page.rows.iter().find(|row| !row.place.is_aside());
        let aside = set_aside_as(AsideState::Waiting, "closed", "");
        let batch = SettlementBatch {
            leases: lane.leases.clone(),
            verdicts: vec![(pending.unwrap().place, aside)],
        };
        lane.reader.settle(&batch).await.unwrap();
    }
    assert_eq!(read, ["2", "d"]);
}

/// Lanes change hands between the workers of a relay under the same token.
pub async fn what_another_reader_set_aside_is_known_after_a_request_without_the_lane<H: Harness>() {
    let h = H::start().await;
    let store = h.store();
    let mut lane = Lane::of::<H>(&store, &[]).await;
    assert!(lane.read(&[]).await.is_empty());
    let mut other = Lane {
        leases: lane.leases.clone(),
        reader: store.reader(),
    };
    enqueue::<H>(&store, &[message(("1", "orders", "k"))]).await;
    other.set_aside(&[("1", AsideState::Waiting)]).await;
    let without = lane.reader.fetch(&request(&[])).await.unwrap();
    assert!(without.rows.is_empty());
    enqueue::<H>(&store, &[message(("2", "orders", "k"))]).await;
    assert_eq!(lane.read(&[]).await, ["aside 1", "2"]);
    let page = lane.fetch(&["orders"]).await;
    assert_eq!(page.rows[0].ahead.len(), 1);
}

pub async fn within_a_scope_a_key_waits_for_its_closed_destination<H: Harness>() {
    let h = H::start().await;
    let store = h.store();
    let messages = [
        ("1", "ev.a", "k"),
        ("2", "ev.b", "k"),
        ("3", "ev.b", "j"),
        ("4", "mail.b", "k"),
    ];
    let mut lane = Lane::of::<H>(&store, &messages).await;
    lane.set_aside(&messages.map(|(id, ..)| (id, AsideState::Waiting)))
        .await;
    let read = lane.read(&["ev.a"]).await;
    assert_eq!(sorted(read), ["aside 3", "aside 4"]);
    let read = lane.read(&["ev.b"]).await;
    assert_eq!(sorted(read), ["aside 1", "aside 4"]);
    assert_eq!(lane.read(&[]).await.len(), 4);
}

/// An exchange without a routing key, a stream's bare subject: the scope's own name is one of its destinations.
pub async fn a_destination_named_as_its_scope_waits_for_the_others_of_it<H: Harness>() {
    let h = H::start().await;
    let store = h.store();
    let messages = [("1", "ev.a", "k"), ("2", "ev", "k"), ("3", "ev", "j")];
    let mut lane = Lane::of::<H>(&store, &messages).await;
    lane.set_aside(&messages.map(|(id, ..)| (id, AsideState::Waiting)))
        .await;
    assert_eq!(lane.read(&["ev.a"]).await, ["aside 3"]);
    let read = lane.read(&["mail"]).await;
    assert_eq!(sorted(read), ["aside 1", "aside 2", "aside 3"]);
}

fn sorted(mut names: Vec<String>) -> Vec<String> {
    names.sort();
    names
}

pub async fn what_is_set_aside_and_refused_stays_at_its_place<H: Harness>() {
    let h = H::start().await;
    let store = h.store();
    let messages = [("1", "orders", "k"), ("2", "orders", "k")];
    let mut lane = Lane::of::<H>(&store, &messages).await;
    lane.set_aside(&messages.map(|(id, ..)| (id, AsideState::Waiting)))
        .await;
    let page = lane.fetch(&[]).await;
    let batch = SettlementBatch {
        leases: lane.leases.clone(),
        verdicts: vec![(
            page.rows[0].place,
            set_aside_as(AsideState::Parked, "rejected", "no"),
        )],
    };
    assert_eq!(lane.reader.settle(&batch).await.unwrap().applied, 1);
    assert_eq!(lane.read(&[]).await, ["aside 2"]);
    let listed = store.list_aside(&AsideFilter::all(), 0, 10).await.unwrap();
    let first = &listed[0];
    assert_eq!((&*first.state, first.attempts), ("parked", 1));
    assert_eq!(
        (first.reason.as_str(), first.error.as_deref()),
        ("rejected", Some("no"))
    );
    assert_eq!((&*listed[1].state, listed[1].attempts), ("waiting", 0));
    assert_eq!(listed[1].error, None);
    // It belongs to the operator now.
    let settled = lane
        .reader
        .settle(&confirm(&lane.leases, &page))
        .await
        .unwrap();
    assert_eq!((settled.applied, settled.fenced), (1, 1));
}

pub async fn rows_set_aside_are_fenced_like_others<H: Harness>() {
    let h = H::start().await;
    let store = h.store();
    let messages = [("1", "orders", "k"), ("2", "orders", "k")];
    let mut lane = Lane::of::<H>(&store, &messages).await;
    lane.set_aside(&[("1", AsideState::Waiting)]).await;
    let page = lane.fetch(&[]).await;
    store.release(&lane.leases).await.unwrap();
    let new = lease_all(&store).await;
    let mut batch = confirm(&lane.leases, &page);
    for verdict in [
        Verdict::Confirmed,
        set_aside_as(AsideState::Parked, "rejected", ""),
    ] {
        batch.verdicts[0].1 = verdict;
        batch.verdicts[1].1 = set_aside_as(AsideState::Waiting, "closed", "");
        let settled = lane.reader.settle(&batch).await.unwrap();
        assert_eq!((settled.applied, settled.fenced), (0, 2));
    }
    assert!(lane.read(&[]).await.is_empty());
    lane.leases = new;
    assert_eq!(lane.read(&[]).await, ["aside 1", "2"]);
}

pub async fn what_waits_leaves_room_for_what_is_pending<H: Harness>() {
    let h = H::start().await;
    let store = h.store();
    let messages: Vec<_> = (0..40).map(|n| keyed("k", &n.to_string())).collect();
    enqueue::<H>(&store, &messages).await;
    let mut lane = Lane::of::<H>(&store, &[]).await;
    let places: Vec<Place> = lane
        .fetch(&[])
        .await
        .rows
        .iter()
        .map(|row| row.place)
        .collect();
    let waiting = places[..30]
        .iter()
        .map(|place| (*place, set_aside_as(AsideState::Waiting, "closed", "")));
    let batch = SettlementBatch {
        leases: lane.leases.clone(),
        verdicts: waiting.collect(),
    };
    lane.reader.settle(&batch).await.unwrap();
    lane.leases.retain(|lease| lease.lane == lane_of(b"k"));
    let request = FetchRequest {
        rows_max: 10,
        ..request(&lane.leases)
    };
    let page = lane.reader.fetch(&request).await.unwrap();
    let aside = page.rows.iter().filter(|row| row.place.is_aside()).count();
    assert!((1..=6).contains(&aside), "{aside}");
    assert!(page.rows.len() - aside >= 4 && page.rows.len() <= 10);
    let first: Vec<_> = page.rows[..aside]
        .iter()
        .map(|row| row.place.position)
        .collect();
    let expected: Vec<_> = places[..aside].iter().map(|place| place.position).collect();
    assert_eq!(first, expected);
}

/// A byte limit ends what is read of a lane; it takes nothing out of its middle.
pub async fn what_waits_and_does_not_fit_keeps_back_what_is_behind_it<H: Harness>() {
    let h = H::start().await;
    let store = h.store();
    let large = "x".repeat(10_000);
    let messages = ["1", &large, "3"].map(|payload| keyed("k", payload));
    enqueue::<H>(&store, &messages).await;
    let mut lane = Lane::of::<H>(&store, &[]).await;
    let waiting = lane.fetch(&[]).await.rows.into_iter().map(|row| {
        let aside = set_aside_as(AsideState::Waiting, "closed", "");
        (row.place, aside)
    });
    let batch = SettlementBatch {
        leases: lane.leases.clone(),
        verdicts: waiting.collect(),
    };
    lane.reader.settle(&batch).await.unwrap();
    lane.leases.retain(|lease| lease.lane == lane_of(b"k"));
    let request = FetchRequest {
        bytes_max: 4_000,
        ..request(&lane.leases)
    };
    let page = lane.reader.fetch(&request).await.unwrap();
    assert_eq!(ids(&page), [messages[0].id.as_str()]);
}

/// However long the key, and whatever its bytes: an index must not refuse the settlement.
pub async fn any_key_can_be_set_aside<H: Harness>() {
    let h = H::start().await;
    let store = h.store();
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let long: Vec<u8> = std::iter::repeat_with(|| random.u8(..))
        .take(20_000)
        .collect();
    let mut longer = long.clone();
    longer.push(0);
    let messages = [&long, &long, &longer].map(|key| Message::new("orders", "T").with_key(key));
    enqueue::<H>(&store, &messages).await;
    let mut lane = Lane::of::<H>(&store, &[]).await;
    let page = lane.fetch(&[]).await;
    let mut batch = park(&lane.leases, &page);
    let states = [AsideState::Blocking, AsideState::Held, AsideState::Waiting];
    for (id, state) in messages.iter().map(|m| &m.id).zip(states) {
        let at = page
            .rows
            .iter()
            .position(|row| row.message.id == *id)
            .unwrap();
        batch.verdicts[at].1 = set_aside_as(state, "test", "");
    }
    assert_eq!(lane.reader.settle(&batch).await.unwrap().applied, 3);
    let page = lane.fetch(&[]).await;
    assert_eq!(ids(&page), [messages[2].id.as_str()]);
}
