//! Runs a function that may fail on numbered items, with several threads.
use crate::error::Result;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Calls `work(state, i)` for every index `i` from 0 to `count` - 1, on at most `threads` threads,
/// each of which passes its own `state`. Each thread makes its state with `start`. Returns the
/// results in the order of the indices.
///
/// After an error no thread takes a further index, so that the results of later indices may be
/// absent. The results of all earlier indices are present.
pub(crate) fn map_indices<S, T: Send>(
    threads: usize,
    count: usize,
    start: impl Fn() -> S + Sync,
    work: impl Fn(&mut S, usize) -> Result<T> + Sync,
) -> Vec<Result<T>> {
    let next = AtomicUsize::new(0);
    let run = || {
        let (mut state, mut done) = (start(), Vec::new());
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            if i >= count {
                return done;
            }
            let result = work(&mut state, i);
            if result.is_err() {
                next.store(count, Ordering::Relaxed);
            }
            done.push((i, result));
        }
    };
    let mut done = std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads.min(count)).map(|_| scope.spawn(run)).collect();
        let mut done = run();
        for other in others {
            done.extend(other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
        done
    });
    done.sort_unstable_by_key(|(i, _)| *i);
    done.into_iter().map(|(_, result)| result).collect()
}
