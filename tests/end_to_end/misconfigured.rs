//! Checks that wrong jobs are rejected before a process starts, with the key and the line of the
//! mistake.

use crate::support::{
    self,
    environment::{TestDirectory, create_test_directory, launch_command},
};
use serde_json::Value;
use std::{fs, path::Path, process::Output};

/// A test case of a wrong job: its lines below `train:`, the key that the error must name, and the
/// expected code. The line that ends with `#!` is the expected location.
type MisconfiguredTrainSection = (&'static str, &'static str, &'static str);

/// The valid `data` section that precedes the cases of [`REJECTED_CASES`] and [`WARNING_CASES`].
const DATA_SECTION: &str = "  data: {files: [corpus.txt], seq_len: 32}\n";

/// Jobs whose lines do not include a `data` section, each with exactly one mistake, which is an
/// error.
const REJECTED_CASES: &[MisconfiguredTrainSection] = &[
    // frozen and trained parameters
    ("  freeze: [\"*\"] #!", "train.freeze", "no-trained-parameters"),
    ("  train_only: [\"*.weight\"]\n  freeze: [\"*\"] #!", "train.freeze", "job-keys-conflict"),
    ("  freeze: [\"*.9.*\"] #!", "train.freeze", "parameter-pattern-unmatched"),
    ("  freeze: [\"a[\"] #!", "train.freeze", "parameter-pattern-invalid"),
    ("  train_only: [\"transformer.h.*\"] #!", "train.train_only", "parameter-pattern-unmatched"),
    ("  train_only: [] #!", "train.train_only", "job-value-out-of-range"),
    // adapters
    ("  lora: {rank: 0} #!", "train.lora.rank", "job-value-out-of-range"),
    ("  lora: {alpha: 0} #!", "train.lora.alpha", "job-value-out-of-range"),
    ("  lora: {dropout: 1} #!", "train.lora.dropout", "job-value-out-of-range"),
    ("  lora: {targets: []} #!", "train.lora.targets", "job-value-out-of-range"),
    ("  lora: {targets: [q_proj, c_attn]} #!", "train.lora.targets", "lora-target-unknown"),
    (
        "  model: {family: mixtral}\n  lora: {targets: [q_proj, gate_proj]} #!",
        "train.lora.targets",
        "lora-target-unknown",
    ),
    ("  lora: {}\n  freeze: [\"*embed*\"] #!", "train.freeze", "job-keys-conflict"),
    ("  lora: {}\n  train_only: [\"*embed*\"] #!", "train.train_only", "job-keys-conflict"),
    ("  lora: {from: none} #!", "train.lora.from", "checkpoint-io-failed"),
    ("  lora:\n    from: adapter\n    rank: 4 #!", "train.lora.rank", "job-keys-conflict"),
    // the adapter has weights for q_proj only, with another width
    ("  lora: {from: adapter} #!", "train.lora.from", "adapter-model-mismatch"),
    ("  lora: {from: dora} #!", "train.lora.from", "adapter-config-unsupported"),
    // the optimizer
    (
        "  optimizer: {groups: [{match: [\"*.bias\"], lr: 1e-3}]} #!",
        "train.optimizer.groups",
        "parameter-pattern-unmatched",
    ),
    (
        "  freeze: [\"*embed*\"]\n  optimizer: {groups: [{match: [\"*embed*\"]}]} #!",
        "train.optimizer.groups",
        "parameter-pattern-unmatched",
    ),
    (
        "  optimizer:\n    groups:\n      - {match: [a], lr: 1, lr_scale: 2} #!",
        "train.optimizer.groups",
        "job-keys-conflict",
    ),
    (
        "  optimizer:\n    groups:\n      - {match: [a], weight: 1} #!",
        "train.optimizer.groups",
        "job-key-unknown",
    ),
    ("  optimizer:\n    groups:\n      - {lr: 1} #!", "train.optimizer.groups", "job-key-required"),
    (
        "  optimizer:\n    name: sgd\n    groups: [{match: [a], eps: 1}] #!",
        "train.optimizer.groups",
        "job-key-has-no-effect",
    ),
    ("  optimizer: {momentum: 0.5} #!", "train.optimizer.momentum", "job-key-has-no-effect"),
    ("  optimizer: {name: sgd, betas: [0.1, 0.2]} #!", "train.optimizer.betas", "job-key-has-no-effect"),
    ("  optimizer: {name: lion, eps: 1e-6} #!", "train.optimizer.eps", "job-key-has-no-effect"),
    ("  optimizer: {name: adam} #!", "train.optimizer.name", "job-value-unknown"),
    ("  optimizer: {lr: 0} #!", "train.optimizer.lr", "job-value-out-of-range"),
    ("  optimizer: {betas: [0.9, 1]} #!", "train.optimizer.betas", "job-value-out-of-range"),
    ("  optimizer: {no_decay: [\"{\"]} #!", "train.optimizer.no_decay", "parameter-pattern-invalid"),
    ("  clip_norm: -1 #!", "train.clip_norm", "job-value-out-of-range"),
    // the schedule
    ("  schedule: {name: cosine, decay_steps: 5} #!", "train.schedule.decay_steps", "job-key-has-no-effect"),
    ("  schedule: {name: linear, min_lr: 1} #!", "train.schedule.min_lr", "job-values-inconsistent"),
    ("  schedule: {name: constant, min_lr: 0} #!", "train.schedule.min_lr", "job-key-has-no-effect"),
    ("  steps: 0 #!", "train.steps", "job-value-out-of-range"),
    // the batch
    ("  batch: {global: 10, micro: 4} #!", "train.batch.global", "job-value-not-multiple"),
    ("  batch: {global: 0} #!", "train.batch.global", "job-value-out-of-range"),
    // the model
    ("  model: {family: lama} #!", "train.model.family", "model-family-unknown"),
    (
        "  model: {num_attention_heads: 4, num_key_value_heads: 3} #!",
        "train.model.num_key_value_heads",
        "job-value-not-multiple",
    ),
    ("  model: {head_dim: 7} #!", "train.model.head_dim", "job-value-not-multiple"),
    (
        "  model: {hidden_size: 100, num_attention_heads: 3} #!",
        "train.model.num_attention_heads",
        "job-value-not-multiple",
    ),
    ("  model: {vocab_size: 256} #!", "train.model.vocab_size", "job-values-inconsistent"),
    (
        "  model: {max_position_embeddings: 31} #!",
        "train.model.max_position_embeddings",
        "job-values-inconsistent",
    ),
    ("  model: {from: bare} #!", "train.model.from", "model-config-unreadable"),
    ("  model: {dropout: 1} #!", "train.model.dropout", "job-value-out-of-range"),
    ("  model: {from: dropped} #!", "train.model.from", "model-config-value-invalid"),
    ("  model: {from: short} #!", "train.model.from", "sequence-too-long"),
    ("  model: {from: gelu} #!", "train.model.from", "model-config-value-unsupported"),
    ("  model: {from: narrow} #!", "train.model.from", "model-config-value-invalid"),
    ("  model:\n    from: short\n    hidden_size: 8 #!", "train.model.hidden_size", "job-keys-conflict"),
    // the other keys
    ("  precision: int3 #!", "train.precision", "job-value-unknown"),
    ("  precision: fp16\n  master_weights: false #!", "train.master_weights", "job-keys-conflict"),
    ("  zero: {stage: 4} #!", "train.zero.stage", "job-value-out-of-range"),
    ("  recompute: all #!", "train.recompute", "job-value-unknown"),
    ("  eval: {every: 5} #!", "train.eval", "job-key-required"),
    ("  eval:\n    files: [corpus.txt]\n    sample: {tokens: 3} #!", "train.eval.sample", "job-key-required"),
    ("  eval: {files: [none.txt]} #!", "train.eval.files", "data-file-missing"),
    ("  eval: {files: [body.jsonl]} #!", "train.eval.files", "data-field-missing"),
    ("  learning_rate: 1e-3 #!", "train.learning_rate", "job-key-unknown"),
];

/// Jobs whose lines do not include a `data` section, and which cause a warning but no error.
const WARNING_CASES: &[MisconfiguredTrainSection] = &[
    (
        "  steps: 10\n  schedule: {warmup_steps: 11} #!",
        "train.schedule.warmup_steps",
        "job-schedule-truncated",
    ),
    (
        "  steps: 10\n  schedule: {name: wsd, warmup_steps: 6, decay_steps: 5} #!",
        "train.schedule.decay_steps",
        "job-schedule-truncated",
    ),
    ("  master_weights: false #!", "train.master_weights", "job-key-has-no-effect"),
    (
        "  precision: bf16\n  loss_scale: {min_loss_scale: 2} #!",
        "train.loss_scale.min_loss_scale",
        "job-key-has-no-effect",
    ),
];

/// Jobs whose lines include a `data` section, each with exactly one mistake, which is an error.
const DATA_CASES: &[MisconfiguredTrainSection] = &[
    ("  data: {files: [none.txt]} #!", "train.data.files", "data-file-missing"),
    ("  data: {files: [empty.txt]} #!", "train.data.files", "data-empty"),
    ("  data: {files: [body.jsonl]} #!", "train.data.files", "data-field-missing"),
    ("  data: {files: [number.jsonl]} #!", "train.data.files", "data-record-invalid"),
    ("  data: {mixture: {a: {files: [number.jsonl]}}} #!", "train.data.mixture", "data-record-invalid"),
    (
        "  data: {files: [body.jsonl], format: chat, tokenizer: five.json, chat_template: chat.jinja} #!",
        "train.data.files",
        "data-field-missing",
    ),
    (
        "  data: {files: [corpus.txt], format: chat, tokenizer: five.json, chat_template: chat.jinja} #!",
        "train.data.files",
        "data-format-not-chat",
    ),
    ("  data: {files: [corpus.txt], held_out: 1} #!", "train.data.held_out", "job-value-out-of-range"),
    ("  data: {files: [corpus.txt], tokenizer: none.json} #!", "train.data.tokenizer", "tokenizer-missing"),
    (
        "  model: {vocab_size: 4} #!\n  data: {files: [corpus.txt], seq_len: 32, tokenizer: five.json}",
        "train.model.vocab_size",
        "vocab-size-too-small",
    ),
];

/// A tokenizer.json with a vocabulary of five words that splits text at white space.
const FIVE_WORD_TOKENIZER: &str = r#"{"version": "1.0", "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": {"type": "WordLevel",
    "vocab": {"<unk>": 0, "a": 1, "b": 2, "c": 3, "</s>": 4}, "unk_token": "<unk>"},
    "added_tokens": [{"id": 4, "content": "</s>", "single_word": false, "lstrip": false, "rstrip": false,
    "normalized": false, "special": true}]}"#;

/// Creates a temporary directory with data files, a tokenizer, and directories of models and
/// adapters.
fn create_input_directory() -> TestDirectory {
    let dir = create_test_directory();
    let path = |name: &str| dir.path().join(name);
    fs::write(path("corpus.txt"), "a b c ".repeat(2000)).expect("text");
    fs::write(path("five.json"), FIVE_WORD_TOKENIZER).expect("tokenizer");
    fs::write(path("empty.txt"), "").expect("text");
    fs::write(path("body.jsonl"), "{\"body\": \"a\"}\n").expect("records");
    fs::write(path("number.jsonl"), "\n{\"text\": 3}\n").expect("records");
    fs::write(path("chat.jinja"), "{{ messages }}").expect("template");
    for (name, act, kv, positions, dropout) in [
        ("short", "silu", 2, 16, 0.0),
        ("gelu", "gelu", 2, 64, 0.0),
        ("narrow", "silu", 3, 64, 0.0),
        ("dropped", "silu", 2, 64, 1.5),
    ] {
        let config = serde_json::json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 300, "hidden_size": 16,
            "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": kv,
            "max_position_embeddings": positions, "hidden_act": act, "rms_norm_eps": 1e-6,
            "tie_word_embeddings": false, "attention_dropout": dropout,
        });
        fs::create_dir(path(name)).expect("directory");
        fs::write(path(name).join("config.json"), config.to_string()).expect("config");
        fs::write(path(name).join("tokenizer.json"), FIVE_WORD_TOKENIZER).expect("tokenizer");
    }
    for (name, dora) in [("adapter", false), ("dora", true)] {
        let config =
            serde_json::json!({"peft_type": "LORA", "r": 1, "target_modules": ["q_proj"], "use_dora": dora});
        let tensor = |n: usize, at: usize| serde_json::json!({"dtype": "F32", "shape": [1, n], "data_offsets": [at, at + 4 * n]});
        let prefix = "base_model.model.model.layers.0.self_attn.q_proj";
        let header = serde_json::json!({format!("{prefix}.lora_A.weight"): tensor(3, 0), format!("{prefix}.lora_B.weight"): tensor(2, 12)});
        let header = header.to_string();
        let file = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &[0; 20]].concat();
        fs::create_dir(path(name)).expect("directory");
        fs::write(path(name).join("adapter_config.json"), config.to_string()).expect("config");
        fs::write(path(name).join("adapter_model.safetensors"), file).expect("weights");
    }
    fs::create_dir(path("bare")).expect("directory");
    fs::write(path("bare").join("tokenizer.json"), FIVE_WORD_TOKENIZER).expect("tokenizer");
    dir
}

/// Writes a job with this `train` section to `dir/job.yaml`, and runs `launch plan` for the job.
/// `options` are further arguments of `launch plan`.
fn run_plan(dir: &Path, train: &str, options: &[&str]) -> Output {
    let job = format!(
        "name: wrong\ncluster: {{hosts: local, workers_per_host: 2, devices: cpu}}\ntrain:\n{train}\n"
    );
    fs::write(dir.join("job.yaml"), &job).expect("job");
    launch_command(dir, &["plan", "job.yaml"]).args(options).output().expect("launch starts")
}

/// Runs `launch plan` for a job with this `train` section, and returns one diagnostic for each
/// mistake in the job. Panics if the job is not rejected.
fn collect_mistakes(dir: &Path, train: &str) -> Vec<Value> {
    let output = run_plan(dir, train, &["--json"]);
    let (_, error) = support::parse_rejection(&output);
    assert_eq!(output.status.code(), Some(2), "{train}: {error}");
    assert_eq!(error["code"], "job-invalid", "{train}: {error}");
    support::expand_details(&error).into_iter().cloned().collect()
}

/// Describes how the mistakes that `launch plan` reports for a case differ from the expected one.
/// Returns `None` if they are equal.
fn describe_difference(
    dir: &Path,
    (train, key, code): &MisconfiguredTrainSection,
    data: &str,
) -> Option<String> {
    let text = format!("{data}{train}");
    let line = 4 + text.lines().position(|l| l.contains("#!")).expect("a marked line");
    let reported = collect_mistakes(dir, &text);
    let is_expected = |mistake: &Value| {
        mistake["code"] == *code && mistake["location"]["line"] == line && mistake["subject"] == *key
    };
    let differs = reported.len() != 1 || !reported.iter().all(is_expected);
    let reported = Value::from(reported);
    differs.then(|| format!("{train}\nexpected one {code} of {key} in line {line}, reported: {reported}"))
}

#[test]
fn every_mistake_is_reported_with_its_key_line_and_code() {
    let dir = create_input_directory();
    let with_data =
        REJECTED_CASES.iter().filter_map(|case| describe_difference(dir.path(), case, DATA_SECTION));
    let without = DATA_CASES.iter().filter_map(|case| describe_difference(dir.path(), case, ""));
    let differences: Vec<String> = with_data.chain(without).collect();
    assert!(REJECTED_CASES.len() + DATA_CASES.len() >= 30);
    assert!(differences.is_empty(), "{} cases:\n{}", differences.len(), differences.join("\n"));
    let entries = fs::read_dir(dir.path()).expect("directory").map(|e| e.expect("entry").file_name());
    // the directories of the test's environment are hidden
    let entries: Vec<_> = entries.filter(|name| !name.as_encoded_bytes().starts_with(b".")).collect();
    assert_eq!(entries.len(), 14, "planning created files: {entries:?}");
}

#[test]
fn keys_without_an_effect_on_results_are_warnings() {
    let dir = create_input_directory();
    for (train, key, code) in WARNING_CASES {
        let text = format!("{DATA_SECTION}{train}");
        let line = 4 + text.lines().position(|l| l.contains("#!")).expect("a marked line");
        let output = run_plan(dir.path(), &text, &["--json"]);
        let plan: Value = serde_json::from_slice(&output.stdout).expect("a plan");
        let warnings = plan["warnings"].as_array().expect("warnings");
        let found = warnings.iter().map(|w| (&w["code"], &w["subject"], &w["location"]["line"]));
        let expected = (&Value::from(*code), &Value::from(*key), &Value::from(line));
        assert!(found.into_iter().any(|warning| warning == expected), "{train}: {}", plan["warnings"]);
    }
}

#[test]
fn every_mistake_has_a_readable_message() {
    let dir = create_input_directory();
    let mut messages = String::new();
    let with_data = REJECTED_CASES.iter().map(|(train, ..)| format!("{DATA_SECTION}{train}"));
    for train in with_data.chain(DATA_CASES.iter().map(|(train, ..)| (*train).to_owned())) {
        let output = run_plan(dir.path(), &train, &[]);
        assert!(output.stdout.is_empty(), "{train}: a plan of a wrong job");
        messages += &String::from_utf8_lossy(&output.stderr);
        messages.push('\n');
    }
    support::assert_snapshot(dir.path(), "messages", &messages, &[]);
}

#[test]
fn all_mistakes_are_reported_at_once() {
    let dir = create_input_directory();
    // mistakes that are found without the model
    let schema = "  data: {files: [corpus.txt], seq_len: 0}\n  batch: {global: 5, micro: 2}\n  optimizer: {lr: -1, name: x}\n  zero: {stage: 9}\n  model: {head_dim: 3}";
    // mistakes that are found with the names of the model's parameters
    let patterns =
        "  data: {files: [corpus.txt], seq_len: 8}\n  eval: {files: [none.txt]}\n  freeze: [x, \"*\", y]";
    let groups = "  data: {files: [corpus.txt], seq_len: 8}\n  optimizer: {groups: [{match: [x]}, {match: [\"*\", y]}], no_decay: [\"[\"]}";
    // mistakes that are found in the data
    let data = "  data: {files: [body.jsonl, number.jsonl], seq_len: 8}\n  eval: {files: [empty.txt]}\n  freeze: [x]";
    for (train, expected) in [
        (schema, vec![4, 5, 6, 6, 7, 8]),
        (patterns, vec![5, 6, 6]),
        (groups, vec![5, 5, 5]),
        (data, vec![4, 4, 5, 6]),
    ] {
        let reported = collect_mistakes(dir.path(), train);
        let mut lines: Vec<u64> = reported.iter().filter_map(|m| m["location"]["line"].as_u64()).collect();
        lines.sort_unstable();
        assert_eq!(lines, expected, "{reported:#?}");
    }
}
