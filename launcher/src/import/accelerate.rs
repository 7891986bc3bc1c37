//! Converts Accelerate's configuration file to a job.yaml. `accelerate config` writes the
//! configuration to default_config.yaml.
//!
//! The environment of the job equals the one that `accelerate launch` sets for the configuration.
mod arguments;
mod conversion;
mod distributed_type;
pub(super) mod drop_in;
mod merged_config;
mod worker_environment;

use super::{
    import_options::{ImportErrors, ImportOptions, set_command, set_hostfile, set_slurm_nodes_with_note},
    job_draft::{ImportedJob, JobDraft},
    remaining_keys::RemainingKeys,
};
use diagnostic::{Diagnostic, Location, codes::command};
use distributed_type::DistributedType;
use jobspec::Document;
use std::path::Path;

/// The values of `distributed_type` in Accelerate's configuration that launch supports, each with
/// the kind of job, such as FSDP, that it selects.
const DISTRIBUTED_TYPES: &[(&str, DistributedType)] = &[
    ("NO", DistributedType::Single),
    ("MULTI_CPU", DistributedType::Cpu),
    ("MULTI_GPU", DistributedType::Gpu),
    ("DEEPSPEED", DistributedType::DeepSpeed),
    ("FSDP", DistributedType::Fsdp),
    ("MEGATRON_LM", DistributedType::Megatron),
];

/// The keys of Accelerate's configuration that only apply to TPUs.
const TPU_KEYS: &[&str] = &[
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

/// Converts a configuration of Accelerate to a job.yaml, with notes about keys that were not
/// converted. Fails if the configuration is invalid, or describes a kind of job that launch does
/// not run.
pub(crate) fn convert_accelerate_config(
    document: &Document,
    context: &ImportOptions<'_>,
) -> Result<ImportedJob, ImportErrors> {
    let mut keys = RemainingKeys::from_document(document)?;
    let mut draft = JobDraft::default();
    let kind = take_distributed_type(&mut keys, document)?;
    set_command(&mut draft, context, "the configuration of Accelerate");
    let cpu = keys.take_boolean("use_cpu").unwrap_or(false);
    let has_mpi_hostfile = set_mpi_hostfile(&mut draft, &mut keys, context);
    let named = has_mpi_hostfile || context.hostfile.is_some();
    let machines = set_processes(&mut draft, &mut keys, kind, cpu, named);
    set_master_port(&mut draft, &mut keys);
    let names_hosts = worker_environment::set_worker_environment(&mut draft, &mut keys, kind, cpu);
    if machines > 1 && !named && !names_hosts {
        set_slurm_nodes_with_note(&mut draft, "num_machines", machines);
    }
    if let Some(file) = context.hostfile {
        set_hostfile(&mut draft, "--hostfile", file);
    }
    take_tpu_keys_with_notes(&mut draft, &mut keys);
    finish_job(draft, keys, document)
}

/// Completes the job.yaml that was converted from Accelerate's configuration: adds notes about
/// unconverted keys, and checks the result by loading it. Fails if values in the configuration had
/// errors.
fn finish_job(
    mut draft: JobDraft,
    keys: RemainingKeys<'_>,
    document: &Document,
) -> Result<ImportedJob, ImportErrors> {
    let (rest, errors) = keys.into_unconverted_keys();
    for (key, value) in rest {
        draft.add_not_converted_note(&key, format!("launch does not know this key (value: {value})"), "");
    }
    match errors.is_empty() {
        true => draft.finish_job(&format!("{}, configuration of Accelerate", document.file_name())),
        false => Err(errors),
    }
}

/// Returns the kind of job, such as DeepSpeed or FSDP, that `distributed_type` in Accelerate's
/// configuration selects, and marks the key as converted. Fails if launch does not run this kind of
/// job.
fn take_distributed_type(
    keys: &mut RemainingKeys<'_>,
    document: &Document,
) -> Result<DistributedType, ImportErrors> {
    let error = |code, message: String, help: &str| {
        let location = Location::File { file: document.file_name().to_owned() };
        vec![Diagnostic::error(code, message).with_location(location).with_help(help)]
    };
    if let Some(name) = keys.take_text("compute_environment").filter(|e| e != "LOCAL_MACHINE") {
        let message = format!("`compute_environment` is `{name}`, which launch does not support");
        let help = "launch runs on this machine, over SSH and inside Slurm";
        return Err(error(command::IMPORT_UNSUPPORTED, message, help));
    }
    let given = keys.take_scalar("distributed_type");
    if !keys.errors.is_empty() {
        return Err(std::mem::take(&mut keys.errors));
    }
    let Some(item) = given else {
        let message =
            "`distributed_type` is missing; the file is not a configuration of Accelerate".to_owned();
        return Err(error(command::IMPORT_NOT_A_CONFIG, message, "`accelerate config` writes one"));
    };
    // Accelerate reads `no` without quotes as a boolean.
    let word = item.text.to_ascii_uppercase();
    match DISTRIBUTED_TYPES.iter().find(|(name, _)| *name == word || word == "FALSE" && *name == "NO") {
        Some((_, kind)) => Ok(*kind),
        None => {
            let known: Vec<&str> = DISTRIBUTED_TYPES.iter().map(|(name, _)| *name).collect();
            let message = format!("`distributed_type` is {}, which launch does not support", item.describe());
            let help = format!("supported are {}", known.join(", "));
            Err(error(command::IMPORT_UNSUPPORTED, message, &help))
        }
    }
}

/// Sets the key `cluster.hosts` of job.yaml to the hostfile in Accelerate's section
/// `mpirun_config`, unless the option `--hostfile` was given. Returns whether the configuration
/// names a hostfile.
fn set_mpi_hostfile(draft: &mut JobDraft, keys: &mut RemainingKeys<'_>, context: &ImportOptions<'_>) -> bool {
    let Some(mut mpi) = keys.take_section("mpirun_config") else { return false };
    let file = mpi.take_text("mpirun_hostfile");
    if let Some(file) = file.as_deref().filter(|_| context.hostfile.is_none()) {
        set_hostfile(draft, "mpirun_config.mpirun_hostfile", Path::new(file));
    }
    let (rest, errors) = mpi.into_unconverted_keys();
    keys.errors.extend(errors);
    for (key, _) in rest {
        draft.add_not_converted_note(&key, "launch starts the processes without mpirun", "");
    }
    file.is_some()
}

/// Converts the numbers of processes and hosts in Accelerate's configuration to keys of job.yaml,
/// such as `cluster.workers_per_host`. `kind` and `cpu` are the values of `distributed_type` and
/// `use_cpu`. `named` states whether a hostfile of mpirun or `--hostfile` names the hosts. Returns
/// the number of hosts.
fn set_processes(
    draft: &mut JobDraft,
    keys: &mut RemainingKeys<'_>,
    kind: DistributedType,
    cpu: bool,
    named: bool,
) -> u64 {
    let machines = keys.take_integer("num_machines", 1).unwrap_or(1);
    // -1 means that the number was given on Accelerate's command line.
    let total = keys.take_integer("num_processes", -1).filter(|n| *n > 0);
    match total {
        _ if kind == DistributedType::Single && !named => {
            draft.set_required_key("cluster.workers_per_host", "1")
        }
        None => draft.add_key_note(
            "cluster.workers_per_host",
            "`num_processes` is not given: one worker per GPU, or one per host without GPUs",
            "set the number if that is not intended",
        ),
        Some(total) => {
            let each = (total / machines).max(1);
            if total % machines != 0 {
                let reason = format!(
                    "{total} is not a multiple of {machines} machines; Accelerate starts {each} on each"
                );
                draft.add_key_note("num_processes", reason, "this job does the same");
            }
            draft.set_imported_key("num_processes", "cluster.workers_per_host", each.to_string());
        }
    }
    if kind == DistributedType::Cpu && !named && total.is_some_and(|n| n > 1) {
        draft.add_key_note(
            "num_processes",
            "without mpirun Accelerate would start one process; this job starts all of them",
            "",
        );
    }
    if cpu || kind == DistributedType::Cpu {
        draft.set_imported_key("use_cpu", "cluster.devices", "cpu");
    } else if kind != DistributedType::Single {
        draft.set_imported_key("distributed_type", "cluster.devices", "cuda");
    }
    set_gpus(draft, keys, cpu);
    take_multi_host_keys_with_notes(draft, keys, machines);
    machines as u64
}

/// Converts Accelerate's key `gpu_ids` to the job.yaml key `cluster.devices`. `cpu` states whether
/// the job runs on CPUs.
fn set_gpus(draft: &mut JobDraft, keys: &mut RemainingKeys<'_>, cpu: bool) {
    let Some(ids) = keys.take_text("gpu_ids").filter(|ids| ids != "all") else { return };
    let numbers: Option<Vec<u32>> = ids.split(',').map(|id| id.trim().parse().ok()).collect();
    match numbers {
        _ if cpu => draft.add_not_converted_note("gpu_ids", "`use_cpu` hides the GPUs", ""),
        Some(numbers) => {
            let numbers: Vec<String> = numbers.iter().map(u32::to_string).collect();
            draft.set_imported_key("gpu_ids", "cluster.devices", format!("[{}]", numbers.join(", ")));
        }
        None => {
            let todo = "list numbers in `cluster.devices`, or set `CUDA_VISIBLE_DEVICES` for launch";
            draft.add_not_converted_note(
                "gpu_ids",
                format!("`{}` is not a list of numbers", ids.escape_debug()),
                todo,
            );
        }
    }
}

/// Removes keys for jobs on several hosts, such as `machine_rank`, from Accelerate's configuration,
/// and adds a note about each value that Accelerate would use but launch ignores. `machines` is the
/// number of hosts.
fn take_multi_host_keys_with_notes(draft: &mut JobDraft, keys: &mut RemainingKeys<'_>, machines: i128) {
    let rank = keys.take_integer("machine_rank", 0);
    let backend = keys.take_text("rdzv_backend").filter(|b| b != "static");
    let same_network = keys.take_boolean("same_network");
    if let Some(function) = keys.take_text("main_training_function").filter(|f| f != "main") {
        let reason = format!("`{function}` applies to notebooks and TPUs; launch runs the whole script");
        draft.add_not_converted_note("main_training_function", reason, "");
    }
    if let Some(backend) = backend {
        let reason = format!("`{backend}`: launch assigns the ranks itself");
        draft.add_not_converted_note("rdzv_backend", reason, "");
    }
    if machines <= 1 {
        return;
    }
    if rank.is_some() {
        let reason = "one launch starts all hosts; ranks follow the order of `cluster.hosts`";
        draft.add_not_converted_note("machine_rank", reason, "");
    }
    if same_network == Some(false) {
        draft.add_not_converted_note(
            "same_network",
            "launch reaches each host over SSH or through Slurm",
            "",
        );
    }
}

/// Converts the rendezvous port in Accelerate's configuration to the job.yaml key
/// `cluster.master_port`, and adds a note about the address, which launch chooses itself.
fn set_master_port(draft: &mut JobDraft, keys: &mut RemainingKeys<'_>) {
    if let Some(address) = keys.take_text("main_process_ip") {
        let reason = format!("`{}`: `MASTER_ADDR` is the address of the first host", address.escape_debug());
        draft.add_not_converted_note("main_process_ip", reason, "name that host first in `cluster.hosts`");
    }
    if let Some(port) = keys.take_integer("main_process_port", 0).filter(|port| *port > 0) {
        draft.set_imported_key("main_process_port", "cluster.master_port", port.to_string());
    }
}

/// Removes the keys for TPUs from Accelerate's configuration, and adds a note for the user about
/// each key that is not empty or false.
fn take_tpu_keys_with_notes(draft: &mut JobDraft, keys: &mut RemainingKeys<'_>) {
    for key in TPU_KEYS {
        let Some(item) = keys.take(key) else { continue };
        let has_no_effect = matches!(item.text.to_ascii_lowercase().as_str(), "no" | "false" | "")
            && !matches!(&item.value, jobspec::DocumentValue::List(list) if !list.is_empty());
        if !has_no_effect {
            draft.add_not_converted_note(key, "launch doesn't run on TPUs", "");
        }
    }
}
