//! Defines [`convert_torchrun_command`], which converts a command line of torchrun to the job.yaml
//! that `launch torchrun` runs.
use super::{
    arguments::{PROGRAM_NAME, TorchProgram, insert_defaults_from_env},
    check_option_values, set_numa_binding, set_restarts_and_signals,
    worker_command::build_worker_command,
};
use crate::import::{
    command_line::{CommandLine, CommandLineError},
    drop_in::{
        DropInContext,
        OptionEffect::{NoEffect, Rejected},
        OptionRule, apply_option_rules, check_worker_count, create_unsupported_option_error,
        load_drop_in_job, set_console_ranks, set_local_job_keys, set_rendezvous_timeouts, set_thread_count,
    },
    import_options::ImportErrors,
    job_draft::{ImportedJob, ImportedNodes, JobDraft},
};
use diagnostic::Diagnostic;
use jobspec::{
    AcceleratorKind,
    hosts::{NodeCount, RendezvousAddress},
    quote_yaml,
};

/// The rendezvous host names of torchrun that mean this machine; launch ignores them without a note
/// to the user.
const LOOPBACK_NAMES: [&str; 4] = ["", "localhost", "127.0.0.1", "[::1]"];

/// The options of torchrun that job.yaml cannot express, each with the note or error that the
/// option causes.
const UNSUPPORTED_OPTION_RULES: &[OptionRule] = &[
    ("rdzv-backend", &["static", "c10d"], NoEffect("launch assigns the ranks itself")),
    ("monitor-interval", &["0.1"], NoEffect("launch is notified at once when a worker ends")),
    ("start-method", &["spawn"], NoEffect("workers are separate programs")),
    ("local-addr", &[""], NoEffect("launch chooses the addresses of the ranks")),
    ("event-log-handler", &["null"], Rejected("launch records events itself", "see `launch events`")),
    (
        "log-line-prefix-template",
        &[""],
        Rejected("lines begin with `[rank N]`", "set `run.logs.prefix: false` in a job.yaml for plain lines"),
    ),
    (
        "duplicate-stdout-filters",
        &[""],
        Rejected("no filtered copies are written", "use `launch logs --grep`"),
    ),
    (
        "duplicate-stderr-filters",
        &[""],
        Rejected("no filtered copies are written", "use `launch logs --grep`"),
    ),
    ("logs-specs", &["default"], Rejected("launch has its own log format", "use `launch logs`")),
];

/// Converts the arguments that follow `torchrun`, or another program of torch, to a job.yaml. Fails
/// if the program would reject the command line, or if launch cannot honour an option.
pub(crate) fn convert_torchrun_command(
    program: TorchProgram,
    args: &[String],
    context: &DropInContext<'_>,
) -> Result<ImportedJob, ImportErrors> {
    let rejected = |error: CommandLineError| vec![error.into_diagnostic(PROGRAM_NAME)];
    let mut given = program.parse(args).map_err(rejected)?;
    insert_defaults_from_env(&mut given, |name| context.user_env_variable(name)).map_err(rejected)?;
    check_option_values(&given).map_err(rejected)?;
    if given.take_flag("standalone") {
        for name in ["rdzv-backend", "rdzv-endpoint", "rdzv-id", "nnodes", "node-rank"] {
            given.take_last_value(name);
        }
        given.insert_default("nnodes", "1".to_owned());
    }
    let mut errors = ImportErrors::new();
    let nodes = take_node_options(&mut given).unwrap_or_else(|error| {
        errors.push(error);
        None
    });
    let is_joining = nodes.as_ref().is_some_and(|nodes| nodes.count.max > 1);
    let (mut draft, workers) = match take_worker_count(&mut given, context) {
        Ok(workers) => (JobDraft::default(), workers),
        Err(error) => return Err(errors.into_iter().chain([error]).collect()),
    };
    let command = build_worker_command(program, &mut given, context, workers).unwrap_or_else(|error| {
        errors.push(error);
        Vec::new()
    });
    set_local_job_keys(&mut draft, &given.program, &command, workers);
    set_master_address(&mut draft, &mut given, is_joining);
    set_rendezvous_timeouts(&mut draft, &mut given, "rdzv-conf", is_joining);
    set_numa_binding(&mut draft, &mut given);
    set_restarts_and_signals(&mut draft, &mut given);
    errors.extend(set_logs(&mut draft, &mut given, workers).err());
    if workers > 1 {
        set_thread_count(&mut draft, context, 1);
    }
    apply_option_rules(&mut draft, &mut errors, PROGRAM_NAME, &mut given, UNSUPPORTED_OPTION_RULES);
    match errors.is_empty() {
        true => load_drop_in_job(draft, PROGRAM_NAME, errors).map(|job| ImportedJob { nodes, ..job }),
        false => Err(errors),
    }
}

/// Removes `--nnodes` and `--node-rank` from a torchrun command line, and returns the number of
/// nodes (hosts), this node's number and the rendezvous address. Returns `None` if the command line
/// does not state the number of nodes. Fails if a value is not valid.
fn take_node_options(given: &mut CommandLine) -> Result<Option<ImportedNodes>, Diagnostic> {
    let rank = given.take_last_value("node-rank");
    let Some(text) = given.take_last_value("nnodes") else {
        return match rank.filter(|rank| !rank.trim_start_matches('0').is_empty()) {
            Some(rank) => {
                let reason = format!("there is no node {} without `--nnodes`", rank.escape_debug());
                Err(create_unsupported_option_error(PROGRAM_NAME, "--node-rank", reason, "add `--nnodes N`"))
            }
            None => Ok(None),
        };
    };
    let Ok(count) = text.parse::<NodeCount>() else {
        let reason = format!("`{}` is not a number such as 4 or a range such as 1:4", text.escape_debug());
        return Err(create_unsupported_option_error(PROGRAM_NAME, "--nnodes", reason, ""));
    };
    if let Some(rank) = rank.as_ref().filter(|rank| rank.trim().parse::<u32>().is_ok_and(|n| n >= count.max))
    {
        let reason = format!("`{}` is not a number below {}", rank.escape_debug(), count.max);
        return Err(create_unsupported_option_error(PROGRAM_NAME, "--node-rank", reason, ""));
    }
    if count.max == 1 {
        return Ok(Some(ImportedNodes { count, node_rank: None, rendezvous: None }));
    }
    let endpoint = given.last_value("rdzv-endpoint").filter(|text| !text.is_empty()).map(str::to_owned);
    let backend = given.last_value("rdzv-backend").unwrap_or("static");
    if !["static", "c10d"].contains(&backend) {
        let reason = format!("the nodes meet at node 0, and not at a server of `{}`", backend.escape_debug());
        return Err(create_unsupported_option_error(
            PROGRAM_NAME,
            "--rdzv-backend",
            reason,
            "use `c10d`, and the address of node 0",
        ));
    }
    let is_static = backend == "static";
    let invalid = |option: &str, text: &str| {
        create_unsupported_option_error(
            PROGRAM_NAME,
            option,
            format!("`{}` is not `HOST:PORT`", text.escape_debug()),
            "",
        )
    };
    let rendezvous = match (endpoint, given.last_value("master-addr")) {
        (Some(text), _) => Some(text.parse().map_err(|_| invalid("--rdzv-endpoint", &text))?),
        (None, Some(address)) => {
            let mut found: RendezvousAddress =
                address.parse().map_err(|_| invalid("--master-addr", address))?;
            let port = given.last_value("master-port").unwrap_or("29500");
            found.port = port.parse().map_err(|_| invalid("--master-port", port))?;
            Some(found)
        }
        (None, None) => None,
    };
    // torchrun's default without a dynamic rendezvous is 0, which only fits the first node.
    let node_rank = rank.and_then(|rank| rank.trim().parse().ok()).or(is_static.then_some(0));
    Ok(Some(ImportedNodes { count, node_rank, rendezvous }))
}

/// Removes `--nproc-per-node` from a parsed torchrun command line, and returns the number of
/// workers per host, which is 1 without this option.
fn take_worker_count(given: &mut CommandLine, context: &DropInContext<'_>) -> Result<i64, Diagnostic> {
    /// The name of torchrun's option for the number of workers per host, for use in error messages.
    const OPTION_NAME: &str = "--nproc-per-node";
    let workers = match given.take_last_value("nproc-per-node").as_deref() {
        None => 1,
        Some("cpu") => context.cpus as i64,
        Some("auto") if context.gpus == 0 => context.cpus as i64,
        Some("auto") => context.gpus as i64,
        Some("gpu") if context.gpus > 0 && context.kind.is_cuda_device() => context.gpus as i64,
        Some("gpu") => {
            return Err(create_unsupported_option_error(
                PROGRAM_NAME,
                OPTION_NAME,
                "this machine has no GPU",
                "use a number, or `cpu`",
            ));
        }
        Some("xpu") if context.gpus > 0 && context.kind == AcceleratorKind::Xpu => context.gpus as i64,
        Some("xpu") => {
            return Err(create_unsupported_option_error(
                PROGRAM_NAME,
                OPTION_NAME,
                "this machine has no XPU",
                "use a number, or `cpu`",
            ));
        }
        Some(number) => number.trim().parse().unwrap_or_default(),
    };
    check_worker_count(PROGRAM_NAME, OPTION_NAME, workers).map(|()| workers)
}

/// Converts torchrun's options for the address and port of the rendezvous to keys of job.yaml. On
/// one host the port becomes `MASTER_PORT`, and the ranks meet at the loopback address. If nodes
/// join (`is_joining`), the nodes meet at the address, and launch chooses another port for the
/// ranks.
fn set_master_address(draft: &mut JobDraft, given: &mut CommandLine, is_joining: bool) {
    /// The explanation that the user gets if launch ignores the rendezvous address of a torchrun
    /// command line.
    const NOTE_REASON: &str = "the ranks of one host meet at its loopback address";
    if given.take_flag("virtual-local-rank") {
        draft.set_imported_key("--virtual-local-rank", "run.visible_devices", "one");
    }
    if is_joining {
        ["rdzv-endpoint", "master-addr", "master-port"]
            .iter()
            .for_each(|name| _ = given.take_last_value(name));
        return;
    }
    let endpoint = given.take_last_value("rdzv-endpoint").unwrap_or_default();
    let (host, port) = endpoint.rsplit_once(':').unwrap_or((&endpoint, "0"));
    if !LOOPBACK_NAMES.contains(&host) {
        draft.add_key_note("--rdzv-endpoint", NOTE_REASON, "");
    }
    if port != "0" {
        draft.set_imported_key("--rdzv-endpoint", "cluster.master_port", quote_unless_number(port));
    }
    if given.take_last_value("master-addr").is_some_and(|address| !LOOPBACK_NAMES.contains(&address.as_str()))
    {
        draft.add_key_note("--master-addr", NOTE_REASON, "");
    }
}

/// Formats a value of torchrun's command line for job.yaml: digits as a number, and any other text
/// in quotes.
fn quote_unless_number(text: &str) -> String {
    crate::import::value_text::format_yaml_whole_number(text)
}

/// Converts torchrun's options for the log directory, and for the ranks whose output the console
/// shows, to keys of job.yaml.
fn set_logs(draft: &mut JobDraft, given: &mut CommandLine, workers: i64) -> Result<(), Diagnostic> {
    if let Some(dir) = given.take_last_value("log-dir") {
        let dir = format!("{}/{{name}}/{{run}}", dir.trim_end_matches('/'));
        draft.set_imported_key("--log-dir", "run.logs.dir", quote_yaml(&dir));
    }
    let [tee, redirects, filter] =
        ["tee", "redirects", "local-ranks-filter"].map(|name| given.take_last_value(name));
    set_console_ranks(draft, PROGRAM_NAME, workers, [tee.as_deref(), redirects.as_deref(), filter.as_deref()])
}
