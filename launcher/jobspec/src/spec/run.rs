//! `run`: the program of a job, its environment and supervision.
use super::{
    activation::{ActivationStep, activation_type},
    cluster::MAX_HOST_COUNT,
    container::ContainerSpec,
    environment::{EnvSource, declare_environment_sources, declare_environment_values},
    hang_timeout::HangTimeout,
    run_values::{command_type, variable_pattern_type},
    signals::{RunSignalActions, StopSignal, signals_type},
    straggler::StragglerSpec,
    wrap::WrapSpec,
};
use crate::{
    ids::Rank,
    keys::{
        choice::{choice_type, choices},
        collections::described_list_type,
        key::Key,
        key_info::{Condition, Rule},
        numbers::{boolean_type, integer_type},
        record::record_type,
        section::{inner_section, section},
        text::{path_type, template_type, text_type},
        units::{duration_range_type, duration_type, size_type},
        value_type::{ValueType, in_variant},
    },
};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

section! {
    /// The program, its environment and supervision.
    pub struct RunSpec at "run";
    /// The program and its arguments, started once per rank.
    ///
    /// `None` stands for the built-in runtime.
    pub command: Option<Vec<String>> =
        Key::optional(command_type(), "none: the built-in training, which needs `train`");
    /// The working directory of the workers; other paths of the job are relative to it.
    ///
    /// The path is absolute after loading.
    pub workdir: PathBuf = Key::new(path_type(), ".");
    /// The variables that are added to the environment of each worker.
    ///
    /// The field contains the variables whose values are written in the job.
    pub env: Vec<(String, String)> = declare_environment_values();
    /// Variables whose values are read when the run starts, each with the source of the value. The
    /// values are never shown.
    pub env_from: Vec<(String, EnvSource)> = declare_environment_sources();
    /// Variables in launch's environment that are passed to the workers on other hosts.
    ///
    /// Each item is a name pattern. The values are never shown.
    pub pass_env: Vec<String> =
        Key::new(described_list_type("list of patterns", "a list of patterns of names", variable_pattern_type()), "[]");
    /// The environments that workers use on each host, such as a virtual environment.
    ///
    /// A login shell activates them in this order, once per host. An empty list activates nothing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub activate: Vec<ActivationStep> = Key::computed(activation_type(), "none", |_, _| Vec::new()).with_rules(ACTIVATE_RULES);
    /// The time limit of `activate` on each host.
    #[serde(default = "default_activate_timeout")]
    pub activate_timeout_ms: u64 = Key::new(
        duration_range_type(1..=MAX_ACTIVATE_TIMEOUT_MS, "a duration of at most 1h").documented_as("duration of at most 1h"),
        "60s",
    ).with_rules(ACTIVATE_TIMEOUT_RULES);
    /// The programs that start the workers of some ranks, such as profilers.
    ///
    /// The first item that matches a rank is the outermost program.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub wrap: Vec<WrapSpec> = Key::new(wrappers_type(), "[]").with_rules(WRAP_RULES);
    /// The container in which each worker runs.
    ///
    /// The agents run outside, and supervise the containers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container: Option<ContainerSpec> = Key::optional(container_type(), "none").with_rules(CONTAINER_RULES);
    /// The rank that gets the terminal in which launch runs, for example for `breakpoint()`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub terminal: Option<Rank> = Key::optional(integer_type(0..=u64::from(u32::MAX) - 1), "none").with_rules(TERMINAL_RULES);
    /// The binding of workers to CPUs.
    #[serde(rename = "bind")]
    pub cpu_bind: CpuBind = Key::new(choice_type(), "auto").with_deprecated_name("bind");
    /// The GPUs that a worker of a program sees.
    pub visible_devices: VisibleDevices = Key::new(choice_type(), "all").with_rules(PROGRAM_RULES);
    /// Insert `--local_rank=N` after the name of the script.
    ///
    /// Older launchers do so. `N` is the local rank.
    pub local_rank_argument: bool = Key::new(boolean_type(), "false").with_rules(PROGRAM_RULES);
    /// The signal that asks a program to save and stop.
    #[serde(default)]
    pub stop_signal: StopSignal = Key::new(choice_type(), "SIGTERM").with_rules(PROGRAM_RULES);
    /// The time from `stop_signal` to SIGTERM, in which a program can save and exit.
    #[serde(default = "default_stop_timeout")]
    pub stop_timeout_ms: u64 = Key::new(duration_type(), "60s").with_rules(STOP_TIMEOUT_RULES);
    /// The time from SIGTERM to SIGKILL when a program must end.
    #[serde(rename = "grace_ms")]
    pub grace_period_ms: u64 = Key::new(duration_type(), "30s").with_deprecated_name("grace");
    /// The maximum number of restarts of the job after failures.
    ///
    /// The limit applies regardless of which hosts failed.
    pub restarts: u32 = Key::new(integer_type(0..=10_000), "0");
    /// The minimum number of hosts of an attempt.
    pub min_hosts: MinHosts = Key::new(
        in_variant!(integer_type(1..=MAX_HOST_COUNT).documented_as("integer of 1 or more"), MinHosts::AtLeast)
            .or_keywords(&[("all", MinHosts::All)]),
        "all",
    );
    /// The time without a message from a host after which the host counts as lost.
    ///
    /// The key applies to other hosts than that of the controller.
    pub host_lease_ms: u64 = Key::new(lease_type(), "5s").with_rules(LEASE_RULES);
    /// The time without a message from the controller after which a host counts the controller as
    /// lost.
    ///
    /// A suspended controller is tolerated for this time.
    pub controller_lease_ms: u64 = Key::new(lease_type(), "60s").with_rules(LEASE_RULES);
    /// What workers do when the [controller is lost](design/processes.md#loss-of-the-controller).
    pub on_controller_loss: Option<ControllerLossAction> =
        Key::optional(choice_type(), "`stop`; with `--detach` and in Slurm `continue`");
    /// How long workers continue without a controller before they save and stop, with
    /// `on_controller_loss: continue`.
    pub controller_timeout_ms: u64 = Key::new(duration_type(), "15m").with_rules(CONTROLLER_TIMEOUT_RULES);
    /// The time without progress after which the attempt fails.
    ///
    /// `auto` stands for 10 minutes if workers have accelerators, and for `off` otherwise.
    #[serde(rename = "hang_timeout_ms", default)]
    pub hang_timeout: HangTimeout = Key::new(HangTimeout::value_type(), "auto");
    /// The text whose occurrence in an output line counts as progress.
    ///
    /// If this value is `None`, CPU time counts as progress.
    #[serde(rename = "progress")]
    pub progress_pattern: Option<String> = Key::new(text_type().or_none("off"), "off").with_deprecated_name("progress");
    /// The actions of launch on signals.
    pub signals: RunSignalActions = Key::new(signals_type(), "{SIGUSR1: save, SIGUSR2: ignore, SIGTERM: save_and_stop}");
    /// When a rank that slows down the others is reported.
    #[serde(default)]
    pub straggler: StragglerSpec = inner_section();
    /// The settings of workers' logs and of the console.
    pub logs: LogsSpec = inner_section();
}

/// The time, in milliseconds, that built-in workers get at least to save and stop when their agent
/// no longer waits for a new controller. If `run.controller_timeout` is longer, it applies instead.
const MIN_UNATTENDED_SAVE_MS: u64 = 600_000;

impl RunSpec {
    /// Returns how many milliseconds after `run.stop_signal` launch sends SIGTERM to the workers of
    /// a program. The time is 0 if `run.stop_signal` is SIGTERM itself.
    pub fn sigterm_delay_ms(&self) -> u64 {
        if self.stop_signal == StopSignal::Term { 0 } else { self.stop_timeout_ms }
    }

    /// Returns how many milliseconds the workers have to save and stop after their agent has waited
    /// in vain for a new controller. The agent then kills the workers that still run.
    pub fn unattended_stop_ms(&self) -> u64 {
        match self.command {
            Some(_) => self.grace_period_ms.saturating_add(self.sigterm_delay_ms()),
            None => self.controller_timeout_ms.max(MIN_UNATTENDED_SAVE_MS),
        }
    }
}

/// Returns the parser and printer ([`ValueType`]) for `run.host_lease` and `run.controller_lease`:
/// durations of at least 2 s without a heartbeat. A lease is longer than the interval of
/// heartbeats.
fn lease_type() -> ValueType<u64> {
    duration_range_type(2000..=u64::MAX, "a duration of 2s or more").documented_as("duration of 2s or more")
}

/// The rule that warns that a key of the section `run`, such as `run.stop_signal`, has no effect in
/// a job without `run.command`.
const PROGRAM_RULES: &[Rule] = &[Rule::no_effect(&[Condition::NotGiven("run.command")]).into_warning()];

/// The rules that warn that `run.activate` has no effect in the built-in training, which does not
/// use the user's Python environments.
const ACTIVATE_RULES: &[Rule] = PROGRAM_RULES;

/// The rules that warn about `run.activate_timeout` in a job without `run.activate`.
const ACTIVATE_TIMEOUT_RULES: &[Rule] =
    &[Rule::no_effect(&[Condition::NotGiven("run.activate")]).into_warning()];

/// The rule that rejects the key `run.wrap` in the built-in training, because no process may be
/// between a built-in worker and its agent (launch's process on the host).
const WRAP_RULES: &[Rule] = &[Rule::no_effect(&[Condition::NotGiven("run.command")])
    .with_message("`{key}` starts only programs; the built-in training cannot be wrapped")];

/// The rule that rejects the key `run.container` in the built-in training, because built-in workers
/// share memory with their agent (launch's process on the host).
const CONTAINER_RULES: &[Rule] = &[Rule::no_effect(&[Condition::NotGiven("run.command")])
    .with_message("`{key}` contains only programs; the built-in training runs without a container")];

/// The rules that reject the key `run.terminal` in the built-in training, which reads no input, and
/// in a job whose workers continue without their controller, to which the terminal belongs.
const TERMINAL_RULES: &[Rule] = &[
    Rule::no_effect(&[Condition::NotGiven("run.command")]),
    Rule::conflict(&[Condition::OneOf("run.on_controller_loss", &["continue"])])
        .with_message(
            "`{key}` gives a rank the terminal of the controller, without which the rank cannot continue as \
             `run.on_controller_loss: continue` requires",
        )
        .with_help("remove one of them"),
];

/// The rule that warns about `run.logs.show`, which has no effect in a job with `run.terminal`
/// because the terminal belongs to one rank.
const SHOW_RULES: &[Rule] = &[Rule::no_effect(&[Condition::Given("run.terminal")]).into_warning()];

/// The rules that warn that `run.stop_timeout` has no effect: in jobs without `run.command`, and in
/// jobs whose `run.stop_signal` is SIGTERM.
const STOP_TIMEOUT_RULES: &[Rule] = &[
    Rule::no_effect(&[Condition::NotGiven("run.command")]).into_warning(),
    Rule::no_effect(&[Condition::OneOf("run.stop_signal", &["SIGTERM"])]).into_warning(),
];

/// The largest value of `run.activate_timeout`, in milliseconds.
const MAX_ACTIVATE_TIMEOUT_MS: u64 = 3_600_000;

/// Returns the value of `run.activate_timeout` (the time limit for activating environments) in
/// stored jobs of earlier versions, which do not have the key.
fn default_activate_timeout() -> u64 {
    60_000
}

/// Returns the value of `run.stop_timeout` (the time from the signal to stop to SIGTERM) in stored
/// jobs of earlier versions, which do not have the key.
fn default_stop_timeout() -> u64 {
    60_000
}

/// Returns the parser and printer ([`ValueType`]) for `run.container`: a mapping that describes a
/// container.
fn container_type() -> ValueType<ContainerSpec> {
    record_type(
        "mapping of `image`, `runtime`, `mounts` and `options`",
        "a mapping with `image` and `runtime`",
    )
}

/// Returns the parser and printer ([`ValueType`]) for `run.wrap`: a list of programs that start
/// workers, such as profilers, each with the ranks that it starts.
fn wrappers_type() -> ValueType<Vec<WrapSpec>> {
    let item = record_type("mapping of `ranks` and `command`", "a mapping of `ranks` and `command`");
    described_list_type(
        "list of mappings of `ranks` and `command`",
        "a list of mappings of `ranks` and `command`",
        item,
    )
}

/// The rule that warns about `run.host_lease` and `run.controller_lease` in a job that runs only on
/// this machine (`cluster.hosts: local`).
const LEASE_RULES: &[Rule] =
    &[Rule::no_effect(&[Condition::OneOf("cluster.hosts", &["local"])]).into_warning()];

/// The rules that warn about `run.controller_timeout` in jobs whose workers do not wait for a new
/// controller: those with `run.on_controller_loss: stop` or `run.terminal`.
const CONTROLLER_TIMEOUT_RULES: &[Rule] = &[
    Rule::no_effect(&[Condition::OneOf("run.on_controller_loss", &["stop"])]).into_warning(),
    Rule::no_effect(&[Condition::Given("run.terminal")]).into_warning(),
];

section! {
    /// The settings of workers' logs and of the console.
    pub struct LogsSpec at "run.logs";
    /// The run directory.
    pub dir: String = Key::new(template_type(&["name", "run"]), "runs/{name}/{run}");
    /// The ranks whose output the [console](cli.md#console) shows.
    pub show: Vec<Rank> = Key::new(
        described_list_type("list of integers", "a list of ranks", integer_type(0..=u64::from(u32::MAX) - 1)),
        "[0]",
    ).into_reloadable().with_rules(SHOW_RULES);
    /// Show `[rank N]` before each line, and deduplicate equal lines of several ranks.
    pub prefix: bool = Key::new(boolean_type(), "true");
    /// The maximum size of a rank's log, at least `4KiB`; output beyond this size is not stored.
    pub max_size: u64 = Key::new(size_type(4096, "a size of 4KiB or more"), "1GiB");
}

/// `run.min_hosts`: the smallest number of hosts with which an attempt (start of all workers)
/// begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MinHosts {
    /// All hosts that the job uses.
    All,
    /// This number of hosts.
    AtLeast(u32),
}

choices! {
    /// `run.on_controller_loss`: what an agent does when its controller is lost.
    pub enum ControllerLossAction {
        /// End all workers at once.
        Stop = "stop",
        /// Continue without a controller, until `launch attach` starts another one or
        /// `run.controller_timeout` has passed.
        Continue = "continue",
    }
}

choices! {
    /// `run.cpu_bind`: the CPUs that each worker is bound to.
    pub enum CpuBind {
        /// Like `numa` if each worker has a GPU whose NUMA node is known, otherwise like `cores`.
        /// Workers are not bound if there are more workers than CPUs.
        Auto = "auto",
        /// Workers may run on all CPUs of the host.
        None = "none",
        /// A worker is bound to all cores of its GPU's NUMA node. A worker without a GPU is bound
        /// to all cores of an equal share of the NUMA nodes.
        Numa = "numa",
        /// A worker is bound to an equal share of the cores, which no other worker uses.
        Cores = "cores",
    }
}

choices! {
    /// `run.visible_devices`: the GPUs of its host that a process of a program sees.
    pub enum VisibleDevices {
        /// All GPUs of the host that the job uses. The program selects one by `LOCAL_RANK`.
        All = "all",
        /// Only the GPU of the process. `LOCAL_RANK` is then 0.
        One = "one",
    }
}
