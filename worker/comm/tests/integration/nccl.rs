//! Tests of the NCCL binding with the emulated NCCL, which moves real data in host memory and
//! injects faults.
use crate::emulated_nccl::build_library;
use comm::{
    AbortReason, Comm,
    nccl::{CudaStream, NcclError, NcclLibrary, PeerBuffer, RawNcclComm, ncclDataType_t::*},
    thread_comm,
};
use diagnostic::{Diagnostic, codes::collective as codes};
use std::{
    ffi::{c_int, c_void},
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

/// A timeout for operations of NCCL. It is so long that no test reaches it.
const LONG_TIMEOUT: Duration = Duration::from_secs(60);

// The faults of libnccl.cpp.
const NO_FAULT: c_int = 0;
const ID_FAILS: c_int = 1;
const NEVER_JOINS: c_int = 2;
const FAILS_LATER: c_int = 3;
const REJECTS_CALLS: c_int = 4;
const NEVER_DONE: c_int = 5;
/// The rank argument of [`EmulatedNccl::inject`] for faults that do not affect one rank in
/// particular.
const NO_RANK: c_int = -1;

fn open_nccl() -> NcclLibrary {
    NcclLibrary::open(&[build_library().to_owned()]).expect("the emulated NCCL can be opened")
}

/// Calls the functions of the emulated NCCL that inject faults and inspect its state.
struct EmulatedNccl(libloading::Library);

impl EmulatedNccl {
    fn new() -> Self {
        let path = build_library().join("libnccl.so.2");
        // SAFETY: the library is built by these tests.
        EmulatedNccl(unsafe { libloading::Library::new(path) }.expect("the emulated NCCL can be opened"))
    }

    /// Makes the rank `rank` fail in the way that `fault` selects.
    fn inject(&self, fault: c_int, rank: c_int) {
        // SAFETY: libnccl.cpp declares the function with this type.
        unsafe {
            let function = self.0.get::<unsafe extern "C" fn(c_int, c_int) -> c_int>(b"fakeFault\0");
            function.expect("the function exists")(fault, rank)
        };
    }

    /// Returns the number of communicators that were not aborted.
    fn count_live_communicators(&self) -> c_int {
        // SAFETY: libnccl.cpp declares the function with this type.
        unsafe {
            let function = self.0.get::<unsafe extern "C" fn() -> c_int>(b"fakeLive\0");
            function.expect("the function exists")()
        }
    }

    fn create_stream(&self) -> CudaStream {
        // SAFETY: libnccl.cpp declares the function with this type.
        unsafe {
            let function = self.0.get::<unsafe extern "C" fn() -> *mut c_void>(b"fakeStream\0");
            CudaStream(function.expect("the function exists")())
        }
    }

    fn is_done(&self, stream: CudaStream) -> bool {
        // SAFETY: libnccl.cpp declares the function with this type.
        unsafe {
            let function = self.0.get::<unsafe extern "C" fn(*mut c_void) -> c_int>(b"fakePending\0");
            function.expect("the function exists")(stream.0) == 0
        }
    }
}

/// Locks the emulated NCCL for one test, because its faults apply to the whole process.
fn lock_faults() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    let guard = LOCK.lock().unwrap_or_else(PoisonError::into_inner);
    EmulatedNccl::new().inject(NO_FAULT, NO_RANK);
    guard
}

/// Runs `f` in one thread per rank of a group of `world` ranks. Returns the results by rank.
fn run_ranks<T: Send>(world: usize, f: impl Fn(&dyn Comm) -> T + Sync) -> Vec<T> {
    thread::scope(|s| {
        let f = &f;
        let threads: Vec<_> =
            thread_comm::create_thread_group(world).into_iter().map(|c| s.spawn(move || f(&c))).collect();
        threads.into_iter().map(|t| t.join().expect("no rank panics")).collect()
    })
}

/// Returns the address of a slice in host memory, which the emulated NCCL takes for GPU memory.
fn to_address<T>(x: &mut [T]) -> u64 {
    x.as_mut_ptr() as u64
}

/// Computes element `i` of the test data that the rank `rank` sends.
fn compute_value(rank: usize, i: usize) -> f32 {
    (rank * 100 + i) as f32
}

#[test]
fn collectives_move_the_data() {
    let _lock = lock_faults();
    for world in [1, 2, 3, 5] {
        let control = EmulatedNccl::new();
        run_ranks(world, |host_comm| {
            let group = RawNcclComm::connect(&open_nccl(), host_comm, LONG_TIMEOUT).expect("connected");
            let (rank, stream, n) = (group.rank(), EmulatedNccl::new().create_stream(), 7);
            assert_eq!((rank, group.world_size()), (host_comm.rank(), world));
            let wait = |operation: &str| {
                group
                    .wait_until_done(operation, || EmulatedNccl::new().is_done(stream))
                    .expect("the work ends")
            };
            let mut x: Vec<f32> = (0..n).map(|i| compute_value(rank, i)).collect();
            let mut gathered = vec![f32::NAN; n * world];
            let (to, from) = (to_address(&mut gathered), to_address(&mut x));
            // SAFETY: the vectors live until the work is done.
            unsafe { group.all_gather(to, from, n, ncclFloat32, stream) }.expect("accepted");
            wait("all-gather");
            assert!((0..n * world).all(|i| gathered[i] == compute_value(i / n, i % n)));
            check_exchange(&group, stream, &wait);
        });
        assert_eq!(control.count_live_communicators(), 0, "every communicator is aborted");
    }
}

/// Checks sends and receives between all ranks, in which rank r sends r + to + 1 bytes to rank
/// `to`.
fn check_exchange(group: &RawNcclComm, stream: CudaStream, wait: &dyn Fn(&str)) {
    let (rank, world) = (group.rank(), group.world_size());
    let mut sent: Vec<Vec<u8>> = (0..world).map(|to| vec![(rank * 16 + to) as u8; rank + to + 1]).collect();
    let mut received: Vec<Vec<u8>> = (0..world).map(|from| vec![255; rank + from + 1]).collect();
    let buffers = |messages: &mut Vec<Vec<u8>>| {
        let buffer =
            |(peer, x): (usize, &mut Vec<u8>)| PeerBuffer { peer, address: to_address(x), len: x.len() };
        messages.iter_mut().enumerate().map(buffer).collect::<Vec<_>>()
    };
    let (sends, receives) = (buffers(&mut sent), buffers(&mut received));
    // SAFETY: the vectors live until the work is done.
    unsafe { group.exchange(&sends, &receives, ncclUint8, stream) }.expect("accepted");
    wait("exchange");
    for (from, message) in received.iter().enumerate() {
        assert!(message.iter().all(|x| *x == (from * 16 + rank) as u8), "from {from}: {message:?}");
    }
    let out_of_range = [PeerBuffer { peer: world, address: 0, len: 1 }];
    // SAFETY: the call is rejected before the address is used.
    let rejected = unsafe { group.exchange(&out_of_range, &[], ncclUint8, stream) };
    assert_eq!(rejected, Err(NcclError::PeerOutOfRange { peer: world, world }));
}

#[test]
fn a_missing_library_is_an_error_that_lists_the_attempts() {
    let Err(error) = NcclLibrary::open(&["/no/such/directory".into()]).map(|_| ()) else {
        return eprintln!("skipped: this machine has NCCL");
    };
    let diagnostic = Diagnostic::from(error);
    assert_eq!(diagnostic.code(), codes::NCCL_LIBRARY_MISSING);
    assert!(!diagnostic.help().is_empty());
    let attempts = diagnostic.field("attempts").and_then(|a| a.as_array()).expect("a list");
    assert_eq!(attempts.len(), 2, "the directory and the loader");
    assert!(attempts[0].to_string().contains("/no/such/directory/libnccl.so.2"), "{attempts:?}");
    let nccl = open_nccl();
    assert_eq!(nccl.version(), "2.27.3");
    assert!(nccl.path().is_absolute());
}

#[test]
fn a_failed_connect_fails_on_every_rank() {
    let _lock = lock_faults();
    let control = EmulatedNccl::new();
    control.inject(ID_FAILS, NO_RANK);
    let connect = |timeout| move |c: &dyn Comm| RawNcclComm::connect(&open_nccl(), c, timeout).map(|_| ());
    let message = NcclError::Call {
        function: "ncclGetUniqueId".into(),
        status: 2,
        message: "unhandled system error: injected".into(),
    }
    .to_string();
    for result in run_ranks(3, connect(LONG_TIMEOUT)) {
        assert_eq!(result, Err(NcclError::PeerFailed { rank: 0, message: message.clone() }));
    }
    control.inject(NEVER_JOINS, 1);
    let began = Instant::now();
    for result in run_ranks(3, connect(Duration::from_millis(200))) {
        let error = result.expect_err("rank 1 never joins");
        assert_eq!(error.code(), codes::NCCL_TIMEOUT, "{error}");
    }
    assert!(began.elapsed() < Duration::from_secs(30));
    assert_eq!(control.count_live_communicators(), 0);
}

/// Checks that an abort ends the wait of ranks that join a group, long before the timeout. Rank 1
/// never joins, and rank 0 is informed that it was killed.
#[test]
fn an_abort_ends_a_connect() {
    let _lock = lock_faults();
    let control = EmulatedNccl::new();
    control.inject(NEVER_JOINS, 1);
    let began = Instant::now();
    let results = run_ranks(3, |host_comm| {
        thread::scope(|s| {
            if host_comm.rank() == 0 {
                // the session of a worker does this for a rank that waits
                s.spawn(|| {
                    thread::sleep(Duration::from_millis(100));
                    host_comm.abort("rank 1 was killed");
                });
            }
            RawNcclComm::connect(&open_nccl(), host_comm, LONG_TIMEOUT).map(|_| ())
        })
    });
    let reason = AbortReason::Requested { reason: "rank 1 was killed".into() };
    for result in results {
        assert_eq!(result, Err(NcclError::Aborted(reason.clone())));
    }
    assert!(began.elapsed() < LONG_TIMEOUT / 2, "{:?}", began.elapsed());
    assert_eq!(control.count_live_communicators(), 0);
}

/// Runs an all-gather of two ranks while the fault `fault` is injected into `rank`. Returns the
/// results by rank.
fn all_gather_with_fault(fault: c_int, rank: c_int, timeout: Duration) -> Vec<Result<(), NcclError>> {
    let control = EmulatedNccl::new();
    let results = run_ranks(2, |host_comm| {
        let mut group = RawNcclComm::connect(&open_nccl(), host_comm, LONG_TIMEOUT).expect("connected");
        group.set_timeout(timeout);
        host_comm.barrier().expect("all have connected");
        if group.rank() == 0 {
            EmulatedNccl::new().inject(fault, rank);
        }
        host_comm.barrier().expect("the fault is injected");
        let (stream, mut x, mut gathered) =
            (EmulatedNccl::new().create_stream(), vec![1.0f32; 4], vec![0.0f32; 8]);
        let (to, from) = (to_address(&mut gathered), to_address(&mut x));
        // SAFETY: the vectors live until the work is done or aborted.
        let accepted = unsafe { group.all_gather(to, from, 4, ncclFloat32, stream) };
        let result =
            accepted.and_then(|()| group.wait_until_done("a gather", || EmulatedNccl::new().is_done(stream)));
        host_comm.barrier().expect("both have finished");
        if result.is_err() {
            // Later calls return the same error, and no kernel on the stream waits for a peer.
            // SAFETY: the call is rejected before the address is used.
            let later = unsafe { group.all_gather(to, from, 4, ncclFloat32, stream) };
            assert_eq!(later, result);
            assert!(EmulatedNccl::new().is_done(stream));
        }
        result
    });
    assert_eq!(control.count_live_communicators(), 0);
    results
}

#[test]
fn an_asynchronous_error_ends_the_work() {
    let _lock = lock_faults();
    // the communicator fails while rank 1 waits
    let results = all_gather_with_fault(FAILS_LATER, 1, Duration::from_secs(5));
    let Err(NcclError::Call { status: 6, message, .. }) = &results[1] else { panic!("{results:?}") };
    assert_eq!(message, "remote process exited or there was a network error: injected");
}

#[test]
fn a_rejected_call_fails_at_once() {
    let _lock = lock_faults();
    let results = all_gather_with_fault(REJECTS_CALLS, 0, Duration::from_millis(300));
    let Err(NcclError::Call { function, status: 2, .. }) = &results[0] else { panic!("{results:?}") };
    assert_eq!(function, "ncclAllGather");
    assert!(matches!(results[1], Err(NcclError::Timeout { .. })), "{results:?}");
}

#[test]
fn work_that_never_ends_times_out() {
    let _lock = lock_faults();
    let timeout = Duration::from_millis(200);
    let expected = Err(NcclError::Timeout { operation: "a gather".into(), timeout });
    for result in all_gather_with_fault(NEVER_DONE, NO_RANK, timeout) {
        assert_eq!(result, expected);
    }
}

/// Checks that, if a peer dies, the abort of the group ends the wait of another rank long before
/// the timeout.
#[test]
fn an_abort_ends_a_wait() {
    let _lock = lock_faults();
    let elapsed = run_ranks(2, |host_comm| {
        let group = RawNcclComm::connect(&open_nccl(), host_comm, LONG_TIMEOUT).expect("connected");
        if group.rank() == 1 {
            return Duration::ZERO; // never calls the collective
        }
        let (stream, mut x, mut gathered) =
            (EmulatedNccl::new().create_stream(), vec![1.0f32; 4], vec![0.0f32; 8]);
        let (to, from) = (to_address(&mut gathered), to_address(&mut x));
        // SAFETY: the vectors live until the work is aborted.
        unsafe { group.all_gather(to, from, 4, ncclFloat32, stream) }.expect("accepted");
        thread::scope(|s| {
            s.spawn(|| {
                thread::sleep(Duration::from_millis(50));
                group.abort("rank 1 died");
                group.abort("a later reason");
            });
            let began = Instant::now();
            let result = group.wait_until_done("a gather", || EmulatedNccl::new().is_done(stream));
            let reason = AbortReason::Requested { reason: "rank 1 died".into() };
            assert_eq!(result, Err(NcclError::Aborted(reason)));
            began.elapsed()
        })
    });
    assert!(elapsed[0] < LONG_TIMEOUT / 2, "{elapsed:?}");
    assert_eq!(EmulatedNccl::new().count_live_communicators(), 0);
}
