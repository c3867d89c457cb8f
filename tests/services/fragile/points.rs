//! A member dies at each point of its work, and another takes over.

use std::ops::RangeInclusive;

use futures_util::{FutureExt, StreamExt, stream};

use super::judge::Allowed;
use super::*;

const MESSAGES: usize = 40;
const OTHERS: [(usize, Kind); 6] = [
    (3, Kind::Fail),
    (5, Kind::Once),
    (16, Kind::Fail),
    (17, Kind::Once),
    (28, Kind::Fail),
    (31, Kind::Once),
];
const DOUBLED: [usize; 4] = [1, 9, 22, 39];
/// Deaths at a time: each member is a process with connections of its own.
const AT_A_TIME: usize = 8;
/// Leaves everything that was delivered as suspects, and a failed one among them.
const FIRST: &str = "publish:1";

/// Where a member dies.
#[derive(Debug, Clone)]
enum Death {
    /// At messages that nobody had before.
    Fresh(&'static str),
    /// At messages that another left when it died, so each start is noted. At some points it looks as if a message had ended
    /// the process, and that one is blamed.
    Suspect(&'static str, RangeInclusive<usize>),
}

const DEATHS: [Death; 19] = [
    Death::Fresh("begin:5"),
    Death::Fresh("begun:5"),
    Death::Fresh("record:5"),
    Death::Fresh("recorded:5"),
    Death::Fresh("commit:5"),
    Death::Fresh("committed:5"),
    Death::Fresh("publish:2"),
    Death::Fresh("published:2"),
    Death::Fresh("settle:5"),
    Death::Fresh("settled:5"),
    Death::Suspect("note:3", 0..=0),
    Death::Suspect("noted:3", 1..=1),
    // Some of a partition that the first had not seen yet may be committed first, and they are no suspects.
    Death::Suspect("commit:3", 0..=1),
    // Its key is recorded, so nobody asks for its start.
    Death::Suspect("committed:3", 0..=0),
    // Blamed if it failed; what it did is known of one that succeeded.
    Death::Suspect("forget:3", 0..=1),
    Death::Suspect("forgotten:3", 0..=0),
    Death::Suspect("publish:1", 0..=0),
    Death::Suspect("published:1", 0..=0),
    // One that is no suspect has no place any more when it is settled, so that a suspect may be in work.
    Death::Suspect("settled:3", 0..=1),
];

over_each_broker! {
    a_consumer_that_dies_at_any_point_loses_and_doubles_nothing
}

async fn a_consumer_that_dies_at_any_point_loses_and_doubles_nothing(product: Product) {
    let database = Database::postgres().await;
    // Boxed: so many of them side by side are too large for a stack.
    let trials = stream::iter(DEATHS)
        .map(|death| survived(death, product, database.clone()).boxed())
        .buffer_unordered(AT_A_TIME);
    trials.collect::<Vec<()>>().await;
}

async fn survived(death: Death, product: Product, database: Database) {
    let kinds = kinds(MESSAGES, &OTHERS);
    let scene = Scene::new(format!("{death:?}"), product, database, &kinds, &DOUBLED).await;
    let (point, blames) = match death {
        Death::Fresh(point) => (point, 0..=0),
        Death::Suspect(point, blames) => {
            scene.die_at(FIRST).await;
            (point, blames)
        }
    };
    scene.die_at(point).await;
    scene.run_to_the_end(&["a"], 0).await;
    let allowed = Allowed {
        blames,
        second_copies: 1,
    };
    scene.judge(allowed).await;
}
