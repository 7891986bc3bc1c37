//! Decoding section by section: the tree → [`JobSpec`]. Ranges are checked here, what keys mean together in `check`.
use super::{
    Bind, CheckpointSpec, ClusterSpec, Collectives, Count, Devices, EnvSource, Every, Interface, JobSpec,
    LogsSpec, MasterPort, MinHosts, ResumeFrom, ResumeSpec, RngPolicy, RunSpec, SignalAction, Signals,
    StoreHost, VisibleDevices,
    decode::{Decoder, Table},
    hosts,
    read::{Read, boolean, choice, duration, expected, int, int32, list, size, text, word, word_or},
    slurm, train,
    tree::{Entry, Fault, Node, Value, shown},
};
use crate::env;
use std::path::PathBuf;

/// Most GPUs of a host.
const MOST_GPUS: u32 = 1024;
/// Most built-in workers that share a GPU.
const MOST_PER_GPU: u32 = 64;
/// Most workers of a host.
const MOST_WORKERS: u32 = 1024;
/// Most hosts of a job.
const MOST_HOSTS: u32 = 65_536;
/// Most restarts of a job.
const MOST_RESTARTS: u32 = 10_000;

/// The whole job. `stem` is the name it has when none is given.
pub(crate) fn job(d: &mut Decoder, root: &Node, stem: &str) -> JobSpec {
    let top = d.top(root);
    let name = d.opt(&top, "name", job_name).unwrap_or_else(|| stem.to_owned());
    let cluster = cluster(d, &top);
    let run = run(d, &top);
    let train_table = d.section(&top, "train");
    let train = train_table.given().then(|| train::decode(d, &train_table));
    let checkpoint = checkpoint(d, &top, &name);
    let mut resume = resume(d, &top);
    if d.map.is_given("run.command") && !d.map.is_given("resume.from") {
        // a program resumes by itself, unless it is asked to resume by launch
        resume.from = ResumeFrom::Never;
    }
    let slurm = slurm::decode(d, &top);
    JobSpec { name, cluster, run, train, checkpoint, resume, slurm }
}

/// A name that is one safe component of a path.
fn job_name(node: &Node) -> Read<String> {
    let name = text(node)?;
    let safe = name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-'));
    if safe && !name.starts_with(['.', '-']) && name.len() <= 100 {
        return Ok(name);
    }
    let what = "a file name of at most 100 letters, digits, `.`, `_` and `-` that begins with a letter, a digit or `_`";
    Err(expected(what, node))
}

fn cluster(d: &mut Decoder, top: &Table<'_>) -> ClusterSpec {
    let t = d.section(top, "cluster");
    ClusterSpec {
        hosts: d.get(&t, "cluster.hosts", hosts::hosts),
        include: d.get(&t, "cluster.include", hosts::filters),
        exclude: d.get(&t, "cluster.exclude", hosts::filters),
        ssh: hosts::ssh(d, &t),
        use_hosts: d.get(
            &t,
            "cluster.use_hosts",
            word_or("all", None, |n| int32(1..=MOST_HOSTS)(n).map(Some)),
        ),
        workers_per_host: d.get(
            &t,
            "cluster.workers_per_host",
            word_or("auto", Count::Auto, |n| int32(1..=MOST_WORKERS)(n).map(Count::Exactly)),
        ),
        devices: d.get(&t, "cluster.devices", devices),
        workers_per_gpu: d.get(&t, "cluster.workers_per_gpu", int32(1..=MOST_PER_GPU)),
        collectives: d.get(
            &t,
            "cluster.collectives",
            choice(
                &[("auto", Collectives::Auto), ("nccl", Collectives::Nccl), ("host", Collectives::Host)],
                &[],
            ),
        ),
        cuda_libs: d.get(&t, "cluster.cuda_libs", list("a list of paths", path)),
        master_port: d.get(
            &t,
            "cluster.master_port",
            word_or("auto", MasterPort::Auto, |n| {
                int32(1..=u32::from(u16::MAX))(n).map(|p| MasterPort::Fixed(p as u16))
            }),
        ),
        store: d.get(
            &t,
            "cluster.store",
            choice(&[("agent", StoreHost::Agent), ("rank0", StoreHost::Rank0)], &[]),
        ),
        interface: d.get(&t, "cluster.interface", word_or("auto", Interface::Auto, interface)),
    }
}

fn interface(node: &Node) -> Read<Interface> {
    let name = text(node)?;
    match Interface::is_sound(&name) {
        true => Ok(Interface::Named(name)),
        false => Err(expected("the name of an interface or a network such as `10.1.0.0/16`", node)),
    }
}

fn devices(node: &Node) -> Read<Devices> {
    match node.value {
        Value::List(_) => {
            let numbers = list("a list of GPU numbers", int32(0..=MOST_GPUS - 1))(node)?;
            let twice = numbers.iter().enumerate().find(|(i, n)| numbers[..*i].contains(n));
            match twice {
                _ if numbers.is_empty() => Err(expected("a list of at least one GPU number", node)),
                Some((_, n)) => Err(Fault::at(node.span, format!("names GPU {n} twice"))),
                None => Ok(Devices::List(numbers)),
            }
        }
        _ => choice(&[("auto", Devices::Auto), ("cpu", Devices::Cpu), ("cuda", Devices::Cuda)], &[])(node),
    }
}

fn run(d: &mut Decoder, top: &Table<'_>) -> RunSpec {
    let t = d.section(top, "run");
    let logs = d.section(&t, "run.logs");
    let (env, env_from) = d.get(&t, "run.env", environment);
    RunSpec {
        command: d.opt(&t, "run.command", command),
        workdir: d.get(&t, "run.workdir", path),
        env,
        env_from,
        pass_env: d.get(&t, "run.pass_env", list("a list of patterns of names", name_pattern)),
        bind: d.get(
            &t,
            "run.bind",
            choice(
                &[("auto", Bind::Auto), ("none", Bind::None), ("numa", Bind::Numa), ("cores", Bind::Cores)],
                &[],
            ),
        ),
        visible_devices: d.get(
            &t,
            "run.visible_devices",
            choice(&[("all", VisibleDevices::All), ("one", VisibleDevices::One)], &[]),
        ),
        local_rank_argument: d.get(&t, "run.local_rank_argument", boolean),
        grace_ms: d.get(&t, "run.grace", duration),
        restarts: d.get(&t, "run.restarts", int32(0..=MOST_RESTARTS)),
        min_hosts: d.get(
            &t,
            "run.min_hosts",
            word_or("all", MinHosts::All, |n| int32(1..=MOST_HOSTS)(n).map(MinHosts::AtLeast)),
        ),
        hang_timeout_ms: d.get(&t, "run.hang_timeout", word_or("off", None, |n| hang_timeout(n).map(Some))),
        progress: d.get(&t, "run.progress", word_or("off", None, |n| marker(n).map(Some))),
        signals: d.get(&t, "run.signals", signals),
        logs: LogsSpec {
            dir: d.get(&logs, "run.logs.dir", template(&["name", "run"])),
            show: d.get(&logs, "run.logs.show", list("a list of ranks", int32(0..=u32::MAX - 1))),
            prefix: d.get(&logs, "run.logs.prefix", boolean),
            max_size: d.get(&logs, "run.logs.max_size", log_size),
        },
    }
}

fn hang_timeout(node: &Node) -> Read<u64> {
    match duration(node)? {
        0..1000 => Err(expected("a duration of 1s or more", node)),
        ms => Ok(ms),
    }
}

/// Text that a line of output may have.
fn marker(node: &Node) -> Read<String> {
    match text(node)? {
        marker if marker.is_empty() => Err(expected("`off` or a text that some lines have", node)),
        marker => Ok(marker),
    }
}

/// What the named signals do; the others keep their default.
fn signals(node: &Node) -> Read<Signals> {
    let Value::Map(entries) = &node.value else {
        return Err(expected("a mapping of signals to what they do", node));
    };
    const ACTIONS: &[(&str, SignalAction)] = &[
        ("save", SignalAction::Save),
        ("save_and_stop", SignalAction::SaveAndStop),
        ("ignore", SignalAction::Ignore),
    ];
    let mut signals =
        Signals { usr1: SignalAction::Save, usr2: SignalAction::Ignore, term: SignalAction::SaveAndStop };
    for entry in entries {
        let slot = match entry.key.as_str() {
            "SIGUSR1" => &mut signals.usr1,
            "SIGUSR2" => &mut signals.usr2,
            "SIGTERM" => &mut signals.term,
            other => {
                let message = format!("has the signal `{}`", shown(other));
                let hint = "it can have SIGUSR1, SIGUSR2 and SIGTERM";
                return Err(Fault::at(entry.key_span, message).hint(hint));
            }
        };
        *slot = choice(ACTIONS, &[])(&entry.value)?;
    }
    Ok(signals)
}

fn command(node: &Node) -> Read<Vec<String>> {
    let what = "a list: the program and its arguments";
    if let Value::Text = node.value {
        let words: Vec<&str> = node.raw.split_whitespace().collect();
        return Err(expected(what, node).hint(format!("write [{}]", shown(&words.join(", ")))));
    }
    let words = list(what, word)(node)?;
    match words.first() {
        None => Err(expected(what, node)),
        Some(program) if program.is_empty() => Err(Fault::at(node.span, "has an empty program name")),
        Some(_) => Ok(words),
    }
}

/// A pattern of names of the environment: letters, digits, `_`, and `*` for any of them.
fn name_pattern(node: &Node) -> Read<String> {
    let pattern = text(node)?;
    let fits = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '*' || c == '?';
    if pattern.chars().all(fits) && !pattern.is_empty() && pattern.len() <= 200 {
        return Ok(pattern);
    }
    Err(expected("a name or a pattern such as `HF_*`", node))
}

/// A path: text without control characters.
pub(crate) fn path(node: &Node) -> Read<PathBuf> {
    text(node).map(PathBuf::from)
}

fn log_size(node: &Node) -> Read<u64> {
    match size(node)? {
        0..4096 => Err(expected("a size of 4KiB or more", node)),
        bytes => Ok(bytes),
    }
}

/// Names that `launch` sets itself, and what to use instead.
const RESERVED: &[(&str, &str)] = &[
    (env::RANK, "each worker gets its own"),
    (env::LOCAL_RANK, "each worker gets its own"),
    (env::WORLD_SIZE, "use `cluster.workers_per_host`"),
    (env::LOCAL_WORLD_SIZE, "use `cluster.workers_per_host`"),
    (env::MASTER_ADDR, "it is the first host's address"),
    (env::MASTER_PORT, "use `cluster.master_port`"),
    (env::GROUP_RANK, "it is the number of its host"),
    (env::NODE_RANK, "it is the number of its host"),
    (env::CROSS_RANK, "it is the number of its host"),
    (env::ROLE_RANK, "each worker gets its own"),
    (env::ROLE_NAME, "there is one role"),
    (env::LOCAL_SIZE, "use `cluster.workers_per_host`"),
    (env::ROLE_WORLD_SIZE, "use `cluster.workers_per_host`"),
    (env::GROUP_WORLD_SIZE, "it is the number of hosts"),
    (env::CROSS_SIZE, "it is the number of hosts"),
    (env::TORCHELASTIC_RESTART_COUNT, "launch counts"),
    (env::TORCHELASTIC_MAX_RESTARTS, "use `run.restarts`"),
    (env::TORCHELASTIC_RUN_ID, "it is the run's own name"),
    (env::TORCHELASTIC_USE_AGENT_STORE, "use `cluster.store`"),
    (env::TORCHELASTIC_ERROR_FILE, "it lies in the run directory"),
    (env::LAUNCH_CONTROL_FD, "it is launch's own"),
    (env::LAUNCH_RESUME_FROM, "use `resume.from`"),
    (env::LAUNCH_SHM_FD, "it is launch's own"),
];

/// Is this a name of the environment that `launch` sets itself?
pub fn is_reserved(name: &str) -> bool {
    RESERVED.iter().any(|(reserved, _)| *reserved == name)
}

/// Variables with their values, and those whose values are elsewhere.
type Environment = (Vec<(String, String)>, Vec<(String, EnvSource)>);

fn environment(node: &Node) -> Read<Environment> {
    let Value::Map(entries) = &node.value else {
        return Err(expected("a mapping of names to text", node));
    };
    let (mut env, mut env_from) = (Vec::new(), Vec::new());
    let mut faults = Vec::new();
    for entry in entries {
        let name = entry.key.clone();
        if let Err(fault) = variable(entry) {
            faults.push(fault);
            continue;
        }
        let fault = match &entry.value.value {
            Value::Map(from) => env_source(entry, from).map(|v| env_from.push((name.clone(), v))).err(),
            _ => word(&entry.value).map(|v| env.push((name.clone(), v))).err(),
        };
        faults.extend(fault.map(|fault| fault.of(&format!("entry `{name}`"))));
    }
    Fault::all(faults).map_or(Ok((env, env_from)), Err)
}

/// `{from_env: NAME}` or `{from_file: path}`.
fn env_source(entry: &Entry, from: &[Entry]) -> Read<EnvSource> {
    if entry.key == env::OMP_NUM_THREADS {
        let fault = Fault::at(entry.value.span, "must be a number: the plan depends on it");
        return Err(fault.hint("leave it out for the worker's share of the cores"));
    }
    match from {
        [only] if only.key == "from_env" => text(&only.value).map(EnvSource::FromEnv),
        [only] if only.key == "from_file" => path(&only.value).map(EnvSource::FromFile),
        _ => Err(expected("text, `{from_env: NAME}` or `{from_file: path}`", &entry.value)),
    }
}

/// Is this a name that a job may set?
fn variable(entry: &Entry) -> Read<()> {
    let name = &entry.key;
    let fault = |message: String, hint: &str| Err(Fault::at(entry.key_span, message).hint(hint));
    let first_fits = name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_');
    if !first_fits || !name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') {
        let message = format!("has the name `{}`, which isn't one for the environment", shown(name));
        return fault(message, "names are letters, digits and `_`, and don't begin with a digit");
    }
    if let Some((_, instead)) = RESERVED.iter().find(|(reserved, _)| reserved == name) {
        return fault(format!("can't set `{name}`: launch sets it"), instead);
    }
    Ok(())
}

/// Text in which only these `{names}` occur.
fn template(names: &'static [&'static str]) -> impl Fn(&Node) -> Read<String> {
    move |node| {
        let text = text(node)?;
        let known = || {
            let quoted: Vec<String> = names.iter().map(|n| format!("`{{{n}}}`")).collect();
            format!("it can have {}", quoted.join(" and "))
        };
        let mut rest = text.as_str();
        while let Some(open) = rest.find(['{', '}']) {
            let (name, after) = match rest[open..].find('}') {
                Some(close) if rest[open..].starts_with('{') => {
                    (&rest[open + 1..open + close], &rest[open + close + 1..])
                }
                _ => return Err(Fault::at(node.span, "has a brace without its partner").hint(known())),
            };
            if !names.contains(&name) {
                let message = format!("has the placeholder `{{{}}}`, which isn't known here", shown(name));
                return Err(Fault::at(node.span, message).hint(known()));
            }
            rest = after;
        }
        Ok(text)
    }
}

fn checkpoint(d: &mut Decoder, top: &Table<'_>, name: &str) -> CheckpointSpec {
    let t = d.section(top, "checkpoint");
    CheckpointSpec {
        dir: d.get(&t, "checkpoint.dir", template(&["name"])).replace("{name}", name).into(),
        every: d.get(&t, "checkpoint.every", every),
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

fn every(node: &Node) -> Read<Every> {
    let what = "a number of steps, a duration such as `10m`, or `never`";
    match node.value {
        Value::Text if node.raw == "never" => Ok(Every::Never),
        Value::Text => match duration(node) {
            Ok(ms) if ms > 0 => Ok(Every::Duration(ms)),
            _ => Err(expected(what, node)),
        },
        _ => int(1..=u64::MAX)(node).map(Every::Steps).map_err(|_| match node.value {
            Value::Int(0) => expected(what, node).hint("write `never`"),
            _ => expected(what, node),
        }),
    }
}

fn resume(d: &mut Decoder, top: &Table<'_>) -> ResumeSpec {
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
            choice(
                &[
                    ("reconcile", RngPolicy::Reconcile),
                    ("strict", RngPolicy::Strict),
                    ("reseed", RngPolicy::Reseed),
                ],
                &[],
            ),
        ),
    }
}
