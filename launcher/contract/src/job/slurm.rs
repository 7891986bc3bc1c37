//! `slurm`: the options of `launch sbatch`, including how a job is requeued at its time limit.
use super::{
    decode::{JobDecoder, JobSection},
    readers::{
        ReadResult, int32_reader, list_reader, out_of_range_error, read_boolean, read_duration, read_size,
        read_text, wrong_format_error,
    },
    yaml::YamlNode,
};
use serde::{Deserialize, Serialize};

/// The largest number of nodes of an allocation.
const MAX_NODES: u32 = 16_384;
/// The longest `slurm.signal_time`, in milliseconds. Slurm stores the time of `--signal` as 16-bit
/// seconds.
const MAX_SIGNAL_TIME: u64 = 65_535_000;
/// The longest `slurm.time`, in milliseconds: a hundred years.
const MAX_TIME: u64 = 36_525 * 86_400_000;

/// `slurm`: the options of `launch sbatch`. If an option is `None`, Slurm's default applies.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SlurmSpec {
    /// The partition to submit to (`--partition`).
    pub partition: Option<String>,
    /// The account that is charged (`--account`).
    pub account: Option<String>,
    /// The quality of service (`--qos`).
    pub qos: Option<String>,
    /// The number of nodes to allocate.
    pub nodes: u32,
    /// The time limit of the job, in milliseconds.
    pub time_ms: Option<u64>,
    /// The number of GPUs per node; 0 requests none.
    pub gpus_per_node: u32,
    /// The number of CPUs per node, because each node has a single task.
    pub cpus_per_task: Option<u32>,
    /// The memory per node, in bytes.
    pub mem: Option<u64>,
    /// Further options for sbatch. Each item is a whole `--option=value`.
    pub extra: Vec<String>,
    /// How long before the time limit Slurm signals the job, in milliseconds.
    #[serde(rename = "notice_ms")]
    pub signal_time_ms: u64,
    /// The largest number of times that the job is requeued.
    pub requeues: u32,
    /// Whether the executable `launch` is copied to the nodes before the job starts there.
    pub bcast: bool,
}

impl Default for SlurmSpec {
    /// Returns the options of a job without a `slurm` section.
    fn default() -> Self {
        SlurmSpec {
            partition: None,
            account: None,
            qos: None,
            nodes: 1,
            time_ms: None,
            gpus_per_node: 0,
            cpus_per_task: None,
            mem: None,
            extra: Vec::new(),
            signal_time_ms: 120_000,
            requeues: 10,
            bcast: false,
        }
    }
}

/// Decodes the section `slurm`. Reports errors to `d`.
pub(crate) fn decode_slurm(d: &mut JobDecoder, top: &JobSection<'_>) -> SlurmSpec {
    let t = d.open_section(top, "slurm");
    SlurmSpec {
        partition: d.decode_optional(&t, "slurm.partition", read_slurm_name),
        account: d.decode_optional(&t, "slurm.account", read_slurm_name),
        qos: d.decode_optional(&t, "slurm.qos", read_slurm_name),
        nodes: d.decode_value(&t, "slurm.nodes", int32_reader(1..=MAX_NODES)),
        time_ms: d.decode_optional(&t, "slurm.time", read_time_limit),
        gpus_per_node: d.decode_value(&t, "slurm.gpus_per_node", int32_reader(0..=1024)),
        cpus_per_task: d.decode_optional(&t, "slurm.cpus_per_task", int32_reader(1..=65_536)),
        mem: d.decode_optional(&t, "slurm.mem", read_memory_size),
        extra: d.decode_value(&t, "slurm.extra", list_reader("a list of options", read_sbatch_option)),
        signal_time_ms: d.decode_value(&t, "slurm.signal_time", read_signal_time),
        requeues: d.decode_value(&t, "slurm.requeues", int32_reader(0..=10_000)),
        bcast: d.decode_value(&t, "slurm.bcast", read_boolean),
    }
}

/// Reads the name of a partition, an account or a QOS, or several names separated by commas.
fn read_slurm_name(node: &YamlNode) -> ReadResult<String> {
    let name = read_text(node)?;
    let fits = |c: char| c.is_ascii_alphanumeric() || "_-.,:/@+".contains(c);
    if name.chars().all(fits) && !name.starts_with('-') && name.len() <= 255 {
        Ok(name)
    } else {
        Err(wrong_format_error("a name of letters, digits and `_-.,:/@+`", node))
    }
}

/// Reads an option of sbatch, such as `--constraint=a100`. Each option becomes one line of the
/// batch script.
fn read_sbatch_option(node: &YamlNode) -> ReadResult<String> {
    let option = read_text(node)?;
    if option.starts_with("--") && option.len() > 2 && option.len() <= 1024 {
        Ok(option)
    } else {
        Err(wrong_format_error("an option of sbatch such as \"--constraint=a100\"", node))
    }
}

/// Reads a duration from one minute to [`MAX_TIME`]. Returns milliseconds.
fn read_time_limit(node: &YamlNode) -> ReadResult<u64> {
    match read_duration(node)? {
        ms @ 60_000..=MAX_TIME => Ok(ms),
        _ => Err(out_of_range_error("a duration from `1m` to a hundred years", node)),
    }
}

/// Reads a duration from one second to [`MAX_SIGNAL_TIME`]. Returns milliseconds.
fn read_signal_time(node: &YamlNode) -> ReadResult<u64> {
    match read_duration(node)? {
        ms @ 1000..=MAX_SIGNAL_TIME => Ok(ms),
        _ => Err(out_of_range_error("a duration from `1s` to `65535s`", node)),
    }
}

/// Reads a size of 1 MiB or more. Returns bytes.
fn read_memory_size(node: &YamlNode) -> ReadResult<u64> {
    match read_size(node)? {
        0..1_048_576 => Err(out_of_range_error("a size of 1MiB or more", node)),
        bytes => Ok(bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::{JobSource, load_job};
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
