//! Transactions that use a connection one after the other.

use relaybox::ErrorKind;
use relaybox::store::postgres::PostgresStore;
use relaybox::store::{InboxStore, Recorded, StoreTransaction};
use relaybox::testing::eventually;
use sqlx::postgres::PgPoolOptions;
use sqlx::{Connection, PgConnection};

use super::*;

const DEADLINE: Duration = Duration::from_secs(180);
const PID: &str = "SELECT pg_backend_pid()::bigint";

async fn of_connections(h: &Postgres, count: u32) -> PostgresStore {
    let pool = PgPoolOptions::new().max_connections(count);
    PostgresStore::new(pool.connect(&h.url).await.unwrap())
}

async fn number(transaction: &mut StoreTransaction<sqlx::Postgres>, sql: &str) -> i64 {
    <Postgres as Harness>::number(PostgresStore::connection(transaction), sql).await
}

#[tokio::test]
async fn a_commit_begins_the_next_transaction_on_its_connection() {
    let h = Postgres::start().await;
    let store = of_connections(&h, 2).await;
    let mut transaction = store.begin().await.unwrap();
    let first = number(&mut transaction, PID).await;
    for n in 1..=3 {
        let key = format!("m-{n}");
        let recorded = store.record(&mut transaction, "c", &[&key]).await.unwrap();
        assert_eq!(recorded, [Recorded::First]);
        let insert = format!("INSERT INTO work (id) VALUES ({n})");
        let connection = PostgresStore::connection(&mut transaction);
        assert!(Postgres::execute(connection, &insert).await);
        Postgres::nested(connection, "SELECT 1").await;
        let next = store.commit_and_begin(transaction).await.unwrap();
        transaction = next.expect("the pool has another connection");
        assert_eq!(h.number("SELECT count(*) FROM work").await, n);
        assert_eq!(number(&mut transaction, PID).await, first);
    }
    let connection = PostgresStore::connection(&mut transaction);
    assert!(Postgres::execute(connection, "INSERT INTO work (id) VALUES (4)").await);
    store.rollback(transaction).await.unwrap();
    assert_eq!(h.number("SELECT count(*) FROM work").await, 3);
}

#[tokio::test]
async fn a_transaction_that_was_begun_and_not_used_gives_its_connection_back() {
    let h = Postgres::start().await;
    let store = of_connections(&h, 2).await;
    let mut transaction = store.begin().await.unwrap();
    let pid = number(&mut transaction, PID).await;
    let next = store.commit_and_begin(transaction).await.unwrap();
    drop(next.expect("the pool has another connection"));
    eventually(DEADLINE, "it is back", || async {
        store.pool().num_idle() == store.pool().size() as usize
    })
    .await;
    let idle =
        format!("SELECT count(*) FROM pg_stat_activity WHERE pid = {pid} AND state = 'idle'");
    assert_eq!(h.number(&idle).await, 1, "the same, in no transaction");
    // Whoever gets it now begins a transaction of their own, not a savepoint in one of ours.
    let mut borrowed = Vec::new();
    for n in 1..=2 {
        let mut connection = store.pool().acquire().await.unwrap();
        let mut transaction = connection.begin().await.unwrap();
        let insert = format!("INSERT INTO work (id) VALUES ({n})");
        assert!(Postgres::execute(&mut transaction, &insert).await);
        transaction.commit().await.unwrap();
        borrowed.push(connection);
        assert_eq!(h.number("SELECT count(*) FROM work").await, n);
    }
}

#[tokio::test]
async fn a_pool_that_has_nothing_else_to_give_gets_its_connection_back() {
    let h = Postgres::start().await;
    let store = of_connections(&h, 2).await;
    let other = store.pool().acquire().await.unwrap();
    let transaction = store.begin().await.unwrap();
    assert!(store.commit_and_begin(transaction).await.unwrap().is_none());
    let transaction = store.begin().await.unwrap();
    drop(other);
    eventually(DEADLINE, "the other is back", || async {
        store.pool().num_idle() == 1
    })
    .await;
    assert!(store.commit_and_begin(transaction).await.unwrap().is_some());
}

#[tokio::test]
async fn a_connection_goes_back_after_so_many_transactions() {
    let h = Postgres::start().await;
    for (max, expected) in [(0, 1), (1, 1), (2, 2), (5, 5)] {
        let store = of_connections(&h, 2).await.with_in_a_row_max(max);
        let mut transaction = store.begin().await.unwrap();
        let mut in_a_row = 1;
        while let Some(next) = store.commit_and_begin(transaction).await.unwrap() {
            in_a_row += 1;
            transaction = next;
        }
        assert_eq!(in_a_row, expected, "at most {max}");
    }
}

async fn swallows_an_error(db: &mut PgConnection) {
    assert!(!Postgres::execute(db, "SELECT 1/0").await);
}

async fn rolls_back(db: &mut PgConnection) {
    assert!(Postgres::execute(db, "ROLLBACK").await);
}

async fn commits(db: &mut PgConnection) {
    assert!(Postgres::execute(db, "COMMIT").await);
}

async fn leaves_an_aborted_savepoint(db: &mut PgConnection) {
    let sql = "SAVEPOINT mine; SELECT 1/0";
    assert!(!Postgres::execute(db, sql).await);
}

#[tokio::test]
async fn only_what_was_committed_is_reported_so_also_of_the_next_transaction() {
    let h = Postgres::start().await;
    let store = of_connections(&h, 2).await;
    for code in ["25P02", "25P01", "25P01", "25P02"].iter().enumerate() {
        for is_next in [false, true] {
            let mut transaction = store.begin().await.unwrap();
            if is_next {
                let next = store.commit_and_begin(transaction).await.unwrap();
                transaction = next.expect("the pool has another connection");
            }
            let key = format!("m-{}-{is_next}", code.0);
            store.record(&mut transaction, "c", &[&key]).await.unwrap();
            let db = PostgresStore::connection(&mut transaction);
            match code.0 {
                0 => swallows_an_error(db).await,
                1 => rolls_back(db).await,
                2 => commits(db).await,
                _ => leaves_an_aborted_savepoint(db).await,
            }
            let error = store.commit_and_begin(transaction).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Handler, "{error:?}");
            assert!(error.to_string().contains(code.1), "{error}");
        }
    }
    let recorded = "SELECT count(*) FROM relaybox_inbox WHERE message_id NOT LIKE 'm-2-%'";
    assert_eq!(h.number(recorded).await, 0);
}

#[tokio::test]
async fn a_savepoint_that_a_handler_left_open_is_committed_and_its_connection_closed() {
    let h = Postgres::start().await;
    let store = of_connections(&h, 2).await;
    let mut transaction = store.begin().await.unwrap();
    let pid = number(&mut transaction, PID).await;
    let db = PostgresStore::connection(&mut transaction);
    let mut savepoint = db.begin().await.unwrap();
    let insert = "INSERT INTO work (id) VALUES (1)";
    assert!(Postgres::execute(&mut savepoint, insert).await);
    std::mem::forget(savepoint);
    assert!(store.commit_and_begin(transaction).await.unwrap().is_none());
    assert_eq!(h.number("SELECT count(*) FROM work").await, 1);
    h.until_none(&format!(
        "SELECT count(*) FROM pg_stat_activity WHERE pid = {pid}"
    ))
    .await;
}
