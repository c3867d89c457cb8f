//! The waiting room between two sessions.

use std::time::Duration;

use relaybox::store::{Line, ReleaseAs, WaitingStore};

use crate::store_contract::Harness;
use crate::store_contract::waiting::waiting;

use super::Postgres;

#[tokio::test]
async fn a_release_waits_for_the_end_of_a_row_ahead_of_the_head() {
    let h = Postgres::start().await;
    let store = h.store();
    let room: &dyn WaitingStore = &store;
    let one = Duration::from_secs(60);
    let (ahead, head) = (waiting("k", "ahead", 1), waiting("k", "head", 1));
    room.put("c", &ahead, true, Duration::ZERO).await.unwrap();
    let claims = room.claim("c", 1, one).await.unwrap();
    assert_eq!(claims.rows.len(), 1);
    room.hold("c", &head, None).await.unwrap();
    assert!(room.follow("c", &waiting("k", "next", 0)).await.unwrap());
    // The end of the first one has found nobody to make due, and is not committed.
    let mut end = h.pool().begin().await.unwrap();
    let delete = "DELETE FROM relaybox_waiting WHERE message_id = 'ahead'";
    assert!(Postgres::execute(&mut end, delete).await);
    let release = room.release("c", Line::of("orders", b"k"), ReleaseAs::Skip);
    let commit = async {
        h.blocked().await;
        end.commit().await.unwrap();
    };
    let (released, ()) = tokio::time::timeout(one, async { tokio::join!(release, commit) })
        .await
        .expect("the release waits");
    assert!(released.unwrap());
    let claims = room.claim("c", 1, one).await.unwrap();
    assert_eq!(claims.rows[0].letter.message.id.as_str(), "next");
}
