//! [`read_allocation`]: reads the nodes of the Slurm allocation in which launch runs from
//! environment variables.
//!
//! The functions are pure, because the environment is an argument. The rules below hold for Slurm
//! 22.05 to 24.11:
//!
//! - In a batch script and in `salloc` the variables describe the job. In a step (`srun`),
//!   `SLURM_STEP_*`, `SLURM_NTASKS` and similar variables describe the step.
//! - `SLURM_TASKS_PER_NODE` is set even if the user requested no tasks. With `--exclusive` its
//!   value is the number of CPUs. This module therefore uses the variable only if `SLURM_NTASKS` or
//!   `SLURM_NTASKS_PER_NODE` shows that tasks were requested.
//! - A heterogeneous job also has all names with the suffix `_HET_GROUP_n`. Each group is a job,
//!   and the names without the suffix describe the first group.
use diagnostic::{Diagnostic, codes::slurm as codes};
use jobspec::hosts;
use std::collections::{BTreeMap, BTreeSet};

/// The largest number of nodes of a Slurm allocation that is accepted. A larger allocation is
/// rejected.
pub(super) const MAX_NODES: usize = hosts::MAX_HOSTS;
/// The longest node list in Slurm's environment variables that is accepted, in bytes.
const MAX_LIST_BYTES: usize = 1 << 20;
/// The longest name of a Slurm node that is accepted, in bytes.
const MAX_NAME_BYTES: usize = 255;
/// The largest number of components (groups of nodes) of a heterogeneous Slurm job that is
/// accepted.
const MAX_HETEROGENEOUS_GROUPS: u32 = 128;

/// The Slurm job in which launch runs, with the nodes that Slurm has allocated to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SlurmAllocation {
    /// The job id. A task of an array has its own job id. A heterogeneous job has the job id of its
    /// first group.
    pub(super) job: u64,
    /// For a task of a job array: the job id of the array, and the index of the task. `None` for
    /// other jobs.
    pub(super) array: Option<(u64, u64)>,
    /// The groups of nodes. Only a heterogeneous job has more than one group.
    pub(super) groups: Vec<SlurmNodeGroup>,
}

/// The nodes of a whole Slurm job, or of one component of a heterogeneous Slurm job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SlurmNodeGroup {
    /// The number of the group in a heterogeneous job; `None` in other jobs.
    pub(super) het: Option<u32>,
    /// The nodes in the order in which Slurm lists them; at least one.
    pub(super) nodes: Vec<SlurmNode>,
    /// The number of GPUs that the job has on the node that runs the batch script; `None` if Slurm
    /// does not state it. The other nodes may have other numbers of GPUs.
    pub(super) gpus_on_batch_node: Option<u32>,
}

/// A node of a Slurm allocation, with the numbers of tasks, CPUs and GPUs that Slurm has allocated
/// on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SlurmNode {
    /// The name of the node.
    pub(super) name: String,
    /// The number of tasks on the node; `None` if the job requested no tasks.
    pub(super) tasks: Option<u32>,
    /// The number of CPUs that the job has on the node; 0 if unknown.
    pub(super) cpus: u32,
    /// The number of GPUs that the job has on the node; `None` if Slurm does not state it before a
    /// step runs.
    pub(super) gpus: Option<u32>,
    /// Whether a step must request the GPUs of its nodes, because the job requested GPUs per task
    /// (`--gpus-per-task`) or in total (`--gpus`), or has all GPUs of its nodes without a request
    /// (`--exclusive`). Without a request, a step with one task per node
    /// gets no GPU or the GPUs of one task, or cannot be created.
    pub(super) requires_gpu_request: bool,
}

/// The GPUs of a whole Slurm job, as `scontrol show job` reports them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct SlurmJobGpus {
    /// The number of GPUs on each node. Nodes without GPUs have 0 GPUs or are left out.
    pub(super) counts: BTreeMap<String, u32>,
    /// Whether the job requested GPUs, so that its steps get them without a request. A job with
    /// `--exclusive` has all GPUs of its nodes even if it requested none.
    pub(super) are_requested: bool,
}

impl SlurmAllocation {
    /// Returns an iterator over the nodes of the Slurm job, one component of a heterogeneous job
    /// after the other.
    pub(super) fn nodes(&self) -> impl Iterator<Item = &SlurmNode> {
        self.groups.iter().flat_map(|group| &group.nodes)
    }

    /// Returns whether there is a node whose GPUs must be requested by each Slurm step (`srun`) but
    /// whose number of GPUs is unknown.
    pub(super) fn lacks_gpu_requests(&self) -> bool {
        self.nodes().any(|node| node.requires_gpu_request && node.gpus.is_none())
    }

    /// Returns whether Slurm's environment variables do not state how many GPUs some node has.
    pub(super) fn lacks_gpu_counts(&self) -> bool {
        self.nodes().any(|node| node.gpus.is_none())
    }

    /// Sets the unknown numbers of GPUs of the allocation's nodes to the numbers that Slurm has
    /// reported in `job`. A step must request these GPUs if the job did not. If the job has no GPUs
    /// at all, Slurm may not know the GPUs of the nodes, and only their agents can count them. If
    /// only some nodes have GPUs, Slurm 22.05 rejects each request of a step.
    pub(super) fn set_gpu_counts(&mut self, job: &SlurmJobGpus) {
        let are_known = job.counts.values().any(|count| *count > 0);
        let have_all = self.nodes().all(|node| job.counts.get(&node.name).is_some_and(|count| *count > 0));
        let unknown = |node: &&mut SlurmNode| node.gpus.is_none();
        for node in self.groups.iter_mut().flat_map(|group| &mut group.nodes).filter(unknown) {
            let count = job.counts.get(&node.name).copied().unwrap_or(0);
            node.gpus = (are_known || node.requires_gpu_request).then_some(count);
            node.requires_gpu_request |= have_all && !job.are_requested;
        }
    }

    /// Assumes that each node with an unknown number of GPUs has as many GPUs as the node of the
    /// batch script, because Slurm did not report the number. Returns a warning with the error
    /// `cause` of Slurm, or `None` if nothing shows that the job has GPUs.
    pub(super) fn assume_equal_gpu_counts(&mut self, cause: &Diagnostic) -> Option<Diagnostic> {
        let gpus = self.groups.iter().find_map(|group| group.gpus_on_batch_node).filter(|gpus| *gpus > 0)?;
        for group in &mut self.groups {
            let assumed = group.gpus_on_batch_node;
            group.nodes.iter_mut().for_each(|node| node.gpus = node.gpus.or(assumed));
        }
        let message = format!(
            "Slurm does not state how many GPUs each node has; launch assumes {gpus} on each node, as on \
             the node of the batch script"
        );
        let warning = Diagnostic::warning(codes::SLURM_GPU_COUNTS_UNKNOWN, message).with_cause(cause);
        let warning = warning.with_help("set `cluster.workers_per_host` if the number is wrong");
        Some(warning.with_field("gpus", gpus))
    }
}

impl SlurmNode {
    /// Returns how many workers run on this Slurm node by default, in jobs with `workers_per_host:
    /// auto`. In a job that uses GPUs, this is the number of GPUs. Otherwise it is the number of
    /// requested tasks, or 1. `None` means that the number of GPUs is not known before an agent
    /// reports it.
    pub(super) fn default_worker_count(&self, use_gpus: bool) -> Option<u32> {
        let tasks = self.tasks.unwrap_or(1).max(1);
        match self.gpus {
            Some(gpus) if use_gpus && gpus > 0 => Some(gpus),
            None if use_gpus && tasks == 1 => None,
            _ => Some(tasks),
        }
    }
}

/// Reads the nodes and resources of the Slurm allocation from Slurm's environment variables, which
/// the function `get` looks up. Returns `None` outside of Slurm.
pub(super) fn read_allocation(
    get: &dyn Fn(&str) -> Option<String>,
) -> diagnostic::Result<Option<SlurmAllocation>> {
    let Some(job) = get("SLURM_JOB_ID") else { return Ok(None) };
    let job = parse_number(&job).ok_or_else(|| build_invalid_variable_error("SLURM_JOB_ID", &job))?;
    check_single_task_step(get)?;
    let groups = match get("SLURM_HET_SIZE") {
        None => vec![read_node_group(get, None)?],
        Some(size) => {
            let count = parse_number(&size).filter(|n| (1..=u64::from(MAX_HETEROGENEOUS_GROUPS)).contains(n));
            let count = count.ok_or_else(|| build_invalid_variable_error("SLURM_HET_SIZE", &size))?;
            (0..count as u32).map(|g| read_node_group(get, Some(g))).collect::<Result<_, _>>()?
        }
    };
    let mut names = BTreeSet::new();
    let nodes = groups.iter().flat_map(|g: &SlurmNodeGroup| &g.nodes);
    if let Some(node) = nodes.clone().find(|n| !names.insert(n.name.as_str())) {
        let message = format!("node {} is in two groups of this heterogeneous job", node.name);
        return Err(Diagnostic::error(codes::SLURM_NODE_DUPLICATE, message)
            .with_subject(node.name.as_str())
            .with_help("request groups of different nodes (--exclusive), or one group"));
    }
    if nodes.count() > MAX_NODES {
        let message = format!("the allocation has more than {MAX_NODES} nodes");
        return Err(
            Diagnostic::error(codes::SLURM_ALLOCATION_TOO_LARGE, message).with_help("request fewer nodes")
        );
    }
    let array = get("SLURM_ARRAY_JOB_ID").zip(get("SLURM_ARRAY_TASK_ID"));
    let array = array.and_then(|(job, task)| parse_number(&job).zip(parse_number(&task)));
    Ok(Some(SlurmAllocation { job, array, groups }))
}

/// Reads the id of the Slurm job in which this process runs, and how often Slurm has requeued the
/// job. Returns `None` outside of Slurm. Also answers in a step in which each task is launch on
/// another node (nodes that join), from which [`read_allocation`] returns an error.
pub(super) fn read_job_id_and_restarts(get: &dyn Fn(&str) -> Option<String>) -> Option<(u64, u32)> {
    let job = get("SLURM_JOB_ID").and_then(|id| parse_number(&id))?;
    let restarts = get("SLURM_RESTART_COUNT").and_then(|n| parse_number(&n)).unwrap_or(0);
    Some((job, u32::try_from(restarts).unwrap_or(u32::MAX)))
}

/// Fails if launch runs in a step of several tasks (`srun launch job.yaml`), which would run the
/// whole job once per task.
fn check_single_task_step(get: &dyn Fn(&str) -> Option<String>) -> diagnostic::Result<()> {
    let tasks = get("SLURM_STEP_ID").and(get("SLURM_STEP_NUM_TASKS")).and_then(|n| parse_number(&n));
    match tasks {
        Some(tasks) if tasks > 1 => {
            let message = format!("launch was started {tasks} times, once for each task of an srun step");
            Err(Diagnostic::error(codes::SLURM_STARTED_PER_TASK, message)
                .with_field("tasks", tasks)
                .with_help("start launch once, without srun; it starts a step on all nodes of the allocation")
                .with_help(
                    "for one launch on each node, as in containers, give them all a key: `--key-file FILE`",
                )
                .with_help("to stay on one machine in each task, set `cluster.hosts: local`"))
        }
        _ => Ok(()),
    }
}

/// Reads the nodes of the whole Slurm job, or of one component of a heterogeneous job, from Slurm's
/// environment variables. `het` is the number of the group in a heterogeneous job; `None` in other
/// jobs.
fn read_node_group(
    get: &dyn Fn(&str) -> Option<String>,
    het: Option<u32>,
) -> diagnostic::Result<SlurmNodeGroup> {
    let full_name = |name: &str| het.map_or_else(|| name.to_owned(), |n| format!("{name}_HET_GROUP_{n}"));
    let variable = |name: &str| get(&full_name(name));
    let list = variable("SLURM_JOB_NODELIST").ok_or_else(|| {
        let name = full_name("SLURM_JOB_NODELIST");
        let message = format!("{name} is not set, although SLURM_JOB_ID is");
        Diagnostic::error(codes::SLURM_ALLOCATION_MISSING, message)
            .with_subject(name)
            .with_help("start launch inside sbatch or salloc, or set `cluster.hosts: local`")
    })?;
    let names = expand_node_list(&list)
        .ok_or_else(|| build_invalid_variable_error(&full_name("SLURM_JOB_NODELIST"), &list))?;
    let counts = |name: &str| -> diagnostic::Result<Option<Vec<u32>>> {
        let Some(text) = variable(name) else { return Ok(None) };
        let counts = expand_counts(&text).filter(|counts| counts.len() == names.len());
        counts.map(Some).ok_or_else(|| build_invalid_variable_error(&full_name(name), &text))
    };
    let are_requested = variable("SLURM_NTASKS").is_some() || variable("SLURM_NTASKS_PER_NODE").is_some();
    // In a step of one task these variables describe the step, not the job.
    let in_step = get("SLURM_STEP_ID").is_some();
    let tasks = if are_requested && !in_step { counts("SLURM_TASKS_PER_NODE")? } else { None };
    let cpus = counts("SLURM_JOB_CPUS_PER_NODE")?;
    let gpus_per_task = variable("SLURM_GPUS_PER_TASK").and_then(|text| parse_gpu_count(&text));
    // Slurm may give the nodes of such a job different numbers of GPUs.
    let in_total = variable("SLURM_GPUS").is_some()
        && variable("SLURM_GPUS_PER_NODE").is_none()
        && gpus_per_task.is_none()
        && names.len() > 1;
    let gpus_per_node = variable("SLURM_GPUS_PER_NODE").and_then(|text| parse_gpu_count(&text));
    let gpus_on_batch_node = variable("SLURM_GPUS_ON_NODE").and_then(|text| parse_gpu_count(&text));
    let nodes = names.into_iter().enumerate().map(|(i, name)| {
        let tasks = tasks.as_ref().map(|tasks| tasks[i]);
        let gpus_of_tasks = tasks.zip(gpus_per_task).map(|(tasks, gpus)| tasks.saturating_mul(gpus));
        let cpus = cpus.as_ref().map_or(0, |cpus| cpus[i]);
        let gpus = gpus_of_tasks.or(gpus_per_node);
        SlurmNode { name, tasks, cpus, gpus, requires_gpu_request: in_total || gpus_of_tasks.is_some() }
    });
    Ok(SlurmNodeGroup { het, nodes: nodes.collect(), gpus_on_batch_node })
}

/// Parses a number of GPUs in Slurm's notation, such as `4`, `a100:4` or `a100:2,h100:2`. Returns
/// the sum over all GPU types, or `None` if the text is malformed or the sum is above 1024.
fn parse_gpu_count(text: &str) -> Option<u32> {
    let mut counts = text.split(',').map(|part| parse_number(part.rsplit(':').next()?));
    let sum = counts.try_fold(0u64, |sum, n| sum.checked_add(n?))?;
    u32::try_from(sum).ok().filter(|gpus| *gpus <= 1024)
}

/// Creates the error that the environment variable `name` has a value that is not in Slurm's
/// notation.
fn build_invalid_variable_error(name: &str, value: &str) -> Diagnostic {
    let excerpt: String = value.chars().take(60).flat_map(char::escape_default).collect();
    Diagnostic::error(codes::SLURM_VARIABLE_INVALID, format!("{name} has an unexpected value: `{excerpt}`"))
        .with_subject(name)
        .with_field("value", excerpt)
        .with_help("check whether it was changed by hand; `cluster.hosts: local` ignores it")
}

/// Parses a number of at most 19 decimal digits from a value in Slurm's notation. Returns `None`
/// for other text.
pub(super) fn parse_number(text: &str) -> Option<u64> {
    let digits = !text.is_empty() && text.len() <= 19 && text.bytes().all(|b| b.is_ascii_digit());
    text.parse().ok().filter(|_| digits)
}

/// Expands repeated counts in Slurm's notation, such as `5,1(x2)`, into a list (5, 1, 1). Returns
/// `None` if the text is malformed or has more than [`MAX_NODES`] counts.
pub(super) fn expand_counts(text: &str) -> Option<Vec<u32>> {
    let mut counts = Vec::new();
    for part in text.split(',') {
        let (value, times) = match part.split_once("(x") {
            Some((value, times)) => (value, parse_number(times.strip_suffix(')')?)?),
            None => (part, 1),
        };
        let value = u32::try_from(parse_number(value)?).ok()?;
        if times == 0 || times > (MAX_NODES - counts.len()) as u64 {
            return None;
        }
        counts.extend(std::iter::repeat_n(value, times as usize));
    }
    Some(counts)
}

/// Expands a node list in Slurm's notation, such as `a[1-2]n[01,03-04],b`, into the names of the
/// nodes, in Slurm's order. Returns `None` if the list is malformed or has more than [`MAX_NODES`]
/// names.
pub(super) fn expand_node_list(list: &str) -> Option<Vec<String>> {
    if list.len() > MAX_LIST_BYTES {
        return None;
    }
    let names = hosts::expand_ranges(list).ok()?;
    names.iter().all(|name| is_node_name(name)).then_some(names)
}

/// Returns whether `name`, a node name from Slurm, has only characters that are allowed in host
/// names. The check is necessary because node names become part of command lines.
fn is_node_name(name: &str) -> bool {
    let is_allowed = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
    (1..=MAX_NAME_BYTES).contains(&name.len()) && !name.starts_with('-') && name.bytes().all(is_allowed)
}

/// Parses untrusted values of Slurm's environment variables and discards the result, so that a
/// fuzzer can find errors in the parser. The lines of `text` are the node list, tasks per node,
/// CPUs per node, and number of groups.
pub(crate) fn parse_untrusted_variables(text: &str) -> diagnostic::Result<()> {
    let mut lines = text.lines();
    let names = ["SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE", "SLURM_JOB_CPUS_PER_NODE", "SLURM_HET_SIZE"];
    let set: Vec<(&str, &str)> = names.iter().copied().zip(&mut lines).collect();
    let get = |name: &str| match name {
        "SLURM_JOB_ID" | "SLURM_NTASKS" => Some("1".to_owned()),
        _ => set.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned()),
    };
    read_allocation(&get).map(drop)
}

#[cfg(test)]
#[path = "allocation_tests.rs"]
mod tests;
