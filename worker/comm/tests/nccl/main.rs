//! The NCCL binding against a stand-in that does real sums over host memory and fails when it is told to.
mod stand_in;

use comm::{
    Comm, local,
    nccl::{DataType, Group, Nccl, NcclError, Stream, Sum},
};
use stand_in::folder;
use std::{
    ffi::{c_int, c_void},
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

const PATIENT: Duration = Duration::from_secs(60);

fn nccl() -> Nccl {
    Nccl::open(&[folder().to_owned()]).expect("the stand-in")
}

/// Functions of the stand-in that NCCL doesn't have.
struct Fake(libloading::Library);

impl Fake {
    fn new() -> Self {
        // SAFETY: our own library.
        Fake(unsafe { libloading::Library::new(folder().join("libnccl.so.2")) }.expect("opened"))
    }
    fn fault(&self, which: c_int, rank: c_int) {
        // SAFETY: as the source declares it.
        unsafe {
            self.0.get::<unsafe extern "C" fn(c_int, c_int) -> c_int>(b"fakeFault\0").expect("there")(
                which, rank,
            )
        };
    }
    fn live(&self) -> c_int {
        // SAFETY: as the source declares it.
        unsafe { self.0.get::<unsafe extern "C" fn() -> c_int>(b"fakeLive\0").expect("there")() }
    }
    fn stream(&self) -> Stream {
        // SAFETY: as the source declares it.
        Stream(unsafe {
            self.0.get::<unsafe extern "C" fn() -> *mut c_void>(b"fakeStream\0").expect("there")()
        })
    }
    fn is_done(&self, stream: Stream) -> bool {
        // SAFETY: as the source declares it.
        unsafe {
            self.0.get::<unsafe extern "C" fn(*mut c_void) -> c_int>(b"fakePending\0").expect("there")(
                stream.0,
            ) == 0
        }
    }
}

/// The stand-in's faults hold for the whole process: one test at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    let guard = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    Fake::new().fault(0, -1);
    guard
}

/// Runs `rank` in a thread for each rank, with a way to meet.
fn each<T: Send>(world: usize, rank: impl Fn(&dyn Comm) -> T + Sync) -> Vec<T> {
    thread::scope(|s| {
        let rank = &rank;
        let threads: Vec<_> = local::group(world).into_iter().map(|c| s.spawn(move || rank(&c))).collect();
        threads.into_iter().map(|t| t.join().expect("no panic")).collect()
    })
}

fn address<T>(x: &mut [T]) -> u64 {
    x.as_mut_ptr() as u64
}

fn value(rank: usize, i: usize) -> f32 {
    (rank * 100 + i) as f32
}

#[test]
fn collectives_move_and_add_up() {
    let _alone = alone();
    for world in [1, 2, 3, 5] {
        let fake = Fake::new();
        each(world, |others| {
            let group = Group::meet(&nccl(), others, PATIENT).expect("met");
            let (rank, stream, n) = (group.rank(), Fake::new().stream(), 7);
            assert_eq!((rank, group.world()), (others.rank(), world));
            let done = |what: &str| group.finish(what, || Fake::new().is_done(stream)).expect("finished");
            let mut own: Vec<f32> = (0..n).map(|i| value(rank, i)).collect();
            let mut all = vec![f32::NAN; n * world];
            let mut part = vec![f32::NAN; n];
            // SAFETY: the vectors live until the work is finished.
            unsafe {
                group
                    .all_gather(address(&mut all), address(&mut own), n, DataType::F32, stream)
                    .expect("given");
                done("gather");
                assert!((0..n * world).all(|i| all[i] == value(i / n, i % n)));
                group
                    .reduce_scatter(
                        address(&mut part),
                        address(&mut all),
                        n,
                        DataType::F32,
                        Sum::Plain,
                        stream,
                    )
                    .expect("given");
                done("scatter");
                assert!((0..n).all(|i| part[i] == value(rank, i) * world as f32));
                group.all_reduce(address(&mut own), n, DataType::F32, Sum::Mean, stream).expect("given");
                done("reduce");
                let mean = |i| (0..world).map(|r| value(r, i)).sum::<f32>() / world as f32;
                assert!((0..n).all(|i| own[i] == mean(i)));
                part.fill(rank as f32);
                group.broadcast(address(&mut part), n, DataType::F32, world - 1, stream).expect("given");
                done("broadcast");
            }
            assert!(part.iter().all(|x| *x == (world - 1) as f32));
            exchange(&group, stream, &done);
        });
        assert_eq!(fake.live(), 0, "every communicator was given up");
    }
}

/// Rank r sends r + to + 1 bytes to rank `to`.
fn exchange(group: &Group, stream: Stream, done: &dyn Fn(&str)) {
    let (rank, world) = (group.rank(), group.world());
    let mut out: Vec<Vec<u8>> = (0..world).map(|to| vec![(rank * 16 + to) as u8; rank + to + 1]).collect();
    let mut into: Vec<Vec<u8>> = (0..world).map(|from| vec![255; rank + from + 1]).collect();
    let list = |v: &mut Vec<Vec<u8>>| {
        v.iter_mut().enumerate().map(|(p, x)| (p, address(x), x.len())).collect::<Vec<_>>()
    };
    let (sends, receives) = (list(&mut out), list(&mut into));
    // SAFETY: the vectors live until the work is finished.
    unsafe { group.exchange(&sends, &receives, DataType::U8, stream) }.expect("given");
    done("exchange");
    for (from, got) in into.iter().enumerate() {
        assert!(got.iter().all(|x| *x == (from * 16 + rank) as u8), "from {from}: {got:?}");
    }
    let nobody = [(world, 0, 1)];
    // SAFETY: refused before anything is touched.
    let refused = unsafe { group.exchange(&nobody, &[], DataType::U8, stream) };
    assert!(matches!(refused, Err(NcclError::Meeting(_))));
}

#[test]
fn without_a_library_every_place_is_named() {
    let Err(e) = Nccl::open(&["/no/such/folder".into()]).map(|_| ()) else {
        return eprintln!("this machine has NCCL");
    };
    let text = e.to_string();
    assert!(text.contains("/no/such/folder/libnccl.so.2") && text.contains("LD_LIBRARY_PATH"), "{text}");
    assert!(nccl().describe().starts_with("NCCL 2.27.3 (/"), "{}", nccl().describe());
}

/// Every rank learns why nobody can begin.
#[test]
fn a_meeting_that_fails_fails_for_all() {
    let _alone = alone();
    let fake = Fake::new();
    fake.fault(1, -1);
    for result in each(3, |others| Group::meet(&nccl(), others, PATIENT).map(|_| ())) {
        let text = result.expect_err("no id").to_string();
        assert!(
            text.contains("rank 0 has no id: ncclGetUniqueId failed: unhandled system error: injected (2)"),
            "{text}"
        );
    }
    fake.fault(2, 1);
    let began = Instant::now();
    for result in each(3, |others| Group::meet(&nccl(), others, Duration::from_millis(200)).map(|_| ())) {
        let e = result.expect_err("rank 1 never joins");
        assert!(matches!(e, NcclError::Timeout { .. }) && e.to_string().contains("is a rank missing"), "{e}");
    }
    assert!(began.elapsed() < Duration::from_secs(30));
    assert_eq!(fake.live(), 0);
}

/// A peer dies while the others join: who hears of it doesn't wait for the limit.
#[test]
fn an_abort_ends_a_meeting() {
    let _alone = alone();
    let fake = Fake::new();
    fake.fault(2, 1);
    let began = Instant::now();
    let all = each(3, |others| {
        thread::scope(|s| {
            if others.rank() == 0 {
                // as the session does, for a rank that waits
                s.spawn(|| {
                    thread::sleep(Duration::from_millis(100));
                    others.abort("rank 1 was killed");
                });
            }
            Group::meet(&nccl(), others, PATIENT).map(|_| ())
        })
    });
    for result in all {
        let text = result.expect_err("aborted").to_string();
        assert!(text.contains("rank 1 was killed"), "{text}");
    }
    assert!(began.elapsed() < PATIENT / 2, "{:?}", began.elapsed());
    assert_eq!(fake.live(), 0);
}

/// What a group's work ends with under a fault, by rank: here rank 0 sums with peers.
fn under(fault: c_int, rank: c_int, limit: Duration) -> Vec<NcclError> {
    let fake = Fake::new();
    let errors = each(2, |others| {
        let mut group = Group::meet(&nccl(), others, PATIENT).expect("met");
        group.set_limit(limit);
        others.barrier().expect("all have met");
        if group.rank() == 0 {
            Fake::new().fault(fault, rank);
        }
        others.barrier().expect("the fault is set");
        let (stream, mut x) = (Fake::new().stream(), vec![1.0f32; 4]);
        // SAFETY: the vector lives until the work is finished or given up.
        let given = unsafe { group.all_reduce(address(&mut x), 4, DataType::F32, Sum::Plain, stream) };
        let first = given
            .and_then(|()| group.finish("a sum", || Fake::new().is_done(stream)))
            .err()
            .unwrap_or_else(|| NcclError::Meeting("it went well".into()));
        others.barrier().expect("both are through");
        if fault != 0 && !matches!(first, NcclError::Meeting(_)) {
            // later calls say the same, and the stream is free: no kernel waits for a peer any more
            // SAFETY: refused before anything is touched.
            let later = unsafe { group.broadcast(address(&mut x), 4, DataType::F32, 0, stream) };
            assert_eq!(later, Err(first.clone()));
            assert!(Fake::new().is_done(stream));
        }
        first
    });
    assert_eq!(fake.live(), 0);
    errors
}

#[test]
fn errors_of_the_library_end_the_work() {
    let _alone = alone();
    // the communicator fails while rank 1 waits
    let e = under(3, 1, Duration::from_secs(5))[1].to_string();
    assert!(e.contains("remote process exited or there was a network error: injected (6)"), "{e}");
}

#[test]
fn a_refused_call_is_an_error_at_once() {
    let _alone = alone();
    let limit = Duration::from_millis(300);
    let errors = under(4, 0, limit);
    assert!(
        matches!(&errors[0], NcclError::Call { what, code: 2, .. } if what == "ncclAllReduce"),
        "{errors:?}"
    );
    assert!(matches!(errors[1], NcclError::Timeout { .. }), "{errors:?}");
}

#[test]
fn work_that_never_ends_has_a_limit() {
    let _alone = alone();
    for e in under(5, -1, Duration::from_millis(200)) {
        assert_eq!(
            e.to_string(),
            "a sum did not end within 0.2 s: is a rank missing, or can't its host be reached?"
        );
    }
}

/// A peer died: whoever learns it aborts the group, and a rank that waits for the peer returns long before any limit.
#[test]
fn abort_frees_a_rank_that_waits() {
    let _alone = alone();
    let took = each(2, |others| {
        let group = Group::meet(&nccl(), others, PATIENT).expect("met");
        if group.rank() == 1 {
            return Duration::ZERO; // dies: never gives its part
        }
        let (stream, mut x) = (Fake::new().stream(), vec![1.0f32; 4]);
        // SAFETY: the vector lives until the work is given up.
        unsafe { group.all_reduce(address(&mut x), 4, DataType::F32, Sum::Plain, stream) }.expect("given");
        thread::scope(|s| {
            s.spawn(|| {
                thread::sleep(Duration::from_millis(50));
                group.abort("rank 1 died");
                group.abort("a later reason");
            });
            let began = Instant::now();
            let e = group.finish("a sum", || Fake::new().is_done(stream)).expect_err("aborted");
            assert_eq!(e, NcclError::Aborted("rank 1 died".into()));
            began.elapsed()
        })
    });
    assert!(took[0] < PATIENT / 2, "{took:?}");
    assert_eq!(Fake::new().live(), 0);
}
