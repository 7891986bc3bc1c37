//! Compares the LoRA adapters of a job with PEFT. PEFT loads the gathered adapters without a
//! warning, computes the reported loss and merges the adapters to the same weights. A job starts
//! from the adapters that PEFT saves.
use crate::support::{self, JobDirectory, environment::isolated_command};
use serde_json::Value;
use std::{fs, path::Path};

/// The number of tokens of each training sample of the test's jobs.
const SEQ_LEN: usize = 64;
/// The number of samples on which the job evaluates the model.
const EVAL_SAMPLES: usize = 8;

#[test]
fn peft_reads_the_adapters_of_a_job_and_a_job_those_of_peft() {
    let Some(python) =
        support::find_deepspeed_python_or_skip("peft_reads_the_adapters_of_a_job_and_a_job_those_of_peft")
    else {
        return;
    };
    for (family, workers, targets) in [("llama", 2, "[q_proj, v_proj, down_proj]"), ("gpt2", 3, "all-linear")]
    {
        let job_dir = JobDirectory::new();
        let path = |name: &str| job_dir.path(name).to_string_lossy().into_owned();
        run_oracle_script(&job_dir, &python, "hf_directories.py", &["make", &path("source"), family]);
        let corpus = fs::read_to_string(job_dir.path("corpus.txt")).unwrap();
        fs::write(job_dir.path("held.txt"), &corpus[corpus.len() - SEQ_LEN * EVAL_SAMPLES..]).unwrap();
        let lora = format!("{{rank: 4, alpha: 8, targets: {targets}}}");
        let loss = train_adapters(&job_dir, workers, &lora, "5e-2", 12, "checkpoints");
        // the run gathered its adapters at its end
        assert!(job_dir.path("checkpoints/weights/adapter_model.safetensors").exists());
        gather_checkpoint(&job_dir, &["checkpoints", "adapter"]);
        gather_checkpoint(&job_dir, &["checkpoints", "merged", "--merge-lora", "--dtype", "fp32"]);
        let seq_len = SEQ_LEN.to_string();
        let arguments =
            [path("source"), path("adapter"), path("merged"), path("held.txt"), seq_len, path("again")];
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let report = run_oracle_script(&job_dir, &python, "evaluate_adapters.py", &arguments);
        let report: Value = serde_json::from_str(report.trim()).unwrap_or_else(|e| panic!("{e}: {report}"));
        let number = |key: &str| report[key].as_f64().unwrap();
        assert_eq!(report["warnings"], Value::Array(vec![]), "{family}: {report}");
        assert_eq!(report["windows"], EVAL_SAMPLES, "{family}: {report}");
        for key in ["loss", "merged_loss"] {
            let difference = (number(key) - loss).abs() / loss;
            assert!(difference <= 1e-5, "{family}: {key} of PEFT {}, of launch {loss}", number(key));
        }
        let without = number("without");
        assert!(without > loss + 0.2, "{family}: loss without adapters {without}, with them {loss}");
        assert!(number("merged") <= 1e-6, "{family}: {report}");
        // the adapters that PEFT saved; the learning rate is too small to change the loss
        let again = train_adapters(&job_dir, 2, "{from: again}", "1e-12", 1, "second");
        assert!((again - loss).abs() <= 1e-6 * loss, "{family}: {again} from PEFT's files, {loss} before");
    }
}

/// Runs a LoRA job of `steps` steps with the checkpoint directory `dir`. Returns the eval loss at
/// its end.
fn train_adapters(job_dir: &JobDirectory, workers: u32, lora: &str, lr: &str, steps: u64, dir: &str) -> f64 {
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
    fs::write(job_dir.path("job.yaml"), job).unwrap();
    let ran = job_dir.run(&[]).expect_success();
    let evaluations = ran.events_named("eval");
    let at_end = evaluations.iter().find(|e| e["step"] == steps).expect("an evaluation at the end");
    at_end["loss"].as_f64().unwrap()
}

/// Runs `launch ckpt gather ARGUMENTS…`. Panics if the command fails.
fn gather_checkpoint(job_dir: &JobDirectory, arguments: &[&str]) {
    let gathered = job_dir.run_launch(&[&["ckpt", "gather"], arguments].concat());
    assert!(gathered.status.success(), "{}", String::from_utf8_lossy(&gathered.stderr));
}

/// Runs a script of scripts/oracle and returns the script's stdout. Panics if the script fails.
fn run_oracle_script(job_dir: &JobDirectory, python: &Path, name: &str, arguments: &[&str]) -> String {
    let scripts = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/oracle");
    let mut command = isolated_command(python, &job_dir.path(""));
    command.arg(scripts.join(name)).args(arguments).env("HF_HUB_OFFLINE", "1");
    let output = command.output().expect("python starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}
