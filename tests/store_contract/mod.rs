//! The store contracts as cases, written once and run against every database.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod admin;
mod aside;
mod delayed;
mod history;
mod inbox;
mod outbox;
mod parking;
mod redrive;
mod relays;
mod versions;
pub mod waiting;
mod waiting_model;

pub use admin::*;
pub use aside::*;
pub use delayed::*;
pub use history::*;
pub use inbox::*;
pub use outbox::*;
pub use parking::*;
pub use redrive::*;
pub use relays::*;
pub use versions::*;
pub use waiting::{
    a_follower_and_the_end_of_its_head_never_miss_each_other, a_held_line_is_listed_and_counted,
    a_line_whose_first_row_stands_behind_nobody_is_released,
    a_message_that_fails_again_keeps_its_place_and_voids_its_claim,
    a_row_is_one_holders_until_its_lease_ends_and_then_it_is_told_so,
    notes_are_recalled_with_what_is_left_of_the_wait_and_cleaned_up,
    nothing_is_claimed_before_its_time_and_the_next_time_is_told,
    what_waits_keeps_every_byte_and_its_story,
};
pub use waiting_model::*;

use std::future::Future;
use std::time::Duration;

use relaybox::Message;
use relaybox::lane::LANES;
use relaybox::store::{
    AsideState, Enqueue, FetchRequest, InboxStore, Lease, OutboxAdmin, OutboxStore, Page,
    RedriveStore, SetAside, SettlementBatch, Verdict, VersionStore,
};
use relaybox::story::Reason;

/// A fresh, migrated database with an empty table `work (id int primary key)`.
pub trait Harness: Sized {
    type Connection: Send;
    type Store: Enqueue<Connection = Self::Connection>
        + InboxStore<Connection = Self::Connection>
        + VersionStore<Connection = Self::Connection>
        + OutboxStore
        + OutboxAdmin
        + RedriveStore
        + Clone;

    fn start() -> impl Future<Output = Self>;
    fn store(&self) -> Self::Store;
    /// A store that waits for another transaction's id only briefly.
    fn impatient(&self) -> impl Future<Output = Self::Store>;
    /// A store whose pool has one connection.
    fn single(&self) -> impl Future<Output = Self::Store>;
    /// Runs a statement; whether it succeeded.
    fn execute(connection: &mut Self::Connection, sql: &str) -> impl Future<Output = bool>;
    fn number(connection: &mut Self::Connection, sql: &str) -> impl Future<Output = i64>;
    /// Begins and commits a transaction inside, by the driver's own means.
    fn nested(connection: &mut Self::Connection, sql: &str) -> impl Future<Output = ()>;
    /// Runs a statement on a connection of the store's pool, outside any transaction.
    fn autocommit(store: &Self::Store, sql: &'static str) -> impl Future<Output = ()>;
    /// Completes once a session waits for another one's lock, where the database can tell.
    fn blocked(&self) -> impl Future<Output = ()>;
}

const MINUTE: Duration = Duration::from_secs(60);

pub fn keyed(key: &str, payload: &str) -> Message {
    Message::new("orders", "OrderPlaced")
        .with_key(key)
        .with_payload(payload.to_owned())
}

pub async fn enqueue<H: Harness>(store: &H::Store, messages: &[Message]) {
    let mut transaction = store.begin().await.unwrap();
    let connection = H::Store::connection(&mut transaction);
    store.insert(connection, messages).await.unwrap();
    store.commit(transaction).await.unwrap();
}

pub fn request(leases: &[Lease]) -> FetchRequest {
    FetchRequest {
        leases: leases.to_vec(),
        rows_max: 16_000,
        bytes_max: 1 << 30,
        closed: Vec::new(),
    }
}

pub async fn lease_all<S: OutboxStore>(store: &S) -> Vec<Lease> {
    let leases = store.lease("relay", 100, MINUTE).await.unwrap();
    assert_eq!(leases.len(), LANES as usize);
    leases
}

pub async fn pending<S: OutboxStore>(store: &S) -> Page {
    let leases = lease_all(store).await;
    let page = store.reader().fetch(&request(&leases)).await.unwrap();
    store.release(&leases).await.unwrap();
    page
}

pub fn ids(page: &Page) -> Vec<&str> {
    page.rows
        .iter()
        .map(|row| row.message.id.as_str())
        .collect()
}

pub fn confirm(leases: &[Lease], page: &Page) -> SettlementBatch {
    SettlementBatch {
        leases: leases.to_vec(),
        verdicts: page
            .rows
            .iter()
            .map(|row| (row.place, Verdict::Confirmed))
            .collect(),
    }
}

pub fn park(leases: &[Lease], page: &Page) -> SettlementBatch {
    let mut batch = confirm(leases, page);
    for (.., verdict) in &mut batch.verdicts {
        *verdict = set_aside_as(AsideState::Parked, "rejected", "too \0 large");
    }
    batch
}

/// Set aside from scope `orders`.
pub fn set_aside_as(state: AsideState, reason: &str, error: &str) -> Verdict {
    Verdict::SetAside(SetAside {
        state,
        reason: Reason::new(reason),
        error: error.into(),
        scope: "orders".into(),
    })
}

/// One test a case.
#[macro_export]
macro_rules! store_contract {
    ($harness:ty: $($case:ident),* $(,)?) => {
        $(
            #[tokio::test]
            async fn $case() {
                $crate::store_contract::$case::<$harness>().await;
            }
        )*
    };
    ($harness:ty) => {
        $crate::store_contract!(
            $harness: rolled_back_and_savepoint_rolled_back_messages_do_not_exist,
            rows_come_in_order_of_position_within_a_lane_and_key,
            messages_without_a_key_spread_over_lanes,
            payload_key_and_headers_keep_every_byte,
            a_refused_message_leaves_the_business_transaction_usable,
            two_relays_leasing_in_the_same_instant_get_disjoint_lanes,
            a_lease_taken_over_fences_its_old_holder,
            an_expired_lease_renews_until_taken_and_a_released_one_never,
            a_lease_of_a_state_that_was_undone_is_never_anothers,
            relays_see_each_other_and_agree_on_their_places,
            relays_that_come_in_the_same_instant_get_different_places,
            a_registration_ends_by_the_databases_clock_and_can_begin_again,
            ended_registrations_are_removed_in_bounded_steps,
            no_lease_depends_on_a_registration,
            a_parked_row_moves_with_its_reason_and_is_counted,
            what_waits_comes_back_in_front_of_what_is_pending,
            a_closed_destination_is_passed_over_only_where_it_is_set_aside,
            a_blocked_key_waits_for_an_operator_and_then_goes_in_order,
            a_discarded_head_lets_its_key_go_on,
            a_key_that_nothing_blocks_goes_on_however_busy_its_lane_is,
            what_another_reader_set_aside_is_known_after_a_request_without_the_lane,
            within_a_scope_a_key_waits_for_its_closed_destination,
            a_destination_named_as_its_scope_waits_for_the_others_of_it,
            what_is_set_aside_and_refused_stays_at_its_place,
            rows_set_aside_are_fenced_like_others,
            what_waits_leaves_room_for_what_is_pending,
            what_waits_and_does_not_fit_keeps_back_what_is_behind_it,
            any_key_can_be_set_aside,
            a_delayed_message_is_released_once_when_it_is_due,
            a_delayed_message_exists_only_if_its_transaction_commits,
            operators_pause_resume_and_limit_destinations,
            an_error_text_of_any_length_and_characters_is_parked_and_listed,
            row_limits_hold_and_no_lane_is_starved,
            byte_limits_hold_but_for_one_message_a_lane,
            a_large_message_among_small_ones_arrives_whole,
            an_unreadable_row_is_named_and_stops_no_other,
            an_id_is_new_once_per_consumer,
            each_key_of_a_batch_is_new_once,
            batches_with_the_same_keys_in_any_order_never_block_each_other_for_good,
            a_start_of_another_run_is_told_until_it_is_forgotten,
            a_concurrent_duplicate_waits_for_the_end_of_the_first,
            the_wait_for_a_concurrent_duplicate_is_bounded,
            a_dropped_transaction_leaves_nothing_behind,
            a_cancelled_begin_poisons_no_connection,
            a_nested_transaction_is_a_savepoint,
            a_transaction_ended_inside_is_never_reported_as_committed,
            clean_up_deletes_old_records_in_bounded_steps,
            an_older_version_is_told_per_consumer_and_aggregate,
            a_version_counts_only_if_its_transaction_commits,
            of_two_versions_at_once_the_lower_is_never_applied_last,
            an_overlong_aggregate_is_refused_and_leaves_the_transaction_usable,
            clean_up_forgets_quiet_aggregates_of_the_consumer_in_bounded_steps,
            dead_letters_keep_bytes_and_story,
            two_messages_of_one_id_are_two_dead_letters,
            each_letter_filter_finds_its_entries_and_lists_go_by_pages,
            letters_are_read_whole_and_bounded_in_bytes,
            an_entry_that_cannot_be_read_is_listed_and_stops_no_other,
            a_letter_that_left_is_not_taken_in_again,
            what_a_run_may_have_sent_is_nobodys_to_change,
            a_settlement_is_whole_fenced_and_harmless_to_repeat,
            two_runs_at_once_each_take_an_entry_out_once,
            an_entry_is_replaced_or_entered_together_with_its_audit,
            clean_up_takes_old_audit_and_ended_runs_in_bounded_steps,
            depth_is_counted_by_destination_and_reason_with_the_oldest_age,
            depth_counts_and_returns_no_more_than_asked,
            each_filter_finds_its_rows_and_lists_go_by_pages,
            a_filter_or_words_that_mean_nothing_are_refused_by_name,
            a_requeued_message_is_the_same_message_at_a_new_position,
            a_row_that_cannot_be_read_is_listed_shown_and_discarded,
            requeues_and_discards_at_once_neither_double_nor_lose,
            ten_thousand_rows_are_requeued_under_a_relay_and_each_is_sent_once,
            a_requeue_ends_though_the_same_messages_are_refused_again,
            what_was_published_is_kept_with_every_byte_and_nothing_else,
            nothing_is_kept_unless_asked_for,
            what_was_set_aside_is_kept_once_it_is_confirmed,
            a_fenced_settlement_keeps_nothing,
            a_message_sent_again_is_found_each_time,
            history_goes_by_age_and_nothing_else_does,
            checks_pass_on_migrated_tables,
            what_waits_keeps_every_byte_and_its_story,
            nothing_is_claimed_before_its_time_and_the_next_time_is_told,
            a_row_is_one_holders_until_its_lease_ends_and_then_it_is_told_so,
            a_message_that_fails_again_keeps_its_place_and_voids_its_claim,
            a_follower_and_the_end_of_its_head_never_miss_each_other,
            notes_are_recalled_with_what_is_left_of_the_wait_and_cleaned_up,
            the_room_does_as_a_simple_model_says,
            a_held_line_is_listed_and_counted,
            a_line_whose_first_row_stands_behind_nobody_is_released,
        );
    };
}
