//! The allocation that Slurm gave us, from the environment it set. No I/O: the environment is an argument.
//!
//! Facts, as Slurm 22.05 to 24.11 set them: inside a batch script and `salloc` the variables are the job's; inside a step
//! (`srun`) `SLURM_STEP_*` are the step's and `SLURM_NTASKS` and friends are the step's too. `SLURM_TASKS_PER_NODE` is
//! set even where nobody asked for tasks (with `--exclusive` it is the number of CPUs), so it counts only where
//! `SLURM_NTASKS` says that somebody did. A heterogeneous job has the same names again with `_HET_GROUP_n`, each group is
//! a job of its own, and the plain names are those of the first group.
use contract::hosts;
use std::collections::BTreeSet;

/// Most nodes of an allocation.
pub const MOST_NODES: usize = hosts::MAX_HOSTS;
/// Longest list that is read, bytes.
const LONGEST_LIST: usize = 1 << 20;
/// Longest name of a node, bytes.
const LONGEST_NAME: usize = 255;
/// Most groups of a heterogeneous job.
const MOST_GROUPS: u32 = 128;

/// What Slurm gave us.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// Job id: of an array's task its own, of a heterogeneous job the first group's.
    pub job: u64,
    /// `(array's job id, this task's index)`.
    pub array: Option<(u64, u64)>,
    /// How often Slurm has started this job again.
    pub restarts: u32,
    /// One, or each group of a heterogeneous job.
    pub groups: Vec<Group>,
}

/// Nodes that were asked for together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// Its number in a heterogeneous job.
    pub het: Option<u32>,
    /// At least one, in Slurm's order.
    pub nodes: Vec<Node>,
}

/// A node of the allocation, or our part of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    pub name: String,
    /// Tasks that were asked for; `None`: nobody said.
    pub tasks: Option<u32>,
    /// CPUs that are ours; 0: unknown.
    pub cpus: u32,
    /// GPUs that are ours, as far as Slurm says before a step runs.
    pub gpus: Option<u32>,
    /// They were asked for by task (`--gpus-per-task`): a step of one task on each node gets those of one task, unless
    /// it asks for all of them.
    pub by_task: bool,
}

impl Allocation {
    /// All nodes in order.
    pub fn nodes(&self) -> impl Iterator<Item = &Node> {
        self.groups.iter().flat_map(|group| &group.nodes)
    }
}

impl Node {
    /// Workers that `workers_per_host: auto` means here: its GPUs for jobs that use them, else the tasks that were
    /// asked for, else 1. `None`: as many as the GPUs that its agent finds.
    pub fn workers(&self, use_gpus: bool) -> Option<u32> {
        let tasks = self.tasks.unwrap_or(1).max(1);
        match self.gpus {
            Some(gpus) if use_gpus && gpus > 0 => Some(gpus),
            None if use_gpus && tasks == 1 => None,
            _ => Some(tasks),
        }
    }
}

/// Why an allocation can't be used: what is wrong, and what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unusable {
    pub message: String,
    pub hint: String,
}

fn unusable(message: impl Into<String>, hint: &str) -> Unusable {
    Unusable { message: message.into(), hint: hint.to_owned() }
}

/// The allocation that this environment tells of; `None` outside of Slurm.
pub fn allocation(get: &dyn Fn(&str) -> Option<String>) -> Result<Option<Allocation>, Unusable> {
    let Some(job) = get("SLURM_JOB_ID") else { return Ok(None) };
    let job = number(&job).ok_or_else(|| damaged("SLURM_JOB_ID", &job))?;
    one_of_many(get)?;
    let groups = match get("SLURM_HET_SIZE") {
        None => vec![group(get, None)?],
        Some(size) => {
            let count = number(&size).filter(|n| (1..=u64::from(MOST_GROUPS)).contains(n));
            let count = count.ok_or_else(|| damaged("SLURM_HET_SIZE", &size))?;
            (0..count as u32).map(|g| group(get, Some(g))).collect::<Result<_, _>>()?
        }
    };
    let mut seen = BTreeSet::new();
    let nodes = groups.iter().flat_map(|g: &Group| &g.nodes);
    if let Some(twice) = nodes.clone().find(|n| !seen.insert(n.name.as_str())) {
        let message = format!("the node {} is in two groups of this heterogeneous job", twice.name);
        return Err(unusable(message, "ask for groups of different nodes (--exclusive), or for one group"));
    }
    if nodes.count() > MOST_NODES {
        return Err(unusable(format!("the allocation has more than {MOST_NODES} nodes"), "use fewer"));
    }
    let pair = get("SLURM_ARRAY_JOB_ID").zip(get("SLURM_ARRAY_TASK_ID"));
    let array = pair.and_then(|(job, task)| number(&job).zip(number(&task)));
    let restarts = get("SLURM_RESTART_COUNT").and_then(|n| number(&n)).unwrap_or(0);
    Ok(Some(Allocation { job, array, restarts: restarts.min(u64::from(u32::MAX)) as u32, groups }))
}

/// `srun launch job.yaml` would run the whole job once for each task.
fn one_of_many(get: &dyn Fn(&str) -> Option<String>) -> Result<(), Unusable> {
    let tasks = get("SLURM_STEP_ID").and(get("SLURM_STEP_NUM_TASKS")).and_then(|n| number(&n));
    match tasks {
        Some(tasks) if tasks > 1 => Err(unusable(
            format!("launch was started {tasks} times, once for each task of an srun step"),
            "call it once, without srun: launch starts its own step on all nodes of the allocation \
             (to stay on one machine in each task, set `cluster.hosts: local`)",
        )),
        _ => Ok(()),
    }
}

fn group(get: &dyn Fn(&str) -> Option<String>, het: Option<u32>) -> Result<Group, Unusable> {
    let named = |name: &str| match het {
        Some(n) => get(&format!("{name}_HET_GROUP_{n}")),
        None => get(name),
    };
    let of_group = |name: &str| het.map_or_else(|| name.to_owned(), |n| format!("{name}_HET_GROUP_{n}"));
    let list = named("SLURM_JOB_NODELIST").ok_or_else(|| {
        let message = format!("{} isn't set, though SLURM_JOB_ID is", of_group("SLURM_JOB_NODELIST"));
        unusable(message, "start launch inside sbatch or salloc, or set `cluster.hosts: local`")
    })?;
    let names = expand(&list).ok_or_else(|| damaged(&of_group("SLURM_JOB_NODELIST"), &list))?;
    let counts = |name: &str| -> Result<Option<Vec<u32>>, Unusable> {
        let Some(text) = named(name) else { return Ok(None) };
        let counts = repeated(&text).filter(|counts| counts.len() == names.len());
        counts.map(Some).ok_or_else(|| damaged(&of_group(name), &text))
    };
    let asked = named("SLURM_NTASKS").is_some() || named("SLURM_NTASKS_PER_NODE").is_some();
    // In a step of one task these are the step's own numbers, and not those of the job.
    let in_step = get("SLURM_STEP_ID").is_some();
    let tasks = if asked && !in_step { counts("SLURM_TASKS_PER_NODE")? } else { None };
    let cpus = counts("SLURM_JOB_CPUS_PER_NODE")?;
    let gpus = gpus(&named);
    let each = named("SLURM_GPUS_PER_TASK").and_then(|text| gpu_count(&text));
    let nodes = names.into_iter().enumerate().map(|(i, name)| {
        let tasks = tasks.as_ref().map(|tasks| tasks[i]);
        let of_tasks = tasks.zip(each).map(|(tasks, each)| tasks.saturating_mul(each));
        let cpus = cpus.as_ref().map_or(0, |cpus| cpus[i]);
        Node { name, tasks, cpus, gpus: of_tasks.or(gpus), by_task: of_tasks.is_some() }
    });
    Ok(Group { het, nodes: nodes.collect() })
}

/// GPUs of each node: what was asked for, or what the batch script's own node has.
fn gpus(get: &dyn Fn(&str) -> Option<String>) -> Option<u32> {
    let asked = get("SLURM_GPUS_PER_NODE").and_then(|text| gpu_count(&text));
    asked.or_else(|| gpu_count(&get("SLURM_GPUS_ON_NODE")?))
}

/// `4`, `a100:4` or `a100:2,h100:2`.
fn gpu_count(text: &str) -> Option<u32> {
    let mut each = text.split(',').map(|part| number(part.rsplit(':').next()?));
    let sum = each.try_fold(0u64, |sum, n| sum.checked_add(n?))?;
    u32::try_from(sum).ok().filter(|gpus| *gpus <= 1024)
}

fn damaged(name: &str, value: &str) -> Unusable {
    let shown: String = value.chars().take(60).flat_map(char::escape_default).collect();
    unusable(
        format!("{name} is `{shown}`, which launch can't read"),
        "was it changed by hand? `cluster.hosts: local` doesn't read it",
    )
}

fn number(text: &str) -> Option<u64> {
    let digits = !text.is_empty() && text.len() <= 19 && text.bytes().all(|b| b.is_ascii_digit());
    text.parse().ok().filter(|_| digits)
}

/// `5,1(x2)` → 5, 1, 1; `None` when it can't be read or is longer than any allocation.
pub fn repeated(text: &str) -> Option<Vec<u32>> {
    let mut counts = Vec::new();
    for part in text.split(',') {
        let (value, times) = match part.split_once("(x") {
            Some((value, times)) => (value, number(times.strip_suffix(')')?)?),
            None => (part, 1),
        };
        let value = u32::try_from(number(value)?).ok()?;
        if times == 0 || times > (MOST_NODES - counts.len()) as u64 {
            return None;
        }
        counts.extend(std::iter::repeat_n(value, times as usize));
    }
    Some(counts)
}

/// `a[1-2]n[01,03-04],b` → the names in order; `None` when it can't be read or has more than [`MOST_NODES`].
pub fn expand(list: &str) -> Option<Vec<String>> {
    if list.len() > LONGEST_LIST {
        return None;
    }
    let names = hosts::expand(list).ok()?;
    names.iter().all(|name| is_name(name)).then_some(names)
}

/// Node names go into command lines: no other characters than host names have.
fn is_name(name: &str) -> bool {
    let fits = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
    (1..=LONGEST_NAME).contains(&name.len()) && !name.starts_with('-') && name.bytes().all(fits)
}

#[cfg(test)]
#[path = "slurm_tests.rs"]
mod tests;
