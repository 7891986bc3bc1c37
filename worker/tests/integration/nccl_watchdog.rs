//! Tests of the watchdog of NCCL: an error that NCCL reports while a rank waits for the GPU, and a
//! panic of a rank, end the wait of every rank.
use crate::{
    common::*,
    emulated::{create_llama_train_spec, open_emulated_gpu},
    emulated_nccl,
    own_process::is_own_process,
};
use comm::{
    AbortReason, Comm, CommError,
    nccl::{NcclComm, NcclError, NcclLibrary},
};
use device::{Dtype, Storage};
use jobspec::{Precision, TrainSpec};
use std::{
    ffi::c_int,
    io::Write,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
        mpsc::{self, RecvTimeoutError},
    },
    time::{Duration, Instant},
};
use worker::{
    model::MicroBatch,
    train::step::{RankStepReport, SampleSource},
    zero::collective_queue::CollectiveQueue,
};

/// The fault of libnccl.cpp with which work never ends, and the communicator of one rank fails
/// while the work runs.
const HANGS_AND_FAILS_LATER: c_int = 6;
/// The rank whose communicator fails.
const FAILING_RANK: c_int = 1;
/// A limit on the time until the wait of every rank ends. Without the watchdog, it never ends.
const WAIT_LIMIT: Duration = Duration::from_secs(60);

/// Injects [`HANGS_AND_FAILS_LATER`] into [`FAILING_RANK`].
fn inject_fault() {
    // SAFETY: libnccl.cpp declares the function with this type.
    unsafe {
        let library = libloading::Library::new(emulated_nccl::build_library().join("libnccl.so.2")).unwrap();
        let inject = library.get::<unsafe extern "C" fn(c_int, c_int) -> c_int>(b"fakeFault\0").unwrap();
        inject(HANGS_AND_FAILS_LATER, FAILING_RANK);
    }
}

#[test]
fn an_error_while_a_rank_waits_for_the_gpu_ends_the_wait_of_every_rank() {
    if !is_own_process("nccl_watchdog::an_error_while_a_rank_waits_for_the_gpu_ends_the_wait_of_every_rank") {
        return;
    }
    // SAFETY: no other thread is running. Streams run in threads, so that work can hang.
    unsafe { std::env::set_var("EMULATED_GPU_LAG", "side:1") };
    let nccl = NcclLibrary::open(&[emulated_nccl::build_library().to_owned()]).unwrap();
    let errors = run_on_ranks(2, |hosts| {
        let cuda = open_emulated_gpu();
        let comm = NcclComm::connect(&nccl, cuda.clone(), hosts.clone(), Duration::from_secs(60)).unwrap();
        let (send, mut recv) = (cuda.zeroed(Dtype::F32, 4), cuda.zeroed(Dtype::F32, 8));
        cuda.synchronize().unwrap();
        if comm.rank() == 0 {
            inject_fault();
        }
        comm.barrier().unwrap();
        cuda.with_separate_stream(&mut || {
            comm.all_gather(recv.view_mut(), send.view(), &[4, 4]).unwrap();
            let began = Instant::now();
            cuda.synchronize().unwrap();
            assert!(began.elapsed() < WAIT_LIMIT);
        });
        // what the GPU has computed is not used, because the next collective fails
        [comm.barrier().unwrap_err(), comm.all_gather_bytes(&[]).unwrap_err()]
    });
    let message = "remote process exited or there was a network error: injected".to_owned();
    let error = NcclError::Call { function: "all_gather (call 0) of rank 1".into(), status: 6, message };
    let reason = AbortReason::Requested { reason: error.to_string() };
    assert_eq!(errors[0], [CommError::Aborted(reason.clone()), CommError::Aborted(reason)]);
    let found = CommError::Nccl(Box::new(error));
    assert_eq!(errors[1], [found.clone(), found]);
}

/// Checks that a rank whose NCCL reports the end of a peer fails with the reason that the transport
/// between host memories reports soon after, which names the peer.
#[test]
fn the_end_of_a_peer_is_reported_with_its_reason() {
    if !is_own_process("nccl_watchdog::the_end_of_a_peer_is_reported_with_its_reason") {
        return;
    }
    // SAFETY: no other thread is running. Streams run in threads, so that work can hang.
    unsafe { std::env::set_var("EMULATED_GPU_LAG", "side:1") };
    let nccl = NcclLibrary::open(&[emulated_nccl::build_library().to_owned()]).unwrap();
    let errors = run_on_ranks(2, |hosts| {
        let cuda = open_emulated_gpu();
        let comm = NcclComm::connect(&nccl, cuda.clone(), hosts.clone(), Duration::from_secs(60)).unwrap();
        let (send, mut recv) = (cuda.zeroed(Dtype::F32, 4), cuda.zeroed(Dtype::F32, 8));
        cuda.synchronize().unwrap();
        if comm.rank() == 0 {
            inject_fault();
        }
        comm.barrier().unwrap();
        if comm.rank() == 0 {
            // The communicator of the other rank fails 100 ms after its call.
            std::thread::sleep(Duration::from_millis(400));
            hosts.abort("rank 0 has ended");
            return None;
        }
        cuda.with_separate_stream(&mut || {
            comm.all_gather(recv.view_mut(), send.view(), &[4, 4]).unwrap();
            cuda.synchronize().unwrap();
        });
        comm.barrier().err()
    });
    let reason = AbortReason::Requested { reason: "rank 0 has ended".into() };
    assert_eq!(errors[1], Some(CommError::Aborted(reason)));
}

/// Ends the process after [`WAIT_LIMIT`], unless the returned sender is dropped before.
fn limit_time() -> mpsc::Sender<()> {
    let (sender, dropped) = mpsc::channel();
    std::thread::spawn(move || {
        if dropped.recv_timeout(WAIT_LIMIT) == Err(RecvTimeoutError::Timeout) {
            _ = std::io::stderr().write_all(b"a rank waits without end\n");
            std::process::abort();
        }
    });
    sender
}

/// Checks that a panic in the communication thread of a rank releases a rank that waits while it
/// enqueues a collective. The default streams of the emulated GPU block such a rank.
#[test]
fn a_panic_of_a_communication_thread_ends_the_wait_of_every_rank() {
    let _limit = limit_time();
    let nccl = NcclLibrary::open(&[emulated_nccl::build_library().to_owned()]).unwrap();
    let results = run_on_ranks(2, |hosts| {
        let cuda = open_emulated_gpu();
        let comm = NcclComm::connect(&nccl, cuda.clone(), hosts, WAIT_LIMIT).unwrap();
        let panics = comm.rank() == FAILING_RANK as usize;
        let queue = CollectiveQueue::new(Arc::new(comm), cuda.clone()).unwrap();
        let (send, mut recv) = (cuda.zeroed(Dtype::F32, 8), cuda.zeroed(Dtype::F32, 4));
        let reduced = queue.run_and_wait(move |comm| {
            if panics {
                // Meanwhile the other rank begins its collective.
                std::thread::sleep(Duration::from_millis(300));
                panic!("intended");
            }
            comm.reduce_scatter(recv.view_mut(), send.view(), &[4, 4])?;
            Ok((send, recv))
        });
        // What the released rank has received is not used, because its next collective fails.
        (reduced.err(), queue.run_and_wait(|comm| comm.barrier()).unwrap_err())
    });
    let reason = AbortReason::Requested { reason: "intended".into() };
    assert_eq!(results[0].1, CommError::Aborted(reason));
    let expected = Some(CommError::ThreadEnded { message: Some("intended".into()) });
    assert_eq!(results[1], (expected, CommError::ThreadEnded { message: None }));
}

/// Samples of which one cannot be loaded: the source panics.
struct PanickingSamples {
    inner: SyntheticSamples,
    loaded: AtomicUsize,
    /// The number of micro-batches that are loaded before the panic; `None` for no panic.
    panics_after: Option<usize>,
}

impl SampleSource for PanickingSamples {
    fn fill(&self, first: u64, batch: &mut MicroBatch) -> worker::error::Result<()> {
        assert!(Some(self.loaded.fetch_add(1, Relaxed)) != self.panics_after, "intended");
        self.inner.fill(first, batch)
    }
}

/// Checks that a panic in the main thread of a rank ends the training of all ranks.
#[test]
fn a_panic_of_one_rank_ends_the_training_of_all_ranks() {
    let _limit = limit_time();
    let spec = TrainSpec { deterministic: false, ..create_llama_train_spec(3, Precision::Fp32) };
    let nccl = NcclLibrary::open(&[emulated_nccl::build_library().to_owned()]).unwrap();
    let train = |hosts: Arc<dyn Comm>| {
        let cuda = open_emulated_gpu();
        let comm = NcclComm::connect(&nccl, cuda.clone(), hosts, WAIT_LIMIT).unwrap();
        let panics_after = (comm.rank() == FAILING_RANK as usize).then_some(3);
        let mut running = build_trainer_on(&spec, Arc::new(comm), cuda).start_with_random_params();
        let inner = SyntheticSamples { vocab: spec.model.vocab_size };
        let source = PanickingSamples { inner, loaded: AtomicUsize::new(0), panics_after };
        for _ in 0..20 {
            running.run_step(&source, RankStepReport::default()).unwrap();
        }
    };
    catch_unwind(AssertUnwindSafe(|| run_on_ranks(3, train))).unwrap_err();
}
