//! Estimates how long training steps take on real GPUs, with the virtual clock of the emulated GPU.
//! The real trainer makes the calls of one rank, which only take time. The other ranks of the run
//! do not exist.
//!
//! The variable `EMULATED_GPU_TIMELINE` applies to the whole process, so each test needs its own.
mod published;

use crate::common::*;
use crate::emulated::*;
use crate::emulated_nccl;
use crate::own_process::is_own_process;
use comm::{
    AbortReason, Comm, PartialSink,
    nccl::{NcclComm, NcclLibrary},
};
use device::{Cuda, Storage, View, ViewMut};
use jobspec::*;
use std::{
    ffi::{CStr, CString, c_char},
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};
use worker::{
    model::MicroBatch,
    train::{
        running_trainer::Cursor,
        step::{RankStepReport, SampleSource},
    },
};

/// The peak rate of an H100 and an H200 in dense bf16 operations per second.
const PEAK_FLOPS: f64 = 989.5e12;
/// The time in ns that ranks of several hosts need to exchange a short message.
const HOST_EXCHANGE_NS: f64 = 100e3;
/// The number of ranks of a host, as the virtual clock assumes.
const RANKS_PER_HOST: usize = 8;
/// Number of steps before the measurement: enough that memory is allocated and graphs are captured.
const WARM_UP_STEPS: u64 = 3;
const MEASURED_STEPS: u64 = 2;

/// The functions of the virtual clock in the emulated driver.
struct VirtualClock(libloading::Library);

impl VirtualClock {
    /// Opens the functions in the driver that this process uses.
    fn open() -> VirtualClock {
        let path = crate::emulated_gpu::library_directory().join("libcuda.so.1");
        // SAFETY: the library is built by these tests.
        VirtualClock(unsafe { libloading::Library::new(path) }.unwrap())
    }

    /// Returns a time or a count of the measurement. libcuda.cpp documents the names.
    fn read(&self, name: &str) -> f64 {
        let name = CString::new(name).unwrap();
        // SAFETY: timeline.hpp declares the function with this type.
        unsafe {
            let read = self.0.get::<unsafe extern "C" fn(*const c_char) -> f64>(b"emulatedGpuTimeline\0");
            read.unwrap()(name.as_ptr())
        }
    }

    /// Returns the names of the times that the virtual clock has measured.
    fn list_names(&self) -> Vec<String> {
        // SAFETY: timeline.hpp declares the function with this type. The text is valid until the
        // next call.
        unsafe {
            let list = self.0.get::<unsafe extern "C" fn() -> *const c_char>(b"emulatedGpuTimelineNames\0");
            CStr::from_ptr(list.unwrap()()).to_str().unwrap().lines().map(str::to_owned).collect()
        }
    }

    /// Begins a new measurement, with all times at 0. The GPU must be idle.
    fn reset(&self) {
        // SAFETY: libcuda.cpp declares the function with this type.
        unsafe { self.0.get::<unsafe extern "C" fn()>(b"emulatedGpuResetTimeline\0").unwrap()() }
    }

    /// Advances the clock of this thread.
    fn spend_on_host(&self, ns: f64) {
        // SAFETY: timeline.hpp declares the function with this type.
        unsafe { self.0.get::<unsafe extern "C" fn(f64)>(b"emulatedGpuSpendOnHost\0").unwrap()(ns) }
    }
}

/// The transport between host memories of rank 0 in a group whose other ranks do not exist. Every
/// rank sends what rank 0 sends.
struct VirtualGroup {
    world: usize,
    clock: VirtualClock,
}

impl VirtualGroup {
    fn new(world: usize) -> VirtualGroup {
        VirtualGroup { world, clock: VirtualClock::open() }
    }
}

impl Comm for VirtualGroup {
    fn rank(&self) -> usize {
        0
    }

    fn world_size(&self) -> usize {
        self.world
    }

    fn all_gather_bytes(&self, bytes: &[u8]) -> comm::Result<Vec<Vec<u8>>> {
        self.clock.spend_on_host(HOST_EXCHANGE_NS);
        // Other ranks may have some more blocks of the gradient norm than rank 0.
        let more = if bytes.len() < 1 << 10 { 0 } else { bytes.len() / 32 * 8 };
        let longer = [bytes, &vec![0; more][..]].concat();
        Ok((0..self.world).map(|rank| if rank == 0 { bytes.to_vec() } else { longer.clone() }).collect())
    }

    fn list_rank_hosts(&self) -> Vec<usize> {
        (0..self.world).map(|rank| rank / RANKS_PER_HOST).collect()
    }

    fn barrier(&self) -> comm::Result<()> {
        self.clock.spend_on_host(HOST_EXCHANGE_NS);
        Ok(())
    }

    fn abort(&self, reason: &str) {
        eprintln!("the rank was aborted: {reason}"); // there is no other rank to inform
    }

    fn abort_reason(&self) -> Option<AbortReason> {
        None
    }

    fn all_gather(&self, _: ViewMut, _: View, _: &[usize]) -> comm::Result<()> {
        unreachable!("NCCL gathers")
    }

    fn reduce_scatter_ordered(
        &self,
        _: &[View],
        _: &[usize],
        _: &[usize],
        _: &mut PartialSink,
    ) -> comm::Result<()> {
        unreachable!("NCCL transfers gradients")
    }

    fn reduce_scatter(&self, _: ViewMut, _: View, _: &[usize]) -> comm::Result<()> {
        unreachable!("NCCL transfers gradients")
    }

    fn all_reduce(&self, _: ViewMut) -> comm::Result<()> {
        unreachable!("training has no all-reduce")
    }

    fn broadcast(&self, _: ViewMut, _: usize) -> comm::Result<()> {
        unreachable!("training has no broadcast")
    }

    fn all_to_all(&self, _: ViewMut, _: &[usize], _: View, _: &[usize]) -> comm::Result<()> {
        unreachable!("dense models have no all-to-all")
    }

    fn all_to_all_bytes(&self, _: &mut [u8], _: &[usize], _: &[u8], _: &[usize]) -> comm::Result<()> {
        unreachable!("dense models have no all-to-all")
    }
}

/// The estimated timeline of a step, in ns.
struct Estimate {
    /// The duration of a step.
    step: f64,
    /// The busy and idle times of the main stream by kind, and the busy times of the other streams.
    parts: Vec<(String, f64)>,
    /// The time of collectives during which the main stream works.
    overlap: f64,
    /// How often the host waits for the GPU in a step.
    host_waits: f64,
    tokens_per_second: f64,
    mfu: f64,
    peak_bytes: f64,
}

impl Estimate {
    /// Returns the sum of the parts whose names begin with `prefix`.
    fn sum_parts(&self, prefix: &str) -> f64 {
        self.parts.iter().filter(|(name, _)| name.starts_with(prefix)).map(|(_, ns)| ns).sum()
    }

    /// Returns the time of one part.
    fn part_time(&self, name: &str) -> f64 {
        self.parts.iter().find(|(part, _)| part == name).map_or(0.0, |(_, ns)| *ns)
    }
}

/// Samples of one document each, whose tokens follow from their positions.
struct PositionSamples;

impl SampleSource for PositionSamples {
    fn fill(&self, first: u64, batch: &mut MicroBatch) -> worker::error::Result<()> {
        let from = first as u32 * 7;
        batch.tokens.iter_mut().zip(from..).for_each(|(token, i)| *token = i % 50_000);
        batch.labels.copy_from_slice(&batch.tokens);
        batch.starts.fill(0);
        Ok(())
    }
}

/// Opens the emulated GPU and a communicator of rank 0 among `world` ranks.
fn open_rank(world: usize) -> (Arc<Cuda>, Arc<dyn Comm>) {
    let cuda = open_emulated_gpu();
    if world == 1 {
        return (cuda, create_single_rank_comm());
    }
    let nccl = NcclLibrary::open(&[emulated_nccl::build_library().to_owned()]).unwrap();
    let hosts = Arc::new(VirtualGroup::new(world));
    let comm = NcclComm::connect(&nccl, cuda.clone(), hosts, Duration::from_secs(60)).unwrap();
    (cuda, Arc::new(comm))
}

/// Estimates a training step of one rank of `world`.
fn estimate_step(spec: &TrainSpec, world: usize) -> Estimate {
    let (cuda, comm) = open_rank(world);
    cuda.set_matmul_epilogues_enabled(!spec.deterministic);
    let mut running = build_trainer_on(spec, comm, cuda.clone()).start_at_position(Cursor::default());
    let mut train = |steps| {
        for _ in 0..steps {
            running.run_step(&PositionSamples, RankStepReport::default()).unwrap();
        }
    };
    train(WARM_UP_STEPS);
    cuda.synchronize().unwrap();
    let clock = VirtualClock::open();
    clock.reset();
    train(MEASURED_STEPS);
    let steps = MEASURED_STEPS as f64;
    let host_waits = clock.read("host waits") / steps;
    cuda.synchronize().unwrap();
    let step = clock.read("step") / steps;
    let parts = clock.list_names().into_iter().map(|name| (clock.read(&name) / steps, name));
    let tokens = f64::from(spec.batch.global) / world as f64 * f64::from(spec.data.seq_len);
    let flops = running.trainer.model.compute_flops_per_token(spec.data.seq_len as usize);
    let tokens_per_second = tokens / step * 1e9;
    Estimate {
        step,
        parts: parts.map(|(ns, name)| (name, ns)).collect(),
        overlap: clock.read("overlap") / steps,
        host_waits,
        tokens_per_second,
        mfu: tokens_per_second * flops / PEAK_FLOPS,
        peak_bytes: clock.read("peak bytes"),
    }
}

/// Selects the virtual clock for the process. Must be called before the emulated GPU is opened.
fn use_virtual_clock(gpu: &str) {
    // SAFETY: no other thread of this process uses the environment.
    unsafe { std::env::set_var("EMULATED_GPU_TIMELINE", gpu) };
}

/// Checks that GELU and bias gradients in the epilogues of matmuls shorten a step of GPT-2: fewer
/// bytes are read and written, while matmuls take longer.
#[test]
fn epilogues_shorten_a_step() {
    if !is_own_process("timeline::epilogues_shorten_a_step") {
        return;
    }
    use_virtual_clock("h200");
    let model = create_sized_model("gpt2", [50_000, 768, 3072, 4, 12, 12], true, 1024);
    let estimate = |deterministic| {
        let spec = create_train_spec(model.clone(), 0, 16, 16, 1024);
        estimate_step(&TrainSpec { precision: Precision::Bf16, deterministic, ..spec }, 1)
    };
    let [separate, fused] = [true, false].map(estimate);
    let saved = |part| separate.part_time(part) - fused.part_time(part);
    assert!(saved("main:rows") > 0.2 * separate.part_time("main:rows"), "{}", saved("main:rows"));
    assert!(saved("main:matmuls") < 0.0, "an epilogue takes time: {}", saved("main:matmuls"));
    assert!(saved("main:rows") + saved("main:matmuls") > 0.0);
    assert!(fused.step < separate.step, "{} ns, without epilogues {} ns", fused.step, separate.step);
}

#[test]
fn a_timeline_consists_of_its_parts() {
    if !is_own_process("timeline::a_timeline_consists_of_its_parts") {
        return;
    }
    use_virtual_clock("h200");
    let model = ModelSpec {
        vocab_size: 50_000,
        hidden_size: 1024,
        intermediate_size: 4096,
        num_attention_heads: 16,
        num_key_value_heads: 16,
        head_dim: 64,
        max_position_embeddings: 1024,
        ..create_odd_sized_model()
    };
    let spec = |stage, world, deterministic| TrainSpec {
        precision: Precision::Bf16,
        deterministic,
        ..create_train_spec(model.clone(), stage, 2 * 4 * world, 4, 1024)
    };
    for graphs in [false, true] {
        USE_CUDA_GRAPHS.store(graphs, Relaxed);
        let mut collectives = Vec::new();
        for (stage, world, deterministic) in [
            (0, 1, true),
            (2, 2, true),
            (3, 2, true),
            (3, 16, true),
            (3, 16, false),
            (0, 2, true),
            (1, 2, true),
        ] {
            let what = format!("stage {stage}, {world} ranks, {deterministic}, graphs: {graphs}");
            let estimate = estimate_step(&spec(stage, world as u32, deterministic), world);
            assert_eq!(estimate.host_waits, 1.0, "{what}");
            // the host waits for the end of the main stream's work
            let difference = (estimate.sum_parts("main:") - estimate.step).abs();
            assert!(difference < 10e3, "{what}: {difference} ns of {} are missing", estimate.step);
            let (collective, overlap) = (estimate.part_time("side:collectives"), estimate.overlap);
            assert_eq!(collective > 0.0, world > 1, "{what}");
            // At stages 0 and 1, reductions hide behind the layers that follow in the backward
            // pass. With few layers, as here, the reduction of the embedding is a large remainder.
            let hidden = if stage < 2 { 0.1 * collective } else { 0.0 };
            assert!(
                overlap <= collective && (overlap > hidden || world == 1),
                "{what}: {overlap} of {collective}"
            );
            assert!(
                estimate.part_time("main:matmuls") > 0.4 * estimate.sum_parts("main:") || world > 1,
                "{what}"
            );
            assert!((0.05..0.9).contains(&estimate.mfu) || world > 1, "{what}: MFU {}", estimate.mfu);
            collectives.push(collective);
        }
        let [_, _, two, sixteen, native, ..] = collectives[..] else { unreachable!() };
        assert!(sixteen > 1.5 * two, "a network is slower than NVLink: {two}, {sixteen}");
        // In two levels, the fixed order sends as few bytes to other hosts as NCCL's sums.
        assert!((0.7..1.3).contains(&(native / sixteen)), "with NCCL's sums: {native}, {sixteen}");
    }
}
