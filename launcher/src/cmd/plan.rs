//! `launch plan` and `launch run --dry-run`: print the plan of a job without starting it.
mod activated_environment;
mod memory_copy_time;

use super::{
    context::CommandContext,
    job_preparation::{JobArgs, JobLoadRequest, PreparedJob, prepare_job},
    output,
};
use crate::{
    agent::{environment_activation::activate_environments, environment_changes::EnvironmentChanges},
    cluster::{self, HostTarget},
    controller::count_controller_descriptors,
    format::{format_ranges, format_rank_label, format_table, quote_shell_words},
    plan::{HangDetectionReason, MemoryCopyCost},
    secrets::{redact_job_secrets, redact_secret_value},
};
use diagnostic::{
    Diagnostic, Location,
    quantity::{format_bytes, format_count, format_seconds},
};
use jobspec::{EnvSource, RankSelection, hide_secret_arguments, ids::RunId};
use memory_copy_time::{MemoryCopyTime, measure_copy_rate};
use protocol::{
    control::{HangDetection, HostPlan, WorkerPlan},
    preflight::MemoryEstimate,
};
use serde_json::{Map, Value, json};
use std::{fmt::Write, time::Duration};

/// The text at the end of the help of `launch plan`.
pub(crate) const HELP: &str = "With --verbose, the command also activates the environments of `run.activate` on this \
    machine, and shows which variables they change.";

/// Runs `launch plan`: prints which worker of a job would run where, with which CPUs, GPUs and
/// environment, and returns the exit code.
pub(crate) fn run(args: JobArgs, context: &CommandContext) -> diagnostic::Result<u8> {
    let prepared = prepare_job(&args.to_job_load_request(), &placeholder_run_id(), context.preflight)?;
    check_resume_path(&prepared)?;
    print_plan(&prepared, context, false)
}

/// Runs `launch run --dry-run`: prints the plan of a job and the job with all defaults. Returns the
/// exit code.
pub(crate) fn print_dry_run_plan(
    request: &JobLoadRequest,
    context: &CommandContext,
) -> diagnostic::Result<u8> {
    let prepared = prepare_job(request, &placeholder_run_id(), context.preflight)?;
    check_resume_path(&prepared)?;
    print_plan(&prepared, context, true)
}

/// Checks the path of `resume.from`, if all hosts of the job are this machine. Other hosts may have
/// files that this machine lacks.
fn check_resume_path(prepared: &PreparedJob) -> diagnostic::Result<()> {
    if prepared.hosts.iter().any(|host| !host.local) {
        return Ok(());
    }
    super::ckpt::resume_path::check_resume_path(&prepared.job)
}

/// Returns the placeholder `{run}`, which stands for the run ID in the paths of a plan.
fn placeholder_run_id() -> RunId {
    RunId("{run}".to_owned())
}

/// Prints the plan of a job (what would run where) to stdout, and the warnings about the job to
/// stderr. With `with_job`, the text output ends with the job with all defaults. With `--verbose`,
/// activates the environments of `run.activate` on this machine, and also prints what they change.
fn print_plan(prepared: &PreparedJob, context: &CommandContext, with_job: bool) -> diagnostic::Result<u8> {
    output::print_warnings(&prepared.warnings);
    let changes = match context.verbosity {
        0 => None,
        _ => activate_environment(prepared)?,
    };
    if context.format.json {
        let mut object = render_json(prepared);
        object["activation"] = changes.as_ref().map(activated_environment::env_changes_to_json).into();
        return output::print_json(&object);
    }
    let mut text = render_text(prepared);
    if let Some(changes) = &changes {
        text.push_str(&activated_environment::format_env_changes(changes, &prepared.inventory.host));
    }
    if with_job {
        _ = write!(text, "\n# the job with all defaults\n{}", redact_job_secrets(&prepared.job).to_yaml());
    }
    output::print_text(&text)
}

/// Formats a set of ranks that a key of the job selects as text, such as `all ranks`, `rank 3` or
/// `ranks 0,3-5`.
fn format_rank_selection(ranks: &RankSelection) -> String {
    match ranks {
        RankSelection::All => "all ranks".to_owned(),
        RankSelection::Ranges(_) => format_rank_label(&ranks.format()),
    }
}

/// Activates the environments that `run.activate` names (such as a Conda environment) on this
/// machine, and returns the changed variables. Returns `None` for a job that activates nothing.
fn activate_environment(prepared: &PreparedJob) -> diagnostic::Result<Option<EnvironmentChanges>> {
    let run = &prepared.job.run;
    if run.activate.is_empty() || run.command.is_none() {
        return Ok(None);
    }
    let hidden = cluster::list_hidden_variables(&prepared.job);
    activate_environments(run, &prepared.inventory.host, &hidden).map(Some)
}

/// Returns the plan of a job as the JSON object that `--json` prints. Secrets are redacted.
pub(crate) fn render_json(p: &PreparedJob) -> Value {
    let memory = |rank: u32| p.preflight.iter().flat_map(|v| &v.memory).find(|m| m.rank == rank);
    let devices = collect_device_names(p);
    let ranks: Vec<Value> = list_workers_with_hosts(p)
        .map(|(host, w)| {
            json!({
                "rank": w.rank,
                "host": host,
                "local_rank": w.local_rank,
                "device": devices.get(w.rank as usize),
                "cpus": w.cpus,
                "threads": w.threads,
                "env": env_to_json(&add_master_variables(p, w)),
                "workdir": w.workdir,
                "command": w.command.as_deref().map(hide_secret_arguments),
                "wrapper": hide_secret_arguments(&w.wrapper),
                "log": w.log,
                "memory": memory(w.rank).map(|m| json!({
                    "total": m.total,
                    "parts": m.parts.iter().map(|(n, b)| (n.clone(), Value::from(*b))).collect::<Map<_, _>>(),
                })),
            })
        })
        .collect();
    let warnings: Vec<Value> = p.warnings.iter().map(warning_to_json).collect();
    let (host, detection) = (&p.inventory, find_hang_detection(p));
    json!({
        "name": p.job.name,
        "world": p.plan.world,
        "run_dir": p.plan.run_dir,
        "checkpoint_dir": resolve_checkpoint_dir(p),
        "hang_detection": {
            "timeout_ms": detection.map(|detection| detection.timeout_ms),
            "only_in_collectives": detection.is_some_and(|detection| detection.only_in_collectives),
            "reason": HangDetectionReason::explain(&p.job, detection).name(),
        },
        "host": {
            "name": host.host, "cpus": host.cpus, "quota": host.quota, "memory": host.memory,
            "smallest_gpu_memory": p.gpu_memory,
        },
        "parameters": p.preflight.as_ref().map(|v| v.parameters),
        "memory_copies": compute_memory_copy_cost(p).map(|(cost, time)| json!({
            "memory_by_host": cost.memory_by_host,
            "sent_by_host": cost.sent_by_host,
            "sent_by_rank": cost.sent_by_rank,
            "every": cost.every,
            "copy_seconds": time.copy.as_secs_f64(),
            "send_seconds_at_100_gbps": time.send_at_100_gbps.as_secs_f64(),
        })),
        "controller_descriptors": count_needed_descriptors(p),
        "ranks": ranks,
        "warnings": warnings,
        "job": redact_job_secrets(&p.job).to_key_json(),
    })
}

/// Describes the memory of this machine, or of its GPUs if the job trains on them, as the end of a
/// sentence. Returns an empty text if the memory is unknown.
fn describe_installed_memory(p: &PreparedJob) -> String {
    match (p.job.cluster.trains_on_gpus(), p.gpu_memory, p.inventory.memory) {
        (true, Some(memory), _) => {
            format!("; the smallest GPU of this machine has {}", format_bytes(memory))
        }
        (true, None, _) | (false, _, 0) => String::new(),
        (false, _, memory) => format!("; this machine has {}", format_bytes(memory)),
    }
}

/// Returns environment variables as a JSON object, with secret values redacted.
fn env_to_json(env: &[(String, String)]) -> Map<String, Value> {
    env.iter().map(|(name, value)| (name.clone(), Value::from(redact_secret_value(name, value)))).collect()
}

/// Returns a warning as a JSON object with its code, message and other fields. The object also has
/// `path`, `file`, `line`, `column` and `hint`, which schema 1 had.
fn warning_to_json(warning: &Diagnostic) -> Value {
    let mut object = warning.to_json();
    object["path"] = json!(warning.subject());
    object["file"] = json!(warning.location().map(Location::file));
    object["line"] = json!(warning.location().map(Location::line));
    object["column"] = json!(warning.location().map(Location::column));
    object["hint"] = json!(warning.help().first());
    object
}

/// Formats the plan of a job as text: a summary, a table of ranks, the environment of the workers
/// and, for built-in training, the memory estimate.
pub(crate) fn render_text(p: &PreparedJob) -> String {
    let mut text = String::new();
    // Writing to a String does not fail.
    let workers = format_count(p.plan.world, "worker");
    let hosts = match &p.plan.host_names[..] {
        [one] => one.clone(),
        several => format!("{} hosts", several.len()),
    };
    _ = writeln!(text, "job {}: {workers} on {hosts}", p.job.name);
    match &p.job.run.command {
        Some(command) => {
            _ = writeln!(text, "command: {}", quote_shell_words(&hide_secret_arguments(command)))
        }
        None => _ = writeln!(text, "command: built-in training"),
    }
    for item in &p.job.run.wrap {
        let command = quote_shell_words(&hide_secret_arguments(&item.command));
        _ = writeln!(text, "wrapper of {}: {command}", format_rank_selection(&item.ranks));
    }
    if let Some(container) = &p.job.run.container {
        _ = writeln!(text, "container: {} ({})", container.image, container.runtime.name());
    }
    _ = writeln!(text, "workdir: {}", p.job.run.workdir.display());
    _ = writeln!(text, "run directory: {}", p.plan.run_dir.display());
    if let Some(dir) = resolve_checkpoint_dir(p) {
        _ = writeln!(text, "checkpoints: {}", dir.display());
    }
    if p.plan.host_names.len() > 1 {
        _ = writeln!(text, "file descriptors of the controller: {}", count_needed_descriptors(p));
    }
    let detection = find_hang_detection(p);
    let timeout = detection.map(|detection| format_seconds(Duration::from_millis(detection.timeout_ms)));
    let reason = HangDetectionReason::explain(&p.job, detection).describe();
    _ = writeln!(text, "hang timeout: {} ({reason})", timeout.as_deref().unwrap_or("off"));
    _ = write!(text, "\n{}", format_table(&format_rank_rows(p)));
    _ = write!(text, "\n{}", format_environment(p));
    if let (Some(report), Some(train)) = (&p.preflight, &p.job.train) {
        let n = report.parameters;
        _ = writeln!(text, "\nmodel: {}, {} parameters", train.model.family, group_digits(n));
        _ = writeln!(text, "ZeRO stage {}, {} samples per step", train.zero.stage, train.batch.global);
        let kind = if p.job.cluster.trains_on_gpus() { "GPU memory" } else { "memory" };
        _ = write!(text, "{}", format_memory_summary(&report.memory, kind, &describe_installed_memory(p)));
        if let Some((cost, time)) = compute_memory_copy_cost(p) {
            _ = writeln!(text, "{}\n{}", cost.format(), time.format());
        }
    }
    text
}

/// Computes the host memory, network traffic and time that `checkpoint.memory` costs, which keeps
/// copies of the training state in the memory of hosts. Measures the memory of this machine.
fn compute_memory_copy_cost(p: &PreparedJob) -> Option<(MemoryCopyCost, MemoryCopyTime)> {
    let workers: Vec<usize> = p.plan.host_plans.iter().map(|plan| plan.workers.len()).collect();
    let state_bytes = &p.preflight.as_ref()?.state_bytes;
    let cost = MemoryCopyCost::compute(&p.job, &workers, state_bytes)?;
    let threads = p.plan.host_plans.iter().flat_map(|plan| &plan.workers).map(|worker| worker.threads);
    let states = state_bytes.iter().copied().zip(threads);
    let time = MemoryCopyTime::estimate(&cost, states, measure_copy_rate());
    Some((cost, time))
}

/// Returns the number of file descriptors that the controller of the job needs.
fn count_needed_descriptors(p: &PreparedJob) -> u64 {
    let remote_hosts = p.hosts.iter().filter(|host| !host.local).count();
    count_controller_descriptors(cluster::count_connection_descriptors(&p.job, remote_hosts))
}

/// Returns the host name and the plan of every worker, in the order of ranks.
fn list_workers_with_hosts(p: &PreparedJob) -> impl Iterator<Item = (&str, &WorkerPlan)> {
    let hosts = p.plan.host_names.iter().zip(&p.plan.host_plans);
    hosts.flat_map(|(name, plan)| plan.workers.iter().map(move |w| (name.as_str(), w)))
}

/// Returns the name of each rank's device, such as `cpu`, in the order of ranks.
fn collect_device_names(p: &PreparedJob) -> Vec<String> {
    let host_devices = |(target, plan): (&HostTarget, &HostPlan)| {
        let inventory = super::job_preparation::build_planning_host(target, &p.inventory).inventory;
        crate::plan::list_device_labels(&p.job, &inventory, plan.workers.len() as u32)
    };
    p.hosts.iter().zip(&p.plan.host_plans).flat_map(host_devices).collect()
}

/// Returns the hang detection settings of the agents, or `None` if the agents do not detect hangs.
/// The value is the same on all hosts.
fn find_hang_detection(p: &PreparedJob) -> Option<HangDetection> {
    p.plan.host_plans.first().and_then(|plan| plan.hang_detection)
}

/// Returns the path of the job's checkpoint directory, or `None` for a job that runs a program.
fn resolve_checkpoint_dir(p: &PreparedJob) -> Option<std::path::PathBuf> {
    p.job.train.as_ref().map(|_| p.job.run.workdir.join(&p.job.checkpoint.dir))
}

/// Returns the rows of the table of ranks: a row with the column names, then a row for each rank.
fn format_rank_rows(p: &PreparedJob) -> Vec<Vec<String>> {
    let head = ["rank", "host", "local rank", "device", "cpus", "threads", "memory"];
    let columns = if p.preflight.is_some() { head.len() } else { head.len() - 1 };
    let mut rows = vec![head[..columns].iter().map(|h| (*h).to_owned()).collect::<Vec<_>>()];
    let devices = collect_device_names(p);
    for (host, w) in list_workers_with_hosts(p) {
        let memory = p.preflight.iter().flat_map(|v| &v.memory).find(|m| m.rank == w.rank);
        let mut row = vec![
            w.rank.to_string(),
            host.to_owned(),
            w.local_rank.to_string(),
            devices.get(w.rank as usize).cloned().unwrap_or_default(),
            if w.cpus.is_empty() { "any".to_owned() } else { format_ranges(&w.cpus, ",") },
            w.threads.to_string(),
            memory.map_or_else(|| "-".to_owned(), |m| format_bytes(m.total)),
        ];
        row.truncate(columns);
        rows.push(row);
    }
    rows
}

/// Formats the environment variables of the workers as text. A value that differs between ranks is
/// shown as `(by rank)`. A secret is shown only by its source.
fn format_environment(p: &PreparedJob) -> String {
    let mut text = "environment of each worker:\n".to_owned();
    let workers: Vec<_> =
        list_workers_with_hosts(p).map(|(_, worker)| add_master_variables(p, worker)).collect();
    let Some(first) = workers.first() else { return text };
    for (name, value) in first {
        let differs = workers.iter().any(|env| !env.contains(&(name.clone(), value.clone())));
        let shown = if differs {
            "(by rank)".to_owned()
        } else {
            redact_secret_value(name, value).replace(char::is_control, "\u{fffd}")
        };
        _ = writeln!(text, "  {name}={shown}");
    }
    for (name, source) in &p.job.run.env_from {
        _ = match source {
            EnvSource::FromEnv(from) => writeln!(text, "  {name}=(the value of {from}, not shown)"),
            EnvSource::FromFile(path) => {
                writeln!(text, "  {name}=(the text of {}, not shown)", path.display())
            }
        };
    }
    for name in p.secrets.passed_names() {
        _ = writeln!(text, "  {name}=(from launch's environment by run.pass_env, not shown)");
    }
    text
}

/// Returns the environment variables of a worker, with `MASTER_ADDR` and `MASTER_PORT` added.
fn add_master_variables(p: &PreparedJob, worker: &WorkerPlan) -> Vec<(String, String)> {
    let mut env = worker.env.clone();
    p.plan.insert_rendezvous(&mut env);
    env
}

/// Formats the memory estimate of the rank that needs the most memory, with one line for each use
/// of memory. The last line has the sum of the estimates of all ranks. Returns an empty text if
/// there are no estimates.
///
/// `kind` is the name of the memory in the text: `memory` or `GPU memory`. `installed` is appended
/// to the last line, and states the memory of this machine.
fn format_memory_summary(estimates: &[MemoryEstimate], kind: &str, installed: &str) -> String {
    let mut text = String::new();
    let Some(largest) = estimates.iter().max_by_key(|m| m.total) else { return text };
    let (rank, bytes) = (largest.rank, format_bytes(largest.total));
    _ = writeln!(text, "{kind} of rank {rank} (the largest): {bytes}");
    let rows: Vec<Vec<String>> =
        largest.parts.iter().map(|(name, n)| vec![format!("  {name}"), format_bytes(*n)]).collect();
    text.push_str(&format_table(&rows));
    let total = estimates.iter().map(|m| m.total).sum();
    _ = writeln!(text, "{kind} of all ranks: {}{installed}", format_bytes(total));
    text
}

/// Formats a number with thousands separators: `1,234,567`.
fn group_digits(n: u64) -> String {
    let digits = n.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prepare_sample_job(text: &str, report: Option<protocol::preflight::PreflightReport>) -> PreparedJob {
        let source = jobspec::JobSource::Text { name: "demo.yaml".to_owned(), text: text.to_owned() };
        let (job, _, warnings) = jobspec::load_job(source, &[]).expect("a job");
        let inventory = protocol::control::HostInventory {
            host: "node".to_owned(),
            cpus: (0..8).collect(),
            memory: 8 << 30,
            topology: protocol::hardware::CpuTopology::with_one_core_per_cpu(&(0..8).collect::<Vec<_>>()),
            ..Default::default()
        };
        let hosts = crate::cluster::find_host_provider(&job)
            .and_then(|c| c.hosts(&job, &inventory.host, &mut Vec::new()))
            .expect("hosts");
        let planning: Vec<_> =
            hosts.iter().map(|h| super::super::job_preparation::build_planning_host(h, &inventory)).collect();
        let attempt = crate::plan::Attempt::default();
        let plan =
            crate::plan::plan_attempt(&job, &planning, &placeholder_run_id(), &attempt).expect("a plan");
        let secrets = crate::secrets::SecretVariables::default();
        PreparedJob {
            job,
            inventory,
            gpu_memory: None,
            hosts,
            plan,
            secrets,
            mlflow: None,
            preflight: report,
            warnings,
        }
    }

    fn make_preflight_report() -> protocol::preflight::PreflightReport {
        let estimate = |rank, total| MemoryEstimate {
            rank,
            parts: vec![("activations".to_owned(), total - 1024), ("process".to_owned(), 1024)],
            total,
        };
        protocol::preflight::PreflightReport {
            parameters: 1_234_567,
            memory: vec![estimate(0, 3 << 20), estimate(1, 2 << 20)],
            ..Default::default()
        }
    }

    const TRAIN: &str =
        "cluster: {workers_per_host: 2}\nrun: {workdir: /w, env: {A: b}}\ntrain: {data: {files: [a]}}";

    #[test]
    fn a_plan_as_text_has_ranks_environment_and_memory() {
        let expected = "\
job demo: 2 workers on node
command: built-in training
workdir: /w
run directory: /w/runs/demo/{run}
checkpoints: /w/runs/demo/checkpoints
hang timeout: off (default of workers without accelerators)

rank  host  local rank  device  cpus  threads  memory
0     node  0           cpu     0-3   4        3.0 MiB
1     node  1           cpu     4-7   4        2.0 MiB

environment of each worker:
  RANK=(by rank)
  LOCAL_RANK=(by rank)
  WORLD_SIZE=2
  LOCAL_WORLD_SIZE=2
  MASTER_ADDR=127.0.0.1
  MASTER_PORT=auto
  OMP_NUM_THREADS=4
  A=b

model: llama, 1,234,567 parameters
ZeRO stage 3, 64 samples per step
memory of rank 0 (the largest): 3.0 MiB
  activations  3.0 MiB
  process      1.0 KiB
memory of all ranks: 5.0 MiB; this machine has 8.0 GiB
";
        assert_eq!(render_text(&prepare_sample_job(TRAIN, Some(make_preflight_report()))), expected);
    }

    #[test]
    fn the_source_of_a_secret_is_shown() {
        let job = "run: {command: [a], env: {K: {from_env: KEY}, F: {from_file: f.txt}}}";
        insta::with_settings!({ filters => [(env!("CARGO_MANIFEST_DIR"), "[DIR]")] }, {
            insta::assert_snapshot!("secrets", format_environment(&prepare_sample_job(job, None)));
        });
    }

    #[test]
    fn a_plan_as_json_has_every_field() {
        let plan = render_json(&prepare_sample_job(TRAIN, Some(make_preflight_report())));
        assert_eq!(plan["parameters"], 1_234_567);
        assert_eq!(plan["checkpoint_dir"], "/w/runs/demo/checkpoints");
        let detection = json!({
            "timeout_ms": null, "only_in_collectives": false, "reason": "no_accelerators",
        });
        assert_eq!(plan["hang_detection"], detection);
        assert_eq!(plan["ranks"][1]["env"]["RANK"], "1");
        assert_eq!(plan["ranks"][1]["cpus"], json!([4, 5, 6, 7]));
        assert_eq!(plan["ranks"][0]["memory"]["parts"]["process"], 1024);
        let plan = render_json(&prepare_sample_job("run: {command: [a]}", None));
        assert!(plan["checkpoint_dir"].is_null() && plan["ranks"][0]["memory"].is_null());
        assert_eq!(plan["ranks"][0]["command"], json!(["a"]));
    }

    #[test]
    fn words_of_commands_are_quoted_for_a_shell() {
        let words = ["sh", "-c", "echo it's", "", "--lr=3e-4"].map(str::to_owned);
        assert_eq!(quote_shell_words(&words), r"sh -c 'echo it'\''s' '' --lr=3e-4");
    }

    #[test]
    fn cpu_ranges_and_numbers_are_formatted() {
        assert_eq!(format_ranges(&[0, 1, 2, 4, 8, 9], ","), "0-2,4,8-9");
        assert_eq!(
            (group_digits(7), group_digits(1234), group_digits(1_234_567)),
            ("7".into(), "1,234".into(), "1,234,567".into())
        );
    }
}
