//! The thread transport.
use crate::checks;
use comm::{Comm, CommError, local};
use device::Buf;
use std::{
    sync::atomic::{AtomicUsize, Ordering::SeqCst},
    thread,
    time::Duration,
};

/// Runs `rank` in a thread for each communicator; results by rank, None where it panicked.
fn each<T: Send>(
    group: Vec<local::LocalComm>,
    rank: impl Fn(local::LocalComm) -> T + Sync,
) -> Vec<Option<T>> {
    thread::scope(|s| {
        let rank = &rank;
        let threads: Vec<_> = group.into_iter().map(|c| s.spawn(move || rank(c))).collect();
        threads.into_iter().map(|t| t.join().ok()).collect()
    })
}

#[test]
fn conforms() {
    for world in [1, 2, 3, 4, 5, 8, 16] {
        for seed in 0..4 {
            let done = each(local::group(world), |c| checks::run(&c, seed, 40, 700));
            assert!(done.iter().all(|d| d == &Some(Ok(()))), "world {world}: {done:?}");
        }
    }
    let done = each(local::group(2), |c| checks::run(&c, 9, 12, 300_000));
    assert!(done.iter().all(|d| d == &Some(Ok(()))), "{done:?}");
}

#[test]
fn nobody_passes_a_barrier_before_all_have_come() {
    let (world, rounds) = (5, 200);
    let came = AtomicUsize::new(0);
    each(local::group(world), |c| {
        for round in 1..=rounds {
            came.fetch_add(1, SeqCst);
            c.barrier().unwrap();
            assert!(came.load(SeqCst) >= world * round);
        }
    })
    .into_iter()
    .for_each(|r| r.unwrap());
    assert_eq!(came.load(SeqCst), world * rounds);
}

#[test]
fn abort_reaches_waiting_and_later_calls() {
    let group = local::group(3);
    let errors = each(group, |c| {
        if c.rank() == 2 {
            c.abort("the disk is full");
            c.abort("a later reason");
        }
        [c.barrier().unwrap_err(), c.all_reduce(Buf::zeroed(3).view_mut()).unwrap_err()]
    });
    let aborted = CommError::Aborted("the disk is full".into());
    assert!(errors.iter().all(|e| e.as_ref() == Some(&[aborted.clone(), aborted.clone()])), "{errors:?}");
}

#[test]
fn abort_comes_from_another_thread_of_the_same_rank() {
    let group = local::group(2);
    let (first, _second) = (&group[0], &group[1]);
    thread::scope(|s| {
        let waiting = s.spawn(|| first.barrier());
        s.spawn(|| first.abort("stop"));
        assert_eq!(waiting.join().unwrap(), Err(CommError::Aborted("stop".into())));
    });
}

#[test]
fn a_rank_that_panics_or_leaves_frees_the_others() {
    let errors = each(local::group(3), |c| {
        assert!(c.rank() != 1, "on purpose");
        c.barrier().unwrap_err().to_string()
    });
    assert!(errors[0].as_ref().unwrap().contains("rank 1 panicked"), "{errors:?}");
    let errors = each(local::group(3), |c| match c.rank() {
        1 => String::new(),
        _ => c.barrier().unwrap_err().to_string(),
    });
    assert!(errors[2].as_ref().unwrap().contains("rank 1 left the group before barrier"), "{errors:?}");
    // inside a sink: the memory that peers still read stays alive until they are done
    let errors = each(local::group(3), |c| {
        let partial = Buf::zeroed(3000);
        let mut sum = 0.0;
        let sink = &mut |rank: usize, _: usize, piece: device::View<'_>| {
            assert!(c.rank() != 0 || rank != 1, "on purpose");
            sum += piece.host().iter().sum::<f32>();
        };
        c.reduce_scatter_fold(&[partial.view(), partial.view()], &[1000; 3], sink)
            .map_err(|e| e.to_string())
            .and_then(|()| c.barrier().map_err(|e| e.to_string()))
            .unwrap_err()
    });
    assert!(errors[0].is_none() && errors[1].as_ref().unwrap().contains("rank 0 panicked"), "{errors:?}");
}

#[test]
fn disagreement_is_named_by_everybody() {
    let errors = each(local::group(3), |c| match c.rank() {
        1 => c.barrier().unwrap_err(),
        _ => c.all_reduce(Buf::zeroed(5).view_mut()).unwrap_err(),
    });
    for e in errors.into_iter().flatten() {
        let CommError::Mismatch(text) = e else { panic!("{e}") };
        assert!(text.contains("rank 1 calls barrier (call 0") && text.contains("calls all_reduce"), "{text}");
    }
    let errors = each(local::group(2), |c| {
        let (mut recv, send) = (Buf::zeroed(3 + c.rank()), Buf::zeroed(4));
        let recv_counts = [[2, 1], [2, 2]][c.rank()];
        c.all_to_all(recv.view_mut(), &recv_counts, send.view(), &[2, 2]).unwrap_err()
    });
    for e in errors.into_iter().flatten() {
        assert!(e.to_string().contains("rank 1 sends 2 elements to rank 0, which expects 1"), "{e}");
    }
}

#[test]
fn wrong_arguments_fail_on_the_caller_and_free_the_peers() {
    let errors = each(local::group(2), |c| {
        let (mut recv, send) = (Buf::zeroed(4), Buf::zeroed(3 - c.rank()));
        c.all_gather(recv.view_mut(), send.view(), &[2, 2]).unwrap_err()
    });
    let wrong = "rank 0: all_gather: send has 3 elements, counts[rank] is 2";
    assert_eq!(errors[0], Some(CommError::Mismatch(wrong.into())));
    assert!(errors[1].as_ref().unwrap().to_string().contains(wrong), "{errors:?}");
}

#[test]
fn a_wait_has_a_limit_that_names_the_missing() {
    let group = local::group_with(3, Duration::from_millis(30));
    let Err(CommError::Io(error)) = group[0].barrier() else { panic!("a barrier without peers") };
    assert!(error.contains("in barrier (call 0) for ranks 1, 2 of 3"), "{error}");
    assert_eq!(group[1].barrier(), Err(CommError::Aborted(error)), "who comes later learns why");
}
