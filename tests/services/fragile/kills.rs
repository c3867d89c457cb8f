//! Members that are killed at random moments.

use relaybox::testing::eventually;

use super::judge::Allowed;
use super::*;

const MESSAGES: usize = 120;
const ROUNDS: usize = 4;
/// Most effects between two kills.
const PROGRESS_MAX: usize = 12;

over_each_broker! {
    a_consumer_killed_at_random_moments_loses_and_doubles_nothing
}

async fn a_consumer_killed_at_random_moments_loses_and_doubles_nothing(product: Product) {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let mut others = Vec::new();
    let mut doubled = Vec::new();
    for n in 0..MESSAGES {
        match random.u8(..10) {
            0 => others.push((n, Kind::Fail)),
            1 => others.push((n, Kind::Once)),
            2 => doubled.push(n),
            _ => {}
        }
    }
    let database = Database::postgres().await;
    let name = format!("killed with seed {seed}");
    let kinds = kinds(MESSAGES, &others);
    let scene = Scene::new(name, product, database, &kinds, &doubled).await;
    for _ in 0..ROUNDS {
        let mut member = scene.start("a", None);
        let before = scene.effects().await.len();
        let wanted = (before + random.usize(1..=PROGRESS_MAX)).min(scene.effects_due());
        let awaited = format!("{}: progress", scene.name);
        eventually(DEADLINE, &awaited, || {
            assert!(!member.has_died(), "{}: it died by itself", scene.name);
            async { scene.effects().await.len() >= wanted }
        })
        .await;
        // The moment itself.
        tokio::time::sleep(Duration::from_micros(random.u64(..20_000))).await;
        member.kill();
    }
    scene.run_to_the_end(&["a"], 0).await;
    // A kill leaves one noted start at most.
    let allowed = Allowed {
        blames: 0..=ROUNDS,
        second_copies: ROUNDS,
    };
    let blames = scene.judge(allowed).await;
    println!("{}: {blames} blamed", scene.name);
}
