//! Converts the arguments of torchrun to a job.yaml.
mod arguments;
pub(super) mod drop_in;
mod worker_command;

use super::command_line::{CommandLine, CommandLineError};
use super::{
    import_options::{ImportErrors, ImportOptions, set_hostfile, set_slurm_nodes_with_note},
    job_draft::{ImportedJob, JobDraft},
    value_text,
};
pub(crate) use arguments::TorchProgram;
use arguments::parse_torchrun_args;
use jobspec::quote_yaml;

/// The default value of torchrun's option `--signals-to-handle`.
const DEFAULT_SIGNALS: &str = "SIGTERM,SIGINT,SIGHUP,SIGQUIT";

/// The options of torchrun that have no counterpart in job.yaml. Each has its name, the value that
/// has no effect, and the reason in a note.
const UNSUPPORTED_OPTIONS: &[(&str, &str, &str)] = &[
    ("rdzv-backend", "static", "launch assigns the ranks itself"),
    ("rdzv-endpoint", "", "launch assigns the ranks itself, and hosts the store on the first host"),
    ("rdzv-conf", "", "launch assigns the ranks itself"),
    ("monitor-interval", "0.1", "launch is notified at once when a worker ends"),
    ("start-method", "spawn", "workers are separate programs"),
    ("event-log-handler", "null", "`launch events` shows the events of a run"),
    ("role", "default", "launch has one role, `default`"),
    ("redirects", "0", "every rank has a log, and `run.logs.show` selects the ranks on the console"),
    ("tee", "0", "every rank has a log, and `run.logs.show` selects the ranks on the console"),
    ("log-line-prefix-template", "", "lines begin with `[rank N]`, or with nothing (`run.logs.prefix`)"),
    ("duplicate-stdout-filters", "", "`launch logs --grep` filters lines"),
    ("duplicate-stderr-filters", "", "`launch logs --grep` filters lines"),
    ("node-rank", "", "one launch starts all hosts; ranks follow `cluster.hosts`"),
    ("master-addr", "127.0.0.1", "`MASTER_ADDR` is the address of the first host"),
    ("local-addr", "", "hosts are named in `cluster.hosts`"),
    ("logs-specs", "default", "launch has its own log format"),
];

/// Converts the arguments that follow `torchrun` to a job.yaml, with notes about options that were
/// not converted. Fails if torchrun would reject the command line.
pub(crate) fn convert_torchrun_args(
    args: &[String],
    context: &ImportOptions<'_>,
) -> Result<ImportedJob, ImportErrors> {
    let rejected = |error: CommandLineError| {
        let example = "write the arguments that follow `torchrun`: -- --nproc-per-node 2 train.py";
        vec![error.into_diagnostic("torchrun").with_help(example)]
    };
    let mut given = parse_torchrun_args(args).map_err(rejected)?;
    check_option_values(&given).map_err(rejected)?;
    let mut draft = JobDraft::default();
    draft.set_required_key("run.command", &value_text::format_yaml_list(&take_program_command(&mut given)));
    set_hosts(&mut draft, &mut given, context);
    set_workers(&mut draft, &mut given);
    set_restarts_and_signals(&mut draft, &mut given);
    set_logs(&mut draft, &mut given);
    if let Some(name) = given.take_last_value("rdzv-id").filter(|id| id != "none") {
        draft.set_imported_key("--rdzv-id", "name", quote_yaml(&name));
    }
    let standalone = given.take_flag("standalone");
    for (name, no_effect, reason) in UNSUPPORTED_OPTIONS {
        let Some(value) = given.take_last_value(name).filter(|value| value != no_effect) else { continue };
        if !(standalone && name.starts_with("rdzv-")) {
            draft.add_not_converted_note(
                &format!("--{name}"),
                format!("{reason} (value: {})", value.escape_debug()),
                "",
            );
        }
    }
    draft.finish_job("torchrun's arguments")
}

/// Returns the command of the job from torchrun's script and arguments, which starts with `python`
/// unless `--no-python` was given. Removes `--module`, `--no-python` and `--run-path`.
fn take_program_command(given: &mut CommandLine) -> Vec<String> {
    let prefix: &[&str] = match (given.take_flag("module"), given.take_flag("no-python")) {
        (_, true) => &[],
        (true, false) => &["python", "-m"],
        (false, false) => &["python"],
    };
    // With --run-path torchrun runs the script inside its own Python process, which the script does
    // not notice.
    given.take_flag("run-path");
    prefix.iter().map(|word| (*word).to_owned()).chain(given.program.iter().cloned()).collect()
}

/// Checks the values of torchrun's options, and fails at the first value that torchrun would
/// reject, such as text in place of a number.
fn check_option_values(given: &CommandLine) -> Result<(), CommandLineError> {
    /// A function that returns whether torchrun accepts the value of an option.
    type ValuePredicate = fn(&str) -> bool;
    let count: ValuePredicate = |text| text.parse::<u32>().is_ok();
    let seconds: ValuePredicate = |text| text.parse::<f64>().is_ok_and(|s| s >= 0.0 && s.is_finite());
    let workers: ValuePredicate =
        |text| ["auto", "gpu", "cpu", "xpu"].contains(&text) || text.parse::<u32>().is_ok_and(|n| n > 0);
    let kinds: [(&'static str, ValuePredicate, &'static str); 7] = [
        ("nnodes", |text| parse_host_range(text).is_some(), "a number of hosts, or a range such as 1:4"),
        ("nproc-per-node", workers, "a number of workers, auto, gpu, cpu or xpu"),
        ("max-restarts", count, "a number of restarts"),
        ("node-rank", count, "a number of a host, from 0"),
        ("master-port", |text| text.parse::<u16>().is_ok(), "a port, from 0 to 65535"),
        ("monitor-interval", seconds, "a number of seconds"),
        ("shutdown-timeout", count, "a whole number of seconds"),
    ];
    for (name, is_valid, expected) in kinds {
        if let Some(value) = given.last_value(name).filter(|value| !is_valid(value)) {
            let value = value.escape_debug().to_string();
            return Err(CommandLineError::InvalidValue {
                option: name,
                value,
                expected: expected.to_owned(),
            });
        }
    }
    Ok(())
}

/// Parses the value `4` or `1:4` of `--nnodes` into the smallest and the largest number of hosts.
/// Returns `None` for other text.
fn parse_host_range(text: &str) -> Option<(u64, u64)> {
    let (low, high) = text.split_once(':').unwrap_or((text, text));
    low.parse().ok().zip(high.parse().ok()).filter(|(low, high)| *low > 0 && low <= high)
}

/// Converts torchrun's `--nnodes`, and the hostfile that `launch import` was given, to keys of
/// job.yaml.
fn set_hosts(draft: &mut JobDraft, given: &mut CommandLine, context: &ImportOptions<'_>) {
    if let Some(file) = context.hostfile {
        set_hostfile(draft, "--hostfile", file);
    }
    let Some(nodes) = given.take_last_value("nnodes") else { return };
    let Some((low, high)) = parse_host_range(&nodes) else { return };
    let named = context.hostfile.is_some();
    if high > 1 && !named {
        set_slurm_nodes_with_note(draft, "--nnodes", high);
    }
    match low == high {
        true if named => draft.set_imported_key("--nnodes", "cluster.use_hosts", high.to_string()),
        true => {}
        false if named || low == 1 => draft.set_imported_key("--nnodes", "run.min_hosts", low.to_string()),
        false => {
            let reason = format!("at least {low} hosts are required but not named");
            draft.add_not_converted_note(
                "--nnodes",
                reason,
                &format!("set `run.min_hosts: {low}` together with `cluster.hosts`"),
            );
        }
    }
}

/// Converts torchrun's `--nproc-per-node` (a number, `auto`, `gpu` or `cpu`),
/// `--virtual-local-rank` and `--numa-binding` to keys of job.yaml.
fn set_workers(draft: &mut JobDraft, given: &mut CommandLine) {
    /// The name of torchrun's option for the number of workers per host, for use in notes to the
    /// user.
    const OPTION_NAME: &str = "--nproc-per-node";
    let (path, devices) = ("cluster.workers_per_host", "cluster.devices");
    match given.take_last_value("nproc-per-node").as_deref() {
        None => draft.set_required_key(path, "1"),
        Some("gpu") => {
            draft.set_imported_key(OPTION_NAME, devices, "cuda");
            draft.set_imported_key(OPTION_NAME, path, "auto");
        }
        Some("auto") => {
            draft.set_imported_key(OPTION_NAME, path, "auto");
            draft.add_key_note(
                OPTION_NAME,
                "on a host without GPUs torchrun starts one worker per CPU, launch a single one",
                "",
            );
        }
        Some("cpu") => {
            draft.set_imported_key(OPTION_NAME, devices, "cpu");
            draft.set_required_key(path, "1");
            draft.add_not_converted_note(
                OPTION_NAME,
                "one worker per CPU is not supported",
                "set `cluster.workers_per_host`",
            );
        }
        Some(other) => draft.set_imported_key(OPTION_NAME, path, value_text::format_yaml_whole_number(other)),
    }
    if given.take_flag("virtual-local-rank") {
        draft.set_imported_key("--virtual-local-rank", "run.visible_devices", "one");
    }
    set_numa_binding(draft, given);
}

/// Converts torchrun's option `--numa-binding` to the job.yaml key `run.cpu_bind`, with a note if
/// launch binds workers differently.
fn set_numa_binding(draft: &mut JobDraft, given: &mut CommandLine) {
    let Some(binding) = given.take_last_value("numa-binding") else { return };
    let (bind, replacement) = match binding.as_str() {
        "node" => ("numa", None),
        "socket" => ("numa", Some("a NUMA node, which may be smaller than a socket")),
        "core-complex" => ("cores", Some("equal shares of the cores")),
        _ => ("cores", None),
    };
    draft.set_imported_key("--numa-binding", "run.cpu_bind", bind);
    if let Some(replacement) = replacement {
        draft.add_key_note("--numa-binding", format!("`{binding}` becomes {replacement}"), "");
    }
}

/// Converts torchrun's options for restarts, shutdown, the rendezvous port and signals to keys of
/// job.yaml.
fn set_restarts_and_signals(draft: &mut JobDraft, given: &mut CommandLine) {
    if let Some(restarts) = given.take_last_value("max-restarts").filter(|n| n != "0") {
        draft.set_imported_key(
            "--max-restarts",
            "run.restarts",
            value_text::format_yaml_whole_number(&restarts),
        );
    }
    if let Some(seconds) = given.take_last_value("shutdown-timeout") {
        draft.set_imported_key("--shutdown-timeout", "run.grace_period", quote_yaml(&format!("{seconds}s")));
    }
    if let Some(port) = given.take_last_value("master-port").filter(|port| port != "0") {
        draft.set_imported_key(
            "--master-port",
            "cluster.master_port",
            value_text::format_yaml_whole_number(&port),
        );
    }
    let Some(signals) = given.take_last_value("signals-to-handle").filter(|s| s != DEFAULT_SIGNALS) else {
        return;
    };
    for signal in
        signals.split(',').map(str::trim).filter(|s| !DEFAULT_SIGNALS.split(',').any(|default| default == *s))
    {
        match signal {
            "SIGUSR1" | "SIGUSR2" => {
                let path = "run.signals";
                let both = signals.contains("SIGUSR1") && signals.contains("SIGUSR2");
                let yaml = match both {
                    true => "{SIGUSR1: save_and_stop, SIGUSR2: save_and_stop}".to_owned(),
                    false => format!("{{{signal}: save_and_stop}}"),
                };
                draft.set_imported_key("--signals-to-handle", path, yaml);
            }
            other => {
                let reason = format!("launch does not forward `{}`", other.escape_debug());
                draft.add_not_converted_note(
                    "--signals-to-handle",
                    reason,
                    "`run.signals` supports SIGUSR1, SIGUSR2 and SIGTERM",
                );
            }
        }
    }
}

/// Converts torchrun's options for the log directory, and for the ranks whose output is shown, to
/// keys of job.yaml.
fn set_logs(draft: &mut JobDraft, given: &mut CommandLine) {
    if let Some(dir) = given.take_last_value("log-dir") {
        let dir = format!("{}/{{name}}/{{run}}", dir.trim_end_matches('/'));
        draft.set_imported_key("--log-dir", "run.logs.dir", quote_yaml(&dir));
    }
    match given.take_last_value("local-ranks-filter").filter(|ranks| !ranks.is_empty()) {
        Some(ranks) => {
            let ranks: Vec<String> =
                ranks.split(',').map(|rank| value_text::format_yaml_whole_number(rank.trim())).collect();
            draft.set_imported_key(
                "--local-ranks-filter",
                "run.logs.show",
                format!("[{}]", ranks.join(", ")),
            );
        }
        None => draft.add_key_note("run.logs.show", "the console shows rank 0; torchrun shows all ranks", ""),
    }
}
