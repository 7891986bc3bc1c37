//! Tests of all-gathers and reduce-scatters over the emulated NCCL with the partitions of the
//! benchmarked models: NCCL gathers and sums them with its collectives. The gathered bits are those
//! that the ranks sent.
use crate::{common::*, emulated::*, emulated_nccl, own_process::is_own_process};
use comm::{
    Comm,
    nccl::{EqualPartsPlan, NcclComm, NcclLibrary},
};
use device::{Buf, Cuda, Dtype, Storage, ops::NORM_BLOCK_LEN};
use jobspec::{BatchSpec, Precision, TrainSpec};
use std::{sync::Arc, time::Duration};
use worker::{
    expert_layout::build_units_with_experts, model::build_model, params::ParamUnit,
    zero::partition::Partition,
};

/// The numbers of ranks for which the partitions are tested.
const WORLD_SIZES: std::ops::RangeInclusive<usize> = 2..=16;
/// The largest unit whose data is gathered, in elements. Of larger units, only the plan is checked.
const MAX_GATHERED_ELEMENTS: usize = 8 << 20;

/// Returns the parameter units of a model with the given sizes: vocabulary, hidden size, size of
/// the MLP, layers, heads, heads of keys.
fn build_units(family: &str, sizes: [u32; 6], tied: bool) -> Vec<ParamUnit> {
    let spec = create_sized_model(family, sizes, tied, 1024);
    build_units_with_experts(&build_model(&spec, 1024).unwrap(), None)
}

/// Returns the parameter units of the benchmarked models, without further units of equal length.
fn list_benchmark_units() -> Vec<ParamUnit> {
    let mut units = [
        build_units("gpt2", [50257, 768, 3072, 12, 12, 12], true),
        build_units("qwen2", [151_936, 896, 4864, 24, 14, 2], true),
        build_units("qwen2", [151_936, 1536, 8960, 28, 12, 2], true),
        build_units("llama", [128_256, 2048, 8192, 16, 32, 8], true),
        build_units("llama", [128_256, 4096, 14336, 32, 32, 8], false),
    ]
    .concat();
    units.sort_by_key(ParamUnit::len);
    units.dedup_by_key(|unit| unit.len());
    units
}

/// The counters of collectives and bytes of the emulated NCCL, for the whole process.
#[derive(Clone, Copy, Debug)]
struct NcclCounters {
    gathers: i64,
    reduce_scatters: i64,
    sent_bytes: i64,
    sent_bytes_between_hosts: i64,
}

impl NcclCounters {
    fn read() -> NcclCounters {
        // SAFETY: libnccl.cpp declares the functions with this type.
        unsafe {
            let library = libloading::Library::new(emulated_nccl::build_library().join("libnccl.so.2"));
            let library = library.unwrap();
            let call = |name: &[u8]| library.get::<unsafe extern "C" fn() -> i64>(name).unwrap()();
            NcclCounters {
                gathers: call(b"fakeGathers\0"),
                reduce_scatters: call(b"fakeReduceScatters\0"),
                sent_bytes: call(b"fakeSentBytes\0"),
                sent_bytes_between_hosts: call(b"fakeSentBytesBetweenHosts\0"),
            }
        }
    }
}

/// Runs `f` on `world` ranks that communicate over the emulated NCCL.
fn run_over_nccl<T: Send>(world: usize, f: impl Fn(&NcclComm, &Arc<Cuda>) -> T + Sync) -> Vec<T> {
    let nccl = NcclLibrary::open(&[emulated_nccl::build_library().to_owned()]).unwrap();
    run_on_ranks(world, |hosts| {
        let cuda = open_emulated_gpu();
        f(&NcclComm::connect(&nccl, cuda.clone(), hosts, Duration::from_secs(60)).unwrap(), &cuda)
    })
}

/// Creates a vector of 16-bit elements whose bits differ between neighbours.
fn create_unit_values(len: usize) -> Buf {
    let mut values = Buf::zeroed_as(Dtype::Bf16, len);
    let bits = values.view_mut().half_bits();
    bits.iter_mut().enumerate().for_each(|(i, x)| *x = (i as u32).wrapping_mul(2_654_435_761).to_be() as u16);
    values
}

#[test]
fn parts_of_every_benchmarked_model_are_gathered_by_the_native_all_gather() {
    for unit in list_benchmark_units() {
        for world in WORLD_SIZES {
            let counts = Partition::new(&unit, world).shard_lengths().to_vec();
            let parts = EqualPartsPlan::new(&counts);
            let (native, moved) = (parts.part_len() * world, parts.count_moved_elements());
            assert!(unit.len() - native < 65 * world, "{} at {world}: {native}", unit.len());
            if native > NORM_BLOCK_LEN * world {
                let limit = world * (NORM_BLOCK_LEN + 64 * world);
                assert!(moved <= limit, "{} elements at {world}: {moved} move", unit.len());
            }
        }
    }
}

#[test]
fn unequal_parts_are_gathered_without_changing_a_bit() {
    for unit in list_benchmark_units().into_iter().filter(|unit| unit.len() <= MAX_GATHERED_ELEMENTS) {
        let values = create_unit_values(unit.len());
        // all numbers of ranks for small units, some for large ones
        for world in WORLD_SIZES.filter(|world| unit.len() < 1 << 20 || [2, 3, 7, 16].contains(world)) {
            let part = Partition::new(&unit, world);
            let counts = part.shard_lengths();
            let before = NcclCounters::read();
            run_over_nccl(world, |comm, cuda| {
                let owned = values.view().slice(part.shard_range(comm.rank()));
                let send = cuda.clone_to_device(owned);
                let mut recv = cuda.zeroed(Dtype::Bf16, unit.len());
                comm.all_gather(recv.view_mut(), send.view(), counts).unwrap();
                let mut gathered = Buf::default();
                let gathered = cuda.to_host(recv.view(), &mut gathered);
                assert!(
                    gathered.half_bits() == values.view().half_bits(),
                    "{} at {world} ranks: other bits on rank {}",
                    unit.len(),
                    comm.rank()
                );
            });
            let after = NcclCounters::read();
            let parts = EqualPartsPlan::new(counts);
            let calls = if parts.part_len() > 0 { world as i64 } else { 0 };
            assert_eq!(after.gathers - before.gathers, calls, "{} at {world} ranks", unit.len());
            let moved = if counts.iter().all(|n| *n == counts[0]) { 0 } else { parts.count_moved_elements() };
            assert_eq!(after.sent_bytes - before.sent_bytes, 2 * moved as i64, "{} at {world}", unit.len());
        }
    }
}

/// Returns the summand of `rank` for element `i`, such that sums are exact in any order.
fn compute_summand(rank: usize, i: usize) -> f32 {
    ((i * 7 + rank * 13) % 1000) as f32
}

#[test]
fn unequal_parts_are_summed_by_the_native_reduce_scatter() {
    if !is_own_process("nccl_gathers::unequal_parts_are_summed_by_the_native_reduce_scatter") {
        return;
    }
    // counts of units, and short vectors, of which no equal part exists or the remainder has
    // several owners
    let units = list_benchmark_units().into_iter().filter(|unit| unit.len() <= 1 << 20);
    let of_units = units.flat_map(|unit| [2, 7].map(|n| Partition::new(&unit, n).shard_lengths().to_vec()));
    let short = [vec![5, 3], vec![0, 130, 1], vec![200, 64, 70], vec![0, 0, 0, 9], vec![1000, 0, 1, 2, 3]];
    for counts in of_units.chain(short) {
        let (world, total) = (counts.len(), counts.iter().sum());
        let before = NcclCounters::read();
        run_over_nccl(world, |comm, cuda| {
            let me = comm.rank();
            let values: Vec<f32> = (0..total).map(|i| compute_summand(me, i)).collect();
            let send = cuda.clone_to_device(Buf::from_slice(&values).view());
            let mut recv = cuda.zeroed(Dtype::F32, counts[me]);
            comm.reduce_scatter(recv.view_mut(), send.view(), &counts).unwrap();
            let mut sums = Buf::default();
            let sums = cuda.to_host(recv.view(), &mut sums);
            let first: usize = counts[..me].iter().sum();
            for (i, sum) in sums.host_slice().iter().enumerate() {
                let expected: f32 = (0..world).map(|rank| compute_summand(rank, first + i)).sum();
                assert_eq!(*sum, expected, "element {i} of rank {me}, {counts:?}");
            }
        });
        let calls = if EqualPartsPlan::new(&counts).part_len() > 0 { world as i64 } else { 0 };
        assert_eq!(NcclCounters::read().reduce_scatters - before.reduce_scatters, calls, "{counts:?}");
    }
}

/// Checks that training without determinism uses NCCL's sums at every stage, and that its losses
/// differ from those of the ordered sums only by rounding.
#[test]
fn training_without_determinism_uses_the_native_reduce_scatter() {
    if !is_own_process("nccl_gathers::training_without_determinism_uses_the_native_reduce_scatter") {
        return;
    }
    for (stage, world) in [(0, 3), (1, 2), (2, 2), (3, 3)] {
        let ordered = create_llama_train_spec(stage, Precision::Fp32);
        let native = TrainSpec { deterministic: false, ..ordered.clone() };
        let before = NcclCounters::read();
        let expected = train_over_emulated_nccl(&ordered, world, 3);
        let between = NcclCounters::read();
        assert_eq!(between.reduce_scatters, before.reduce_scatters, "stage {stage}");
        let losses = train_over_emulated_nccl(&native, world, 3);
        assert!(NcclCounters::read().reduce_scatters > between.reduce_scatters, "stage {stage}");
        assert_curves_near(&losses, &expected, 1e-5, &format!("stage {stage}"));
    }
}

/// Checks that gradients of several hosts, which are summed within each host first, have the same
/// bits as on one host and on one rank.
#[test]
fn gradients_are_reduced_in_two_levels_with_the_same_bits() {
    if !is_own_process("nccl_gathers::gradients_are_reduced_in_two_levels_with_the_same_bits") {
        return;
    }
    // SAFETY: no other thread of this process uses the environment.
    unsafe { std::env::set_var("EMULATED_GPU_HOST_RANKS", "2") };
    let nccl = NcclLibrary::open(&[emulated_nccl::build_library().to_owned()]).unwrap();
    for stage in 0..=3 {
        // six micro-batches: the last round of stages 2 and 3 does not occupy all ranks
        let spec = TrainSpec {
            batch: BatchSpec { global: 6, micro: 1 },
            ..create_llama_train_spec(stage, Precision::Fp32)
        };
        let expected = train_on_emulated_gpu(&spec, 1, 2);
        let train = |hosts: &[usize]| {
            let before = NcclCounters::read().sent_bytes_between_hosts;
            let curve = expect_equal_on_all_ranks(run_on_hosts(hosts, |comm| {
                let cuda = open_emulated_gpu();
                let comm = NcclComm::connect(&nccl, cuda.clone(), comm, Duration::from_secs(60)).unwrap();
                let trainer = build_trainer_on(&spec, Arc::new(comm), cuda);
                train_steps(&mut trainer.start_with_random_params(), 2)
            }));
            (curve, NcclCounters::read().sent_bytes_between_hosts - before)
        };
        let [(one_host, one_level), (two_hosts, two_levels)] =
            [[0; 4], [0, 0, 1, 1]].map(|hosts| train(&hosts));
        assert_eq!(one_host, expected, "stage {stage}, one host");
        assert_eq!(two_hosts, expected, "stage {stage}, two hosts");
        assert!(
            10 * two_levels < 9 * one_level,
            "stage {stage}: {two_levels} bytes between hosts, in one level {one_level}"
        );
    }
}
