//! Decodes the YAML tree into a [`JobSpec`], section by section. This module checks each value
//! separately. Module `check` then checks that values fit together.
use super::{
    CheckpointSpec, ClusterSpec, CommBackend, CpuBind, DeviceSelection, EnvSource, InterfaceSelector,
    JobSpec, LogsSpec, MasterPort, MinHosts, ResumeFrom, ResumeSpec, RngPolicy, RunSpec, SaveInterval,
    SignalAction, Signals, StoreHost, VisibleDevices, WorkersPerHost,
    decode::{JobDecoder, JobSection},
    decode_hosts,
    readers::{
        ReadResult, choice_reader, int_reader, int32_reader, keyword_or_reader, list_reader,
        out_of_range_error, read_boolean, read_duration, read_size, read_text, read_verbatim,
        wrong_format_error, wrong_type_error,
    },
    slurm, train,
    value_error::ValueError,
    yaml::{YamlEntry, YamlNode, YamlValue, make_excerpt},
};
use crate::env;
use diagnostic::codes::job as codes;
use std::path::PathBuf;

/// The largest number of GPUs on a host. GPU numbers in `cluster.devices` are below this value.
const MAX_GPUS: u32 = 1024;
/// The largest number of built-in workers that share a GPU.
const MAX_WORKERS_PER_GPU: u32 = 64;
/// The largest number of workers on a host.
const MAX_WORKERS: u32 = 1024;
/// The largest number of hosts in `cluster.use_hosts` and `run.min_hosts`.
const MAX_HOST_COUNT: u32 = 65_536;
/// The largest number of restarts that a job may allow (`run.restarts`).
const MAX_RESTARTS: u32 = 10_000;
/// The smallest `run.logs.max_size`, in bytes.
const MIN_LOG_SIZE: u64 = 4096;

/// Decodes the whole job. Reports errors to `d`. A job without the key `name` gets `default_name`.
pub(crate) fn decode_job(d: &mut JobDecoder, root: &YamlNode, default_name: &str) -> JobSpec {
    let top = d.root_section(root);
    let name = d.decode_optional(&top, "name", read_job_name).unwrap_or_else(|| default_name.to_owned());
    let cluster = decode_cluster(d, &top);
    let run = decode_run(d, &top);
    let train_table = d.open_section(&top, "train");
    let train = train_table.is_given().then(|| train::decode_train(d, &train_table));
    let checkpoint = decode_checkpoint(d, &top, &name);
    let mut resume = decode_resume(d, &top);
    if d.sources.is_given("run.command") && !d.sources.is_given("resume.from") {
        // A program finds its checkpoints itself, unless the job has `resume.from`.
        resume.from = ResumeFrom::Never;
    }
    let slurm = slurm::decode_slurm(d, &top);
    JobSpec { name, cluster, run, train, checkpoint, resume, slurm }
}

/// Reads the name of a job. The name must be safe as a component of a path.
fn read_job_name(node: &YamlNode) -> ReadResult<String> {
    let name = read_text(node)?;
    let safe = name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-'));
    if safe && !name.starts_with(['.', '-']) && name.len() <= 100 {
        return Ok(name);
    }
    let what = "a file name of at most 100 letters, digits, `.`, `_` and `-` that begins with a letter, a digit or `_`";
    Err(wrong_format_error(what, node))
}

fn decode_cluster(d: &mut JobDecoder, top: &JobSection<'_>) -> ClusterSpec {
    let t = d.open_section(top, "cluster");
    ClusterSpec {
        hosts: d.decode_value(&t, "cluster.hosts", decode_hosts::read_hosts),
        include: d.decode_value(&t, "cluster.include", decode_hosts::read_filters),
        exclude: d.decode_value(&t, "cluster.exclude", decode_hosts::read_filters),
        ssh: decode_hosts::decode_ssh(d, &t),
        use_hosts: d.decode_value(
            &t,
            "cluster.use_hosts",
            keyword_or_reader("all", None, |n| int32_reader(1..=MAX_HOST_COUNT)(n).map(Some)),
        ),
        workers_per_host: d.decode_value(
            &t,
            "cluster.workers_per_host",
            keyword_or_reader("auto", WorkersPerHost::Auto, |n| {
                int32_reader(1..=MAX_WORKERS)(n).map(WorkersPerHost::Exactly)
            }),
        ),
        devices: d.decode_value(&t, "cluster.devices", read_devices),
        workers_per_gpu: d.decode_value(&t, "cluster.workers_per_gpu", int32_reader(1..=MAX_WORKERS_PER_GPU)),
        comm_backend: d.decode_value(
            &t,
            "cluster.comm_backend",
            choice_reader(&[
                ("auto", CommBackend::Auto),
                ("nccl", CommBackend::Nccl),
                ("host", CommBackend::Host),
            ]),
        ),
        cuda_library_paths: d.decode_value(
            &t,
            "cluster.cuda_library_paths",
            list_reader("a list of paths", read_path),
        ),
        master_port: d.decode_value(
            &t,
            "cluster.master_port",
            keyword_or_reader("auto", MasterPort::Auto, |n| {
                int32_reader(1..=u32::from(u16::MAX))(n).map(|p| MasterPort::Fixed(p as u16))
            }),
        ),
        store: d.decode_value(
            &t,
            "cluster.store",
            choice_reader(&[("agent", StoreHost::Agent), ("rank0", StoreHost::Rank0)]),
        ),
        interface: d.decode_value(
            &t,
            "cluster.interface",
            keyword_or_reader("auto", InterfaceSelector::Auto, read_interface),
        ),
    }
}

/// Reads the name of a network interface, or a network as an address and a prefix length.
fn read_interface(node: &YamlNode) -> ReadResult<InterfaceSelector> {
    let name = read_text(node)?;
    match InterfaceSelector::is_valid_name(&name) {
        true => Ok(InterfaceSelector::Named(name)),
        false => Err(wrong_format_error("the name of an interface or a network such as `10.1.0.0/16`", node)),
    }
}

/// Reads `cluster.devices`: `auto`, `cpu`, `cuda`, or a list of different GPU numbers.
fn read_devices(node: &YamlNode) -> ReadResult<DeviceSelection> {
    match node.value {
        YamlValue::List(_) => {
            let numbers = list_reader("a list of GPU numbers", int32_reader(0..=MAX_GPUS - 1))(node)?;
            let duplicate = numbers.iter().enumerate().find(|(i, n)| numbers[..*i].contains(n));
            match duplicate {
                _ if numbers.is_empty() => Err(out_of_range_error("a list of at least one GPU number", node)),
                Some((_, n)) => {
                    Err(ValueError::new(codes::JOB_ITEM_DUPLICATE, node.span, format!("names GPU {n} twice")))
                }
                None => Ok(DeviceSelection::List(numbers)),
            }
        }
        _ => choice_reader(&[
            ("auto", DeviceSelection::Auto),
            ("cpu", DeviceSelection::Cpu),
            ("cuda", DeviceSelection::Cuda),
        ])(node),
    }
}

fn decode_run(d: &mut JobDecoder, top: &JobSection<'_>) -> RunSpec {
    let t = d.open_section(top, "run");
    let logs = d.open_section(&t, "run.logs");
    let (env, env_from) = d.decode_value(&t, "run.env", read_environment);
    RunSpec {
        command: d.decode_optional(&t, "run.command", read_command),
        workdir: d.decode_value(&t, "run.workdir", read_path),
        env,
        env_from,
        pass_env: d.decode_value(
            &t,
            "run.pass_env",
            list_reader("a list of patterns of names", read_name_pattern),
        ),
        cpu_bind: d.decode_value(
            &t,
            "run.cpu_bind",
            choice_reader(&[
                ("auto", CpuBind::Auto),
                ("none", CpuBind::None),
                ("numa", CpuBind::Numa),
                ("cores", CpuBind::Cores),
            ]),
        ),
        visible_devices: d.decode_value(
            &t,
            "run.visible_devices",
            choice_reader(&[("all", VisibleDevices::All), ("one", VisibleDevices::One)]),
        ),
        local_rank_argument: d.decode_value(&t, "run.local_rank_argument", read_boolean),
        grace_period_ms: d.decode_value(&t, "run.grace_period", read_duration),
        restarts: d.decode_value(&t, "run.restarts", int32_reader(0..=MAX_RESTARTS)),
        min_hosts: d.decode_value(
            &t,
            "run.min_hosts",
            keyword_or_reader("all", MinHosts::All, |n| {
                int32_reader(1..=MAX_HOST_COUNT)(n).map(MinHosts::AtLeast)
            }),
        ),
        hang_timeout_ms: d.decode_value(
            &t,
            "run.hang_timeout",
            keyword_or_reader("off", None, |n| read_hang_timeout(n).map(Some)),
        ),
        progress_pattern: d.decode_value(
            &t,
            "run.progress_pattern",
            keyword_or_reader("off", None, |n| read_text(n).map(Some)),
        ),
        signals: d.decode_value(&t, "run.signals", read_signals),
        logs: LogsSpec {
            dir: d.decode_value(&logs, "run.logs.dir", template_reader(&["name", "run"])),
            show: d.decode_value(
                &logs,
                "run.logs.show",
                list_reader("a list of ranks", int32_reader(0..=u32::MAX - 1)),
            ),
            prefix: d.decode_value(&logs, "run.logs.prefix", read_boolean),
            max_size: d.decode_value(&logs, "run.logs.max_size", read_log_size),
        },
    }
}

/// Reads `run.hang_timeout`, a duration of one second or more. Returns milliseconds.
fn read_hang_timeout(node: &YamlNode) -> ReadResult<u64> {
    match read_duration(node)? {
        0..1000 => Err(out_of_range_error("a duration of 1s or more", node)),
        ms => Ok(ms),
    }
}

/// Reads `run.signals`, a mapping of signals to actions. Signals that the mapping does not name
/// keep their default actions.
fn read_signals(node: &YamlNode) -> ReadResult<Signals> {
    let YamlValue::Map(entries) = &node.value else {
        return Err(wrong_type_error("a mapping of signals to actions", node));
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
                let message = format!("has an action for `{}`, which is not supported", make_excerpt(other));
                return Err(ValueError::new(codes::JOB_VALUE_UNKNOWN, entry.key_span, message)
                    .with_help("use SIGUSR1, SIGUSR2 or SIGTERM"));
            }
        };
        *action = choice_reader(ACTIONS)(&entry.value).map_err(|error| error.in_part(&entry.key))?;
    }
    Ok(signals)
}

/// Reads `run.command`, a list of a program and its arguments. The items are not interpreted.
fn read_command(node: &YamlNode) -> ReadResult<Vec<String>> {
    let what = "a list: the program and its arguments";
    if let YamlValue::Text = node.value {
        let words: Vec<&str> = node.raw.split_whitespace().collect();
        return Err(
            wrong_type_error(what, node).with_help(format!("write [{}]", make_excerpt(&words.join(", "))))
        );
    }
    let words = list_reader(what, read_verbatim)(node)?;
    match words.first() {
        None => Err(out_of_range_error(what, node)),
        Some(program) if program.is_empty() => {
            Err(ValueError::new(codes::JOB_VALUE_FORMAT, node.span, "has an empty program name"))
        }
        Some(_) => Ok(words),
    }
}

/// Reads a pattern of names of environment variables. The pattern consists of letters, digits, `_`,
/// `*` for any text and `?` for any character.
fn read_name_pattern(node: &YamlNode) -> ReadResult<String> {
    let pattern = read_text(node)?;
    let fits = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '*' || c == '?';
    if pattern.chars().all(fits) && !pattern.is_empty() && pattern.len() <= 200 {
        return Ok(pattern);
    }
    Err(wrong_format_error("a name or a pattern such as `HF_*`", node))
}

/// Reads a path: text without control characters.
pub(crate) fn read_path(node: &YamlNode) -> ReadResult<PathBuf> {
    read_text(node).map(PathBuf::from)
}

/// Reads `run.logs.max_size`, a size of at least [`MIN_LOG_SIZE`]. Returns bytes.
fn read_log_size(node: &YamlNode) -> ReadResult<u64> {
    match read_size(node)? {
        0..MIN_LOG_SIZE => Err(out_of_range_error("a size of 4KiB or more", node)),
        bytes => Ok(bytes),
    }
}

/// The environment variables that launch sets itself. Each has advice on what to use instead.
const RESERVED: &[(&str, &str)] = &[
    (env::RANK, "the value differs between workers"),
    (env::LOCAL_RANK, "the value differs between workers"),
    (env::WORLD_SIZE, "use `cluster.workers_per_host`"),
    (env::LOCAL_WORLD_SIZE, "use `cluster.workers_per_host`"),
    (env::MASTER_ADDR, "the value is the address of the first host"),
    (env::MASTER_PORT, "use `cluster.master_port`"),
    (env::GROUP_RANK, "the value is the number of the worker's host"),
    (env::NODE_RANK, "the value is the number of the worker's host"),
    (env::CROSS_RANK, "the value is the number of the worker's host"),
    (env::ROLE_RANK, "the value differs between workers"),
    (env::ROLE_NAME, "launch has a single role"),
    (env::LOCAL_SIZE, "use `cluster.workers_per_host`"),
    (env::ROLE_WORLD_SIZE, "use `cluster.workers_per_host`"),
    (env::GROUP_WORLD_SIZE, "the value is the number of hosts"),
    (env::CROSS_SIZE, "the value is the number of hosts"),
    (env::TORCHELASTIC_RESTART_COUNT, "launch counts the restarts"),
    (env::TORCHELASTIC_MAX_RESTARTS, "use `run.restarts`"),
    (env::TORCHELASTIC_RUN_ID, "the value is the name of the run"),
    (env::TORCHELASTIC_USE_AGENT_STORE, "use `cluster.store`"),
    (env::TORCHELASTIC_ERROR_FILE, "the file is in the run directory"),
    (env::LAUNCH_CONTROL_FD, "the variable is internal to launch"),
    (env::LAUNCH_RESUME_FROM, "use `resume.from`"),
    (env::LAUNCH_SHM_FD, "the variable is internal to launch"),
];

/// Returns whether launch sets the environment variable `name` itself. `run.env` cannot set such a
/// variable.
pub fn is_reserved_variable(name: &str) -> bool {
    RESERVED.iter().any(|(reserved, _)| *reserved == name)
}

/// The variables of `run.env`: those with a value in the job, and those whose values come from
/// another source.
type EnvironmentEntries = (Vec<(String, String)>, Vec<(String, EnvSource)>);

/// Reads `run.env`. The error contains the mistakes of all its entries.
fn read_environment(node: &YamlNode) -> ReadResult<EnvironmentEntries> {
    let YamlValue::Map(entries) = &node.value else {
        return Err(wrong_type_error("a mapping of names to text", node));
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
            YamlValue::Map(from) => {
                read_env_source(entry, from).map(|v| env_from.push((name.clone(), v))).err()
            }
            _ => read_verbatim(&entry.value).map(|v| env.push((name.clone(), v))).err(),
        };
        errors.extend(error.map(|error| error.in_part(&format!("entry `{name}`"))));
    }
    ValueError::merge(errors).map_or(Ok((env, env_from)), Err)
}

/// Reads the source of a variable's value: `{from_env: NAME}` or `{from_file: path}`.
fn read_env_source(entry: &YamlEntry, from: &[YamlEntry]) -> ReadResult<EnvSource> {
    if entry.key == env::OMP_NUM_THREADS {
        let message = "must be a number, because the plan depends on it";
        return Err(ValueError::new(codes::JOB_VALUE_TYPE, entry.value.span, message)
            .with_help("remove it to use the worker's share of the cores"));
    }
    match from {
        [only] if only.key == "from_env" => read_text(&only.value).map(EnvSource::FromEnv),
        [only] if only.key == "from_file" => read_path(&only.value).map(EnvSource::FromFile),
        _ => Err(wrong_type_error("text, `{from_env: NAME}` or `{from_file: path}`", &entry.value)),
    }
}

/// Fails if the name of an entry is not a valid name of an environment variable, or if launch sets
/// the variable itself.
fn check_variable_name(entry: &YamlEntry) -> ReadResult<()> {
    let name = &entry.key;
    let error = |code, message: String, help: &str| {
        Err(ValueError::new(code, entry.key_span, message).with_help(help))
    };
    let first_fits = name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_');
    if !first_fits || !name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') {
        let message =
            format!("contains `{}`, which is not a name of an environment variable", make_excerpt(name));
        let help = "names consist of letters, digits and `_`, and do not begin with a digit";
        return error(codes::JOB_ENV_NAME_INVALID, message, help);
    }
    if let Some((_, instead)) = RESERVED.iter().find(|(reserved, _)| reserved == name) {
        let message = format!("cannot set `{name}`, which launch sets itself");
        return error(codes::JOB_ENV_NAME_RESERVED, message, instead);
    }
    Ok(())
}

/// Returns a reader of texts with placeholders such as `{run}`. Fails for a placeholder that is not
/// in `names`, and for a brace without a counterpart.
fn template_reader(names: &'static [&'static str]) -> impl Fn(&YamlNode) -> ReadResult<String> {
    move |node| {
        let text = read_text(node)?;
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
                let message = format!("has the unknown placeholder `{{{}}}`", make_excerpt(name));
                return Err(
                    ValueError::new(codes::JOB_PLACEHOLDER_INVALID, node.span, message).with_help(known())
                );
            }
            rest = after;
        }
        Ok(text)
    }
}

fn decode_checkpoint(d: &mut JobDecoder, top: &JobSection<'_>, name: &str) -> CheckpointSpec {
    let t = d.open_section(top, "checkpoint");
    CheckpointSpec {
        dir: d.decode_value(&t, "checkpoint.dir", template_reader(&["name"])).replace("{name}", name).into(),
        every: d.decode_value(&t, "checkpoint.every", read_save_interval),
        keep: d.decode_value(&t, "checkpoint.keep", int32_reader(0..=u32::MAX)),
        r#async: d.decode_value(&t, "checkpoint.async", read_boolean),
        parity: d.decode_value(&t, "checkpoint.parity", read_boolean),
        require_shared: d.decode_value(&t, "checkpoint.require_shared", read_boolean),
        gather_16bit_weights_on_model_save: d.decode_value(
            &t,
            "checkpoint.gather_16bit_weights_on_model_save",
            read_boolean,
        ),
    }
}

/// Reads `checkpoint.every`: a number of steps, a duration, or `never`.
fn read_save_interval(node: &YamlNode) -> ReadResult<SaveInterval> {
    let what = "a number of steps, a duration such as `10m`, or `never`";
    match node.value {
        YamlValue::Text if node.raw == "never" => Ok(SaveInterval::Never),
        YamlValue::Text => match read_duration(node) {
            Ok(ms) if ms > 0 => Ok(SaveInterval::Duration(ms)),
            _ => Err(wrong_format_error(what, node)),
        },
        _ => int_reader(1..=u64::MAX)(node).map(SaveInterval::Steps).map_err(|_| match node.value {
            YamlValue::Int(0) => out_of_range_error(what, node).with_help("write `never`"),
            _ => wrong_type_error(what, node),
        }),
    }
}

fn decode_resume(d: &mut JobDecoder, top: &JobSection<'_>) -> ResumeSpec {
    let t = d.open_section(top, "resume");
    ResumeSpec {
        from: d.decode_value(&t, "resume.from", |node| {
            Ok(match read_text(node)?.as_str() {
                "auto" => ResumeFrom::Auto,
                "never" => ResumeFrom::Never,
                path => ResumeFrom::Path(path.into()),
            })
        }),
        rng: d.decode_value(
            &t,
            "resume.rng",
            choice_reader(&[
                ("reconcile", RngPolicy::Reconcile),
                ("strict", RngPolicy::Strict),
                ("reseed", RngPolicy::Reseed),
            ]),
        ),
    }
}
