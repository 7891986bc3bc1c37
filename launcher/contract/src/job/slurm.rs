//! `slurm:` — what `launch sbatch` asks Slurm for, and how a job goes on after its time limit.
use super::{
    decode::{Decoder, Table},
    read::{Read, boolean, duration, expected, int32, list, size, text},
    tree::Node,
};
use serde::{Deserialize, Serialize};

/// Most nodes of an allocation.
const MOST_NODES: u32 = 16_384;
/// Slurm counts the seconds of `--signal` in 16 bits.
const LONGEST_NOTICE: u64 = 65_535_000;
/// Longest time limit: a hundred years.
const LONGEST_TIME: u64 = 36_525 * 86_400_000;

/// What `launch sbatch` asks Slurm for. `None`: Slurm's own default.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SlurmSpec {
    pub partition: Option<String>,
    pub account: Option<String>,
    pub qos: Option<String>,
    pub nodes: u32,
    /// The time limit, milliseconds.
    pub time_ms: Option<u64>,
    /// 0: none asked for.
    pub gpus_per_node: u32,
    /// Of the one task on each node, so of each node.
    pub cpus_per_task: Option<u32>,
    /// Of each node, bytes.
    pub mem: Option<u64>,
    /// More options, each a whole `--option=value`.
    pub extra: Vec<String>,
    /// How long before the time limit the job is told, milliseconds.
    pub notice_ms: u64,
    /// How often the job may be put back into the queue.
    pub requeues: u32,
    /// Copy launch's executable to the nodes.
    pub bcast: bool,
}

impl Default for SlurmSpec {
    /// As without a `slurm:` section.
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
            notice_ms: 120_000,
            requeues: 10,
            bcast: false,
        }
    }
}

pub(crate) fn decode(d: &mut Decoder, top: &Table<'_>) -> SlurmSpec {
    let t = d.section(top, "slurm");
    SlurmSpec {
        partition: d.opt(&t, "slurm.partition", name),
        account: d.opt(&t, "slurm.account", name),
        qos: d.opt(&t, "slurm.qos", name),
        nodes: d.get(&t, "slurm.nodes", int32(1..=MOST_NODES)),
        time_ms: d.opt(&t, "slurm.time", time),
        gpus_per_node: d.get(&t, "slurm.gpus_per_node", int32(0..=1024)),
        cpus_per_task: d.opt(&t, "slurm.cpus_per_task", int32(1..=65_536)),
        mem: d.opt(&t, "slurm.mem", mem),
        extra: d.get(&t, "slurm.extra", list("a list of options", option)),
        notice_ms: d.get(&t, "slurm.notice", notice),
        requeues: d.get(&t, "slurm.requeues", int32(0..=10_000)),
        bcast: d.get(&t, "slurm.bcast", boolean),
    }
}

/// Names of partitions and the like, several separated by commas.
fn name(node: &Node) -> Read<String> {
    let name = text(node)?;
    let fits = |c: char| c.is_ascii_alphanumeric() || "_-.,:/@+".contains(c);
    if name.chars().all(fits) && !name.starts_with('-') && name.len() <= 255 {
        Ok(name)
    } else {
        Err(expected("a name of letters, digits and `_-.,:/@+`", node))
    }
}

/// A whole option, as it stands in a line of the script.
fn option(node: &Node) -> Read<String> {
    let option = text(node)?;
    if option.starts_with("--") && option.len() > 2 && option.len() <= 1024 {
        Ok(option)
    } else {
        Err(expected("an option of sbatch such as \"--constraint=a100\"", node))
    }
}

fn time(node: &Node) -> Read<u64> {
    match duration(node)? {
        ms @ 60_000..=LONGEST_TIME => Ok(ms),
        _ => Err(expected("a duration from `1m` to a hundred years", node)),
    }
}

fn notice(node: &Node) -> Read<u64> {
    match duration(node)? {
        ms @ 1000..=LONGEST_NOTICE => Ok(ms),
        _ => Err(expected("a duration from `1s` to `65535s`", node)),
    }
}

fn mem(node: &Node) -> Read<u64> {
    match size(node)? {
        0..1_048_576 => Err(expected("a size of 1MiB or more", node)),
        bytes => Ok(bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::{Source, load};

    fn slurm(section: &str) -> Result<SlurmSpec, String> {
        let text = format!("run: {{command: [a]}}\n{section}");
        match load(Source::Text { name: "a.yaml".to_owned(), text }, &[]) {
            Ok((job, _, _)) => Ok(job.slurm),
            Err(problems) => Err(problems.iter().map(|p| p.message.clone()).collect::<Vec<_>>().join("; ")),
        }
    }

    #[test]
    fn without_a_section_it_is_the_default() {
        assert_eq!(slurm(""), Ok(SlurmSpec::default()));
    }

    #[test]
    fn what_could_be_another_option_or_line_is_refused() {
        for section in [
            "slurm: {partition: 'a b'}",
            "slurm: {partition: '-a'}",
            "slurm: {account: \"a\\nb\"}",
            "slurm: {extra: [hold]}",
            "slurm: {extra: [\"--a\\nb\"]}",
            "slurm: {extra: ['--']}",
            "slurm: {time: 30s}",
            "slurm: {notice: 20h}",
            "slurm: {mem: 1KiB}",
            "slurm: {nodes: 0}",
        ] {
            assert!(slurm(section).is_err(), "{section}");
        }
    }
}
