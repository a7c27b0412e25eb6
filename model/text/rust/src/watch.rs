//! One thread that cancels what takes too long, for all who ask, from the first who does to the end of the process. What
//! it is handed lies in places that are never given back, and is made and dropped by those who ask: the thread itself
//! owns nothing.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use llguidance::CancellationHandle;

const PLACES: usize = 256; // at once; whoever finds none is told so

struct Waits {
    places: [Option<(Instant, CancellationHandle)>; PLACES],
    runs: bool,
    sleeps_until: Option<Instant>, // none: until somebody asks
}

static WAITS: Mutex<Waits> = Mutex::new(Waits { places: [const { None }; PLACES], runs: false, sleeps_until: None });
static WAKE: Condvar = Condvar::new();

fn waits() -> MutexGuard<'static, Waits> {
    WAITS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// As long as it lives, what it was made for is cancelled when its time is over.
pub struct Watched(usize);

impl Drop for Watched {
    fn drop(&mut self) {
        let gone = waits().places[self.0].take();
        drop(gone); // without the lock
    }
}

/// Nothing: there is no thread or no place to watch it from.
pub fn cancel_after(time: Duration, handle: CancellationHandle) -> Option<Watched> {
    let until = Instant::now() + time;
    let mut waits = waits();
    if !waits.runs {
        std::thread::Builder::new().name("text watch".into()).stack_size(64 << 10).spawn(watch).ok()?;
        waits.runs = true;
    }
    let at = waits.places.iter().position(Option::is_none)?;
    waits.places[at] = Some((until, handle));
    if waits.sleeps_until.map_or(true, |sleeps| sleeps > until) {
        waits.sleeps_until = Some(until);
        WAKE.notify_one();
    }
    Some(Watched(at))
}

fn watch() {
    let mut waits = waits();
    loop {
        let now = Instant::now();
        let mut next: Option<Instant> = None;
        for (until, handle) in waits.places.iter().flatten() {
            if *until <= now {
                handle.cancel();
            } else {
                next = Some(next.map_or(*until, |n| n.min(*until)));
            }
        }
        waits.sleeps_until = next;
        waits = match next {
            None => WAKE.wait(waits).unwrap_or_else(PoisonError::into_inner),
            Some(at) => WAKE.wait_timeout(waits, at - now).unwrap_or_else(PoisonError::into_inner).0,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cancels_what_is_late_and_nothing_else() {
        let (late, early) = (CancellationHandle::default(), CancellationHandle::default());
        let watched = cancel_after(Duration::from_millis(2), late.clone()).unwrap();
        drop(cancel_after(Duration::from_millis(1), early.clone()).unwrap());
        while !late.is_cancelled() {
            std::thread::sleep(Duration::from_millis(1));
        }
        drop(watched);
        assert!(!early.is_cancelled());
    }

    #[test]
    fn has_so_many_places() {
        let hour = Duration::from_secs(3600);
        let all: Vec<Watched> = (0..PLACES).map_while(|_| cancel_after(hour, CancellationHandle::default())).collect();
        assert!(all.len() > PLACES - 8); // another test may have some
        assert!(cancel_after(hour, CancellationHandle::default()).is_none());
        drop(all);
        assert!(cancel_after(hour, CancellationHandle::default()).is_some());
    }
}
