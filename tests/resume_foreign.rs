//! The built-in runtime goes on from what other programs saved, with the losses with which those programs went on.
#![allow(clippy::unwrap_used)] // a test that panics has failed
mod support;
use serde_json::Value;
use std::{
    fs,
    path::{Path, PathBuf},
};
use support::{Place, Ran};

/// Relative difference of losses that different programs computed in fp32.
const CLOSE: f64 = 1e-5;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/deepspeed").join(name)
}

/// What scripts/golden/resume made.
fn saved(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/resume").join(name)
}

/// A place with the job that continues a golden run.
struct Continued {
    place: Place,
    from: PathBuf,
    /// The losses of the steps that follow.
    next: Vec<f64>,
    /// How close to them.
    close: f64,
}

impl Continued {
    fn of(name: &str) -> Continued {
        let (place, from) = (Place::new(), golden(name));
        let told: Value = serde_json::from_slice(&fs::read(from.join("next.json")).unwrap()).unwrap();
        let documents = told["documents"].as_array().unwrap().iter().map(|d| format!("{{\"text\": {d}}}\n"));
        fs::write(place.path("corpus.jsonl"), documents.collect::<String>()).unwrap();
        fs::write(place.path("job.yaml"), job(told["tied"] == true)).unwrap();
        Continued { place, from, next: numbers(&told["next"]), close: CLOSE }
    }

    /// What one of the programs of scripts/golden/resume saved.
    fn program(name: &str) -> (Continued, Value) {
        let (place, at) = (Place::new(), saved(name));
        let told: Value = serde_json::from_slice(&fs::read(at.join("next.json")).unwrap()).unwrap();
        let documents = told["documents"].as_array().unwrap().iter().map(|d| format!("{{\"text\": {d}}}\n"));
        fs::write(place.path("corpus.jsonl"), documents.collect::<String>()).unwrap();
        let model = match told["family"].as_str().unwrap() {
            "llama" => "family: llama, tie_word_embeddings: false",
            other => &format!("family: {other}, tie_word_embeddings: true"),
        };
        let model = format!("{model}, {SMALL}, num_hidden_layers: {}", told["layers"]);
        fs::write(place.path("job.yaml"), job_of(&model)).unwrap();
        // a program that trained in bf16 had other losses; those of its state in fp32 were computed beside
        let next = if told["next_fp32"].is_null() { &told["next"] } else { &told["next_fp32"] };
        let from = at.join(told["folder"].as_str().unwrap());
        (Continued { place, from, next: numbers(next), close: CLOSE }, told)
    }

    /// The steps after the third have the losses that they should have.
    #[track_caller]
    fn follows(&self, ran: &Ran) {
        let steps = ran.kind("step");
        assert_eq!(steps[0]["step"], 4);
        assert!(steps.len() >= self.next.len(), "{} steps", steps.len());
        for (step, want) in steps.iter().zip(&self.next) {
            let got = step["loss"].as_f64().unwrap();
            let from = self.from.display();
            assert!((got - want).abs() <= self.close * want, "{from}: {got}, the program's is {want}");
        }
    }

    fn run(&self, set: &[&str]) -> Ran {
        let from = format!("resume.from={}", self.from.display());
        self.place.forget_checkpoints();
        self.place.run(&[&[from.as_str()], set].concat())
    }

    fn refused(&self, set: &[&str]) -> String {
        let ran = self.run(set);
        assert_eq!(ran.code, 4, "{}", ran.stderr);
        ran.cause()
    }
}

fn numbers(list: &Value) -> Vec<f64> {
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

fn notices(ran: &Ran) -> Vec<String> {
    ran.kind("notice").iter().map(|e| e["message"].as_str().unwrap().to_owned()).collect()
}

/// Programs, what their folders are called, and how many ranks wrote them.
const PROGRAMS: [(&str, &str, u32); 11] = [
    ("trainer_1", "HF Trainer", 1),
    ("trainer_2", "HF Trainer", 2),
    ("trainer_z3", "HF Trainer with DeepSpeed", 2),
    ("trainer_z2_bf16", "HF Trainer with DeepSpeed", 2),
    ("trainer_fsdp_full", "HF Trainer with FSDP, full", 2),
    ("trainer_fsdp_sharded", "HF Trainer with FSDP, sharded", 2),
    ("accelerate_ddp", "Accelerate", 2),
    ("accelerate_fsdp_full", "Accelerate with FSDP, full", 2),
    ("accelerate_fsdp_sharded", "Accelerate with FSDP, sharded", 2),
    ("accelerate_z3_bf16", "Accelerate with DeepSpeed", 2),
    ("dcp", "torch distributed checkpoint", 2),
];

/// Where a program stopped the built-in runtime goes on: on any number of workers, at any stage, with the same bits.
#[test]
fn the_losses_are_those_with_which_trainer_accelerate_and_torch_went_on() {
    for (name, kind, world) in PROGRAMS {
        let (continued, told) = Continued::program(name);
        let inspected = continued.place.launch(&["ckpt", "inspect", "--json", continued.from.to_str().unwrap()]);
        let inspected: Value = serde_json::from_slice(&inspected.stdout).unwrap();
        assert_eq!((&inspected["kind"], &told["world"]), (&kind.into(), &world.into()), "{name}");
        let before = contents(&continued.from);
        let mut bits = Vec::new();
        for (workers, stage) in [(1, 0), (2, 2), (3, 3), (2, 3)] {
            let set = [format!("cluster.workers_per_host={workers}"), format!("train.zero.stage={stage}")];
            let set: Vec<&str> = set.iter().map(String::as_str).chain(["checkpoint.every=never"]).collect();
            let ran = continued.run(&set).succeeded();
            let resumed = ran.kind("resume")[0];
            assert_eq!((&resumed["step"], &resumed["world"]), (&3.into(), &world.into()), "{name}");
            continued.follows(&ran);
            let lr = ran.kind("step")[0]["lr"].as_f64().unwrap();
            assert!((lr - 2e-3 * 17.0 / 18.0).abs() < 1e-12, "{name}: {lr}");
            let said = notices(&ran);
            let differs: Vec<&String> = said
                .iter()
                .filter(|m| m.contains("goes on with") || m.contains("learning rate") || m.contains("scheduler"))
                .collect();
            match name {
                // its one group decays norms as well
                "accelerate_ddp" => {
                    let decays = "`no_decay` goes on with weight_decay 0 (checkpoint: 0.1)";
                    assert!(differs.len() == 1 && differs[0].contains(decays), "{differs:?}");
                }
                _ => assert!(differs.is_empty(), "{name}: {differs:?}"),
            }
            assert!(said.iter().any(|m| m.contains("data goes on at sample 12 ")), "{name}: {said:?}");
            bits.push(ran.losses());
        }
        assert!(bits.iter().all(|b| *b == bits[0]), "{name}: the number of workers changes the losses");
        assert!(before == contents(&continued.from), "{name}: the original was changed");
    }
}

fn contents(dir: &Path) -> Vec<Vec<u8>> {
    support::files_below(dir).iter().map(|f| fs::read(dir.join(f)).unwrap()).collect()
}

#[test]
fn the_losses_are_those_with_which_deepspeed_went_on() {
    for name in ["z2", "z3_tied"] {
        let continued = Continued::of(name);
        let mut bits = Vec::new();
        for (workers, stage) in [(1, 0), (2, 3), (3, 1), (4, 2)] {
            let set = [format!("cluster.workers_per_host={workers}"), format!("train.zero.stage={stage}")];
            let set: Vec<&str> = set.iter().map(String::as_str).chain(["checkpoint.every=never"]).collect();
            let ran = continued.run(&set).succeeded();
            let resumed = ran.kind("resume")[0];
            assert_eq!((&resumed["step"], &resumed["world"]), (&3.into(), &2.into()));
            let steps = ran.kind("step");
            assert_eq!(steps[0]["step"], 4);
            for (step, want) in steps.iter().zip(&continued.next) {
                let got = step["loss"].as_f64().unwrap();
                assert!(
                    (got - want).abs() <= CLOSE * want,
                    "{name} on {workers}: {got}, DeepSpeed's is {want}"
                );
            }
            // linear from 2e-3 at step 2 to 0 at step 20; the fourth step has 3 behind it
            let lr = steps[0]["lr"].as_f64().unwrap();
            assert!((lr - 2e-3 * 17.0 / 18.0).abs() < 1e-12, "{lr}");
            let told = notices(&ran);
            assert!(
                told.iter().any(|m| m.contains("sample 12 ") && m.contains("as the checkpoint says")),
                "{told:?}"
            );
            let differs = |m: &&String| {
                m.contains("goes on with") || m.contains("learning rate") || m.contains("scheduler")
            };
            assert_eq!(told.iter().find(differs), None, "nothing differs");
            bits.push(ran.losses());
        }
        assert!(bits.iter().all(|b| *b == bits[0]), "{name}: the number of workers changes the losses");
    }
}

/// What DeepSpeed's own `ds_to_universal` made of `z2`: read as it is, and converted to a checkpoint of ours.
#[test]
fn the_losses_are_those_of_deepspeed_by_way_of_its_universal_format() {
    let mut continued = Continued::of("z2");
    let universal = golden("z2_universal");
    let native = continued.place.path("native");
    let arguments =
        ["ckpt", "convert", universal.to_str().unwrap(), native.to_str().unwrap(), "--to", "native"];
    let made = continued.place.launch(&arguments);
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    for from in [universal, native] {
        continued.from = from;
        // whose data stood nowhere: the sample is given by the documents that follow
        for workers in [1, 3] {
            let workers = format!("cluster.workers_per_host={workers}");
            let ran = continued.run(&[&workers, "checkpoint.every=never"]).succeeded();
            let steps = ran.kind("step");
            assert_eq!(steps[0]["step"], 4);
            for (step, want) in steps.iter().zip(&continued.next) {
                let got = step["loss"].as_f64().unwrap();
                let shown = continued.from.display();
                assert!((got - want).abs() <= CLOSE * want, "{shown}: {got}, DeepSpeed's is {want}");
            }
        }
    }
}

#[test]
fn what_differs_is_told_and_what_does_not_fit_is_refused() {
    let continued = Continued::of("z2");
    let told = notices(&continued.run(&[
        "train.optimizer.weight_decay=0.2",
        "train.optimizer.betas=[0.8,0.95]",
        "train.schedule.warmup_steps=3",
        "train.steps=4",
    ]));
    for part in [
        "`decay` goes on with weight_decay 0.2 (checkpoint: 0.1), betas (0.8, 0.95) (checkpoint: [0.9, 0.95])",
        "`no_decay` goes on with betas",
        "the next step's learning rate is 0.002 by train.schedule",
    ] {
        assert!(told.iter().any(|m| m.contains(part)), "{told:?} lacks {part}");
    }
    assert!(!told.iter().any(|m| m.contains("`no_decay` goes on with weight_decay")), "{told:?}");

    let wide = continued.refused(&["train.model.intermediate_size=48"]);
    assert!(
        wide.contains("of other shapes are model.layers.0.mlp.gate_proj.weight [40, 24] (the job: [48, 24])"),
        "{wide}"
    );
    assert!(wide.contains("and 2 more"), "{wide}");
    let deep = continued.refused(&["train.model.num_hidden_layers=3"]);
    assert!(deep.contains("it lacks model.layers.2.") && deep.contains("and 5 more"), "{deep}");
    let shallow = continued.refused(&["train.model.num_hidden_layers=1"]);
    assert!(shallow.contains("the job's model hasn't model.layers.1."), "{shallow}");
    let tied = continued.refused(&["train.model.tie_word_embeddings=true"]);
    assert!(tied.contains("lm_head.weight and model.embed_tokens.weight hold different values"), "{tied}");
    let sgd = continued.refused(&["train.optimizer={name: sgd, lr: 0.1}"]);
    assert!(sgd.contains("lacks the optimizer's momentum of model.embed_tokens.weight"), "{sgd}");
}

/// A run that began from DeepSpeed's folder saves checkpoints of its own, from which it goes on with the same bits.
#[test]
fn its_own_checkpoints_follow() {
    let continued = Continued::of("z3_tied");
    let whole = continued.run(&["train.steps=10"]).succeeded().losses();
    continued.run(&["train.steps=10", "train.zero.stage=1", "checkpoint.every=3"]).succeeded();
    let root = continued.place.checkpoints();
    fs::remove_dir_all(root.join("step-00000010")).unwrap();
    let rest = continued.place.run(&["train.steps=10", "cluster.workers_per_host=3"]).succeeded();
    assert_eq!(rest.kind("resume")[0]["step"], 9);
    assert_eq!(rest.losses(), whole[6..]);
    // at its last step there is nothing to train, but something to save
    let ended = continued.run(&["train.steps=3", "train.schedule.warmup_steps=2"]).succeeded();
    assert_eq!(ended.kind("checkpoint").len(), 1, "{}", ended.stderr);
}

#[test]
fn a_lost_rank_is_named_before_anything_runs() {
    let continued = Continued::of("z2");
    let copy = continued.place.path("copy");
    let tag = copy.join("global_step3");
    fs::create_dir_all(&tag).unwrap();
    fs::write(copy.join("latest"), "global_step3").unwrap();
    for entry in fs::read_dir(golden("z2").join("global_step3")).unwrap().flatten() {
        fs::copy(entry.path(), tag.join(entry.file_name())).unwrap();
    }
    fs::remove_file(tag.join("zero_pp_rank_1_mp_rank_00_optim_states.pt")).unwrap();
    let why = continued.refused(&["resume.from=copy"]);
    assert!(why.contains("the optimizer file of rank 1 of 2"), "{why}");
    let nothing = continued.refused(&["resume.from=nowhere"]);
    assert!(nothing.contains("resume.from") && nothing.contains("nowhere"), "{nothing}");
}
