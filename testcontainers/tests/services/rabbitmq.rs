//! RabbitMQ, started for real.

use std::time::Instant;

use relaybox_testcontainers::{RabbitMq, RabbitMqOptions, ServiceError, Way, shared_rabbitmq};

use super::{Owner, runs, until, until_ready_again};

#[tokio::test]
async fn rabbitmq_answers_and_takes_commands() {
    let started = Instant::now();
    let rabbitmq = shared_rabbitmq().await;
    println!(
        "RabbitMQ by {} after {:?}",
        rabbitmq.way(),
        started.elapsed()
    );
    assert!(rabbitmq.is_ready().await);
    if rabbitmq.way() == Way::LocalProcess {
        let flags = rabbitmq.ctl(&["list_feature_flags"]).await.unwrap();
        assert!(flags.contains("stream_queue\tenabled"), "{flags}");
        let refused = rabbitmq.ctl(&["no_such_command"]).await;
        assert!(matches!(refused, Err(ServiceError::Failed { .. })));
    }
    let address = rabbitmq.address();
    assert!(rabbitmq.url_by("elsewhere:1").contains("@elsewhere:1/"));
    assert!(format!("{rabbitmq:?}").contains(&address));
    assert!(!format!("{rabbitmq:?}").contains("guest"));
}

#[tokio::test]
async fn rabbitmq_keeps_its_data_through_kill_and_restart() {
    let options = RabbitMqOptions::default().with_local_process();
    let rabbitmq = RabbitMq::start_with(options).await.unwrap();
    let add = ["add_vhost", "kept"];
    rabbitmq.ctl(&add).await.unwrap();
    let kept = || async {
        rabbitmq
            .ctl(&["list_vhosts"])
            .await
            .unwrap()
            .contains("kept")
    };

    rabbitmq.kill().await.unwrap();
    assert!(!rabbitmq.is_ready().await);
    let started = Instant::now();
    rabbitmq.start_again().await.unwrap();
    println!("RabbitMQ again after {:?}", started.elapsed());
    assert!(kept().await);
    let started = Instant::now();
    rabbitmq.restart().await.unwrap();
    println!("RabbitMQ restarted after {:?}", started.elapsed());
    assert!(kept().await);

    rabbitmq.stop().await.unwrap();
    assert!(!rabbitmq.is_ready().await);
    rabbitmq.cont().await.unwrap();
    until_ready_again(|| rabbitmq.is_ready()).await;
}

#[test]
fn a_sigkilled_owner_takes_its_rabbitmq_along() {
    let mut owner = Owner::of("rabbitmq");
    let family = children(owner.server);
    assert_eq!(family.len(), 2, "the node and its port mapper: {family:?}");
    owner.process.kill().unwrap();
    owner.service_is_gone();
    until("node and port mapper are gone", || {
        !family.iter().copied().any(runs)
    });
}

/// The processes that have this one as their parent.
fn children(parent: u32) -> Vec<u32> {
    let is_child = |pid: &u32| {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let told = status.lines().find_map(|line| line.strip_prefix("PPid:"));
        told.is_some_and(|told| told.trim() == parent.to_string())
    };
    std::fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| entry.unwrap().file_name().to_str()?.parse().ok())
        .filter(is_child)
        .collect()
}
