//! `slurm`: the options of `launch sbatch`, and how a job continues after its time limit.
use super::{
    decode::{Decoder, Section},
    read::{ReadResult, boolean, duration, int32, list, out_of_range, size, text, wrong_format},
    yaml::YamlNode,
};
use serde::{Deserialize, Serialize};

/// Most nodes of an allocation.
const MAX_NODES: u32 = 16_384;
/// Longest `signal_time`: Slurm stores the seconds of `--signal` in 16 bits. Milliseconds.
const MAX_SIGNAL_TIME: u64 = 65_535_000;
/// Longest time limit, a hundred years, milliseconds.
const MAX_TIME: u64 = 36_525 * 86_400_000;

/// The options of `launch sbatch`. `None` is Slurm's default.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SlurmSpec {
    /// `--partition`.
    pub partition: Option<String>,
    /// `--account`.
    pub account: Option<String>,
    /// `--qos`.
    pub qos: Option<String>,
    /// The number of nodes.
    pub nodes: u32,
    /// The time limit, milliseconds.
    pub time_ms: Option<u64>,
    /// The number of GPUs per node; 0 requests none.
    pub gpus_per_node: u32,
    /// The number of CPUs of each node, which has a single task.
    pub cpus_per_task: Option<u32>,
    /// The memory of each node, bytes.
    pub mem: Option<u64>,
    /// Further options, each a whole `--option=value`.
    pub extra: Vec<String>,
    /// How long before the time limit Slurm signals the job, milliseconds.
    #[serde(rename = "notice_ms")]
    pub signal_time_ms: u64,
    /// The most times that the job is requeued.
    pub requeues: u32,
    /// Whether launch's executable is copied to the nodes.
    pub bcast: bool,
}

impl Default for SlurmSpec {
    /// The values of a job without a `slurm` section.
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

/// Decodes `slurm`.
pub(crate) fn decode(d: &mut Decoder, top: &Section<'_>) -> SlurmSpec {
    let t = d.section(top, "slurm");
    SlurmSpec {
        partition: d.get_optional(&t, "slurm.partition", name),
        account: d.get_optional(&t, "slurm.account", name),
        qos: d.get_optional(&t, "slurm.qos", name),
        nodes: d.get(&t, "slurm.nodes", int32(1..=MAX_NODES)),
        time_ms: d.get_optional(&t, "slurm.time", time),
        gpus_per_node: d.get(&t, "slurm.gpus_per_node", int32(0..=1024)),
        cpus_per_task: d.get_optional(&t, "slurm.cpus_per_task", int32(1..=65_536)),
        mem: d.get_optional(&t, "slurm.mem", mem),
        extra: d.get(&t, "slurm.extra", list("a list of options", option)),
        signal_time_ms: d.get(&t, "slurm.signal_time", signal_time),
        requeues: d.get(&t, "slurm.requeues", int32(0..=10_000)),
        bcast: d.get(&t, "slurm.bcast", boolean),
    }
}

/// Reads a partition, account or QOS; several are separated by commas.
fn name(node: &YamlNode) -> ReadResult<String> {
    let name = text(node)?;
    let fits = |c: char| c.is_ascii_alphanumeric() || "_-.,:/@+".contains(c);
    if name.chars().all(fits) && !name.starts_with('-') && name.len() <= 255 {
        Ok(name)
    } else {
        Err(wrong_format("a name of letters, digits and `_-.,:/@+`", node))
    }
}

/// Reads a whole option, which becomes a word of a line of the batch script.
fn option(node: &YamlNode) -> ReadResult<String> {
    let option = text(node)?;
    if option.starts_with("--") && option.len() > 2 && option.len() <= 1024 {
        Ok(option)
    } else {
        Err(wrong_format("an option of sbatch such as \"--constraint=a100\"", node))
    }
}

fn time(node: &YamlNode) -> ReadResult<u64> {
    match duration(node)? {
        ms @ 60_000..=MAX_TIME => Ok(ms),
        _ => Err(out_of_range("a duration from `1m` to a hundred years", node)),
    }
}

fn signal_time(node: &YamlNode) -> ReadResult<u64> {
    match duration(node)? {
        ms @ 1000..=MAX_SIGNAL_TIME => Ok(ms),
        _ => Err(out_of_range("a duration from `1s` to `65535s`", node)),
    }
}

fn mem(node: &YamlNode) -> ReadResult<u64> {
    match size(node)? {
        0..1_048_576 => Err(out_of_range("a size of 1MiB or more", node)),
        bytes => Ok(bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::{Source, load};
    use diagnostic::{Diagnostic, codes::job as codes};

    fn slurm(section: &str) -> Result<SlurmSpec, Vec<Diagnostic>> {
        let text = format!("run: {{command: [a]}}\n{section}");
        load(Source::Text { name: "a.yaml".to_owned(), text }, &[]).map(|(job, ..)| job.slurm)
    }

    #[test]
    fn a_job_without_the_section_has_the_defaults() {
        assert_eq!(slurm(""), Ok(SlurmSpec::default()));
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
            let errors = slurm(section).expect_err(section);
            assert_eq!((errors[0].subject(), errors[0].code()), (Some(subject), code), "{section}");
        }
    }
}
