//! Checks that the real `transformers` loads the gathered weights of a run and computes the loss
//! that launch reported.
use crate::support::{self, JobDirectory, fork_server::ForkServer};
use serde_json::Value;
use std::fs;

/// The number of tokens of each training sample of the test's job.
const SEQ_LEN: usize = 64;
/// The number of samples on which the job evaluates the model.
const EVAL_SAMPLES: usize = 12;
/// The number of training steps of the test's job.
const STEPS: u64 = 30;
/// The modules that the scripts import, and those that transformers imports when it creates the
/// first model.
const IMPORTED_MODULES: [&str; 4] =
    ["torch", "transformers", "transformers.models.auto.modeling_auto", "transformers.modeling_utils"];

#[test]
fn gathered_weights_load_in_transformers_with_the_same_loss() {
    let Some(python) =
        support::find_python_or_skip("gathered_weights_load_in_transformers_with_the_same_loss")
    else {
        return;
    };
    let python = ForkServer::start(&python, &IMPORTED_MODULES);
    // untied and tied heads, grouped heads, sizes that the number of workers does not divide
    for (workers, class, model) in [
        (
            2,
            "LlamaForCausalLM",
            "{hidden_size: 48, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, intermediate_size: 72}",
        ),
        (
            3,
            "LlamaForCausalLM",
            "{hidden_size: 42, num_hidden_layers: 1, num_attention_heads: 3, num_key_value_heads: 1, intermediate_size: 57, tie_word_embeddings: true}",
        ),
        // two expert-parallel groups of two ranks
        (
            4,
            "MixtralForCausalLM",
            "{family: mixtral, hidden_size: 48, num_hidden_layers: 2, num_attention_heads: 4, intermediate_size: 40, num_experts: 4}\n  \
             experts: {expert_parallel_size: 2, placement: {0: 1, 1: 0, 2: 0, 3: 1}}",
        ),
    ] {
        let job_dir = JobDirectory::new();
        let held_out = extract_held_out_text(&job_dir);
        let prompt = &held_out[..16];
        let sample = format!("samples: {EVAL_SAMPLES}, sample: {{prompt: {prompt:?}, tokens: 24}}}}");
        let text = format_job(workers, model).replace(&format!("samples: {EVAL_SAMPLES}}}"), &sample);
        fs::write(job_dir.path("job.yaml"), text).expect("job");
        fs::write(job_dir.path("held.txt"), held_out).expect("text");
        let trained = train_model(&job_dir);

        let reference = gather_and_load(&python, &job_dir, class, &["--dtype", "fp32"]);
        assert_eq!(reference["parameters"], trained.parameters);
        let (loss, expected) = (trained.eval_loss, reference["loss"].as_f64().expect("a number"));
        assert!((loss - expected).abs() <= 1e-5 * expected.abs(), "loss {loss}, transformers {expected}");
        let text = reference["generated"].as_str().expect("text");
        assert!(!text.is_empty() && text.is_ascii(), "text after {STEPS} steps on plain English: {text:?}");
        assert_eq!(trained.sample, text, "the likeliest tokens after the same prompt");

        // rounded weights in several files with an index
        let options = ["--dtype", "bf16", "--max-shard-size", "30KB", "--force"];
        let reference = gather_and_load(&python, &job_dir, class, &options);
        assert!(job_dir.path("weights/model.safetensors.index.json").exists(), "one file only");
        let rounded = reference["loss"].as_f64().expect("a number");
        assert!((loss - rounded).abs() <= 1e-2 * rounded.abs(), "loss {loss}, of rounded weights {rounded}");
    }
}

/// Checks that a run without steps loads the weights of a Hugging Face directory and gathers them
/// unchanged.
#[test]
fn gathered_models_equal_their_source() {
    let Some(python) = support::find_python_or_skip("gathered_models_equal_their_source") else { return };
    let python = ForkServer::start(&python, &IMPORTED_MODULES);
    for (case, workers, dtype, shard) in [
        ("llama", 3, "fp32", "60KB"),
        ("mistral", 1, "bf16", "5GB"),
        ("qwen2", 2, "bf16", "20KB"),
        ("qwen3", 4, "fp32", "40KB"),
        ("mixtral", 2, "bf16", "50KB"),
        ("qwen3_moe", 3, "fp32", "40KB"),
        ("gpt2", 2, "fp32", "50KB"),
        ("gpt2_untied", 3, "bf16", "5GB"),
        ("gemma2", 2, "fp32", "40KB"),
        ("gemma3", 3, "bf16", "20KB"),
    ] {
        let job_dir = JobDirectory::new();
        run_oracle(&python, &["make", &job_dir.path("source").to_string_lossy(), case]);
        let dropout = if case == "gpt2_untied" { ", dropout: 0" } else { "" };
        let text = format_job(workers, &format!("{{from: source{dropout}}}"))
            .replace(&format!("steps: {STEPS}"), "steps: 0");
        let text = text.lines().filter(|l| !l.contains("eval:")).collect::<Vec<_>>().join("\n");
        fs::write(job_dir.path("job.yaml"), text).expect("job");
        job_dir.run(&[]).expect_success();
        let gather =
            ["ckpt", "gather", "checkpoints", "weights", "--dtype", dtype, "--max-shard-size", shard];
        let gathered = job_dir.run_launch(&gather);
        assert!(gathered.status.success(), "{}", String::from_utf8_lossy(&gathered.stderr));
        let (source, weights) = (job_dir.path("source"), job_dir.path("weights"));
        let result = run_oracle(&python, &["compare", &source.to_string_lossy(), &weights.to_string_lossy()]);
        let result: Value = serde_json::from_str(result.trim()).unwrap_or_else(|e| panic!("{e}: {result}"));
        assert!(result["tensors"].as_u64() > Some(20), "{case}: {result}");
        // config.json has the dropout rates of the job
        let rates = serde_json::json!(["attn_pdrop", "embd_pdrop", "resid_pdrop"]);
        assert_eq!(
            result["config"],
            if dropout.is_empty() { Value::Array(vec![]) } else { rates },
            "{case}: {result}"
        );
        for difference in ["missing", "unexpected", "warnings", "names", "values", "texts", "files"] {
            assert_eq!(result[difference], Value::Array(vec![]), "{case}: {difference}: {result}");
        }
        assert_eq!(result["more"], serde_json::json!(["gathered.json"]), "{case}: {result}");
    }
}

/// Runs scripts/oracle/hf_directories.py and returns its stdout. Panics if the script fails.
fn run_oracle(python: &ForkServer, args: &[&str]) -> String {
    let mut command =
        python.script_command(concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/oracle/hf_directories.py"));
    let output = command.args(args).output().expect("python starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

/// The results that a run reported in its events.
struct ReportedValues {
    parameters: u64,
    /// The eval loss after the last step.
    eval_loss: f64,
    /// The continuation of the prompt after the last step.
    sample: String,
}

/// Runs the job, checks that the loss falls, and returns the reported results.
fn train_model(job_dir: &JobDirectory) -> ReportedValues {
    let ran = job_dir.run(&[]).expect_success();
    let number = |event: &Value, name: &str| event[name].as_f64().expect("a number");
    let steps = ran.events_named("step");
    let (first, last) = (number(steps[0], "loss"), number(steps[steps.len() - 1], "loss"));
    assert!(steps.len() as u64 == STEPS && last < first - 1.0, "the loss doesn't fall: {first} to {last}");
    let evaluations = ran.events_named("eval");
    let at_end = evaluations.iter().find(|e| e["step"] == STEPS);
    ReportedValues {
        parameters: ran.events_named("ready")[0]["parameters"].as_u64().expect("a number"),
        sample: ran.events_named("sample")[0]["text"].as_str().expect("text").to_owned(),
        eval_loss: number(at_end.expect("an evaluation at the end"), "loss"),
    }
}

/// Runs `launch ckpt gather` with the arguments `options`, and loads the gathered weights with
/// transformers. Checks that the model is complete and that the tokenizer is unchanged. Returns the
/// values that transformers computed.
fn gather_and_load(python: &ForkServer, job_dir: &JobDirectory, class: &str, options: &[&str]) -> Value {
    let gather = [&["ckpt", "gather", "checkpoints", "weights"], options].concat();
    let gathered = job_dir.run_launch(&gather);
    assert!(gathered.status.success(), "{}", String::from_utf8_lossy(&gathered.stderr));
    let mut command =
        python.script_command(concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/oracle/evaluate_gathered.py"));
    command.arg(job_dir.path("weights")).arg(job_dir.path("held.txt")).arg(SEQ_LEN.to_string());
    let output = command.output().expect("python starts");
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}: {err}", output.status);
    let loaded: Value = serde_json::from_str(out.trim()).unwrap_or_else(|e| panic!("{e}: {out}"));
    assert_eq!(loaded["class"], class);
    for problem in ["missing", "unexpected", "mismatched", "warnings"] {
        assert_eq!(loaded[problem], Value::Array(vec![]), "{problem}: {loaded}");
    }
    assert_eq!(loaded["round_trip"], true, "the tokenizer changes the text");
    assert_eq!(loaded["windows"], EVAL_SAMPLES);
    loaded
}

/// Returns the job file of a run with this model.
fn format_job(workers: u32, model: &str) -> String {
    format!(
        "name: oracle
cluster: {{workers_per_host: {workers}}}
train:
  model: {model}
  data: {{files: [corpus.txt], seq_len: {SEQ_LEN}}}
  zero: {{stage: 3}}
  batch: {{global: 8, micro: 2}}
  optimizer: {{name: adamw, lr: 5e-3}}
  schedule: {{name: constant}}
  steps: {STEPS}
  eval: {{every: {STEPS}, files: [held.txt], samples: {EVAL_SAMPLES}}}
checkpoint: {{dir: checkpoints, every: never, gather_16bit_weights_on_model_save: false}}
"
    )
}

/// Returns the last part of the corpus, which has exactly the tokens of the evaluated samples.
fn extract_held_out_text(job_dir: &JobDirectory) -> String {
    let corpus = fs::read_to_string(job_dir.path("corpus.txt")).expect("corpus");
    corpus[corpus.len() - SEQ_LEN * EVAL_SAMPLES..].to_owned()
}
