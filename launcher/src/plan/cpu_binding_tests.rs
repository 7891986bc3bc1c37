//! Tests of the assignment of CPUs to workers.
use super::*;
use proptest::prelude::*;
use protocol::hardware::CpuTopology;

/// Returns the inventory of a machine with `nodes` NUMA nodes. Each node has `cores` cores of
/// `threads` hardware threads. CPUs are numbered as Linux numbers them: the first threads of all
/// cores come first.
fn build_machine(nodes: u32, cores: u32, threads: u32) -> HostInventory {
    let total = nodes * cores;
    let core = |c: u32| CpuCore { cpus: (0..threads).map(|t| t * total + c).collect(), numa_node: c / cores };
    build_inventory(CpuTopology { cores: (0..total).map(core).collect() }, None)
}

/// Returns the inventory of a machine with the cores in `topology`. `quota` is the limit on CPU
/// time, as a number of CPUs.
fn build_inventory(topology: CpuTopology, quota: Option<f64>) -> HostInventory {
    let mut cpus: Vec<u32> = topology.cores.iter().flat_map(|c| c.cpus.clone()).collect();
    cpus.sort_unstable();
    HostInventory { cpus, quota, topology, ..HostInventory::default() }
}

/// Formats the CPUs and threads of each worker as `FIRST-LAST[,…]xTHREADS`.
fn format_worker_cpus(slots: &[WorkerCpus]) -> Vec<String> {
    let text = |s: &WorkerCpus| {
        let mut runs: Vec<(u32, u32)> = Vec::new();
        for &cpu in &s.cpus {
            match runs.last_mut() {
                Some((_, last)) if *last + 1 == cpu => *last = cpu,
                _ => runs.push((cpu, cpu)),
            }
        }
        let runs: Vec<String> = runs.iter().map(|(a, b)| format!("{a}-{b}")).collect();
        format!("{}x{}", runs.join(","), s.threads)
    };
    slots.iter().map(text).collect()
}

/// Assigns CPUs to workers, and formats the result. `near[i]` is the NUMA node of the GPU of worker
/// `i`. Panics if there are too few CPUs.
fn assign_and_format(inventory: &HostInventory, near: &[Option<u32>], bind: CpuBind) -> Vec<String> {
    format_worker_cpus(&assign_cpus(inventory, near, bind).expect("enough CPUs"))
}

/// The NUMA nodes of the GPUs of eight workers that have no GPU.
const NO_GPU: [Option<u32>; 8] = [None; 8];
/// The NUMA nodes of the GPUs of eight workers. The first four are on node 0, and the others on
/// node 1.
const GPUS: [Option<u32>; 8] = [Some(0), Some(0), Some(0), Some(0), Some(1), Some(1), Some(1), Some(1)];

#[test]
fn workers_are_bound_to_the_socket_of_their_gpu() {
    let inventory = build_machine(2, 32, 2);
    let shared = assign_and_format(&inventory, &GPUS, CpuBind::Auto);
    assert_eq!(shared[..4], ["0-31,64-95x8"; 4], "all cores of the GPU's node, the threads divided");
    assert_eq!(shared[4..], ["32-63,96-127x8"; 4]);
    assert_eq!(assign_and_format(&inventory, &GPUS, CpuBind::Numa), shared);
    let separate = assign_and_format(&inventory, &GPUS, CpuBind::Cores);
    assert_eq!(separate[..2], ["0-7,64-71x8", "8-15,72-79x8"]);
    assert_eq!(separate[4..6], ["32-39,96-103x8", "40-47,104-111x8"]);
    // The GPUs are numbered across the sockets, and the node of one is unknown.
    let crossed = [Some(1), Some(0), Some(1), None];
    assert_eq!(
        assign_and_format(&inventory, &crossed, CpuBind::Cores),
        ["32-47,96-111x16", "0-15,64-79x16", "48-63,112-127x16", "16-31,80-95x16"].map(str::to_owned)
    );
    assert_eq!(assign_and_format(&inventory, &GPUS, CpuBind::None), ["x8"; 8]);
}

#[test]
fn workers_without_gpus_stay_within_a_socket() {
    let inventory = build_machine(2, 4, 2);
    assert_eq!(assign_and_format(&inventory, &NO_GPU[..1], CpuBind::Auto), ["0-15x8"]);
    assert_eq!(assign_and_format(&inventory, &NO_GPU[..2], CpuBind::Auto), ["0-3,8-11x4", "4-7,12-15x4"]);
    // Of three workers, two are on the first node. Staying within a node costs each worker less
    // than a quarter of its cores.
    assert_eq!(
        assign_and_format(&inventory, &NO_GPU[..3], CpuBind::Auto),
        ["0-1,8-9x2", "2-3,10-11x2", "4-5,12-13x2"]
    );
    assert_eq!(assign_and_format(&inventory, &NO_GPU, CpuBind::Auto)[7], "7-7,15-15x1");
    assert_eq!(
        assign_and_format(&inventory, &[None; 16], CpuBind::Auto)[..2],
        ["0-0x1", "8-8x1"],
        "one hardware thread each"
    );
    assert_eq!(
        assign_and_format(&inventory, &[None; 17], CpuBind::Auto)[16],
        "x1",
        "more workers than CPUs: none is bound"
    );
    assert_eq!(assign_and_format(&inventory, &NO_GPU[..2], CpuBind::Numa), ["0-3,8-11x4", "4-7,12-15x4"]);
    assert_eq!(
        assign_and_format(&inventory, &NO_GPU[..3], CpuBind::Numa),
        ["0-3,8-11x2", "0-3,8-11x2", "4-7,12-15x4"]
    );
}

#[test]
fn two_workers_divide_four_nodes() {
    let inventory = build_machine(4, 2, 1);
    assert_eq!(assign_and_format(&inventory, &NO_GPU[..2], CpuBind::Auto), ["0-3x4", "4-7x4"]);
    assert_eq!(assign_and_format(&inventory, &NO_GPU[..2], CpuBind::Numa), ["0-3x4", "4-7x4"]);
}

#[test]
fn an_uneven_set_of_allowed_cpus_is_divided_equally() {
    // The container may use one core of the first socket and seven of the second. Within one socket
    // each worker would get one core.
    let mut topology = build_machine(2, 8, 1).topology;
    topology.cores.retain(|c| c.cpus[0] == 0 || c.cpus[0] > 8);
    let inventory = build_inventory(topology, None);
    assert_eq!(assign_and_format(&inventory, &NO_GPU[..2], CpuBind::Auto), ["0-0,9-11x4", "12-15x4"]);
    // The GPU is on a node without an allowed CPU.
    assert_eq!(assign_and_format(&inventory, &[Some(7)], CpuBind::Auto), ["0-0,9-15x8"]);
}

#[test]
fn a_cpu_time_limit_lowers_the_threads() {
    let inventory = build_inventory(build_machine(1, 8, 2).topology, Some(5.5));
    assert_eq!(assign_and_format(&inventory, &NO_GPU[..2], CpuBind::Auto), ["0-3,8-11x2", "4-7,12-15x2"]);
    assert_eq!(assign_and_format(&inventory, &NO_GPU, CpuBind::None), ["x1"; 8]);
}

#[test]
fn a_gpu_without_a_known_node_gets_unclaimed_cores() {
    let four = build_machine(4, 2, 1);
    assert_eq!(assign_and_format(&four, &[Some(2), None], CpuBind::Cores), ["4-5x2", "0-1x2"]);
    let two = build_machine(2, 4, 1);
    assert_eq!(
        assign_and_format(&two, &[Some(0), Some(1), None], CpuBind::Cores),
        ["0-1x2", "4-5x2", "2-3x2"]
    );
}

#[test]
fn a_required_binding_fails_without_enough_cpus() {
    let inventory = build_machine(1, 2, 1);
    let error = assign_cpus(&inventory, &[None; 3], CpuBind::Cores).expect_err("too few");
    assert_eq!(error, TooFewCpus { workers: 3, cpus: 2 });
    assert!(assign_cpus(&inventory, &[None; 3], CpuBind::Numa).is_ok());
}

proptest! {
    #[test]
    fn shares_are_equal_and_disjoint(
        nodes in 1u32..5,
        cores in 1u32..20,
        threads in 1u32..3,
        near in proptest::collection::vec(proptest::option::of(0u32..5), 1..40),
        dropped in proptest::collection::vec(0usize..400, 0..20),
        quota in proptest::option::of(0.01f64..300.0),
    ) {
        let mut topology = build_machine(nodes, cores, threads).topology;
        for at in dropped {
            if topology.cores.len() > 1 {
                topology.cores.remove(at % topology.cores.len());
            }
        }
        let inventory = build_inventory(topology, quota);
        for bind in [CpuBind::Auto, CpuBind::Cores, CpuBind::Numa, CpuBind::None] {
            let Ok(slots) = assign_cpus(&inventory, &near, bind) else {
                prop_assert!(bind == CpuBind::Cores && near.len() > inventory.cpus.len());
                continue;
            };
            prop_assert_eq!(slots.len(), near.len());
            for slot in &slots {
                prop_assert!(slot.cpus.is_sorted() && slot.cpus.iter().all(|c| inventory.cpus.contains(c)));
                prop_assert!(slot.threads >= 1 && slot.threads <= inventory.usable_cpu_count().max(1));
                prop_assert_eq!(slot.cpus.is_empty(), slots[0].cpus.is_empty());
            }
            if bind == CpuBind::Cores {
                let mut bound: Vec<u32> = slots.iter().flat_map(|s| s.cpus.clone()).collect();
                let count = bound.len();
                bound.sort_unstable();
                bound.dedup();
                prop_assert_eq!(bound.len(), count, "no CPU twice");
                prop_assert!(slots.iter().all(|s| s.threads == slots[0].threads && !s.cpus.is_empty()));
            }
        }
    }
}
