//! Low-rank adapters from a job to what the rest of the world reads: real PEFT loads the gathered folder without a warning
//! and finds the loss that we report, merges as we merge, and a job goes on from what PEFT saved.
#![allow(clippy::unwrap_used)] // a test that panics has failed
mod support;
use serde_json::Value;
use std::{fs, path::Path, process::Command};
use support::JobDirectory;

const SEQ_LEN: usize = 64;
const EVAL_SAMPLES: usize = 8;

#[test]
fn adapters_travel_between_jobs_and_peft() {
    let Some(python) = support::deepspeed("adapters_travel_between_jobs_and_peft") else { return };
    for (family, workers, targets) in [("llama", 2, "[q_proj, v_proj, down_proj]"), ("gpt2", 3, "all-linear")]
    {
        let place = JobDirectory::new();
        let path = |name: &str| place.path(name).to_string_lossy().into_owned();
        script(&python, "hf_directories.py", &["make", &path("source"), family]);
        let corpus = fs::read_to_string(place.path("corpus.txt")).unwrap();
        fs::write(place.path("held.txt"), &corpus[corpus.len() - SEQ_LEN * EVAL_SAMPLES..]).unwrap();
        let lora = format!("{{rank: 4, alpha: 8, targets: {targets}}}");
        let loss = train(&place, workers, &lora, "5e-2", 12, "checkpoints");
        // the end of the run has gathered the adapters
        assert!(place.path("checkpoints/weights/adapter_model.safetensors").exists());
        gather(&place, &["checkpoints", "adapter"]);
        gather(&place, &["checkpoints", "merged", "--merge-lora", "--dtype", "fp32"]);
        let seq_len = SEQ_LEN.to_string();
        let arguments =
            [path("source"), path("adapter"), path("merged"), path("held.txt"), seq_len, path("again")];
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let said = script(&python, "evaluate_adapters.py", &arguments);
        let said: Value = serde_json::from_str(said.trim()).unwrap_or_else(|e| panic!("{e}: {said}"));
        let number = |key: &str| said[key].as_f64().unwrap();
        assert_eq!(said["warnings"], Value::Array(vec![]), "{family}: {said}");
        assert_eq!(said["windows"], EVAL_SAMPLES, "{family}: {said}");
        for key in ["loss", "merged_loss"] {
            let far = (number(key) - loss).abs() / loss;
            assert!(far <= 1e-5, "{family}: {key} {} and ours {loss}", number(key));
        }
        assert!(number("without") > loss + 0.2, "{family}: the adapters learned something: {said}, {loss}");
        assert!(number("merged") <= 1e-6, "{family}: {said}");
        // PEFT's own files, and a step too small to change anything
        let again = train(&place, 2, "{from: again}", "1e-12", 1, "second");
        assert!((again - loss).abs() <= 1e-6 * loss, "{family}: {again} from PEFT's files, {loss} before");
    }
}

/// Runs a job of so many steps; the loss of held-out text at its end.
fn train(place: &JobDirectory, workers: u32, lora: &str, lr: &str, steps: u64, dir: &str) -> f64 {
    let job = format!(
        "name: adapters
cluster: {{workers_per_host: {workers}}}
train:
  model: {{from: source}}
  lora: {lora}
  data: {{files: [corpus.txt], seq_len: {SEQ_LEN}}}
  batch: {{global: 8, micro: 2}}
  optimizer: {{lr: {lr}}}
  steps: {steps}
  eval: {{every: {steps}, files: [held.txt], samples: {EVAL_SAMPLES}}}
checkpoint: {{dir: {dir}, every: never}}
"
    );
    fs::write(place.path("job.yaml"), job).unwrap();
    let ran = place.run(&[]).succeeded();
    let evaluations = ran.named("eval");
    let at_end = evaluations.iter().find(|e| e["step"] == steps).expect("an evaluation at the end");
    at_end["loss"].as_f64().unwrap()
}

fn gather(place: &JobDirectory, arguments: &[&str]) {
    let gathered = place.launch(&[&["ckpt", "gather"], arguments].concat());
    assert!(gathered.status.success(), "{}", String::from_utf8_lossy(&gathered.stderr));
}

fn script(python: &Path, name: &str, arguments: &[&str]) -> String {
    let scripts = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/oracle");
    let mut command = Command::new(python);
    command.arg(scripts.join(name)).args(arguments).env("HF_HUB_OFFLINE", "1");
    let output = command.output().expect("python starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}
