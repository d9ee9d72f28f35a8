//! Whose turn it is within the process.
//!
//! First come, first served: nobody overtakes who came before and wants one of
//! the same things. Who wants several waits in all their lines at once. One
//! after the other would be slower than their number says: each line would
//! stand still for whoever waits in the next, and so on from GPU to GPU.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

/// Everybody who has or awaits a turn. Clones are the same.
#[derive(Debug)]
pub(crate) struct Turns<K>(Arc<Mutex<Places<K>>>);

/// In the order in which they came: a place has its turn as soon as none before
/// it wants any of the same.
#[derive(Debug)]
struct Places<K> {
    next: u64,
    all: BTreeMap<u64, Place<K>>,
}

#[derive(Debug)]
struct Place<K> {
    wants: BTreeSet<K>,
    /// Who is still waiting.
    call: Option<oneshot::Sender<()>>,
}

/// A place: a turn, or on the way to one. It is given up when dropped.
#[derive(Debug)]
pub(crate) struct Turn<K: Ord> {
    places: Arc<Mutex<Places<K>>>,
    number: u64,
}

impl<K> Default for Turns<K> {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(Places { next: 0, all: BTreeMap::new() })))
    }
}

impl<K: Ord> Turns<K> {
    /// Waits until nobody else has any of some things, and tells whether
    /// somebody had.
    pub(crate) async fn take(&self, wants: BTreeSet<K>) -> (Turn<K>, bool) {
        let (call, mut called) = oneshot::channel();
        let turn = {
            let mut places = lock(&self.0);
            let number = places.next;
            places.next += 1;
            places.all.insert(number, Place { wants, call: Some(call) });
            places.call();
            Turn { places: Arc::clone(&self.0), number }
        };
        let waited = called.try_recv().is_err();
        if waited {
            // The sender is kept as long as `turn`.
            let _ = called.await;
        }
        (turn, waited)
    }
}

impl<K: Ord> Places<K> {
    /// Calls all whose turn it is.
    fn call(&mut self) {
        let mut wanted = BTreeSet::new();
        for Place { wants, call } in self.all.values_mut() {
            let is_next = wants.iter().all(|thing| !wanted.contains(thing));
            wanted.extend(wants.iter());
            if is_next && let Some(call) = call.take() {
                // Who does not listen any more gives its place up by itself.
                let _ = call.send(());
            }
        }
    }
}

impl<K: Ord> Drop for Turn<K> {
    fn drop(&mut self) {
        let mut places = lock(&self.places);
        places.all.remove(&self.number);
        places.call();
    }
}

fn lock<K>(places: &Mutex<Places<K>>) -> MutexGuard<'_, Places<K>> {
    places.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    type Waiting<'a> = std::pin::Pin<Box<dyn Future<Output = (Turn<char>, bool)> + 'a>>;

    /// Asks for things, each a letter.
    fn ask<'a>(turns: &'a Turns<char>, things: &str) -> Waiting<'a> {
        Box::pin(turns.take(things.chars().collect()))
    }

    fn now(waiting: &mut Waiting<'_>) -> Option<Turn<char>> {
        waiting.now_or_never().map(|(turn, _)| turn)
    }

    #[test]
    fn whoever_came_first_is_first_at_each_thing_and_nobody_waits_for_what_others_only_wait_for() {
        let turns = Turns::default();
        let a = now(&mut ask(&turns, "a")).unwrap();
        let mut pair = ask(&turns, "ab");
        assert!(now(&mut pair).is_none());
        // Free, but the pair was there before.
        let mut b = ask(&turns, "b");
        assert!(now(&mut b).is_none());
        let c = now(&mut ask(&turns, "c")).unwrap();
        // Behind b and c at once, and not behind whoever comes later.
        let mut bc = ask(&turns, "bc");
        assert!(now(&mut bc).is_none());
        let mut later = ask(&turns, "c");
        assert!(now(&mut later).is_none());
        drop(c);
        assert!(now(&mut later).is_none() && now(&mut bc).is_none());
        drop(a);
        let pair = now(&mut pair).unwrap();
        assert!(now(&mut b).is_none());
        drop(pair);
        drop(now(&mut b).unwrap());
        drop(now(&mut bc).unwrap());
        now(&mut later).unwrap();
    }

    #[test]
    fn a_place_that_is_given_up_holds_nobody_up() {
        let turns = Turns::default();
        let a = now(&mut ask(&turns, "a")).unwrap();
        let mut pair = ask(&turns, "ab");
        let mut b = ask(&turns, "b");
        assert!(now(&mut pair).is_none() && now(&mut b).is_none());
        drop(pair);
        // Called, and gone before it could hear of it.
        let mut second = ask(&turns, "a");
        let mut third = ask(&turns, "a");
        assert!(now(&mut second).is_none() && now(&mut third).is_none());
        drop(a);
        drop(second);
        now(&mut third).unwrap();
        now(&mut b).unwrap();
        assert!(lock(&turns.0).all.is_empty());
    }
}
