//! Creates jobs of the built-in runtime that resume from recorded checkpoints of other programs.
#![allow(clippy::unwrap_used, reason = "a test that panics has failed")]
use super::{FinishedRun, JobDirectory, list_files_below};
use serde_json::Value;
use std::{
    fs,
    path::{Path, PathBuf},
};

/// The largest accepted relative difference between the fp32 losses of launch and of the recorded
/// program.
const MAX_LOSS_DIFFERENCE: f64 = 1e-5;

/// Returns the path of a checkpoint that scripts/golden/resume recorded.
fn locate_recording(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/resume").join(name)
}

/// A directory with a job that resumes a recorded run.
pub(crate) struct ResumedJob {
    pub(crate) job_dir: JobDirectory,
    pub(crate) from: PathBuf,
    /// The losses of the recorded run's next steps.
    pub(crate) next_losses: Vec<f64>,
}

impl ResumedJob {
    /// Creates a job that resumes from a recorded checkpoint of DeepSpeed
    /// (scripts/golden/deepspeed_resume.py).
    pub(crate) fn from_deepspeed(name: &str) -> ResumedJob {
        let (job_dir, from) = (JobDirectory::new(), locate_deepspeed_recording(name));
        let recording: Value = serde_json::from_slice(&fs::read(from.join("next.json")).unwrap()).unwrap();
        let documents =
            recording["documents"].as_array().unwrap().iter().map(|d| format!("{{\"text\": {d}}}\n"));
        fs::write(job_dir.path("corpus.jsonl"), documents.collect::<String>()).unwrap();
        fs::write(job_dir.path("job.yaml"), format_deepspeed_job(recording["tied"] == true)).unwrap();
        ResumedJob { job_dir, from, next_losses: parse_numbers(&recording["next"]) }
    }

    /// Creates a job that resumes from a checkpoint of one of the programs in
    /// scripts/golden/resume. Also returns the recording of the program's run.
    pub(crate) fn from_program(name: &str) -> (ResumedJob, Value) {
        let (job_dir, at) = (JobDirectory::new(), locate_recording(name));
        let recording: Value = serde_json::from_slice(&fs::read(at.join("next.json")).unwrap()).unwrap();
        let documents =
            recording["documents"].as_array().unwrap().iter().map(|d| format!("{{\"text\": {d}}}\n"));
        fs::write(job_dir.path("corpus.jsonl"), documents.collect::<String>()).unwrap();
        let model = match recording["family"].as_str().unwrap() {
            "llama" => "family: llama, tie_word_embeddings: false",
            other => &format!("family: {other}, tie_word_embeddings: true"),
        };
        let model = format!("{model}, {SMALL_MODEL_SIZES}, num_hidden_layers: {}", recording["layers"]);
        let job = match recording["family"].as_str() {
            // config.json has further settings, and the program's loss excludes router losses
            Some(family @ ("mixtral" | "qwen3_moe")) => {
                let directory = locate_recording(&format!("trainer_{family}")).join("checkpoint-3");
                let job = format_job_with_model(&format!("from: {}", directory.display()))
                    + "  experts: {aux_loss: 0}\n";
                job.replace("data: {", "data: {tokenizer: bytes, ")
            }
            _ => format_job_with_model(&model),
        };
        fs::write(job_dir.path("job.yaml"), job).unwrap();
        // for bf16 programs the losses of the fp32 state were recorded separately
        let next_losses =
            if recording["next_fp32"].is_null() { &recording["next"] } else { &recording["next_fp32"] };
        let from = at.join(recording["directory"].as_str().unwrap());
        (ResumedJob { job_dir, from, next_losses: parse_numbers(next_losses) }, recording)
    }

    /// Checks that a run begins at step 4, and that its losses equal those of the recorded run
    /// within [`MAX_LOSS_DIFFERENCE`].
    #[track_caller]
    pub(crate) fn assert_losses(&self, ran: &FinishedRun) {
        let steps = ran.events_named("step");
        assert_eq!(steps[0]["step"], 4);
        assert!(steps.len() >= self.next_losses.len(), "{} steps", steps.len());
        for (step, want) in steps.iter().zip(&self.next_losses) {
            let got = step["loss"].as_f64().unwrap();
            let from = self.from.display();
            assert!((got - want).abs() <= MAX_LOSS_DIFFERENCE * want, "{from}: loss {got}, expected {want}");
        }
    }

    /// Copies the recorded checkpoint without the files and directories `excluded`, which are
    /// relative paths. Returns the path of the copy.
    pub(crate) fn copy_checkpoint_without(&self, excluded: &[&str]) -> PathBuf {
        let directory = self.job_dir.path("copy");
        for file in list_files_below(&self.from) {
            if !excluded.iter().any(|name| file == *name || file.starts_with(&format!("{name}/"))) {
                fs::create_dir_all(directory.join(&file).parent().unwrap()).unwrap();
                fs::copy(self.from.join(&file), directory.join(&file)).unwrap();
            }
        }
        directory
    }

    /// Runs the job with the settings `set`, beginning from the recorded checkpoint, and waits for
    /// its end. Deletes the job's own checkpoints before.
    pub(crate) fn run(&self, set: &[&str]) -> FinishedRun {
        let from = format!("resume.from={}", self.from.display());
        self.job_dir.delete_checkpoints();
        self.job_dir.run(&[&[from.as_str()], set].concat())
    }

    /// Runs the job with these settings and waits for its end. Panics if the exit code is not 4,
    /// the code of a rejected checkpoint.
    #[track_caller]
    pub(crate) fn expect_rejection(&self, set: &[&str]) -> FinishedRun {
        let ran = self.run(set);
        assert_eq!(ran.code, 4, "{}", ran.stderr);
        ran
    }
}

/// Converts a JSON array of numbers to floats. Panics if the value is not an array of numbers.
pub(crate) fn parse_numbers(list: &Value) -> Vec<f64> {
    list.as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
}

/// The sizes of the models in tests/golden/resume, as YAML.
const SMALL_MODEL_SIZES: &str = "vocab_size: 257, hidden_size: 16, intermediate_size: 20, num_attention_heads: 4, num_key_value_heads: 2, \
                     max_position_embeddings: 64, rms_norm_eps: 1e-6";

/// Returns the text of a job that resumes a recorded run of DeepSpeed. `tied` is whether the head
/// is tied to the embedding.
fn format_deepspeed_job(tied: bool) -> String {
    format_job_with_model(&format!(
        "family: llama, vocab_size: 257, hidden_size: 24, intermediate_size: 40, num_hidden_layers: 2, num_attention_heads: 4, \
         num_key_value_heads: 2, max_position_embeddings: 64, tie_word_embeddings: {tied}"
    ))
}

/// Returns the text of a job whose `train.model` section has the content `model`.
fn format_job_with_model(model: &str) -> String {
    format!(
        "name: tiny
cluster: {{workers_per_host: 2}}
train:
  model: {{{model}}}
  data: {{files: [corpus.jsonl], seq_len: 20, pack: false, shuffle: false}}
  zero: {{stage: 3}}
  batch: {{global: 4, micro: 1}}
  optimizer: {{lr: 2e-3, weight_decay: 0.1}}
  schedule: {{name: linear, warmup_steps: 2, min_lr: 0}}
  steps: 20
"
    )
}

/// Returns the path of a checkpoint that scripts/golden/deepspeed_resume.py recorded.
pub(crate) fn locate_deepspeed_recording(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/deepspeed").join(name)
}
