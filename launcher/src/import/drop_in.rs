//! Shared code of the commands `launch torchrun`, `launch accelerate` and `launch deepspeed`, which
//! accept the command lines of these launchers.
//!
//! In contrast to an import, an option that a drop-in command cannot convert is an error.
use super::{
    command_line::CommandLine,
    import_options::ImportErrors,
    job_draft::{ImportNote, ImportedJob, JobDraft, NoteKind},
    value_text::format_yaml_list,
};
use diagnostic::{Diagnostic, codes::command};
use jobspec::{AcceleratorKind, env, make_job_name, quote_yaml};
use std::{collections::BTreeMap, path::Path};

/// The largest number of workers on one host that launch accepts (`cluster.workers_per_host`).
const MAX_WORKERS: i64 = 1024;

/// The properties of this machine and of the user's environment that decide how the command line of
/// another launcher is converted to a job.yaml.
#[derive(Debug)]
pub(crate) struct DropInContext<'a> {
    /// The environment variables of the user.
    pub(crate) variables: &'a BTreeMap<String, String>,
    /// The Python that runs scripts.
    pub(crate) python: &'a str,
    /// The current directory.
    pub(crate) directory: &'a str,
    /// The number of CPUs that this process may use.
    pub(crate) cpus: usize,
    /// The number of physical cores that this process may use.
    pub(crate) cores: usize,
    /// The number of NUMA nodes of these cores.
    pub(crate) numa_nodes: usize,
    /// The kind of the accelerators of this machine.
    pub(crate) kind: AcceleratorKind,
    /// The number of GPUs or other accelerators that programs see, which a variable such as
    /// `CUDA_VISIBLE_DEVICES` may restrict.
    pub(crate) gpus: usize,
    /// The number of GPUs or other accelerators of this machine.
    pub(crate) installed_gpus: usize,
}

impl<'a> DropInContext<'a> {
    /// Returns the value of the environment variable `name` in the user's environment.
    pub(super) fn user_env_variable(&self, name: &str) -> Option<&'a str> {
        self.variables.get(name).map(String::as_str)
    }
}

/// How a launcher such as torchrun starts the user's program: as a script of Python, as a module of
/// Python, or directly.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ProgramForm {
    /// Whether the program is the name of a Python module.
    pub(super) module: bool,
    /// Whether the program is run without Python.
    pub(super) no_python: bool,
    /// Whether Python runs with `-u`.
    pub(super) unbuffered: bool,
}

impl ProgramForm {
    /// Returns the command that runs `program` with the interpreter `python`, as a script, as a
    /// module or directly.
    pub(super) fn build_command(self, python: &str, program: &[String]) -> Vec<String> {
        let mut words: Vec<&str> = Vec::new();
        if !self.no_python {
            words.push(python);
            words.extend(self.unbuffered.then_some("-u"));
            words.extend(self.module.then_some("-m"));
        }
        words.into_iter().map(str::to_owned).chain(program.iter().cloned()).collect()
    }
}

/// Creates the error that launch does not support the option `option` of the other launcher
/// `program`, such as `--tpu` of `accelerate launch`.
pub(super) fn create_unsupported_option_error(
    program: &str,
    option: &str,
    reason: impl AsRef<str>,
    help: &str,
) -> Diagnostic {
    let message = format!("launch does not support `{option}` of {program}: {}", reason.as_ref());
    let error = Diagnostic::error(command::DROP_IN_UNSUPPORTED, message).with_subject(option);
    if help.is_empty() { error } else { error.with_help(help) }
}

/// Creates the error that launch does not support an option for starting another launcher, such as
/// torchrun, on each host separately.
pub(super) fn create_several_machines_error(program: &str, option: &str, reason: &str) -> Diagnostic {
    let help = "one launch starts all hosts over SSH or in a Slurm allocation: name them in `cluster.hosts` \
                of a job.yaml; `launch run --nodes N --node-rank K -- PROGRAM` runs on each node";
    create_unsupported_option_error(program, option, reason, help)
}

/// What launch does with an option of another launcher that job.yaml cannot express: ignore the
/// option with a note, or fail.
#[derive(Clone, Copy, Debug)]
pub(super) enum OptionEffect {
    /// The option changes nothing on one machine or with launch; the reason is shown as a note.
    NoEffect(&'static str),
    /// The option is an error, with the reason and advice.
    Rejected(&'static str, &'static str),
}

/// An option of another launcher that job.yaml cannot express: its name, the values that are
/// ignored silently, and what other values cause.
pub(super) type OptionRule = (&'static str, &'static [&'static str], OptionEffect);

/// Removes the options in `rules`, which job.yaml cannot express, from the command line of another
/// launcher, and reports them by notes or errors. Adds a note or an error for each option whose
/// value is not one of the values that are accepted without a note.
pub(super) fn apply_option_rules(
    draft: &mut JobDraft,
    errors: &mut ImportErrors,
    program: &str,
    given: &mut CommandLine,
    rules: &[OptionRule],
) {
    for (name, neutral, effect) in rules {
        let Some(value) = given.take_last_value(name).filter(|value| !neutral.contains(&value.as_str()))
        else {
            continue;
        };
        let option = format!("--{name}");
        match effect {
            OptionEffect::NoEffect(reason) => draft.add_key_note(&option, reason, ""),
            OptionEffect::Rejected(reason, help) => {
                let shown: String = value.chars().take(60).flat_map(char::escape_debug).collect();
                let reason = if value.is_empty() {
                    (*reason).to_owned()
                } else {
                    format!("{reason} (value: {shown})")
                };
                errors.push(create_unsupported_option_error(program, &option, reason, help));
            }
        }
    }
}

/// Sets the keys that every job of a command such as `launch torchrun` needs, for example `name`
/// and `run.command`, in a new job.yaml.
pub(super) fn set_local_job_keys(draft: &mut JobDraft, program: &[String], command: &[String], workers: i64) {
    draft.set_required_key("name", &quote_yaml(&derive_job_name(program)));
    draft.set_required_key("run.command", &format_yaml_list(command));
    draft.set_required_key("run.cpu_bind", "none");
    draft.set_required_key("cluster.hosts", "local");
    draft.set_required_key("cluster.workers_per_host", &workers.to_string());
}

/// Derives the name of a job from the script, module or program that it runs.
fn derive_job_name(program: &[String]) -> String {
    let first = program.first().map_or("", String::as_str);
    let script = Path::new(first).file_stem().filter(|_| first.ends_with(".py") || first.contains('/'));
    make_job_name(&script.map_or(first.into(), |name| name.to_string_lossy()), "program")
}

/// Fails if `workers`, the number of workers on a host, is less than 1 or more than the maximum.
/// `option` is the option of `program` that states the number.
pub(super) fn check_worker_count(program: &str, option: &str, workers: i64) -> Result<(), Diagnostic> {
    match workers {
        1..=MAX_WORKERS => Ok(()),
        _ => {
            let reason = format!("the number of workers is {workers}; expected 1 to {MAX_WORKERS}");
            Err(create_unsupported_option_error(program, option, reason, ""))
        }
    }
}

/// Returns a command that runs `command` with changed environment variables, through the program
/// `env`. Sets the variables `set`. Undoes launch's changes of the variables `removed`: each gets
/// the value that the user gave, or is unset.
pub(super) fn build_env_command(
    command: Vec<String>,
    context: &DropInContext<'_>,
    removed: &[&str],
    set: &[(&str, String)],
) -> Vec<String> {
    if removed.is_empty() && set.is_empty() {
        return command;
    }
    let mut words = vec!["env".to_owned()];
    let mut assignments = Vec::new();
    for name in removed.iter().filter(|name| !set.iter().any(|(given, _)| given == *name)) {
        match context.user_env_variable(name) {
            Some(value) => assignments.push(format!("{name}={value}")),
            None => words.extend(["-u".to_owned(), (*name).to_owned()]),
        }
    }
    assignments.extend(set.iter().map(|(name, value)| format!("{name}={value}")));
    words.into_iter().chain(assignments).chain(command).collect()
}

/// Converts torchrun's options `--tee`, `--redirects` and `--local-ranks-filter` to the job.yaml
/// key for the ranks whose output the console shows. Fails if a value is not valid, or if only one
/// of the two streams of a rank is redirected.
pub(super) fn set_console_ranks(
    draft: &mut JobDraft,
    program: &str,
    workers: i64,
    [tee, redirects, filter]: [Option<&str>; 3],
) -> Result<(), Diagnostic> {
    let invalid = |option: &str, value: &str| {
        let reason = format!("`{}` is not 0, 1, 2, 3 or a mapping such as 0:3,1:3", value.escape_debug());
        create_unsupported_option_error(program, option, reason, "")
    };
    let streams = |option: &str, value: Option<&str>| match value {
        None => Ok(vec![0; workers as usize]),
        Some(value) => parse_streams(value, workers).ok_or_else(|| invalid(option, value)),
    };
    let (tee, redirects) = (streams("--tee", tee)?, streams("--redirects", redirects)?);
    let filter: Option<Vec<i64>> = match filter.filter(|ranks| !ranks.is_empty()) {
        None => None,
        Some(text) => {
            let ranks: Option<Vec<i64>> = text.split(',').map(|rank| rank.trim().parse().ok()).collect();
            let reason = || format!("`{}` is not a list of ranks such as 0,1", text.escape_debug());
            Some(ranks.ok_or_else(|| {
                create_unsupported_option_error(program, "--local-ranks-filter", reason(), "")
            })?)
        }
    };
    let chosen = tee.iter().chain(&redirects).any(|streams| *streams != 0);
    if !chosen && filter.is_none() {
        return Ok(());
    }
    let mut shown = Vec::new();
    for (rank, (tee, redirect)) in tee.iter().zip(&redirects).enumerate() {
        let hidden = redirect & !tee;
        if hidden == 1 || hidden == 2 {
            let stream = if hidden == 1 { "stdout" } else { "stderr" };
            let reason = format!("only {stream} of rank {rank} is redirected");
            let help = "a rank's log has both streams; use `--redirects 3`, or `--tee 3`";
            return Err(create_unsupported_option_error(program, "--redirects", reason, help));
        }
        if hidden == 0 && filter.as_ref().is_none_or(|ranks| ranks.contains(&(rank as i64))) {
            shown.push(rank.to_string());
        }
    }
    draft.set_imported_key("--tee", "run.logs.show", format!("[{}]", shown.join(", ")));
    Ok(())
}

/// Parses the value of torchrun's `--tee` or `--redirects` to one code per rank: 0 for no stream, 1
/// for stdout, 2 for stderr, 3 for both. Returns this code for each rank, or `None` for other text.
fn parse_streams(text: &str, workers: i64) -> Option<Vec<u8>> {
    let number = |text: &str| text.parse::<u8>().ok().filter(|n| *n <= 3 && text.len() == 1);
    if let Some(streams) = number(text) {
        return Some(vec![streams; workers as usize]);
    }
    let mut streams = vec![0; workers as usize];
    for part in text.split(',') {
        let (rank, value) = part.split_once(':')?;
        let (rank, value) = (rank.parse::<usize>().ok()?, number(value)?);
        if let Some(slot) = streams.get_mut(rank) {
            *slot = value;
        }
    }
    Some(streams)
}

/// Converts the times in torchrun's `--rdzv-conf` or Accelerate's `--rdzv_conf`, the option `name`,
/// to keys of `cluster.join` if nodes join (`is_joining`), and removes the option. A note reports
/// the settings without counterpart.
pub(super) fn set_rendezvous_timeouts(
    draft: &mut JobDraft,
    given: &mut CommandLine,
    name: &str,
    is_joining: bool,
) {
    let Some(settings) = given.take_last_value(name).filter(|text| !text.trim().is_empty()) else { return };
    let option = format!("--{name}");
    let mut others = Vec::new();
    for setting in settings.split(',').map(str::trim).filter(|setting| !setting.is_empty()) {
        let (key, value) = setting.split_once('=').unwrap_or((setting, ""));
        let path = match key.trim() {
            // The static rendezvous calls the time to wait for nodes `timeout`.
            "join_timeout" | "timeout" => "cluster.join.timeout",
            "last_call_timeout" => "cluster.join.last_call",
            _ => "",
        };
        match value.trim().parse::<u64>() {
            Ok(seconds) if is_joining && !path.is_empty() => {
                draft.set_imported_key(&option, path, format!("{seconds}s"));
            }
            _ => others.push(setting),
        }
    }
    if is_joining {
        // The keys of `cluster.join` have no effect on a local job.
        draft.set_required_key("cluster.hosts", "join");
    }
    if !others.is_empty() {
        let shown: String = others.join(",").chars().take(60).flat_map(char::escape_debug).collect();
        draft.add_key_note(&option, format!("launch assigns the ranks itself; `{shown}` has no effect"), "");
    }
}

/// Sets `OMP_NUM_THREADS` in the environment of the workers to `threads`, unless the user has set
/// the variable.
pub(super) fn set_thread_count(draft: &mut JobDraft, context: &DropInContext<'_>, threads: i64) {
    if context.user_env_variable(env::OMP_NUM_THREADS).is_none() {
        draft.set_required_key(
            &format!("run.env.{}", env::OMP_NUM_THREADS),
            &quote_yaml(&threads.to_string()),
        );
    }
}

/// Loads the job.yaml that was converted from another launcher's command line to check it, and
/// returns the resulting job. An option that the job does not honour is an error. `program` is the
/// name of the other launcher.
pub(super) fn load_drop_in_job(
    draft: JobDraft,
    program: &str,
    mut errors: ImportErrors,
) -> Result<ImportedJob, ImportErrors> {
    let job = match draft.finish_job(&format!("{program}'s command line")) {
        Ok(job) => job,
        Err(mistakes) if errors.is_empty() => return Err(mistakes),
        Err(_) => return Err(errors),
    };
    let (unsupported, notes): (Vec<ImportNote>, Vec<ImportNote>) =
        job.notes.into_iter().partition(|note| note.kind == NoteKind::NotConverted);
    errors.extend(
        unsupported.iter().map(|note| create_unsupported_option_error(program, &note.key, &note.text, "")),
    );
    if errors.is_empty() { Ok(ImportedJob { job: job.job, notes, nodes: None }) } else { Err(errors) }
}
