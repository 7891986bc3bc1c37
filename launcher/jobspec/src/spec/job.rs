//! [`JobSpec`]: a job after parsing, defaults and validation. Every key has a value.
use super::{
    checkpoint::{CheckpointSpec, ResumeSpec},
    cluster::ClusterSpec,
    observe::ObserveSpec,
    run::RunSpec,
    slurm::SlurmSpec,
    train::TrainSpec,
};
use crate::{
    keys::{
        decoder::JobDecoder,
        job_values::JobValues,
        key::Key,
        section::{Section, inner_section, optional_inner_section, section},
        text::formatted_text_type,
        value_type::ValueType,
    },
    yaml::tree::YamlNode,
};

section! {
    /// A whole job: the content of job.yaml with all defaults.
    pub struct JobSpec at "";
    /// The name of the job, part of the paths of its files; at most 100 characters.
    pub name: String =
        Key::computed(job_name_type(), "the name of the job file without extension", |_, v| v.default_name.clone());
    /// `cluster`: the hosts and devices that the job uses.
    pub cluster: ClusterSpec = inner_section();
    /// `run`: the program, its environment and supervision.
    pub run: RunSpec = inner_section();
    /// `train`: the built-in training; `None` exactly if the job has `run.command`.
    pub train: Option<TrainSpec> = optional_inner_section().rejecting_null();
    /// `checkpoint`: when and where the built-in training saves checkpoints.
    pub checkpoint: CheckpointSpec = inner_section();
    /// `resume`: the checkpoint that the run resumes from, and the policy for its RNG streams.
    pub resume: ResumeSpec = inner_section();
    /// `observe`: the services that record what the job does.
    #[serde(default, skip_serializing_if = "ObserveSpec::is_empty")]
    pub observe: ObserveSpec = inner_section();
    /// `slurm`: the options that `launch sbatch` passes to Slurm.
    pub slurm: SlurmSpec = inner_section();
}

impl JobSpec {
    /// Decodes a whole job from its YAML tree `root`. Reports errors to `d`. A job without the key
    /// `name` gets `default_name`.
    pub(crate) fn decode_tree(d: &mut JobDecoder, root: &YamlNode, default_name: String) -> JobSpec {
        let top = d.open_root_section(root);
        let mut job = JobSpec::decode(d, &top);
        let mut values = job.list_values();
        values.default_name = default_name;
        job.fill_defaults(&d.unset, &values);
        let directory = job.checkpoint.dir.to_string_lossy().replace("{name}", &job.name);
        job.checkpoint.dir = directory.into();
        job
    }

    /// Returns the values of all keys of the job in YAML, including keys that have no effect in
    /// this job.
    pub(crate) fn list_values(&self) -> JobValues {
        let mut values = JobValues::default();
        self.print(&mut values);
        values
    }
}

/// The largest length of a job's name, in bytes. A longer name is rejected.
const MAX_NAME_BYTES: usize = 100;

/// Returns the parser and printer ([`ValueType`]) for the key `name`, which accepts job names that
/// are safe as a component of a path.
fn job_name_type() -> ValueType<String> {
    let expected = "a file name of at most 100 letters, digits, `.`, `_` and `-` that begins with a letter, a digit or `_`";
    let accepts = "text: letters, digits, `.`, `_`, `-`";
    formatted_text_type(accepts, expected, "^[A-Za-z0-9_][A-Za-z0-9._-]{0,99}$", |name| {
        name.chars().all(is_safe_in_path) && !name.starts_with(['.', '-']) && name.len() <= MAX_NAME_BYTES
    })
}

/// Returns whether the name of a job may contain the character `c`, because the character is safe
/// in a path.
fn is_safe_in_path(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-')
}

/// Makes a valid job name from `text`, by replacing the characters that a job name may not contain
/// by `-`. Returns `default` if no character is left.
pub fn make_job_name(text: &str, default: &str) -> String {
    let safe: String =
        text.chars().take(MAX_NAME_BYTES).map(|c| if is_safe_in_path(c) { c } else { '-' }).collect();
    let safe = safe.trim_start_matches(['.', '-']);
    if safe.is_empty() { default.to_owned() } else { safe.to_owned() }
}
