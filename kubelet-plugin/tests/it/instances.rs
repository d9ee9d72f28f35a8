//! Which instance publishes, told by what a process sees of the others.

use std::path::Path;
use std::time::Duration;

use kerf_kubelet_plugin::{Instances, Lead};

/// Generous: it is reached only by a failure.
const LIMIT: Duration = Duration::from_mins(1);

async fn lead(instances: &mut Instances) -> Lead {
    tokio::time::timeout(LIMIT, instances.lead()).await.unwrap().unwrap()
}

/// Whether something stays undone although everybody had a turn.
async fn waits<T>(work: impl Future<Output = T>) -> bool {
    tokio::time::timeout(Duration::from_millis(200), work).await.is_err()
}

fn files(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder.join("state/instances")).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = names.filter(|name| !name.starts_with('.')).collect();
    names.sort_unstable();
    names
}

#[tokio::test]
async fn the_younger_waits_until_the_elder_hands_over_and_the_elder_until_it_ends() {
    let folder = tempfile::tempdir().unwrap();
    let mut elder = Instances::join(folder.path()).unwrap();
    let term = lead(&mut elder).await;
    assert!(waits(elder.overtaken()).await, "nobody is there to overtake it");

    let mut younger = Instances::join(folder.path()).unwrap();
    let leading = tokio::spawn(async move {
        let term = lead(&mut younger).await;
        (younger, term)
    });
    tokio::time::timeout(LIMIT, elder.overtaken()).await.expect("it sees the younger").unwrap();
    assert!(!leading.is_finished(), "the elder has not handed over");
    drop(term);
    let (mut younger, term) = tokio::time::timeout(LIMIT, leading).await.unwrap().unwrap();
    assert!(waits(younger.overtaken()).await, "the elder does not overtake it");

    let again = tokio::spawn(async move {
        let term = lead(&mut elder).await;
        (elder, term)
    });
    // As when it is killed: the kernel lets go of both locks.
    drop((term, younger));
    let (elder, _term) = tokio::time::timeout(LIMIT, again).await.unwrap().unwrap();
    drop(elder);
    let third = Instances::join(folder.path()).unwrap();
    assert_eq!(files(folder.path()).len(), 1, "files of the dead are removed");
    drop(third);
}

#[tokio::test]
async fn one_leads_whatever_becomes_of_the_folder() {
    let folder = tempfile::tempdir().unwrap();
    let mut only = Instances::join(folder.path()).unwrap();
    let term = lead(&mut only).await;
    std::fs::remove_dir_all(folder.path().join("state")).unwrap();
    tokio::time::timeout(LIMIT, only.overtaken()).await.expect("others do not see it any more").unwrap();
    drop(term);
    let _term = lead(&mut only).await;
    assert_eq!(files(folder.path()).len(), 1);
}

#[tokio::test]
async fn of_many_that_start_at_once_one_leads() {
    let folder = tempfile::tempdir().unwrap();
    let leads = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let (path, leads) = (folder.path().to_owned(), leads.clone());
        tasks.spawn(async move {
            let mut own = Instances::join(&path).unwrap();
            let term = lead(&mut own).await;
            let before = leads.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            assert_eq!(before, 0, "two lead at once");
            // Until somebody younger is there, or for good.
            let _ = tokio::time::timeout(Duration::from_millis(50), own.overtaken()).await;
            leads.fetch_sub(1, std::sync::atomic::Ordering::SeqCst);
            drop(term);
        });
    }
    while let Some(ended) = tokio::time::timeout(LIMIT, tasks.join_next()).await.expect("all lead in turn") {
        ended.unwrap();
    }
}

#[tokio::test]
async fn what_else_lies_in_the_folder_is_in_nobodys_way() {
    let folder = tempfile::tempdir().unwrap();
    let instances = folder.path().join("state/instances");
    std::fs::create_dir_all(instances.join("7/full")).unwrap();
    for name in ["07", "+9", "x", "8"] {
        std::fs::write(instances.join(name), "").unwrap();
    }
    let mut only = Instances::join(folder.path()).unwrap();
    let _term = lead(&mut only).await;
    assert!(waits(only.overtaken()).await);
    assert!(!instances.join("8").exists(), "it was a dead one's");
}
