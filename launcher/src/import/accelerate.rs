//! Accelerate's `ClusterConfig` (`accelerate config` writes it to default_config.yaml) as a job.
//!
//! The environment is the one that Accelerate's own launcher makes of the same file.
mod env;

use super::{Beside, Draft, Imported, Refused, hostfile, keys::Keys, run, unnamed_hosts};
use contract::{Problem, job::Document};
use std::path::Path;

/// What the processes of a job are to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    One,
    Cpu,
    Gpu,
    DeepSpeed,
    Fsdp,
    Megatron,
}

const KINDS: &[(&str, Kind)] = &[
    ("NO", Kind::One),
    ("MULTI_CPU", Kind::Cpu),
    ("MULTI_GPU", Kind::Gpu),
    ("DEEPSPEED", Kind::DeepSpeed),
    ("FSDP", Kind::Fsdp),
    ("MEGATRON_LM", Kind::Megatron),
];

/// Keys that mean nothing on CPUs and GPUs, with the values that ask for nothing.
const TPU: &[&str] = &[
    "downcast_bf16",
    "tpu_name",
    "tpu_zone",
    "tpu_use_cluster",
    "tpu_use_sudo",
    "command_file",
    "commands",
    "tpu_vm",
    "tpu_env",
];

/// A config as a job.
pub(crate) fn accelerate(document: &Document, beside: &Beside<'_>) -> Result<Imported, Refused> {
    let mut keys = Keys::top(document)?;
    let mut draft = Draft::default();
    let kind = kind(&mut keys, document)?;
    run(&mut draft, beside, "Accelerate's config");
    let cpu = keys.boolean("use_cpu").unwrap_or(false);
    let by_mpi = mpirun(&mut draft, &mut keys, beside);
    let named = by_mpi || beside.hostfile.is_some();
    let machines = processes(&mut draft, &mut keys, kind, cpu, named);
    master(&mut draft, &mut keys);
    let by_deepspeed = env::environment(&mut draft, &mut keys, kind, cpu);
    if machines > 1 && !named && !by_deepspeed {
        unnamed_hosts(&mut draft, "num_machines", machines);
    }
    if let Some(file) = beside.hostfile {
        hostfile(&mut draft, "--hostfile", file);
    }
    no_tpu(&mut draft, &mut keys);
    finish(draft, keys, document)
}

fn finish(mut draft: Draft, keys: Keys<'_>, document: &Document) -> Result<Imported, Refused> {
    let (rest, problems) = keys.rest();
    for (key, value) in rest {
        draft.not_carried(&key, format!("launch doesn't know this key (it is {value})"), "");
    }
    match problems.is_empty() {
        true => draft.finish(&format!("{}, Accelerate's config", document.file())),
        false => Err(problems),
    }
}

/// What kind of job it is; what launch can't run at all is refused.
fn kind(keys: &mut Keys<'_>, document: &Document) -> Result<Kind, Refused> {
    let problem = |message: String, hint: &str| {
        let place = contract::problem::Place::File { file: document.file().to_owned() };
        vec![Problem { path: String::new(), place, message, hint: Some(hint.to_owned()) }]
    };
    if let Some(place) = keys.text("compute_environment").filter(|e| e != "LOCAL_MACHINE") {
        let message = format!("`compute_environment: {place}` isn't one that launch runs in");
        return Err(problem(message, "launch runs on this machine, over SSH, and inside Slurm"));
    }
    let given = keys.scalar("distributed_type");
    if !keys.problems.is_empty() {
        return Err(std::mem::take(&mut keys.problems));
    }
    let Some(item) = given else {
        let message = "`distributed_type` is missing: this isn't Accelerate's config".to_owned();
        return Err(problem(message, "`accelerate config` writes one"));
    };
    // `no` without quotes is a boolean to Accelerate's reader of YAML
    let word = item.text.to_ascii_uppercase();
    match KINDS.iter().find(|(name, _)| *name == word || word == "FALSE" && *name == "NO") {
        Some((_, kind)) => Ok(*kind),
        None => {
            let known: Vec<&str> = KINDS.iter().map(|(name, _)| *name).collect();
            let message = format!("`distributed_type` is {}, which launch doesn't run", item.found());
            Err(problem(message, &format!("it runs {}", known.join(", "))))
        }
    }
}

/// A hostfile for mpirun. Is there one?
fn mpirun(draft: &mut Draft, keys: &mut Keys<'_>, beside: &Beside<'_>) -> bool {
    let Some(mut mpi) = keys.section("mpirun_config") else { return false };
    let file = mpi.text("mpirun_hostfile");
    if let Some(file) = file.as_deref().filter(|_| beside.hostfile.is_none()) {
        hostfile(draft, "mpirun_config.mpirun_hostfile", Path::new(file));
    }
    let (rest, problems) = mpi.rest();
    keys.problems.extend(problems);
    for (key, _) in rest {
        draft.not_carried(&key, "launch starts the processes itself, without mpirun", "");
    }
    file.is_some()
}

/// How many processes, where, on which GPUs; the number of machines.
fn processes(draft: &mut Draft, keys: &mut Keys<'_>, kind: Kind, cpu: bool, named: bool) -> u64 {
    let machines = keys.integer("num_machines", 1).unwrap_or(1);
    // -1: to be given on Accelerate's command line
    let total = keys.integer("num_processes", -1).filter(|n| *n > 0);
    match total {
        _ if kind == Kind::One && !named => draft.own("cluster.workers_per_host", "1"),
        None => draft.note(
            "cluster.workers_per_host",
            "`num_processes` isn't given: a worker for each GPU of a host, or one",
            "say how many where that isn't meant",
        ),
        Some(total) => {
            let each = (total / machines).max(1);
            if total % machines != 0 {
                let why = format!(
                    "{total} isn't a multiple of {machines} machines; Accelerate starts {each} on each"
                );
                draft.note("num_processes", why, "so does this job");
            }
            draft.wish("num_processes", "cluster.workers_per_host", each.to_string());
        }
    }
    if kind == Kind::Cpu && !named && total.is_some_and(|n| n > 1) {
        draft.note(
            "num_processes",
            "without mpirun Accelerate would start one process; this job starts all",
            "",
        );
    }
    if cpu || kind == Kind::Cpu {
        draft.wish("use_cpu", "cluster.devices", "cpu");
    } else if kind != Kind::One {
        draft.wish("distributed_type", "cluster.devices", "cuda");
    }
    gpus(draft, keys, cpu);
    several(draft, keys, machines);
    machines as u64
}

fn gpus(draft: &mut Draft, keys: &mut Keys<'_>, cpu: bool) {
    let Some(ids) = keys.text("gpu_ids").filter(|ids| ids != "all") else { return };
    let numbers: Option<Vec<u32>> = ids.split(',').map(|id| id.trim().parse().ok()).collect();
    match numbers {
        _ if cpu => draft.not_carried("gpu_ids", "`use_cpu` hides the GPUs", ""),
        Some(numbers) => {
            let numbers: Vec<String> = numbers.iter().map(u32::to_string).collect();
            draft.wish("gpu_ids", "cluster.devices", format!("[{}]", numbers.join(", ")));
        }
        None => {
            let todo =
                "give their numbers in `cluster.devices`, or set `CUDA_VISIBLE_DEVICES` for launch itself";
            draft.not_carried("gpu_ids", format!("`{}` aren't numbers", ids.escape_debug()), todo);
        }
    }
}

/// What a config says of several machines.
fn several(draft: &mut Draft, keys: &mut Keys<'_>, machines: i128) {
    let rank = keys.integer("machine_rank", 0);
    let backend = keys.text("rdzv_backend").filter(|b| b != "static");
    let same = keys.boolean("same_network");
    if let Some(function) = keys.text("main_training_function").filter(|f| f != "main") {
        let why = format!("`{function}` is for notebooks and TPUs; a script runs as a whole here too");
        draft.not_carried("main_training_function", why, "");
    }
    if let Some(backend) = backend {
        let why = format!("`{backend}`: launch assigns the ranks itself");
        draft.not_carried("rdzv_backend", why, "");
    }
    if machines <= 1 {
        return;
    }
    if rank.is_some() {
        let why = "one launch starts all hosts; ranks follow the order of `cluster.hosts`";
        draft.not_carried("machine_rank", why, "");
    }
    if same == Some(false) {
        draft.not_carried("same_network", "launch reaches each host by SSH or through Slurm", "");
    }
}

fn master(draft: &mut Draft, keys: &mut Keys<'_>) {
    if let Some(address) = keys.text("main_process_ip") {
        let why = format!("`{}`: `MASTER_ADDR` is the first host's address", address.escape_debug());
        draft.not_carried("main_process_ip", why, "name that host first in `cluster.hosts`");
    }
    if let Some(port) = keys.integer("main_process_port", 0).filter(|port| *port > 0) {
        draft.wish("main_process_port", "cluster.master_port", port.to_string());
    }
}

fn no_tpu(draft: &mut Draft, keys: &mut Keys<'_>) {
    for key in TPU {
        let Some(item) = keys.take(key) else { continue };
        let nothing = matches!(item.text.to_ascii_lowercase().as_str(), "no" | "false" | "")
            && !matches!(&item.value, contract::job::ItemValue::List(list) if !list.is_empty());
        if !nothing {
            draft.not_carried(key, "launch doesn't run on TPUs", "");
        }
    }
}
