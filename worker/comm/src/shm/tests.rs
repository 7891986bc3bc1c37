//! Ranks as threads of the test, each with a mapping of its own: what a segment refuses, and what a peer's nonsense does.
use super::*;
use nix::sys::memfd::{MFdFlags, memfd_create};
use std::{
    sync::atomic::{AtomicUsize, Ordering::SeqCst},
    thread,
};

fn memfd() -> OwnedFd {
    memfd_create("comm-test", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING).unwrap()
}

fn short() -> Limits {
    Limits { join: Duration::from_secs(30), wait: Duration::from_secs(30), staging: 4096 }
}

/// Joins `world` ranks and runs `rank` as each of them; results by rank.
fn each<T: Send>(world: usize, limits: Limits, rank: impl Fn(ShmComm) -> T + Sync) -> Vec<T> {
    let fd = memfd();
    thread::scope(|s| {
        let (rank, fd) = (&rank, &fd);
        let one = |r: usize| rank(ShmComm::join(fd.try_clone().unwrap(), r, world, limits).unwrap());
        let threads: Vec<_> = (0..world).map(|r| s.spawn(move || one(r))).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

fn refused(fd: &OwnedFd, rank: usize, world: usize, limits: Limits) -> String {
    ShmComm::join(fd.try_clone().unwrap(), rank, world, limits).err().unwrap().to_string()
}

#[test]
fn a_foreign_or_unfit_segment_is_refused() {
    let fd = memfd();
    nix::sys::uio::pwrite(&fd, b"something else", 0).unwrap();
    assert!(refused(&fd, 0, 2, short()).contains("magic and layout version"));
    assert!(abort(fd.as_fd(), "x").is_err());
    let fd = memfd();
    drop(ShmComm::join(fd.try_clone().unwrap(), 0, 1, short()).unwrap());
    assert!(refused(&fd, 0, 2, short()).contains("world"));
    let fd = memfd();
    let alone = ShmComm::join(fd.try_clone().unwrap(), 0, 1, short()).unwrap();
    assert!(refused(&fd, 0, 1, Limits { staging: 8192, ..short() }).contains("staging"));
    let ended = alone.barrier().unwrap_err().to_string();
    assert!(ended.contains("staging"), "a rank that can't take part ends the group: {ended}");
    let fd = memfd();
    assert!(refused(&fd, 2, 2, short()).contains("rank 2 in a group of 2"));
    assert!(refused(&memfd(), 0, 0, short()).contains("not 0"));
    let nothing = std::fs::File::open("/dev/null").unwrap();
    assert!(ShmComm::join(nothing.into(), 0, 1, short()).is_err());
}

#[test]
fn a_rank_joins_once() {
    let fd = memfd();
    let _first = ShmComm::join(fd.try_clone().unwrap(), 0, 1, short()).unwrap();
    assert!(refused(&fd, 0, 1, short()).contains("rank 0 has joined already"));
}

#[test]
fn an_abort_before_the_first_rank_joins_is_seen() {
    let fd = memfd();
    abort(fd.as_fd(), "no room").unwrap();
    assert_eq!(refused(&fd, 0, 2, short()), "collective aborted: no room");
}

#[test]
fn a_long_reason_is_cut_at_a_character() {
    let long = "ä".repeat(400);
    let errors = each(2, short(), |c| {
        c.barrier().unwrap(); // both have joined
        if c.rank() == 0 {
            c.abort(&format!("x{long}"));
        }
        c.barrier().unwrap_err()
    });
    let kept = format!("x{}", "ä".repeat((segment::REASON - 1) / 2));
    assert_eq!(errors, [CommError::Aborted(kept.clone()), CommError::Aborted(kept)]);
}

#[test]
fn an_aborter_that_died_while_writing_is_survived() {
    let errors = each(2, short(), |c| {
        c.barrier().unwrap(); // both have joined
        c.seg.header().poison.store(1, SeqCst);
        c.barrier().unwrap_err().to_string()
    });
    assert!(errors.iter().all(|e| e.contains("died before it gave a reason")), "{errors:?}");
}

#[test]
fn nobody_passes_a_barrier_before_all_have_come() {
    let (world, rounds) = (4, 300);
    let came = AtomicUsize::new(0);
    each(world, short(), |c| {
        for round in 1..=rounds {
            came.fetch_add(1, SeqCst);
            c.barrier().unwrap();
            assert!(came.load(SeqCst) >= world * round);
        }
    });
    assert_eq!(came.load(SeqCst), world * rounds);
}

#[test]
fn a_wait_has_a_limit_that_names_the_missing() {
    let limits = Limits { wait: Duration::from_millis(50), ..short() };
    let done = std::sync::Barrier::new(3);
    let errors = each(3, limits, |c| {
        let first = (c.rank() == 0).then(|| c.barrier().unwrap_err());
        done.wait(); // the others stay in the group until rank 0 has given up
        first.unwrap_or_else(|| c.barrier().unwrap_err())
    });
    let CommError::Io(error) = &errors[0] else { panic!("{errors:?}") };
    assert!(error.contains("in barrier (call 0) for ranks 1, 2 of 3"), "{error}");
    assert_eq!(errors[1..], [CommError::Aborted(error.clone()), CommError::Aborted(error.clone())]);
}

#[test]
fn a_panic_in_a_sink_frees_the_peers() {
    let errors = each(2, short(), |c| {
        let x = Buf::zeroed(8);
        let fold = || {
            c.reduce_scatter_fold(&[x.view()], &[4, 4], &mut |from, _, _| {
                assert!(c.rank() == 0 || from == 0, "on purpose");
            })
        };
        let first = std::panic::catch_unwind(std::panic::AssertUnwindSafe(fold));
        assert_eq!(first.is_err(), c.rank() == 1);
        c.barrier().unwrap_err().to_string()
    });
    assert!(errors.iter().all(|e| e.contains("rank 1 panicked inside a collective")), "{errors:?}");
}

/// Rank 1 enters rounds as it should but publishes `number` where rank 0 looks for a length; rank 0's error.
fn lied_to(number: u64, call: Call, honest: impl Fn(&ShmComm) -> Result<()> + Sync) -> CommError {
    let mut errors = each(2, short(), |c| {
        if c.rank() == 0 {
            return honest(&c).err();
        }
        let slot = 1;
        c.seg.table(1, slot).iter().for_each(|w| w.store(number, SeqCst));
        c.seg.post(1, 1, call.numbered(0).words());
        while c.healthy().is_ok() {
            thread::yield_now();
        }
        None
    });
    errors.remove(0).unwrap()
}

#[test]
fn lengths_that_a_peer_makes_up_are_refused() {
    let at = Place { rank: 1, world: 2 };
    for lie in [u64::MAX, 1 << 40] {
        let e = lied_to(lie, Call::all_gather_bytes(0).unwrap(), |c| c.all_gather_bytes(b"x").map(drop));
        assert!(e.to_string().contains("rank 1 gives"), "{e}");
        let call = Call::reduce_scatter_fold(at, [].into_iter(), &[1, 1]).unwrap();
        let e = lied_to(lie, call, |c| c.reduce_scatter_fold(&[], &[1, 1], &mut |_, _, _| ()));
        assert!(e.to_string().contains("partials"), "{e}");
        let call = Call::all_to_all_of(at, (0, 4), &[0, 0], (0, 4), &[0, 0]).unwrap();
        let e = lied_to(lie, call, |c| {
            let (mut recv, send) = (Buf::zeroed(2), Buf::zeroed(2));
            c.all_to_all(recv.view_mut(), &[1, 1], send.view(), &[1, 1])
        });
        assert!(e.to_string().contains("rank 1 sends"), "{e}");
    }
}
