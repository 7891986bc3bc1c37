//! `slurm`: the options of `launch sbatch`, including how a job is requeued at its time limit.
use crate::keys::{
    collections::described_list_type,
    key::Key,
    numbers::{boolean_type, integer_type},
    section::{default_section, section},
    text::formatted_text_type,
    units::{duration_range_type, size_type},
    value_type::ValueType,
};

section! {
    /// The options of `launch sbatch`. If an option is `None`, Slurm's default applies.
    pub struct SlurmSpec at "slurm";
    /// The option `--partition`.
    pub partition: Option<String> = Key::optional(slurm_names_type(), "Slurm's default");
    /// The option `--account`.
    pub account: Option<String> = Key::optional(slurm_names_type(), "Slurm's default");
    /// The option `--qos`, the quality of service.
    pub qos: Option<String> = Key::optional(slurm_names_type(), "Slurm's default");
    /// The option `--nodes`.
    pub nodes: u32 = Key::new(integer_type(1..=16_384), "1");
    /// The option `--time`, rounded up to seconds.
    pub time_ms: Option<u64> = Key::optional(time_limit_type(), "the limit of the partition");
    /// The option `--gpus-per-node`; 0 requests no GPUs.
    pub gpus_per_node: u32 = Key::new(integer_type(0..=1024), "0");
    /// The option `--cpus-per-task`: the CPUs of each node, because each node has a single task.
    pub cpus_per_task: Option<u32> = Key::optional(integer_type(1..=65_536), "Slurm's default");
    /// The option `--mem`, which is the memory of each node.
    pub mem: Option<u64> = Key::optional(size_type(1 << 20, "a size of 1MiB or more"), "Slurm's default");
    /// Additional options of sbatch; each item is one option, `--option=value`.
    pub extra: Vec<String> = Key::new(described_list_type("list of options", "a list of options", sbatch_option_type()), "[]");
    /// Additional options of srun for the step of the agents; each item is one option.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub step_options: Vec<String> = Key::new(described_list_type("list of options", "a list of options", srun_option_type()), "[]");
    /// How long before the time limit the job saves and stops.
    #[serde(rename = "notice_ms")]
    pub signal_time_ms: u64 = Key::new(signal_time_type(), "120s").with_deprecated_name("notice");
    /// The maximum number of requeues after the time limit or the loss of a node.
    pub requeues: u32 = Key::new(integer_type(0..=10_000), "10");
    /// Copy launch's executable to `/tmp` of each node.
    pub bcast: bool = Key::new(boolean_type(), "false");
    /// Let workers see the variables of the step that describe a task, such as `SLURM_PROCID`.
    pub step_variables: bool = Key::new(boolean_type(), "false");
}

impl Default for SlurmSpec {
    /// Returns the values that the section `slurm` has if a job does not contain it.
    fn default() -> Self {
        default_section()
    }
}

/// The longest `slurm.signal_time`, in milliseconds. Slurm stores the time of `--signal` as 16-bit
/// seconds.
const MAX_SIGNAL_TIME_MS: u64 = 65_535_000;
/// The longest `slurm.time`, in milliseconds: a hundred years.
const MAX_TIME_LIMIT_MS: u64 = 36_525 * 86_400_000;

/// Returns the parser and printer ([`ValueType`]) for `slurm.time`: a duration from one minute to a
/// hundred years, which is converted to milliseconds.
fn time_limit_type() -> ValueType<u64> {
    duration_range_type(60_000..=MAX_TIME_LIMIT_MS, "a duration from `1m` to a hundred years")
        .documented_as("duration of 1m or more")
}

/// Returns the parser and printer ([`ValueType`]) for `slurm.signal_time`: a duration from one
/// second to 65535 seconds, which is converted to milliseconds.
fn signal_time_type() -> ValueType<u64> {
    duration_range_type(1000..=MAX_SIGNAL_TIME_MS, "a duration from `1s` to `65535s`")
}

/// Returns the parser and printer ([`ValueType`]) for `slurm` keys that accept names of partitions,
/// accounts or QOS, separated by commas.
fn slurm_names_type() -> ValueType<String> {
    let expected = "a name of letters, digits and `_-.,:/@+`";
    formatted_text_type("text", expected, "^[A-Za-z0-9_.,:/@+][A-Za-z0-9_.,:/@+-]{0,254}$", |name| {
        let fits = |c: char| c.is_ascii_alphanumeric() || "_-.,:/@+".contains(c);
        name.chars().all(fits) && !name.starts_with('-') && name.len() <= 255
    })
}

/// Returns the parser and printer ([`ValueType`]) for an option of sbatch, such as
/// `--constraint=a100`. Each option becomes one line of the batch script.
fn sbatch_option_type() -> ValueType<String> {
    formatted_text_type("text", "an option of sbatch such as \"--constraint=a100\"", "^--.+$", |option| {
        option.starts_with("--") && option.len() > 2 && option.len() <= 1024
    })
}

/// The options of srun that a job cannot set, because launch sets them when it starts one agent per
/// node with srun.
const RESERVED_STEP_OPTIONS: &[&str] = &[
    "bcast",
    "cpu-bind",
    "export",
    "gpus",
    "gpus-per-node",
    "het-group",
    "input",
    "job-name",
    "kill-on-bad-exit",
    "mem",
    "mpi",
    "no-kill",
    "nodelist",
    "nodes",
    "ntasks",
    "ntasks-per-node",
    "overlap",
    "quiet",
    "wait",
];

/// Returns the parser and printer ([`ValueType`]) for options of srun such as
/// `--container-image=IMAGE`, which rejects the options that launch sets itself.
fn srun_option_type() -> ValueType<String> {
    let expected = "an option of srun such as \"--container-image=IMAGE\" that launch does not set itself";
    formatted_text_type("text", expected, "^--.+$", |option| {
        let name = option.strip_prefix("--").and_then(|option| option.split('=').next()).unwrap_or_default();
        let is_reserved = RESERVED_STEP_OPTIONS.iter().any(|reserved| reserved.starts_with(name));
        !name.is_empty() && !is_reserved && option.len() <= 1024
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{JobSource, load_job};
    use diagnostic::{Diagnostic, codes::job as codes};

    /// Loads a job that contains the text `section`, and returns its decoded `slurm` section or the
    /// errors.
    fn load_slurm_section(section: &str) -> Result<SlurmSpec, Vec<Diagnostic>> {
        let text = format!("run: {{command: [a]}}\n{section}");
        load_job(JobSource::Text { name: "a.yaml".to_owned(), text }, &[]).map(|(job, ..)| job.slurm)
    }

    #[test]
    fn a_job_without_the_section_has_the_defaults() {
        assert_eq!(load_slurm_section(""), Ok(SlurmSpec::default()));
    }

    #[test]
    fn options_that_launch_sets_for_the_step_are_rejected() {
        let options = "slurm: {step_options: ['--container-image=a#b', '--mem-bind=local']}";
        assert_eq!(load_slurm_section(options).expect("options").step_options.len(), 2);
        for wrong in ["--nodes=3", "--nod=a", "--export=NONE", "-N3", "--", "--=a", "container"] {
            let errors =
                load_slurm_section(&format!("slurm: {{step_options: ['{wrong}']}}")).expect_err(wrong);
            assert_eq!(errors[0].code(), codes::JOB_VALUE_FORMAT, "{wrong}");
        }
    }

    #[test]
    fn values_that_could_inject_options_or_lines_are_rejected() {
        for (section, subject, code) in [
            ("slurm: {partition: 'a b'}", "slurm.partition", codes::JOB_VALUE_FORMAT),
            ("slurm: {partition: '-a'}", "slurm.partition", codes::JOB_VALUE_FORMAT),
            ("slurm: {account: \"a\\nb\"}", "slurm.account", codes::JOB_CONTROL_CHARACTER),
            ("slurm: {extra: [hold]}", "slurm.extra", codes::JOB_VALUE_FORMAT),
            ("slurm: {extra: [\"--a\\nb\"]}", "slurm.extra", codes::JOB_CONTROL_CHARACTER),
            ("slurm: {extra: ['--']}", "slurm.extra", codes::JOB_VALUE_FORMAT),
            ("slurm: {time: 30s}", "slurm.time", codes::JOB_VALUE_OUT_OF_RANGE),
            ("slurm: {signal_time: 20h}", "slurm.signal_time", codes::JOB_VALUE_OUT_OF_RANGE),
            ("slurm: {mem: 1KiB}", "slurm.mem", codes::JOB_VALUE_OUT_OF_RANGE),
            ("slurm: {nodes: 0}", "slurm.nodes", codes::JOB_VALUE_OUT_OF_RANGE),
        ] {
            let errors = load_slurm_section(section).expect_err(section);
            assert_eq!((errors[0].subject(), errors[0].code()), (Some(subject), code), "{section}");
        }
    }
}
