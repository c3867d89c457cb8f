//! The list of cases: the one place that names them all.

use super::{Case, Need, consuming, counting, publishing, sharing, trouble};

/// Hands the list to another macro, in front of which it puts the caller's own words.
#[doc(hidden)]
#[macro_export]
macro_rules! __broker_cases {
    ([$($then:tt)*] $($words:tt)*) => {
        $($then)*! {
            [$($words)*]
            publishing every_byte_arrives Nothing;
            publishing a_batch_has_one_outcome_per_message Nothing;
            publishing an_unknown_destination_rejects_only_itself Nothing;
            publishing an_oversized_message_rejects_only_itself Nothing;
            publishing no_message_makes_it_panic Nothing;
            publishing a_message_sent_again_is_confirmed_again Nothing;
            publishing a_copy_with_another_story_is_a_message_of_its_own Nothing;
            publishing copies_of_two_messages_of_one_id_both_arrive Nothing;
            publishing calls_at_the_same_time_keep_their_own_outcomes Nothing;
            publishing an_abandoned_call_harms_no_later_one Nothing;
            publishing check_names_every_missing_destination Nothing;
            publishing closing_twice_is_harmless Nothing;
            consuming a_first_subscription_begins_at_the_oldest Nothing;
            consuming messages_of_a_key_keep_their_order Nothing;
            consuming what_is_acknowledged_stays_away_and_the_rest_comes_again Nothing;
            consuming what_a_dropped_subscription_held_comes_again Nothing;
            consuming a_dropped_delivery_comes_again Nothing;
            consuming a_released_delivery_comes_again_after_its_delay Nothing;
            consuming a_member_closes_though_its_deadline_never_comes Nothing;
            consuming a_rung_is_never_early_and_blocks_nobody Nothing;
            consuming a_rung_that_nobody_reads_is_named_or_comes_back_by_itself Nothing;
            consuming no_more_than_in_flight_max_are_unsettled Nothing;
            consuming an_abandoned_receive_loses_nothing Nothing;
            consuming create_makes_rungs_and_dead_letters Nothing;
            consuming dead_letters_are_read_by_their_name Nothing;
            consuming verify_names_everything_missing Nothing;
            consuming a_missing_source_is_never_created Nothing;
            consuming unchecked_topology_takes_what_is_there Nothing;
            sharing two_consumers_each_get_everything FanOut;
            sharing two_members_share_and_nothing_is_lost_when_one_leaves Nothing;
            sharing a_receipt_is_void_once_its_message_went_to_another_member KeyAffinity;
            sharing a_key_is_with_one_member_at_a_time KeyAffinity;
            counting depth_and_lag_count_what_is_there Nothing;
            counting what_is_missing_has_no_depth Nothing;
            counting a_source_tells_how_long_it_keeps_messages Nothing;
            counting health_is_up_while_messages_go_through Nothing;
            trouble a_broken_line_confirms_nothing_and_is_told Line;
            trouble a_silent_line_ends_the_call_at_its_deadline Line;
            trouble publishing_goes_on_when_the_line_is_back Line;
            trouble deliveries_go_on_after_a_broken_line Line;
            trouble deliveries_go_on_after_a_silent_line Line;
            trouble a_settlement_over_a_broken_line_loses_nothing Line;
            trouble an_unreachable_broker_is_named_within_seconds Line;
            trouble closing_ends_by_its_deadline_whatever_the_line_does Line;
        }
    };
}

macro_rules! list {
    ([] $($module:ident $name:ident $need:ident;)+) => {
        /// Every case.
        pub const CASES: &[Case] = &[$(Case {
            name: stringify!($name),
            need: Need::$need,
            run: |fixture| Box::pin($module::$name(fixture)),
        },)+];
    };
}
crate::__broker_cases!([list]);

/// Makes a test of every case, for the tests of an adapter.
///
/// The expression is the [`Fixture`](crate::conformance::Fixture); it is evaluated anew in every test and may await. The
/// tests run on tokio with two threads, so your tests need tokio with `macros` and `rt-multi-thread`.
#[macro_export]
macro_rules! broker_tests {
    ($fixture:expr) => {
        $crate::__broker_cases!([$crate::__broker_test] $fixture);
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __broker_test {
    ([$fixture:expr] $($module:ident $name:ident $need:ident;)+) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                $crate::conformance::hold(stringify!($name), &$fixture).await;
            }
        )+
    };
}
