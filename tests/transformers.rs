//! What a run leaves is what the rest of the world reads: real `transformers` loads the gathered folder and finds the loss that we report.
#![allow(clippy::unwrap_used)] // a test that panics has failed
mod support;
use serde_json::Value;
use std::fs;
use support::{JobDirectory, fork_server::ForkServer};

const SEQ_LEN: usize = 64;
const EVAL_SAMPLES: usize = 12;
const STEPS: u64 = 30;
/// What the scripts import, and what transformers does for the first model.
const MODULES: [&str; 4] =
    ["torch", "transformers", "transformers.models.auto.modeling_auto", "transformers.modeling_utils"];

#[test]
fn gathered_weights_load_in_transformers_with_the_same_loss() {
    let Some(python) = support::python("gathered_weights_load_in_transformers_with_the_same_loss") else {
        return;
    };
    let python = ForkServer::start(&python, &MODULES);
    // untied and tied heads, grouped heads, sizes that the workers can't divide evenly
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
        // experts on two ranks of each of two groups
        (
            4,
            "MixtralForCausalLM",
            "{family: mixtral, hidden_size: 48, num_hidden_layers: 2, num_attention_heads: 4, intermediate_size: 40, num_experts: 4}\n  \
             experts: {expert_parallel_size: 2, placement: {0: 1, 1: 0, 2: 0, 3: 1}}",
        ),
    ] {
        let place = JobDirectory::new();
        let held = held_out_text(&place);
        let sample = format!("samples: {EVAL_SAMPLES}, sample: {{prompt: {:?}, tokens: 24}}}}", &held[..16]);
        let text = job(workers, model).replace(&format!("samples: {EVAL_SAMPLES}}}"), &sample);
        fs::write(place.path("job.yaml"), text).expect("job");
        fs::write(place.path("held.txt"), held).expect("text");
        let ours = train(&place);

        let theirs = load(&python, &place, class, &["--dtype", "fp32"]);
        assert_eq!(theirs["parameters"], ours.parameters);
        let (a, b) = (ours.eval_loss, theirs["loss"].as_f64().expect("a number"));
        assert!((a - b).abs() <= 1e-5 * b.abs(), "loss: ours {a}, transformers' {b}");
        let text = theirs["generated"].as_str().expect("text");
        assert!(
            !text.is_empty() && text.is_ascii(),
            "after {STEPS} steps on plain English it writes {text:?}"
        );
        assert_eq!(ours.sample, text, "the likeliest tokens after the same prompt");

        // in several files with an index, and rounded
        let theirs =
            load(&python, &place, class, &["--dtype", "bf16", "--max-shard-size", "30KB", "--force"]);
        assert!(place.path("weights/model.safetensors.index.json").exists(), "one file only");
        let b = theirs["loss"].as_f64().expect("a number");
        assert!((a - b).abs() <= 1e-2 * b.abs(), "loss: ours {a}, transformers' of rounded weights {b}");
    }
}

/// What people have goes through a run that changes nothing, and comes out as it was.
#[test]
fn folders_come_out_as_they_went_in() {
    let Some(python) = support::python("folders_come_out_as_they_went_in") else { return };
    let python = ForkServer::start(&python, &MODULES);
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
        let place = JobDirectory::new();
        folders(&python, &["make", &place.path("source").to_string_lossy(), case]);
        let dropout = if case == "gpt2_untied" { ", dropout: 0" } else { "" };
        let text = job(workers, &format!("{{from: source{dropout}}}"))
            .replace(&format!("steps: {STEPS}"), "steps: 0");
        let text = text.lines().filter(|l| !l.contains("eval:")).collect::<Vec<_>>().join("\n");
        fs::write(place.path("job.yaml"), text).expect("job");
        place.run(&[]).succeeded();
        let gather =
            ["ckpt", "gather", "checkpoints", "weights", "--dtype", dtype, "--max-shard-size", shard];
        let gathered = place.launch(&gather);
        assert!(gathered.status.success(), "{}", String::from_utf8_lossy(&gathered.stderr));
        let (source, weights) = (place.path("source"), place.path("weights"));
        let said = folders(&python, &["compare", &source.to_string_lossy(), &weights.to_string_lossy()]);
        let said: Value = serde_json::from_str(said.trim()).unwrap_or_else(|e| panic!("{e}: {said}"));
        assert!(said["tensors"].as_u64() > Some(20), "{case}: {said}");
        // what the job trained with stands in config.json
        let rates = serde_json::json!(["attn_pdrop", "embd_pdrop", "resid_pdrop"]);
        assert_eq!(
            said["config"],
            if dropout.is_empty() { Value::Array(vec![]) } else { rates },
            "{case}: {said}"
        );
        for difference in ["missing", "unexpected", "warnings", "names", "values", "texts", "files"] {
            assert_eq!(said[difference], Value::Array(vec![]), "{case}: {difference}: {said}");
        }
        assert_eq!(said["more"], serde_json::json!(["gathered.json"]), "{case}: {said}");
    }
}

fn folders(python: &ForkServer, args: &[&str]) -> String {
    let mut command =
        python.command(concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/oracle/hf_directories.py"));
    let output = command.args(args).output().expect("python starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

struct Ours {
    parameters: u64,
    /// At the last step.
    eval_loss: f64,
    /// What the model goes on with, there.
    sample: String,
}

/// Runs the job and reads its events.
fn train(place: &JobDirectory) -> Ours {
    let ran = place.run(&[]).succeeded();
    let number = |event: &Value, name: &str| event[name].as_f64().expect("a number");
    let steps = ran.named("step");
    let (first, last) = (number(steps[0], "loss"), number(steps[steps.len() - 1], "loss"));
    assert!(steps.len() as u64 == STEPS && last < first - 1.0, "the loss doesn't fall: {first} to {last}");
    let evaluations = ran.named("eval");
    let at_end = evaluations.iter().find(|e| e["step"] == STEPS);
    Ours {
        parameters: ran.named("ready")[0]["parameters"].as_u64().expect("a number"),
        sample: ran.named("sample")[0]["text"].as_str().expect("text").to_owned(),
        eval_loss: number(at_end.expect("an evaluation at the end"), "loss"),
    }
}

/// Gathers with these options; what transformers makes of it, which is a whole model and the same text.
fn load(python: &ForkServer, place: &JobDirectory, class: &str, options: &[&str]) -> Value {
    let gather = [&["ckpt", "gather", "checkpoints", "weights"], options].concat();
    let gathered = place.launch(&gather);
    assert!(gathered.status.success(), "{}", String::from_utf8_lossy(&gathered.stderr));
    let mut command =
        python.command(concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/oracle/evaluate_gathered.py"));
    command.arg(place.path("weights")).arg(place.path("held.txt")).arg(SEQ_LEN.to_string());
    let output = command.output().expect("python starts");
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}: {err}", output.status);
    let theirs: Value = serde_json::from_str(out.trim()).unwrap_or_else(|e| panic!("{e}: {out}"));
    assert_eq!(theirs["class"], class);
    for problem in ["missing", "unexpected", "mismatched", "warnings"] {
        assert_eq!(theirs[problem], Value::Array(vec![]), "{problem}: {theirs}");
    }
    assert_eq!(theirs["round_trip"], true, "the tokenizer changes the text");
    assert_eq!(theirs["windows"], EVAL_SAMPLES);
    theirs
}

fn job(workers: u32, model: &str) -> String {
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

/// Exactly the evaluated samples: one document, whose end is the last target.
fn held_out_text(place: &JobDirectory) -> String {
    let corpus = fs::read_to_string(place.path("corpus.txt")).expect("corpus");
    corpus[corpus.len() - SEQ_LEN * EVAL_SAMPLES..].to_owned()
}
