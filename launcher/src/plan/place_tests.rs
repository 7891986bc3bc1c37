use super::*;
use contract::machine::Topology;
use proptest::prelude::*;

/// `nodes` nodes of `cores` cores of `threads` threads, numbered as Linux does: all first threads first.
fn machine(nodes: u32, cores: u32, threads: u32) -> Facts {
    let all = nodes * cores;
    let core = |c: u32| Core { cpus: (0..threads).map(|t| t * all + c).collect(), node: c / cores };
    facts(Topology { cores: (0..all).map(core).collect() }, None)
}

fn facts(topology: Topology, quota: Option<f64>) -> Facts {
    let mut cpus: Vec<u32> = topology.cores.iter().flat_map(|c| c.cpus.clone()).collect();
    cpus.sort_unstable();
    Facts { cpus, quota, topology, ..Facts::default() }
}

/// `first-last[,…]x threads` of each slot.
fn shown(slots: &[Slot]) -> Vec<String> {
    let text = |s: &Slot| {
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

fn placed(facts: &Facts, near: &[Option<u32>], bind: Bind) -> Vec<String> {
    shown(&slots(facts, near, bind).expect("places"))
}

const NO_GPU: [Option<u32>; 8] = [None; 8];
/// The first four GPUs hang on the first socket.
const GPUS: [Option<u32>; 8] = [Some(0), Some(0), Some(0), Some(0), Some(1), Some(1), Some(1), Some(1)];

#[test]
fn two_sockets_and_eight_gpus() {
    let facts = machine(2, 32, 2);
    let near = placed(&facts, &GPUS, Bind::Auto);
    assert_eq!(near[..4], ["0-31,64-95x8"; 4], "all cores of the GPU's node, the threads shared out");
    assert_eq!(near[4..], ["32-63,96-127x8"; 4]);
    assert_eq!(placed(&facts, &GPUS, Bind::Numa), near);
    let own = placed(&facts, &GPUS, Bind::Cores);
    assert_eq!(own[..2], ["0-7,64-71x8", "8-15,72-79x8"]);
    assert_eq!(own[4..6], ["32-39,96-103x8", "40-47,104-111x8"]);
    // GPUs numbered across the sockets, and one that doesn't say.
    let crossed = [Some(1), Some(0), Some(1), None];
    assert_eq!(
        placed(&facts, &crossed, Bind::Cores),
        ["32-47,96-111x16", "0-15,64-79x16", "48-63,112-127x16", "16-31,80-95x16"].map(str::to_owned)
    );
    assert_eq!(placed(&facts, &GPUS, Bind::None), ["x8"; 8]);
}

#[test]
fn workers_without_gpus_keep_inside_their_socket() {
    let facts = machine(2, 4, 2);
    assert_eq!(placed(&facts, &NO_GPU[..1], Bind::Auto), ["0-15x8"]);
    assert_eq!(placed(&facts, &NO_GPU[..2], Bind::Auto), ["0-3,8-11x4", "4-7,12-15x4"]);
    // Three: two on the first node; one core a worker less than without the border would cost more than a quarter.
    assert_eq!(placed(&facts, &NO_GPU[..3], Bind::Auto), ["0-1,8-9x2", "2-3,10-11x2", "4-5,12-13x2"]);
    assert_eq!(placed(&facts, &NO_GPU, Bind::Auto)[7], "7-7,15-15x1");
    assert_eq!(placed(&facts, &[None; 16], Bind::Auto)[..2], ["0-0x1", "8-8x1"], "one hardware thread each");
    assert_eq!(placed(&facts, &[None; 17], Bind::Auto)[16], "x1", "more than CPUs: nobody is bound");
    assert_eq!(placed(&facts, &NO_GPU[..2], Bind::Numa), ["0-3,8-11x4", "4-7,12-15x4"]);
    assert_eq!(placed(&facts, &NO_GPU[..3], Bind::Numa), ["0-3,8-11x2", "0-3,8-11x2", "4-7,12-15x4"]);
}

#[test]
fn four_nodes_are_shared_out_whole() {
    let facts = machine(4, 2, 1);
    assert_eq!(placed(&facts, &NO_GPU[..2], Bind::Auto), ["0-3x4", "4-7x4"]);
    assert_eq!(placed(&facts, &NO_GPU[..2], Bind::Numa), ["0-3x4", "4-7x4"]);
}

#[test]
fn a_container_with_an_odd_set_of_cpus() {
    // One core of the first socket, seven of the second: a border kept would leave each worker one core.
    let mut topology = machine(2, 8, 1).topology;
    topology.cores.retain(|c| c.cpus[0] == 0 || c.cpus[0] > 8);
    let facts = facts(topology, None);
    assert_eq!(placed(&facts, &NO_GPU[..2], Bind::Auto), ["0-0,9-11x4", "12-15x4"]);
    // The GPU's node has no CPU that may be used.
    assert_eq!(placed(&facts, &[Some(7)], Bind::Auto), ["0-0,9-15x8"]);
}

#[test]
fn a_time_limit_lowers_the_threads() {
    let facts = facts(machine(1, 8, 2).topology, Some(5.5));
    assert_eq!(placed(&facts, &NO_GPU[..2], Bind::Auto), ["0-3,8-11x2", "4-7,12-15x2"]);
    assert_eq!(placed(&facts, &NO_GPU, Bind::None), ["x1"; 8]);
}

#[test]
fn a_gpu_whose_node_is_unknown_gets_cores_that_no_other_has_claimed() {
    let four = machine(4, 2, 1);
    assert_eq!(placed(&four, &[Some(2), None], Bind::Cores), ["4-5x2", "0-1x2"]);
    let two = machine(2, 4, 1);
    assert_eq!(placed(&two, &[Some(0), Some(1), None], Bind::Cores), ["0-1x2", "4-5x2", "2-3x2"]);
}

#[test]
fn a_binding_that_was_asked_for_is_had_or_refused() {
    let facts = machine(1, 2, 1);
    let refused = slots(&facts, &[None; 3], Bind::Cores).expect_err("too few");
    assert_eq!(refused, "3 workers can't be bound: only 2 CPUs may be used");
    assert!(slots(&facts, &[None; 3], Bind::Numa).is_ok());
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
        let mut topology = machine(nodes, cores, threads).topology;
        for at in dropped {
            if topology.cores.len() > 1 {
                topology.cores.remove(at % topology.cores.len());
            }
        }
        let facts = facts(topology, quota);
        for bind in [Bind::Auto, Bind::Cores, Bind::Numa, Bind::None] {
            let Ok(slots) = slots(&facts, &near, bind) else {
                prop_assert!(bind == Bind::Cores && near.len() > facts.cpus.len());
                continue;
            };
            prop_assert_eq!(slots.len(), near.len());
            for slot in &slots {
                prop_assert!(slot.cpus.is_sorted() && slot.cpus.iter().all(|c| facts.cpus.contains(c)));
                prop_assert!(slot.threads >= 1 && slot.threads <= facts.cores().max(1));
                prop_assert_eq!(slot.cpus.is_empty(), slots[0].cpus.is_empty());
            }
            if bind == Bind::Cores {
                let mut all: Vec<u32> = slots.iter().flat_map(|s| s.cpus.clone()).collect();
                let given = all.len();
                all.sort_unstable();
                all.dedup();
                prop_assert_eq!(all.len(), given, "no CPU twice");
                prop_assert!(slots.iter().all(|s| s.threads == slots[0].threads && !s.cpus.is_empty()));
            }
        }
    }
}
