//! Decodes the YAML tree into a [`JobSpec`], section by section. Each value is checked on its own
//! here; module `check` checks values against each other.
use super::{
    CheckpointSpec, ClusterSpec, CommBackend, CpuBind, Devices, EnvSource, Interface, JobSpec, LogsSpec,
    MasterPort, MinHosts, ResumeFrom, ResumeSpec, RngPolicy, RunSpec, SaveInterval, SignalAction, Signals,
    StoreHost, VisibleDevices, WorkersPerHost,
    decode::{Decoder, Section},
    hosts,
    read::{
        ReadResult, boolean, choice, duration, int, int32, keyword_or, list, out_of_range, size, text,
        verbatim, wrong_format, wrong_type,
    },
    slurm, train,
    value_error::ValueError,
    yaml::{YamlEntry, YamlNode, YamlValue, excerpt},
};
use crate::env;
use diagnostic::codes::job as codes;
use std::path::PathBuf;

/// Most GPUs on a host.
const MAX_GPUS: u32 = 1024;
/// Most built-in workers that share a GPU.
const MAX_WORKERS_PER_GPU: u32 = 64;
/// Most workers on a host.
const MAX_WORKERS: u32 = 1024;
/// Largest number of hosts in `cluster.use_hosts` and `run.min_hosts`.
const MAX_HOST_COUNT: u32 = 65_536;
/// Most restarts of a job.
const MAX_RESTARTS: u32 = 10_000;
/// Smallest limit of a log file, bytes.
const MIN_LOG_SIZE: u64 = 4096;

/// Decodes the whole job. `default_name` is its name when it has no `name`.
pub(crate) fn decode_job(d: &mut Decoder, root: &YamlNode, default_name: &str) -> JobSpec {
    let top = d.top(root);
    let name = d.get_optional(&top, "name", job_name).unwrap_or_else(|| default_name.to_owned());
    let cluster = decode_cluster(d, &top);
    let run = decode_run(d, &top);
    let train_table = d.section(&top, "train");
    let train = train_table.is_given().then(|| train::decode(d, &train_table));
    let checkpoint = decode_checkpoint(d, &top, &name);
    let mut resume = decode_resume(d, &top);
    if d.sources.is_given("run.command") && !d.sources.is_given("resume.from") {
        // A program finds its own checkpoints, unless the job has `resume.from`.
        resume.from = ResumeFrom::Never;
    }
    let slurm = slurm::decode(d, &top);
    JobSpec { name, cluster, run, train, checkpoint, resume, slurm }
}

/// Reads a name that is a safe component of a path.
fn job_name(node: &YamlNode) -> ReadResult<String> {
    let name = text(node)?;
    let safe = name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-'));
    if safe && !name.starts_with(['.', '-']) && name.len() <= 100 {
        return Ok(name);
    }
    let what = "a file name of at most 100 letters, digits, `.`, `_` and `-` that begins with a letter, a digit or `_`";
    Err(wrong_format(what, node))
}

fn decode_cluster(d: &mut Decoder, top: &Section<'_>) -> ClusterSpec {
    let t = d.section(top, "cluster");
    ClusterSpec {
        hosts: d.get(&t, "cluster.hosts", hosts::read_hosts),
        include: d.get(&t, "cluster.include", hosts::read_filters),
        exclude: d.get(&t, "cluster.exclude", hosts::read_filters),
        ssh: hosts::decode_ssh(d, &t),
        use_hosts: d.get(
            &t,
            "cluster.use_hosts",
            keyword_or("all", None, |n| int32(1..=MAX_HOST_COUNT)(n).map(Some)),
        ),
        workers_per_host: d.get(
            &t,
            "cluster.workers_per_host",
            keyword_or("auto", WorkersPerHost::Auto, |n| {
                int32(1..=MAX_WORKERS)(n).map(WorkersPerHost::Exactly)
            }),
        ),
        devices: d.get(&t, "cluster.devices", devices),
        workers_per_gpu: d.get(&t, "cluster.workers_per_gpu", int32(1..=MAX_WORKERS_PER_GPU)),
        comm_backend: d.get(
            &t,
            "cluster.comm_backend",
            choice(&[("auto", CommBackend::Auto), ("nccl", CommBackend::Nccl), ("host", CommBackend::Host)]),
        ),
        cuda_library_paths: d.get(&t, "cluster.cuda_library_paths", list("a list of paths", path)),
        master_port: d.get(
            &t,
            "cluster.master_port",
            keyword_or("auto", MasterPort::Auto, |n| {
                int32(1..=u32::from(u16::MAX))(n).map(|p| MasterPort::Fixed(p as u16))
            }),
        ),
        store: d.get(
            &t,
            "cluster.store",
            choice(&[("agent", StoreHost::Agent), ("rank0", StoreHost::Rank0)]),
        ),
        interface: d.get(&t, "cluster.interface", keyword_or("auto", Interface::Auto, interface)),
    }
}

fn interface(node: &YamlNode) -> ReadResult<Interface> {
    let name = text(node)?;
    match Interface::is_valid(&name) {
        true => Ok(Interface::Named(name)),
        false => Err(wrong_format("the name of an interface or a network such as `10.1.0.0/16`", node)),
    }
}

fn devices(node: &YamlNode) -> ReadResult<Devices> {
    match node.value {
        YamlValue::List(_) => {
            let numbers = list("a list of GPU numbers", int32(0..=MAX_GPUS - 1))(node)?;
            let duplicate = numbers.iter().enumerate().find(|(i, n)| numbers[..*i].contains(n));
            match duplicate {
                _ if numbers.is_empty() => Err(out_of_range("a list of at least one GPU number", node)),
                Some((_, n)) => {
                    Err(ValueError::new(codes::JOB_ITEM_DUPLICATE, node.span, format!("names GPU {n} twice")))
                }
                None => Ok(Devices::List(numbers)),
            }
        }
        _ => choice(&[("auto", Devices::Auto), ("cpu", Devices::Cpu), ("cuda", Devices::Cuda)])(node),
    }
}

fn decode_run(d: &mut Decoder, top: &Section<'_>) -> RunSpec {
    let t = d.section(top, "run");
    let logs = d.section(&t, "run.logs");
    let (env, env_from) = d.get(&t, "run.env", environment);
    RunSpec {
        command: d.get_optional(&t, "run.command", command),
        workdir: d.get(&t, "run.workdir", path),
        env,
        env_from,
        pass_env: d.get(&t, "run.pass_env", list("a list of patterns of names", name_pattern)),
        cpu_bind: d.get(
            &t,
            "run.cpu_bind",
            choice(&[
                ("auto", CpuBind::Auto),
                ("none", CpuBind::None),
                ("numa", CpuBind::Numa),
                ("cores", CpuBind::Cores),
            ]),
        ),
        visible_devices: d.get(
            &t,
            "run.visible_devices",
            choice(&[("all", VisibleDevices::All), ("one", VisibleDevices::One)]),
        ),
        local_rank_argument: d.get(&t, "run.local_rank_argument", boolean),
        grace_period_ms: d.get(&t, "run.grace_period", duration),
        restarts: d.get(&t, "run.restarts", int32(0..=MAX_RESTARTS)),
        min_hosts: d.get(
            &t,
            "run.min_hosts",
            keyword_or("all", MinHosts::All, |n| int32(1..=MAX_HOST_COUNT)(n).map(MinHosts::AtLeast)),
        ),
        hang_timeout_ms: d.get(
            &t,
            "run.hang_timeout",
            keyword_or("off", None, |n| hang_timeout(n).map(Some)),
        ),
        progress_pattern: d.get(&t, "run.progress_pattern", keyword_or("off", None, |n| text(n).map(Some))),
        signals: d.get(&t, "run.signals", signals),
        logs: LogsSpec {
            dir: d.get(&logs, "run.logs.dir", template(&["name", "run"])),
            show: d.get(&logs, "run.logs.show", list("a list of ranks", int32(0..=u32::MAX - 1))),
            prefix: d.get(&logs, "run.logs.prefix", boolean),
            max_size: d.get(&logs, "run.logs.max_size", log_size),
        },
    }
}

fn hang_timeout(node: &YamlNode) -> ReadResult<u64> {
    match duration(node)? {
        0..1000 => Err(out_of_range("a duration of 1s or more", node)),
        ms => Ok(ms),
    }
}

/// Reads the actions of signals; a signal that is not named keeps its default action.
fn signals(node: &YamlNode) -> ReadResult<Signals> {
    let YamlValue::Map(entries) = &node.value else {
        return Err(wrong_type("a mapping of signals to actions", node));
    };
    const ACTIONS: &[(&str, SignalAction)] = &[
        ("save", SignalAction::Save),
        ("save_and_stop", SignalAction::SaveAndStop),
        ("ignore", SignalAction::Ignore),
    ];
    let mut signals =
        Signals { usr1: SignalAction::Save, usr2: SignalAction::Ignore, term: SignalAction::SaveAndStop };
    for entry in entries {
        let action = match entry.key.as_str() {
            "SIGUSR1" => &mut signals.usr1,
            "SIGUSR2" => &mut signals.usr2,
            "SIGTERM" => &mut signals.term,
            other => {
                let message = format!("has an action for `{}`, which is not supported", excerpt(other));
                return Err(ValueError::new(codes::JOB_VALUE_UNKNOWN, entry.key_span, message)
                    .with_help("use SIGUSR1, SIGUSR2 or SIGTERM"));
            }
        };
        *action = choice(ACTIONS)(&entry.value).map_err(|error| error.in_part(&entry.key))?;
    }
    Ok(signals)
}

fn command(node: &YamlNode) -> ReadResult<Vec<String>> {
    let what = "a list: the program and its arguments";
    if let YamlValue::Text = node.value {
        let words: Vec<&str> = node.raw.split_whitespace().collect();
        return Err(wrong_type(what, node).with_help(format!("write [{}]", excerpt(&words.join(", ")))));
    }
    let words = list(what, verbatim)(node)?;
    match words.first() {
        None => Err(out_of_range(what, node)),
        Some(program) if program.is_empty() => {
            Err(ValueError::new(codes::JOB_VALUE_FORMAT, node.span, "has an empty program name"))
        }
        Some(_) => Ok(words),
    }
}

/// Reads a pattern of names of environment variables: letters, digits, `_`, `*` for any text and
/// `?` for any character.
fn name_pattern(node: &YamlNode) -> ReadResult<String> {
    let pattern = text(node)?;
    let fits = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '*' || c == '?';
    if pattern.chars().all(fits) && !pattern.is_empty() && pattern.len() <= 200 {
        return Ok(pattern);
    }
    Err(wrong_format("a name or a pattern such as `HF_*`", node))
}

/// Reads a path: text without control characters.
pub(crate) fn path(node: &YamlNode) -> ReadResult<PathBuf> {
    text(node).map(PathBuf::from)
}

fn log_size(node: &YamlNode) -> ReadResult<u64> {
    match size(node)? {
        0..MIN_LOG_SIZE => Err(out_of_range("a size of 4KiB or more", node)),
        bytes => Ok(bytes),
    }
}

/// Environment variables that launch sets itself, each with advice on what to use instead.
const RESERVED: &[(&str, &str)] = &[
    (env::RANK, "its value differs between workers"),
    (env::LOCAL_RANK, "its value differs between workers"),
    (env::WORLD_SIZE, "use `cluster.workers_per_host`"),
    (env::LOCAL_WORLD_SIZE, "use `cluster.workers_per_host`"),
    (env::MASTER_ADDR, "its value is the address of the first host"),
    (env::MASTER_PORT, "use `cluster.master_port`"),
    (env::GROUP_RANK, "its value is the number of the worker's host"),
    (env::NODE_RANK, "its value is the number of the worker's host"),
    (env::CROSS_RANK, "its value is the number of the worker's host"),
    (env::ROLE_RANK, "its value differs between workers"),
    (env::ROLE_NAME, "launch has a single role"),
    (env::LOCAL_SIZE, "use `cluster.workers_per_host`"),
    (env::ROLE_WORLD_SIZE, "use `cluster.workers_per_host`"),
    (env::GROUP_WORLD_SIZE, "its value is the number of hosts"),
    (env::CROSS_SIZE, "its value is the number of hosts"),
    (env::TORCHELASTIC_RESTART_COUNT, "launch counts the restarts"),
    (env::TORCHELASTIC_MAX_RESTARTS, "use `run.restarts`"),
    (env::TORCHELASTIC_RUN_ID, "its value is the name of the run"),
    (env::TORCHELASTIC_USE_AGENT_STORE, "use `cluster.store`"),
    (env::TORCHELASTIC_ERROR_FILE, "the file is in the run directory"),
    (env::LAUNCH_CONTROL_FD, "it is internal to launch"),
    (env::LAUNCH_RESUME_FROM, "use `resume.from`"),
    (env::LAUNCH_SHM_FD, "it is internal to launch"),
];

/// Whether launch sets this environment variable itself, so that `run.env` cannot.
pub fn is_reserved(name: &str) -> bool {
    RESERVED.iter().any(|(reserved, _)| *reserved == name)
}

/// Environment variables: first those with a value in the job, then those whose value comes from
/// another source.
type Environment = (Vec<(String, String)>, Vec<(String, EnvSource)>);

fn environment(node: &YamlNode) -> ReadResult<Environment> {
    let YamlValue::Map(entries) = &node.value else {
        return Err(wrong_type("a mapping of names to text", node));
    };
    let (mut env, mut env_from) = (Vec::new(), Vec::new());
    let mut errors = Vec::new();
    for entry in entries {
        let name = entry.key.clone();
        if let Err(error) = check_variable_name(entry) {
            errors.push(error);
            continue;
        }
        let error = match &entry.value.value {
            YamlValue::Map(from) => env_source(entry, from).map(|v| env_from.push((name.clone(), v))).err(),
            _ => verbatim(&entry.value).map(|v| env.push((name.clone(), v))).err(),
        };
        errors.extend(error.map(|error| error.in_part(&format!("entry `{name}`"))));
    }
    ValueError::merge(errors).map_or(Ok((env, env_from)), Err)
}

/// Reads `{from_env: NAME}` or `{from_file: path}`.
fn env_source(entry: &YamlEntry, from: &[YamlEntry]) -> ReadResult<EnvSource> {
    if entry.key == env::OMP_NUM_THREADS {
        let message = "must be a number, because the plan depends on it";
        return Err(ValueError::new(codes::JOB_VALUE_TYPE, entry.value.span, message)
            .with_help("remove it to use the worker's share of the cores"));
    }
    match from {
        [only] if only.key == "from_env" => text(&only.value).map(EnvSource::FromEnv),
        [only] if only.key == "from_file" => path(&only.value).map(EnvSource::FromFile),
        _ => Err(wrong_type("text, `{from_env: NAME}` or `{from_file: path}`", &entry.value)),
    }
}

/// Checks the name of an environment variable that the job sets.
fn check_variable_name(entry: &YamlEntry) -> ReadResult<()> {
    let name = &entry.key;
    let error = |code, message: String, help: &str| {
        Err(ValueError::new(code, entry.key_span, message).with_help(help))
    };
    let first_fits = name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_');
    if !first_fits || !name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') {
        let message = format!("contains `{}`, which is not a name of an environment variable", excerpt(name));
        let help = "names consist of letters, digits and `_`, and do not begin with a digit";
        return error(codes::JOB_ENV_NAME_INVALID, message, help);
    }
    if let Some((_, instead)) = RESERVED.iter().find(|(reserved, _)| reserved == name) {
        let message = format!("cannot set `{name}`, which launch sets itself");
        return error(codes::JOB_ENV_NAME_RESERVED, message, instead);
    }
    Ok(())
}

/// Reads a text whose only placeholders are these `{names}`.
fn template(names: &'static [&'static str]) -> impl Fn(&YamlNode) -> ReadResult<String> {
    move |node| {
        let text = text(node)?;
        let known = || {
            let quoted: Vec<String> = names.iter().map(|n| format!("`{{{n}}}`")).collect();
            let noun = if names.len() == 1 { "placeholder is" } else { "placeholders are" };
            format!("the {noun} {}", quoted.join(" and "))
        };
        let mut rest = text.as_str();
        while let Some(open) = rest.find(['{', '}']) {
            let (name, after) = match rest[open..].find('}') {
                Some(close) if rest[open..].starts_with('{') => {
                    (&rest[open + 1..open + close], &rest[open + close + 1..])
                }
                _ => {
                    let message = "has a brace without a counterpart";
                    return Err(ValueError::new(codes::JOB_PLACEHOLDER_INVALID, node.span, message)
                        .with_help(known()));
                }
            };
            if !names.contains(&name) {
                let message = format!("has the unknown placeholder `{{{}}}`", excerpt(name));
                return Err(
                    ValueError::new(codes::JOB_PLACEHOLDER_INVALID, node.span, message).with_help(known())
                );
            }
            rest = after;
        }
        Ok(text)
    }
}

fn decode_checkpoint(d: &mut Decoder, top: &Section<'_>, name: &str) -> CheckpointSpec {
    let t = d.section(top, "checkpoint");
    CheckpointSpec {
        dir: d.get(&t, "checkpoint.dir", template(&["name"])).replace("{name}", name).into(),
        every: d.get(&t, "checkpoint.every", save_interval),
        keep: d.get(&t, "checkpoint.keep", int32(0..=u32::MAX)),
        r#async: d.get(&t, "checkpoint.async", boolean),
        parity: d.get(&t, "checkpoint.parity", boolean),
        require_shared: d.get(&t, "checkpoint.require_shared", boolean),
        gather_16bit_weights_on_model_save: d.get(
            &t,
            "checkpoint.gather_16bit_weights_on_model_save",
            boolean,
        ),
    }
}

fn save_interval(node: &YamlNode) -> ReadResult<SaveInterval> {
    let what = "a number of steps, a duration such as `10m`, or `never`";
    match node.value {
        YamlValue::Text if node.raw == "never" => Ok(SaveInterval::Never),
        YamlValue::Text => match duration(node) {
            Ok(ms) if ms > 0 => Ok(SaveInterval::Duration(ms)),
            _ => Err(wrong_format(what, node)),
        },
        _ => int(1..=u64::MAX)(node).map(SaveInterval::Steps).map_err(|_| match node.value {
            YamlValue::Int(0) => out_of_range(what, node).with_help("write `never`"),
            _ => wrong_type(what, node),
        }),
    }
}

fn decode_resume(d: &mut Decoder, top: &Section<'_>) -> ResumeSpec {
    let t = d.section(top, "resume");
    ResumeSpec {
        from: d.get(&t, "resume.from", |node| {
            Ok(match text(node)?.as_str() {
                "auto" => ResumeFrom::Auto,
                "never" => ResumeFrom::Never,
                path => ResumeFrom::Path(path.into()),
            })
        }),
        rng: d.get(
            &t,
            "resume.rng",
            choice(&[
                ("reconcile", RngPolicy::Reconcile),
                ("strict", RngPolicy::Strict),
                ("reseed", RngPolicy::Reseed),
            ]),
        ),
    }
}
