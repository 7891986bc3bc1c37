//! Jobs that can't be: each is refused before anything starts, by the name of its key and the line where it stands.
use std::{
    fs,
    path::Path,
    process::{Command, Output},
};

/// A job below `train:`, the key that is refused and what is said of it. The key stands on the line with `#!`.
type Case = (&'static str, &'static str, &'static str);

const DATA: &str = "  data: {files: [corpus.txt], seq_len: 32}\n";

const CASES: &[Case] = &[
    // what is trained
    ("  freeze: [\"*\"] #!", "train.freeze", "nothing is left to train"),
    (
        "  train_only: [\"*.weight\"]\n  freeze: [\"*\"] #!",
        "train.freeze",
        "is given beside `train.train_only`",
    ),
    ("  freeze: [\"*.9.*\"] #!", "train.freeze", "the pattern `*.9.*` matches no parameter"),
    ("  freeze: [\"a[\"] #!", "train.freeze", "bad pattern `a[`"),
    ("  train_only: [\"transformer.h.*\"] #!", "train.train_only", "`transformer.h.*` matches no parameter"),
    ("  train_only: [] #!", "train.train_only", "must be a list of patterns, found an empty list"),
    // adapters
    ("  lora: {rank: 0} #!", "train.lora.rank", "must be an integer from 1"),
    ("  lora: {alpha: 0} #!", "train.lora.alpha", "must be a number above 0"),
    ("  lora: {dropout: 1} #!", "train.lora.dropout", "must be a number from 0 to below 1"),
    ("  lora: {targets: []} #!", "train.lora.targets", "must be `all-linear` or a list of names"),
    (
        "  lora: {targets: [q_proj, c_attn]} #!",
        "train.lora.targets",
        "named `c_attn`; there are down_proj, gate_proj,",
    ),
    (
        "  model: {family: mixtral}\n  lora: {targets: [q_proj, gate_proj]} #!",
        "train.lora.targets",
        "experts and routers have none",
    ),
    ("  lora: {}\n  freeze: [\"*embed*\"] #!", "train.freeze", "is given beside `train.lora`"),
    ("  lora: {}\n  train_only: [\"*embed*\"] #!", "train.train_only", "is given beside `train.lora`"),
    ("  lora: {from: none} #!", "train.lora.from", "none"),
    ("  lora:\n    from: adapter\n    rank: 4 #!", "train.lora.rank", "is given beside `train.lora.from`"),
    // q_proj alone is there, and of another width
    (
        "  lora: {from: adapter} #!",
        "train.lora.from",
        "of other shapes are model.layers.0.self_attn.q_proj.lora_A",
    ),
    ("  lora: {from: dora} #!", "train.lora.from", "`use_dora: true` is not supported"),
    // the optimizer
    (
        "  optimizer: {groups: [{match: [\"*.bias\"], lr: 1e-3}]} #!",
        "train.optimizer.groups",
        "`*.bias` matches no",
    ),
    (
        "  freeze: [\"*embed*\"]\n  optimizer: {groups: [{match: [\"*embed*\"]}]} #!",
        "train.optimizer.groups",
        "matches no",
    ),
    (
        "  optimizer:\n    groups:\n      - {match: [a], lr: 1, lr_scale: 2} #!",
        "train.optimizer.groups",
        "both `lr` and",
    ),
    (
        "  optimizer:\n    groups:\n      - {match: [a], weight: 1} #!",
        "train.optimizer.groups",
        "not a key of a group",
    ),
    ("  optimizer:\n    groups:\n      - {lr: 1} #!", "train.optimizer.groups", "has no `match`"),
    (
        "  optimizer:\n    name: sgd\n    groups: [{match: [a], eps: 1}] #!",
        "train.optimizer.groups",
        "has `eps`, which",
    ),
    (
        "  optimizer: {momentum: 0.5} #!",
        "train.optimizer.momentum",
        "has no effect with the optimizer `adamw`",
    ),
    (
        "  optimizer: {name: sgd, betas: [0.1, 0.2]} #!",
        "train.optimizer.betas",
        "no effect with the optimizer `sgd`",
    ),
    (
        "  optimizer: {name: lion, eps: 1e-6} #!",
        "train.optimizer.eps",
        "has no effect with the optimizer `lion`",
    ),
    ("  optimizer: {name: adam} #!", "train.optimizer.name", "did you mean `adamw`?"),
    ("  optimizer: {lr: 0} #!", "train.optimizer.lr", "must be a number above 0"),
    ("  optimizer: {betas: [0.9, 1]} #!", "train.optimizer.betas", "must be a number from 0 to below 1"),
    ("  optimizer: {no_decay: [\"{\"]} #!", "train.optimizer.no_decay", "bad pattern `{`"),
    ("  clip_norm: -1 #!", "train.clip_norm", "must be `off` or a number above 0"),
    // the schedule
    (
        "  steps: 10\n  schedule: {warmup_steps: 11} #!",
        "train.schedule.warmup_steps",
        "is more than `train.steps` (10)",
    ),
    (
        "  steps: 10\n  schedule: {name: wsd, warmup_steps: 6, decay_steps: 5} #!",
        "train.schedule.decay_steps",
        "more than",
    ),
    (
        "  schedule: {name: cosine, decay_steps: 5} #!",
        "train.schedule.decay_steps",
        "with the schedule `wsd` only",
    ),
    (
        "  schedule: {name: linear, min_lr: 1} #!",
        "train.schedule.min_lr",
        "is more than `train.optimizer.lr`",
    ),
    (
        "  schedule: {name: constant, min_lr: 0} #!",
        "train.schedule.min_lr",
        "no effect with the schedule `constant`",
    ),
    ("  steps: 0 #!", "train.steps", "must be an integer of 1 or more"),
    // the batch
    (
        "  batch: {global: 10, micro: 4} #!",
        "train.batch.global",
        "is not a multiple of `train.batch.micro` (4)",
    ),
    ("  batch: {global: 0} #!", "train.batch.global", "must be an integer from 1"),
    // the model
    ("  model: {family: lama} #!", "train.model.family", "unknown model family `lama`"),
    (
        "  model: {num_attention_heads: 4, num_key_value_heads: 3} #!",
        "train.model.num_key_value_heads",
        "not a multiple",
    ),
    ("  model: {head_dim: 7} #!", "train.model.head_dim", "(7) is odd"),
    (
        "  model: {hidden_size: 100, num_attention_heads: 3} #!",
        "train.model.num_attention_heads",
        "not a multiple",
    ),
    (
        "  model: {vocab_size: 256} #!",
        "train.model.vocab_size",
        "smaller than the byte tokenizer's 257 tokens",
    ),
    ("  model: {max_position_embeddings: 31} #!", "train.model.max_position_embeddings", "smaller than"),
    ("  model: {from: bare} #!", "train.model.from", "config.json"),
    ("  model: {dropout: 1} #!", "train.model.dropout", "must be a number from 0 to below 1"),
    (
        "  model: {from: dropped} #!",
        "train.model.from",
        "`attention_dropout` is 1.5, not a number from 0 to below 1",
    ),
    ("  model: {from: short} #!", "train.model.from", "16 is shorter than data.seq_len 32"),
    ("  model: {from: gelu} #!", "train.model.from", "`hidden_act: \"gelu\"` is not supported"),
    ("  model: {from: narrow} #!", "train.model.from", "num_key_value_heads 3 does not divide"),
    (
        "  model:\n    from: short\n    hidden_size: 8 #!",
        "train.model.hidden_size",
        "is given beside `train.model.from`",
    ),
    // everything else
    ("  precision: int3 #!", "train.precision", "must be"),
    (
        "  master_weights: false #!",
        "train.master_weights",
        "has an effect with `train.precision: bf16` and `fp8` only",
    ),
    (
        "  precision: fp16\n  master_weights: false #!",
        "train.master_weights",
        "has an effect with `train.precision: bf16` and `fp8` only",
    ),
    (
        "  precision: bf16\n  loss_scale: {min_loss_scale: 2} #!",
        "train.loss_scale.min_loss_scale",
        "with `train.precision: fp16` only",
    ),
    ("  zero: {stage: 4} #!", "train.zero.stage", "must be an integer from 0 to 3"),
    ("  recompute: all #!", "train.recompute", "must be `none` or `block`"),
    ("  eval: {every: 5} #!", "train.eval", "has no text to evaluate on"),
    (
        "  eval:\n    files: [corpus.txt]\n    sample: {tokens: 3} #!",
        "train.eval.sample",
        "`train.eval.sample` has no prompt",
    ),
    ("  eval: {files: [none.txt]} #!", "train.eval.files", "none.txt"),
    ("  eval: {files: [body.jsonl]} #!", "train.eval.files", "body.jsonl:1: the object has no field `text`"),
    ("  learning_rate: 1e-3 #!", "train.learning_rate", "is not a key of `train`"),
];

/// Cases whose `data` is part of what is wrong.
const DATA_CASES: &[Case] = &[
    ("  data: {files: [none.txt]} #!", "train.data.files", "none.txt"),
    ("  data: {files: [empty.txt]} #!", "train.data.files", "empty.txt is empty"),
    (
        "  data: {files: [body.jsonl]} #!",
        "train.data.files",
        "body.jsonl:1: the object has no field `text`; it has `body`",
    ),
    ("  data: {files: [number.jsonl]} #!", "train.data.files", "number.jsonl:2: invalid type: integer `3`"),
    ("  data: {mixture: {a: {files: [number.jsonl]}}} #!", "train.data.mixture", "source `a`: "),
    (
        "  data: {files: [body.jsonl], format: chat, tokenizer: five.json, chat_template: chat.jinja} #!",
        "train.data.files",
        "body.jsonl:1: the object has no field `messages`; it has `body`",
    ),
    (
        "  data: {files: [corpus.txt], format: chat, tokenizer: five.json, chat_template: chat.jinja} #!",
        "train.data.files",
        "it holds running text, not chats",
    ),
    ("  data: {files: [corpus.txt], held_out: 1} #!", "train.data.held_out", "from 0 to below 1"),
    ("  data: {files: [corpus.txt], tokenizer: none.json} #!", "train.data.tokenizer", "none.json"),
    (
        "  model: {vocab_size: 4} #!\n  data: {files: [corpus.txt], seq_len: 32, tokenizer: five.json}",
        "train.model.vocab_size",
        "4 is smaller than the tokenizer's 5 tokens",
    ),
];

/// Five words and no rule but white space.
const FIVE: &str = r#"{"version": "1.0", "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": {"type": "WordLevel",
    "vocab": {"<unk>": 0, "a": 1, "b": 2, "c": 3, "</s>": 4}, "unk_token": "<unk>"},
    "added_tokens": [{"id": 4, "content": "</s>", "single_word": false, "lstrip": false, "rstrip": false,
    "normalized": false, "special": true}]}"#;

/// A directory with text, a tokenizer and folders of models.
fn place() -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("directory");
    let path = |name: &str| dir.path().join(name);
    fs::write(path("corpus.txt"), "a b c ".repeat(2000)).expect("text");
    fs::write(path("five.json"), FIVE).expect("tokenizer");
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
        fs::create_dir(path(name)).expect("folder");
        fs::write(path(name).join("config.json"), config.to_string()).expect("config");
        fs::write(path(name).join("tokenizer.json"), FIVE).expect("tokenizer");
    }
    for (name, dora) in [("adapter", false), ("dora", true)] {
        let config =
            serde_json::json!({"peft_type": "LORA", "r": 1, "target_modules": ["q_proj"], "use_dora": dora});
        let tensor = |n: usize, at: usize| serde_json::json!({"dtype": "F32", "shape": [1, n], "data_offsets": [at, at + 4 * n]});
        let prefix = "base_model.model.model.layers.0.self_attn.q_proj";
        let header = serde_json::json!({format!("{prefix}.lora_A.weight"): tensor(3, 0), format!("{prefix}.lora_B.weight"): tensor(2, 12)});
        let header = header.to_string();
        let file = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &[0; 20]].concat();
        fs::create_dir(path(name)).expect("folder");
        fs::write(path(name).join("adapter_config.json"), config.to_string()).expect("config");
        fs::write(path(name).join("adapter_model.safetensors"), file).expect("weights");
    }
    fs::create_dir(path("bare")).expect("folder");
    fs::write(path("bare").join("tokenizer.json"), FIVE).expect("tokenizer");
    dir
}

fn plan(dir: &Path, train: &str) -> Output {
    let job = format!(
        "name: wrong\ncluster: {{hosts: local, workers_per_host: 2, devices: cpu}}\ntrain:\n{train}\n"
    );
    fs::write(dir.join("job.yaml"), &job).expect("job");
    let launch = env!("CARGO_BIN_EXE_launch");
    Command::new(launch).args(["plan", "job.yaml"]).current_dir(dir).output().expect("launch starts")
}

/// What is wrong with the answer to one case.
fn complaint(dir: &Path, (train, key, says): &Case, data: &str) -> Option<String> {
    let text = format!("{data}{train}");
    let output = plan(dir, &text);
    let talk = String::from_utf8_lossy(&output.stderr).into_owned();
    let line = 4 + text.lines().position(|l| l.contains("#!")).expect("a marked line");
    let found = [
        (!output.status.success(), "a failure".to_owned()),
        (output.stdout.is_empty(), "no plan".to_owned()),
        (talk.matches("error:").count() == 1, "one error".to_owned()),
        (talk.contains(&format!("job.yaml:{line}:")), format!("line {line}")),
        (talk.contains(key.rsplit('.').next().unwrap_or(key)), format!("the key {key}")),
        (talk.contains(says), format!("the words `{says}`")),
    ];
    let missing: Vec<String> = found.into_iter().filter(|(there, _)| !there).map(|(_, what)| what).collect();
    (!missing.is_empty()).then(|| format!("{train}\nlacks {}:\n{talk}", missing.join(", ")))
}

#[test]
fn each_is_refused_by_name_and_line() {
    let dir = place();
    let with_data = CASES.iter().filter_map(|c| complaint(dir.path(), c, DATA));
    let without = DATA_CASES.iter().filter_map(|c| complaint(dir.path(), c, ""));
    let complaints: Vec<String> = with_data.chain(without).collect();
    assert!(CASES.len() + DATA_CASES.len() >= 30);
    assert!(complaints.is_empty(), "{} cases:\n{}", complaints.len(), complaints.join("\n"));
    let made: Vec<_> =
        fs::read_dir(dir.path()).expect("directory").map(|e| e.expect("entry").file_name()).collect();
    assert_eq!(made.len(), 14, "nothing was started: {made:?}");
}

#[test]
fn all_at_once() {
    let dir = place();
    // found without a look at the model
    let first = "  data: {files: [corpus.txt], seq_len: 0}\n  batch: {global: 5, micro: 2}\n  optimizer: {lr: -1, name: x}\n  zero: {stage: 9}\n  model: {head_dim: 3}";
    // found with the model
    let second =
        "  data: {files: [corpus.txt], seq_len: 8}\n  eval: {files: [none.txt]}\n  freeze: [x, \"*\", y]";
    let third = "  data: {files: [corpus.txt], seq_len: 8}\n  optimizer: {groups: [{match: [x]}, {match: [\"*\", y]}], no_decay: [\"[\"]}";
    // found in the data
    let fourth = "  data: {files: [body.jsonl, number.jsonl], seq_len: 8}\n  eval: {files: [empty.txt]}\n  freeze: [x]";
    for (train, lines) in [
        (first, vec![4, 5, 6, 6, 7, 8]),
        (second, vec![5, 6, 6]),
        (third, vec![5, 5, 5]),
        (fourth, vec![4, 4, 5, 6]),
    ] {
        let output = plan(dir.path(), train);
        let talk = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success());
        let found = talk.lines().filter_map(|l| l.split_once("job.yaml:")?.1.split(':').next()?.parse().ok());
        let mut found: Vec<usize> = found.collect();
        found.sort_unstable();
        assert_eq!(found, lines, "{talk}");
    }
}
