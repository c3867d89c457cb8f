//! Messages that end the process that handles them.

use std::ops::RangeInclusive;

use super::judge::Allowed;
use super::*;

const MESSAGES: usize = 40;
const POISON: [usize; 2] = [13, 30];
/// Each is told from its neighbours at its second death, and costs one more for each rung. Both may have been in work when
/// the first died of one of them, which spares the other one death.
const DEATHS: RangeInclusive<usize> = 7..=8;

over_each_broker! {
    a_message_that_ends_its_process_becomes_a_dead_letter_and_its_neighbours_are_unharmed
}

async fn a_message_that_ends_its_process_becomes_a_dead_letter_and_its_neighbours_are_unharmed(
    product: Product,
) {
    let scene = poisoned("alone", product, Database::postgres().await).await;
    found(&scene, &["a"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn neighbours_in_another_member_are_unharmed_too() {
    for product in [Product::RabbitMq, Product::Nats, Product::Kafka] {
        let database = Database::postgres().await;
        let scene = poisoned("beside another", product, database).await;
        found(&scene, &["a", "b"]).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_ends_its_process_is_found_with_the_inbox_in_a_file() {
    let directory = tempfile::tempdir().unwrap();
    let database = Database::sqlite(&directory).await;
    let scene = poisoned("SQLite", Product::RabbitMq, database).await;
    found(&scene, &["a"]).await;
}

async fn poisoned(name: &str, product: Product, database: Database) -> Scene {
    let poison = POISON.map(|n| (n, Kind::Abort));
    Scene::new(name, product, database, &kinds(MESSAGES, &poison), &[]).await
}

async fn found(scene: &Scene, members: &[&'static str]) {
    let deaths = scene.run_to_the_end(members, *DEATHS.end()).await;
    println!("{}: {deaths} deaths", scene.name);
    assert!(DEATHS.contains(&deaths), "{}: {deaths} deaths", scene.name);
    // Each death may undo the acknowledgement of copies: on Kafka it is committed later.
    let second_copies = match scene.place.product {
        Product::Kafka => deaths,
        Product::RabbitMq | Product::Nats => 1,
    };
    let allowed = Allowed {
        blames: 0..=0,
        second_copies,
    };
    scene.judge(allowed).await;
}
