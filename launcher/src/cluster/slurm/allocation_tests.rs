//! Tests of reading Slurm allocations from recorded environments.
use super::*;
use diagnostic::Severity;
use proptest::prelude::*;
use std::collections::HashMap;

/// Reads the Slurm allocation from the environment recorded under `name`, with the variables in
/// `changes` changed. A change to `None` removes the variable.
fn read_recorded(
    name: &str,
    changes: &[(&str, Option<&str>)],
) -> diagnostic::Result<Option<SlurmAllocation>> {
    let file = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/slurm/env").join(name);
    let text = std::fs::read_to_string(&file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
    let mut vars: HashMap<String, String> =
        text.lines().filter_map(|l| l.split_once('=')).map(|(n, v)| (n.to_owned(), v.to_owned())).collect();
    for (name, value) in changes {
        match value {
            Some(value) => vars.insert((*name).to_owned(), (*value).to_owned()),
            None => vars.remove(*name),
        };
    }
    read_allocation(&|name| vars.get(name).cloned())
}

/// The properties of each node that tests compare: the number of its group in a heterogeneous job,
/// its name, and its numbers of tasks, CPUs and GPUs.
type NodeSummaries = Vec<(Option<u32>, String, Option<u32>, u32, Option<u32>)>;

fn summarize_nodes(allocation: &SlurmAllocation) -> NodeSummaries {
    let nodes = |g: &SlurmNodeGroup| {
        let each = |n: &SlurmNode| (g.het, n.name.clone(), n.tasks, n.cpus, n.gpus);
        g.nodes.iter().map(each).collect::<Vec<_>>()
    };
    allocation.groups.iter().flat_map(nodes).collect()
}

fn new_node_summary(
    name: &str,
    tasks: Option<u32>,
    cpus: u32,
    gpus: Option<u32>,
) -> (Option<u32>, String, Option<u32>, u32, Option<u32>) {
    (None, name.to_owned(), tasks, cpus, gpus)
}

#[test]
fn outside_of_slurm_there_is_no_allocation() {
    assert_eq!(read_allocation(&|_| None), Ok(None));
}

#[test]
fn recorded_environments_are_read() {
    let recorded_nodes = |name: &str| summarize_nodes(&read_recorded(name, &[]).unwrap().unwrap());
    let each = |names: &[&str], tasks, cpus, gpus| -> NodeSummaries {
        names.iter().map(|name| new_node_summary(name, tasks, cpus, gpus)).collect()
    };
    assert_eq!(recorded_nodes("env.sbatch.1"), each(&["h1", "h2", "h3", "h4"], Some(1), 4, None));
    assert_eq!(recorded_nodes("env.salloc"), each(&["h1", "h2"], None, 1, None));
    assert_eq!(recorded_nodes("env.nodes_only.11"), each(&["h1", "h2", "h4"], None, 1, None));
    assert_eq!(
        recorded_nodes("env.excl.10"),
        each(&["h3", "h4"], None, 8, None),
        "8 tasks were not requested"
    );
    assert_eq!(recorded_nodes("env.gpus_per_node.6"), each(&["h1", "h2"], Some(1), 1, Some(3)));
    assert_eq!(
        recorded_nodes("env.uneven_n7_N3.4"),
        [
            new_node_summary("h1", Some(5), 5, None),
            new_node_summary("h2", Some(1), 1, None),
            new_node_summary("h4", Some(1), 1, None)
        ]
    );
    assert_eq!(recorded_nodes("env.gpus_per_task.7")[0], new_node_summary("h1", Some(3), 3, Some(3)));
    let by_task = read_recorded("env.gpus_per_task.7", &[]).unwrap().unwrap();
    assert!(by_task.nodes().all(|n| n.requires_gpu_request));
    let het = read_recorded("env.het.12", &[]).unwrap().unwrap();
    let group = |g, name: &str, tasks, cpus| (Some(g), name.to_owned(), Some(tasks), cpus, None);
    assert_eq!(summarize_nodes(&het), [group(0, "h1", 2, 2), group(1, "h2", 1, 1), group(1, "h3", 1, 1)]);
    assert_eq!(het.job, 12);
    let array = read_recorded("env.array.8_1", &[]).unwrap().unwrap();
    assert_eq!((array.job, array.array), (8, Some((8, 1))));
}

#[test]
fn the_workers_of_a_node_follow_gpus_and_tasks() {
    let node =
        |tasks, gpus| SlurmNode { name: "n".into(), tasks, cpus: 4, gpus, requires_gpu_request: false };
    assert_eq!(node(Some(2), Some(4)).default_worker_count(true), Some(4));
    assert_eq!(node(Some(2), Some(4)).default_worker_count(false), Some(2));
    assert_eq!(node(Some(2), Some(0)).default_worker_count(true), Some(2));
    assert_eq!(node(Some(2), None).default_worker_count(true), Some(2));
    assert_eq!(
        (node(None, None).default_worker_count(true), node(None, None).default_worker_count(false)),
        (None, Some(1))
    );
}

#[test]
fn a_step_of_several_tasks_is_rejected_and_one_of_a_single_task_is_not() {
    let error = read_recorded("env.srun.1.2", &[]).unwrap_err();
    assert_eq!((error.code(), error.field("tasks")), (codes::SLURM_STARTED_PER_TASK, Some(&4.into())));
    let alone = read_recorded("env.srun.1.2", &[("SLURM_STEP_NUM_TASKS", Some("1"))]).unwrap().unwrap();
    assert_eq!(alone.nodes().count(), 4);
    assert!(alone.nodes().all(|n| n.tasks.is_none()), "the task of the step is not the job's");
}

#[test]
fn gpu_requests_of_every_form_are_read() {
    for (text, gpus) in [("4", Some(4)), ("a100:4", Some(4)), ("a100:2,h100:1", Some(3)), ("x", None)] {
        let set = [("SLURM_GPUS_PER_NODE", Some(text))];
        let found = read_recorded("env.gpus_per_node.6", &set).unwrap().unwrap();
        assert!(found.nodes().all(|n| n.gpus == gpus), "{text}: {found:?}");
    }
}

/// Returns the numbers of GPUs of the nodes.
fn list_gpu_counts(allocation: &SlurmAllocation) -> Vec<Option<u32>> {
    allocation.nodes().map(|node| node.gpus).collect()
}

/// Reads the allocation of a job that has whole nodes (h3 and h4) without a request for GPUs, and
/// sets the numbers of GPUs from the answer of Slurm.
fn read_exclusive(counts: &[(&str, u32)], are_requested: bool) -> SlurmAllocation {
    let mut allocation = read_recorded("env.excl.10", &[]).unwrap().unwrap();
    assert!(allocation.lacks_gpu_counts() && !allocation.lacks_gpu_requests());
    let counts = counts.iter().map(|(node, gpus)| ((*node).to_owned(), *gpus)).collect();
    allocation.set_gpu_counts(&SlurmJobGpus { counts, are_requested });
    allocation
}

#[test]
fn the_gpus_of_the_batch_node_are_not_those_of_other_nodes() {
    let unequal = read_exclusive(&[("h3", 4), ("h4", 2)], false);
    assert_eq!(list_gpu_counts(&unequal), [Some(4), Some(2)]);
    assert!(unequal.nodes().all(|node| node.requires_gpu_request), "a step gets no GPUs otherwise");
    let without = read_exclusive(&[("h3", 4)], false);
    assert_eq!(list_gpu_counts(&without), [Some(4), Some(0)], "h4 has no GPUs");
    assert!(!without.nodes().any(|node| node.requires_gpu_request), "Slurm rejects the request");
    let requested = read_exclusive(&[("h3", 2), ("h4", 2)], true);
    assert_eq!(list_gpu_counts(&requested), [Some(2), Some(2)]);
    assert!(!requested.nodes().any(|node| node.requires_gpu_request));
    let unknown = read_exclusive(&[("h3", 0), ("h4", 0)], false);
    assert_eq!(list_gpu_counts(&unknown), [None, None], "Slurm does not know the GPUs");
    assert!(!unknown.nodes().any(|node| node.requires_gpu_request));
    let requested = read_recorded("env.gpus_per_node.6", &[]).unwrap().unwrap();
    assert!(!requested.lacks_gpu_counts(), "the variables state the numbers");
}

#[test]
fn gpus_decide_before_tasks_in_a_heterogeneous_job() {
    let mut het = read_recorded("env.het.12", &[]).unwrap().unwrap();
    het.set_gpu_counts(&SlurmJobGpus { counts: [("h1".to_owned(), 1)].into(), are_requested: true });
    let workers = het.nodes().map(|node| node.default_worker_count(true));
    assert_eq!(workers.collect::<Vec<_>>(), [Some(1); 3], "h1 has 2 tasks and 1 GPU");
}

#[test]
fn without_an_answer_of_slurm_equal_nodes_are_assumed_with_a_warning() {
    let cause = Diagnostic::error(codes::SLURM_CONTROLLER_UNREACHABLE, "no answer");
    let mut exclusive = read_recorded("env.excl.10", &[]).unwrap().unwrap();
    let warning = exclusive.assume_equal_gpu_counts(&cause).expect("a warning");
    assert_eq!(list_gpu_counts(&exclusive), [Some(4), Some(4)]);
    assert_eq!((warning.code(), warning.field("gpus")), (codes::SLURM_GPU_COUNTS_UNKNOWN, Some(&4.into())));
    assert_eq!((warning.severity(), warning.causes().len()), (Severity::Warning, 1));
    let mut tasks = read_recorded("env.uneven_n7_N3.4", &[]).unwrap().unwrap();
    assert!(tasks.assume_equal_gpu_counts(&cause).is_none(), "nothing shows that the job has GPUs");
    assert_eq!(list_gpu_counts(&tasks), [None; 3]);
}

#[test]
fn invalid_variables_are_named() {
    for (name, value) in [
        ("SLURM_JOB_ID", Some("x")),
        ("SLURM_JOB_NODELIST", Some("h[1-")),
        ("SLURM_JOB_NODELIST", Some("h[1-4];rm")),
        ("SLURM_JOB_NODELIST", None),
        ("SLURM_TASKS_PER_NODE", Some("1(x3)")),
        ("SLURM_JOB_CPUS_PER_NODE", Some("4(x")),
    ] {
        let error = read_recorded("env.sbatch.1", &[(name, value)]).unwrap_err();
        assert_eq!(error.subject(), Some(name), "{value:?}: {error}");
    }
    let twice =
        read_recorded("env.het.12", &[("SLURM_JOB_NODELIST_HET_GROUP_1", Some("h[1-2]"))]).unwrap_err();
    assert_eq!((twice.code(), twice.subject()), (codes::SLURM_NODE_DUPLICATE, Some("h1")));
    assert!(read_recorded("env.het.12", &[("SLURM_HET_SIZE", Some("1000000"))]).is_err());
}

/// Checks that node lists expand to the names that `scontrol show hostnames` prints, and that
/// malformed lists are rejected.
#[test]
fn node_lists_expand_like_scontrol() {
    for (list, names) in [
        ("n[01-03,07]", "n01 n02 n03 n07"),
        ("gpu-a[1-2]-n[01-02]", "gpu-a1-n01 gpu-a1-n02 gpu-a2-n01 gpu-a2-n02"),
        ("h1,h2,h3", "h1 h2 h3"),
        ("node[1-3],login1", "node1 node2 node3 login1"),
        ("a[9-11]", "a9 a10 a11"),
        ("rack[1-2]node[1,3-4]", "rack1node1 rack1node3 rack1node4 rack2node1 rack2node3 rack2node4"),
    ] {
        assert_eq!(expand_node_list(list).map(|n| n.join(" ")).as_deref(), Some(names), "{list}");
    }
    for wrong in [
        "",
        "a,",
        "a[",
        "a]",
        "a[]",
        "a[1",
        "a[[1]]",
        "a[2-1]",
        "a[1-99999999999]",
        "a[1-9999][1-9999]",
        "a b",
        "-x",
        "a[x]",
        "é",
    ] {
        assert_eq!(expand_node_list(wrong), None, "{wrong:?}");
    }
}

#[test]
fn counts_with_repetitions_expand() {
    assert_eq!(expand_counts("5,1(x2)"), Some(vec![5, 1, 1]));
    for wrong in ["", "a", "1(x", "1(x0)", "1(x99999999)", "1(x2))", "-1", "1,,2"] {
        assert_eq!(expand_counts(wrong), None, "{wrong:?}");
    }
}

proptest! {
    #[test]
    fn arbitrary_lists_never_panic_and_stay_small(list in "[a0-9\\[\\],-]{0,60}", counts in "[0-9,()x]{0,40}") {
        prop_assert!(expand_node_list(&list).is_none_or(|names| names.len() <= MAX_NODES));
        prop_assert!(expand_counts(&counts).is_none_or(|counts| counts.len() <= MAX_NODES));
    }

    #[test]
    fn a_range_expands_to_its_numbers(from in 0u64..2000, more in 0u64..2000, width in 1usize..6) {
        let list = format!("n[{from:0width$}-{:0width$}]x", from + more);
        let names: Vec<String> = (from..=from + more).map(|n| format!("n{n:0width$}x")).collect();
        prop_assert_eq!(expand_node_list(&list), Some(names));
    }
}
