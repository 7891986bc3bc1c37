//! Jobs of the built-in runtime that resume from checkpoints of other programs.
#![allow(clippy::unwrap_used)] // a test that panics has failed
use super::{FinishedRun, JobDirectory, files_below};
use serde_json::Value;
use std::{
    fs,
    path::{Path, PathBuf},
};

/// The largest relative difference of fp32 losses between programs.
const CLOSE: f64 = 1e-5;

/// A checkpoint that scripts/golden/resume recorded.
fn recorded(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/resume").join(name)
}

/// A directory with a job that resumes a recorded run.
pub(crate) struct ResumedJob {
    pub(crate) place: JobDirectory,
    pub(crate) from: PathBuf,
    /// The losses of the recorded run's next steps.
    pub(crate) next: Vec<f64>,
}

impl ResumedJob {
    /// Resumes a checkpoint of DeepSpeed (scripts/golden/deepspeed_resume.py).
    pub(crate) fn from_deepspeed(name: &str) -> ResumedJob {
        let (place, from) = (JobDirectory::new(), golden(name));
        let recording: Value = serde_json::from_slice(&fs::read(from.join("next.json")).unwrap()).unwrap();
        let documents =
            recording["documents"].as_array().unwrap().iter().map(|d| format!("{{\"text\": {d}}}\n"));
        fs::write(place.path("corpus.jsonl"), documents.collect::<String>()).unwrap();
        fs::write(place.path("job.yaml"), deepspeed_job(recording["tied"] == true)).unwrap();
        ResumedJob { place, from, next: numbers(&recording["next"]) }
    }

    /// Resumes a checkpoint of one of the programs in scripts/golden/resume.
    pub(crate) fn from_program(name: &str) -> (ResumedJob, Value) {
        let (place, at) = (JobDirectory::new(), recorded(name));
        let recording: Value = serde_json::from_slice(&fs::read(at.join("next.json")).unwrap()).unwrap();
        let documents =
            recording["documents"].as_array().unwrap().iter().map(|d| format!("{{\"text\": {d}}}\n"));
        fs::write(place.path("corpus.jsonl"), documents.collect::<String>()).unwrap();
        let model = match recording["family"].as_str().unwrap() {
            "llama" => "family: llama, tie_word_embeddings: false",
            other => &format!("family: {other}, tie_word_embeddings: true"),
        };
        let model = format!("{model}, {SMALL}, num_hidden_layers: {}", recording["layers"]);
        let job = match recording["family"].as_str() {
            // config.json has further settings, and the program's loss excludes router losses
            Some(family @ ("mixtral" | "qwen3_moe")) => {
                let directory = recorded(&format!("trainer_{family}")).join("checkpoint-3");
                let job =
                    job_with_model(&format!("from: {}", directory.display())) + "  experts: {aux_loss: 0}\n";
                job.replace("data: {", "data: {tokenizer: bytes, ")
            }
            _ => job_with_model(&model),
        };
        fs::write(place.path("job.yaml"), job).unwrap();
        // for bf16 programs the losses of the fp32 state were recorded separately
        let next =
            if recording["next_fp32"].is_null() { &recording["next"] } else { &recording["next_fp32"] };
        let from = at.join(recording["directory"].as_str().unwrap());
        (ResumedJob { place, from, next: numbers(next) }, recording)
    }

    /// Checks that the losses of the run, which begins at step 4, are those of the recorded run.
    #[track_caller]
    pub(crate) fn assert_losses(&self, ran: &FinishedRun) {
        let steps = ran.named("step");
        assert_eq!(steps[0]["step"], 4);
        assert!(steps.len() >= self.next.len(), "{} steps", steps.len());
        for (step, want) in steps.iter().zip(&self.next) {
            let got = step["loss"].as_f64().unwrap();
            let from = self.from.display();
            assert!((got - want).abs() <= CLOSE * want, "{from}: loss {got}, expected {want}");
        }
    }

    /// A copy of the checkpoint without some files.
    pub(crate) fn copy_without(&self, excluded: &[&str]) -> PathBuf {
        let copy = self.place.path("copy");
        for file in files_below(&self.from) {
            if !excluded.iter().any(|l| file == *l || file.starts_with(&format!("{l}/"))) {
                fs::create_dir_all(copy.join(&file).parent().unwrap()).unwrap();
                fs::copy(self.from.join(&file), copy.join(&file)).unwrap();
            }
        }
        copy
    }

    pub(crate) fn run(&self, set: &[&str]) -> FinishedRun {
        let from = format!("resume.from={}", self.from.display());
        self.place.delete_checkpoints();
        self.place.run(&[&[from.as_str()], set].concat())
    }

    /// Runs the job, which must be rejected with exit code 4.
    #[track_caller]
    pub(crate) fn rejected(&self, set: &[&str]) -> FinishedRun {
        let ran = self.run(set);
        assert_eq!(ran.code, 4, "{}", ran.stderr);
        ran
    }
}

pub(crate) fn numbers(list: &Value) -> Vec<f64> {
    list.as_array().unwrap().iter().map(|l| l.as_f64().unwrap()).collect()
}

/// The sizes of the models in tests/golden/resume.
const SMALL: &str = "vocab_size: 257, hidden_size: 16, intermediate_size: 20, num_attention_heads: 4, num_key_value_heads: 2, \
                     max_position_embeddings: 64, rms_norm_eps: 1e-6";

fn deepspeed_job(tied: bool) -> String {
    job_with_model(&format!(
        "family: llama, vocab_size: 257, hidden_size: 24, intermediate_size: 40, num_hidden_layers: 2, num_attention_heads: 4, \
         num_key_value_heads: 2, max_position_embeddings: 64, tie_word_embeddings: {tied}"
    ))
}

fn job_with_model(model: &str) -> String {
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

/// A checkpoint that scripts/golden/deepspeed_resume.py recorded.
pub(crate) fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/deepspeed").join(name)
}
