//! Jobs of the built-in runtime that go on from what another program saved.
#![allow(clippy::unwrap_used)] // a test that panics has failed
use super::{Place, Ran, files_below};
use serde_json::Value;
use std::{
    fs,
    path::{Path, PathBuf},
};

/// Relative difference of losses that different programs computed in fp32.
const CLOSE: f64 = 1e-5;

/// What scripts/golden/resume made.
fn saved(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/resume").join(name)
}

/// A place with the job that continues a golden run.
pub(crate) struct Continued {
    pub(crate) place: Place,
    pub(crate) from: PathBuf,
    /// The losses of the steps that follow.
    pub(crate) next: Vec<f64>,
}

impl Continued {
    /// What DeepSpeed saved (scripts/golden/deepspeed_resume.py).
    pub(crate) fn of(name: &str) -> Continued {
        let (place, from) = (Place::new(), golden(name));
        let told: Value = serde_json::from_slice(&fs::read(from.join("next.json")).unwrap()).unwrap();
        let documents = told["documents"].as_array().unwrap().iter().map(|d| format!("{{\"text\": {d}}}\n"));
        fs::write(place.path("corpus.jsonl"), documents.collect::<String>()).unwrap();
        fs::write(place.path("job.yaml"), job(told["tied"] == true)).unwrap();
        Continued { place, from, next: numbers(&told["next"]) }
    }

    /// What one of the programs of scripts/golden/resume saved.
    pub(crate) fn program(name: &str) -> (Continued, Value) {
        let (place, at) = (Place::new(), saved(name));
        let told: Value = serde_json::from_slice(&fs::read(at.join("next.json")).unwrap()).unwrap();
        let documents = told["documents"].as_array().unwrap().iter().map(|d| format!("{{\"text\": {d}}}\n"));
        fs::write(place.path("corpus.jsonl"), documents.collect::<String>()).unwrap();
        let model = match told["family"].as_str().unwrap() {
            "llama" => "family: llama, tie_word_embeddings: false",
            other => &format!("family: {other}, tie_word_embeddings: true"),
        };
        let model = format!("{model}, {SMALL}, num_hidden_layers: {}", told["layers"]);
        let job = match told["family"].as_str() {
            // its config.json says more; the program's loss was without that of the router
            Some(family @ ("mixtral" | "qwen3_moe")) => {
                let folder = saved(&format!("trainer_{family}")).join("checkpoint-3");
                let job = job_of(&format!("from: {}", folder.display())) + "  experts: {aux_loss: 0}\n";
                job.replace("data: {", "data: {tokenizer: bytes, ")
            }
            _ => job_of(&model),
        };
        fs::write(place.path("job.yaml"), job).unwrap();
        // a program that trained in bf16 had other losses; those of its state in fp32 were computed beside
        let next = if told["next_fp32"].is_null() { &told["next"] } else { &told["next_fp32"] };
        let from = at.join(told["folder"].as_str().unwrap());
        (Continued { place, from, next: numbers(next) }, told)
    }

    /// The steps after the third have the losses that they should have.
    #[track_caller]
    pub(crate) fn follows(&self, ran: &Ran) {
        let steps = ran.kind("step");
        assert_eq!(steps[0]["step"], 4);
        assert!(steps.len() >= self.next.len(), "{} steps", steps.len());
        for (step, want) in steps.iter().zip(&self.next) {
            let got = step["loss"].as_f64().unwrap();
            let from = self.from.display();
            assert!((got - want).abs() <= CLOSE * want, "{from}: {got}, the program's is {want}");
        }
    }

    /// A copy of its folder without some of what is in it.
    pub(crate) fn copy_without(&self, left_out: &[&str]) -> PathBuf {
        let copy = self.place.path("copy");
        for file in files_below(&self.from) {
            if !left_out.iter().any(|l| file == *l || file.starts_with(&format!("{l}/"))) {
                fs::create_dir_all(copy.join(&file).parent().unwrap()).unwrap();
                fs::copy(self.from.join(&file), copy.join(&file)).unwrap();
            }
        }
        copy
    }

    pub(crate) fn run(&self, set: &[&str]) -> Ran {
        let from = format!("resume.from={}", self.from.display());
        self.place.forget_checkpoints();
        self.place.run(&[&[from.as_str()], set].concat())
    }

    pub(crate) fn refused(&self, set: &[&str]) -> String {
        let ran = self.run(set);
        assert_eq!(ran.code, 4, "{}", ran.stderr);
        ran.cause()
    }
}

pub(crate) fn numbers(list: &Value) -> Vec<f64> {
    list.as_array().unwrap().iter().map(|l| l.as_f64().unwrap()).collect()
}

/// Sizes of the models in tests/golden/resume.
const SMALL: &str = "vocab_size: 257, hidden_size: 16, intermediate_size: 20, num_attention_heads: 4, num_key_value_heads: 2, \
                     max_position_embeddings: 64, rms_norm_eps: 1e-6";

fn job(tied: bool) -> String {
    job_of(&format!(
        "family: llama, vocab_size: 257, hidden_size: 24, intermediate_size: 40, num_hidden_layers: 2, num_attention_heads: 4, \
         num_key_value_heads: 2, max_position_embeddings: 64, tie_word_embeddings: {tied}"
    ))
}

fn job_of(model: &str) -> String {
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

pub(crate) fn notices(ran: &Ran) -> Vec<String> {
    ran.kind("notice").iter().map(|e| e["message"].as_str().unwrap().to_owned()).collect()
}

/// What scripts/golden/deepspeed_resume.py made.
pub(crate) fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/deepspeed").join(name)
}
