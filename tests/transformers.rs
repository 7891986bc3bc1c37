//! What a run leaves is what the rest of the world reads: real `transformers` loads the gathered folder and finds the loss that we report.
use serde_json::Value;
use std::{
    env, fs,
    io::Write,
    path::{Path, PathBuf},
    process::Command,
};

const SEQ_LEN: usize = 64;
const EVAL_SAMPLES: usize = 12;
const STEPS: u64 = 30;

#[test]
fn gathered_weights_load_in_transformers_with_the_same_loss() {
    // tied and untied heads, grouped heads, a hidden size that 2 and 3 workers can't divide evenly
    for (workers, model) in [
        (
            2,
            "{hidden_size: 48, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, intermediate_size: 72}",
        ),
        (
            3,
            "{hidden_size: 42, num_hidden_layers: 1, num_attention_heads: 3, num_key_value_heads: 1, intermediate_size: 57, tie_word_embeddings: true}",
        ),
    ] {
        let Some(python) = oracle("gathered_weights_load_in_transformers_with_the_same_loss") else { return };
        let scratch = tempfile::tempdir().expect("temporary directory");
        let root = scratch.path();
        write_corpus(root);
        fs::write(root.join("job.yaml"), job(workers, model)).expect("job.yaml");
        let ours = train(root);
        run(launch().args(["ckpt", "gather", "checkpoints", "weights", "--dtype", "fp32"]).current_dir(root));
        let theirs = load(&python, root);

        assert_eq!(theirs["class"], "LlamaForCausalLM");
        for problem in ["missing", "unexpected", "mismatched", "warnings"] {
            assert_eq!(theirs[problem], Value::Array(vec![]), "{problem}: {theirs}");
        }
        assert_eq!(theirs["round_trip"], true, "the tokenizer changes the text");
        assert_eq!(theirs["windows"], EVAL_SAMPLES);
        assert_eq!(theirs["parameters"], ours.parameters);
        let (a, b) = (ours.eval_loss, theirs["loss"].as_f64().expect("a number"));
        assert!((a - b).abs() <= 1e-5 * b.abs(), "loss: ours {a}, transformers' {b}");
        let text = theirs["generated"].as_str().expect("text");
        assert!(
            !text.is_empty() && text.is_ascii(),
            "after {STEPS} steps on plain English it writes {text:?}"
        );
    }
}

struct Ours {
    parameters: u64,
    /// At the last step.
    eval_loss: f64,
}

/// Runs the job and reads its events.
fn train(root: &Path) -> Ours {
    let events: Vec<Value> = run(launch().args(["--json", "job.yaml"]).current_dir(root))
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}")))
        .collect();
    let of = |kind: &str| events.iter().filter(|e| e["event"] == kind).collect::<Vec<_>>();
    let steps = of("step");
    assert_eq!(steps.len() as u64, STEPS);
    let loss = |i: usize| steps[i]["loss"].as_f64().expect("a number");
    assert!(
        loss(STEPS as usize - 1) < loss(0) - 1.0,
        "the loss doesn't fall: {} to {}",
        loss(0),
        loss(STEPS as usize - 1)
    );
    let evals = of("eval");
    let last = evals
        .iter()
        .find(|e| e["step"] == STEPS)
        .unwrap_or_else(|| panic!("no evaluation at the end: {evals:?}"));
    Ours {
        parameters: of("ready")[0]["parameters"].as_u64().expect("a number"),
        eval_loss: last["loss"].as_f64().expect("a number"),
    }
}

/// What transformers makes of the gathered folder.
fn load(python: &Path, root: &Path) -> Value {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/oracle/gathered.py");
    let mut command = Command::new(python);
    command.arg(script).args(["weights", "held.txt", &SEQ_LEN.to_string()]).current_dir(root);
    command.env("HF_HUB_OFFLINE", "1").env("TRANSFORMERS_VERBOSITY", "warning");
    serde_json::from_str(run(&mut command).trim()).expect("one JSON line")
}

fn job(workers: u32, model: &str) -> String {
    format!(
        "name: oracle
cluster: {{workers_per_host: {workers}}}
train:
  model: {model}
  data: {{files: ['text/*.txt'], tokenizer: bytes, seq_len: {SEQ_LEN}}}
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

/// Text to train on, and a held-out text that is exactly the evaluated samples: one document whose last target is its end.
fn write_corpus(root: &Path) {
    fs::create_dir(root.join("text")).expect("directory");
    for part in 0..3 {
        fs::write(root.join(format!("text/{part}.txt")), sentences(part, 20_000)).expect("text");
    }
    fs::write(root.join("held.txt"), sentences(99, SEQ_LEN * EVAL_SAMPLES)).expect("text");
}

/// `bytes` bytes of plain sentences, the same for the same seed.
fn sentences(seed: u64, bytes: usize) -> String {
    let words = [
        "the", "model", "reads", "a", "line", "of", "text", "and", "then", "it", "writes", "another", "one",
        "slowly",
    ];
    let (mut text, mut state) = (String::new(), seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) + 1);
    while text.len() < bytes {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        text.push_str(words[(state >> 33) as usize % words.len()]);
        text.push_str(if (state >> 60) == 0 { ".\n" } else { " " });
    }
    text.truncate(bytes);
    text
}

fn launch() -> Command {
    Command::new(env!("CARGO_BIN_EXE_launch"))
}

/// Runs a command to its end and returns its stdout; both outputs are shown when it fails.
fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(
        output.status.success(),
        "{command:?}: {}\n{}\n{}",
        output.status,
        text(&output.stdout),
        text(&output.stderr)
    );
    text(&output.stdout)
}

/// The Python that scripts/setup-tests made. Without one the test is skipped by name, or fails where LAUNCH_TEST_REQUIRE is `all`.
fn oracle(test: &str) -> Option<PathBuf> {
    let cache = env::var_os("LAUNCH_TEST_CACHE").map(PathBuf::from);
    let cache = cache.or_else(|| Some(PathBuf::from(env::var_os("HOME")?).join(".cache/launch-tests")));
    let python = cache.map(|cache| cache.join("python/bin/python")).filter(|python| python.exists());
    if python.is_none() {
        let why = format!("{test}: no Python with transformers; scripts/setup-tests makes one");
        assert!(env::var("LAUNCH_TEST_REQUIRE").as_deref() != Ok("all"), "{why}");
        eprintln!("SKIPPED {why}");
        if let Some(list) = env::var_os("LAUNCH_TEST_SKIPS") {
            let mut list =
                fs::OpenOptions::new().append(true).create(true).open(list).expect("list of skips");
            writeln!(list, "{why}").expect("list of skips");
        }
    }
    python
}
