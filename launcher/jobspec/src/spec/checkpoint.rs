//! `checkpoint` and `resume`: when and where a job saves checkpoints, and from which checkpoint it
//! resumes.
use super::cluster::RUNS_PROGRAM;
use crate::{
    keys::{
        choice::{choice_type, choices},
        key::Key,
        key_info::{Condition, Rule},
        numbers::{boolean_type, integer_at_least_type, integer_type},
        section::{optional_inner_section, section},
        text::{path_type, template_type},
        units::duration_type,
        value_type::{
            ReadResult, ValueType, in_variant, out_of_range_error, wrong_format_error, wrong_type_error,
        },
    },
    yaml::{
        format::format_duration,
        tree::{YamlNode, YamlValue},
    },
};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::path::PathBuf;

section! {
    /// When and where the built-in training saves, and which checkpoints are kept.
    pub struct CheckpointSpec at "checkpoint", rules BUILT_IN_ONLY_RULES;
    /// The directory of the checkpoints.
    ///
    /// The path is relative to the workdir. The name of the job has already replaced the
    /// placeholder `{name}`.
    pub dir: PathBuf = Key::new(
        template_type(&["name"]).convert(PathBuf::from, |path| Some(path.to_string_lossy().into_owned())),
        "runs/{name}/checkpoints",
    ).ignoring_section_rules().with_rules(RESUME_AUTO_ONLY_RULES);
    /// The number of steps, or the time, between checkpoints.
    pub every: SaveInterval = Key::new(save_interval_type(), "100").into_reloadable();
    /// The number of newest complete checkpoints that are kept; 0 keeps all.
    pub keep: u32 = Key::new(integer_at_least_type(0), "3");
    /// Write checkpoints while training continues.
    ///
    /// Otherwise training waits for the write.
    pub r#async: bool = Key::new(boolean_type(), "true");
    /// Write XOR parity, from which one lost or damaged shard can be rebuilt.
    pub parity: bool = Key::new(boolean_type(), "false");
    /// Reject hosts that do not share `dir`.
    ///
    /// Otherwise each host keeps the shards of its ranks in its own directory.
    #[serde(default)]
    pub require_shared: bool = Key::new(boolean_type(), "false");
    /// Copies of the training state in the memory of hosts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<MemoryCopySpec> = optional_inner_section();
    /// At the end of the run, write the weights as a Hugging Face directory in bf16.
    pub gather_16bit_weights_on_model_save: bool = Key::new(boolean_type(), "true").with_aliases(&[
        "stage3_gather_16bit_weights_on_model_save",
        "stage3_gather_fp16_weights_on_model_save",
    ]);
}

/// The advice of error messages about keys of `checkpoint` in a job with the user's own program: to
/// remove the key from job.yaml.
const REMOVE_KEY_HELP: &str = "remove it; the program saves its own checkpoints";
/// The rule that rejects keys such as `checkpoint.every` in a job that runs the user's own program
/// (`run.command`).
const BUILT_IN_ONLY_RULES: &[Rule] = &[Rule::no_effect(&[RUNS_PROGRAM]).with_help(REMOVE_KEY_HELP)];
/// The rule that rejects `checkpoint.dir` in a job with `run.command`, unless the job also sets
/// `resume.from: auto`.
const RESUME_AUTO_ONLY_RULES: &[Rule] =
    &[Rule::no_effect(&[RUNS_PROGRAM, Condition::NoneOf("resume.from", &["auto"])])
        .with_message("`{key}` has no effect in a job with `run.command` without `resume.from: auto`")
        .with_help(REMOVE_KEY_HELP)];

section! {
    /// Copies of the training state in memory, from which a restarted job resumes.
    ///
    /// Each host keeps the copies of its workers, which survive the workers.
    pub struct MemoryCopySpec at "checkpoint.memory", rules BUILT_IN_ONLY_RULES;
    /// The number of other hosts that keep a copy of each worker's state; with 0, only the worker's
    /// host keeps a copy.
    ///
    /// With 1 or more, the copies survive the loss of a host.
    pub copies: u32 = Key::new(integer_type(0..=MAX_MEMORY_COPIES), "1");
    /// The number of steps from one copy to the next.
    pub every: u64 = Key::new(integer_at_least_type(1), "1");
    /// When an attempt ends, keep the processes of the workers that did not fail.
    ///
    /// Otherwise, and on GPUs, a restart starts all workers again.
    #[serde(default = "keeps_workers_by_default")]
    pub keep_workers: bool = Key::new(boolean_type(), "true");
}

/// Returns `true`, the value that the option `checkpoint.memory.keep_workers` has in jobs that
/// earlier versions stored without this option.
fn keeps_workers_by_default() -> bool {
    true
}

/// The largest value of `checkpoint.memory.copies`, the number of other hosts that keep a copy of
/// each worker's training state in memory. More copies than this protect against failures that are
/// less likely than the loss of all hosts.
const MAX_MEMORY_COPIES: u64 = 8;

/// `checkpoint.every`: the interval between checkpoints. A checkpoint is always saved at the end of
/// training, and when the run is stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SaveInterval {
    /// No checkpoints before the end of training.
    Never,
    /// A checkpoint after every such number of optimizer steps.
    Steps(u64),
    /// A checkpoint after every such number of milliseconds, which rank 0 measures at step
    /// boundaries.
    Duration(u64),
}

/// Returns the parser and printer ([`ValueType`]) for `checkpoint.every`: a number of steps, a
/// duration, or `never`.
fn save_interval_type() -> ValueType<SaveInterval> {
    let schema = json!({"anyOf": [
        {"enum": ["never"]}, integer_at_least_type::<u64>(1).schema, duration_type().schema,
    ]});
    let accepts = "integer of 1 or more, duration, or `never`";
    ValueType::new_single_line(accepts, schema, read_save_interval, |every| match every {
        SaveInterval::Never => "never".to_owned(),
        SaveInterval::Steps(n) => n.to_string(),
        SaveInterval::Duration(ms) => format_duration(*ms),
    })
}

/// Reads a value of `checkpoint.every` from YAML.
fn read_save_interval(node: &YamlNode) -> ReadResult<SaveInterval> {
    let what = "a number of steps, a duration such as `10m`, or `never`";
    match node.value {
        YamlValue::Text if node.raw == "never" => Ok(SaveInterval::Never),
        YamlValue::Text => match duration_type().read(node) {
            Ok(ms) if ms > 0 => Ok(SaveInterval::Duration(ms)),
            _ => Err(wrong_format_error(what, node)),
        },
        _ => integer_at_least_type(1).read(node).map(SaveInterval::Steps).map_err(|_| match node.value {
            YamlValue::Int(0) => out_of_range_error(what, node).with_help("write `never`"),
            _ => wrong_type_error(what, node),
        }),
    }
}

section! {
    /// The checkpoint from which a run resumes.
    pub struct ResumeSpec at "resume";
    /// The checkpoint to resume from.
    ///
    /// A batch job that its scheduler starts again continues from its newest checkpoint.
    pub from: ResumeFrom = Key::computed(resume_from_type(), "`auto`; `never` with `run.command`", |_, v| {
        // A program finds its checkpoints itself, unless the job has `resume.from`.
        if v.get("run.command").is_some() { ResumeFrom::Never } else { ResumeFrom::Auto }
    });
    /// The treatment of the RNG streams of a checkpoint.
    pub rng: RngPolicy = Key::new(choice_type(), "reconcile").with_rules(RNG_RULES);
}

/// The rule that warns that `resume.rng` has no effect in a job with the user's own program and
/// `resume.from: never`.
const RNG_RULES: &[Rule] = &[Rule::no_effect(&[RUNS_PROGRAM, Condition::OneOf("resume.from", &["never"])])
    .into_warning()
    .with_message("`{key}` has no effect without `resume.from`")
    .with_help("set `resume.from`, or remove the key")];

/// Returns the parser and printer ([`ValueType`]) for `resume.from`: `auto`, `never`, or the path
/// of a checkpoint.
fn resume_from_type() -> ValueType<ResumeFrom> {
    in_variant!(path_type(), ResumeFrom::Path)
        .or_keywords(&[("auto", ResumeFrom::Auto), ("never", ResumeFrom::Never)])
}

/// `resume.from`: the checkpoint that a run resumes from.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ResumeFrom {
    /// The newest complete checkpoint in `checkpoint.dir`. The run begins at step 0 if there is
    /// none.
    #[default]
    Auto,
    /// No checkpoint. The run begins at step 0.
    Never,
    /// The checkpoint at this path, or the newest checkpoint in the directory at this path. The run
    /// fails if there is none.
    Path(PathBuf),
}

choices! {
    /// `resume.rng`: the policy for the RNG streams of a checkpoint that another number of workers
    /// wrote (docs/numerics.md).
    pub enum RngPolicy {
        /// With an unchanged number of workers, every rank keeps its streams. Otherwise, streams
        /// that are equal on all ranks are kept, and the other streams are reseeded.
        Reconcile = "reconcile",
        /// The run fails if a stream would have to be reseeded.
        Strict = "strict",
        /// All streams are reseeded.
        Reseed = "reseed",
    }
}
