//! Speed of training on a card for `launch gpu-check`: models with random weights, data that is made up.
use super::training::{Open, build, job, take_step, train};
use crate::{
    error::Error,
    gpu::{attention, places},
    model,
    save::{Identity, Saver},
    stages::{Running, resolve},
    state::model_card,
    storage::Layout,
};
use comm::{Comm, local, staged::Staged};
use contract::job::{CudaGraphs, JobSpec, Numerics, Offload, Precision, Recompute, TrainSpec, ZeroSpec};
use device::{Cuda, Storage, storage::said};
use serde_json::{Value, json};
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

/// A model whose training is timed.
struct Timed {
    what: &'static str,
    model: &'static str,
    rest: &'static str,
    saves: bool,
    /// Optimizer states lie in the host's memory.
    offload: bool,
}

const GPT2: &str = "family: gpt2, vocab_size: 50257, hidden_size: 768, intermediate_size: 3072, num_hidden_layers: 12, num_attention_heads: 12, tie_word_embeddings: true";
const QWEN_05B: &str = "family: qwen2, vocab_size: 151936, hidden_size: 896, intermediate_size: 4864, num_hidden_layers: 24, num_attention_heads: 14, num_key_value_heads: 2, tie_word_embeddings: true";
const QWEN_15B: &str = "family: qwen2, vocab_size: 151936, hidden_size: 1536, intermediate_size: 8960, num_hidden_layers: 28, num_attention_heads: 12, num_key_value_heads: 2, tie_word_embeddings: true";
const LLAMA_1B: &str = "vocab_size: 128256, hidden_size: 2048, intermediate_size: 8192, num_hidden_layers: 16, num_attention_heads: 32, num_key_value_heads: 8, tie_word_embeddings: true";
const LLAMA_8B: &str = "vocab_size: 128256, hidden_size: 4096, intermediate_size: 14336, num_hidden_layers: 32, num_attention_heads: 32, num_key_value_heads: 8";
const OF_1024: &str = "data.seq_len=1024 batch.global=32 batch.micro=32";
const OF_1024_4: &str = "data.seq_len=1024 batch.global=64 batch.micro=16";
const OF_2048_4: &str = "data.seq_len=2048 batch.global=32 batch.micro=8";

/// A model that is timed and no more.
const fn timed(what: &'static str, model: &'static str, rest: &'static str) -> Timed {
    Timed { what, model, rest, saves: false, offload: false }
}

const TIMED: [Timed; 15] = [
    Timed { saves: true, ..timed("GPT-2 124M, 32 × 1024", GPT2, OF_1024) },
    timed("Qwen2.5-0.5B, 4 × (16 × 1024)", QWEN_05B, OF_1024_4),
    Timed { saves: true, ..timed("Qwen2.5-1.5B, 4 × (16 × 1024)", QWEN_15B, OF_1024_4) },
    timed("Llama-3.2-1B, 4 × (8 × 2048)", LLAMA_1B, OF_2048_4),
    timed(
        "Llama-3.1-8B, 2 × 2048, ZeRO stage 3",
        LLAMA_8B,
        "data.seq_len=2048 batch.global=2 batch.micro=2 zero.stage=3",
    ),
    timed(
        // one sum of gradients: the tree over eight would need four
        "Llama-3.1-8B, 8 × (2 × 2048), ZeRO stage 3, numerics fast",
        LLAMA_8B,
        "data.seq_len=2048 batch.global=16 batch.micro=2 zero.stage=3 numerics=fast",
    ),
    timed(
        "Llama-3.1-8B, 8 × 2048, ZeRO stage 3, recompute",
        LLAMA_8B,
        "data.seq_len=2048 batch.global=8 batch.micro=8 zero.stage=3 recompute=block",
    ),
    timed(
        "Llama-3.1-8B, 4 × 2048, no master weights",
        LLAMA_8B,
        "data.seq_len=2048 batch.global=4 batch.micro=4 master_weights=false",
    ),
    Timed {
        offload: true,
        ..timed("Qwen2.5-1.5B, 4 × (16 × 1024), states on the host", QWEN_15B, OF_1024_4)
    },
    timed(
        "Llama-3.2-1B, 4 × (8 × 2048), products in fp8",
        LLAMA_1B,
        "data.seq_len=2048 batch.global=32 batch.micro=8 precision=fp8",
    ),
    // Bound by launches: without CUDA graphs, and with them.
    timed("GPT-2 124M, 2 × 256", GPT2, "data.seq_len=256 batch.global=2 batch.micro=2 cuda_graphs=false"),
    timed(
        "GPT-2 124M, 2 × 256, CUDA graphs",
        GPT2,
        "data.seq_len=256 batch.global=2 batch.micro=2 cuda_graphs=true",
    ),
    // What reproducible numbers cost: the same with timed algorithms.
    timed(
        "GPT-2 124M, 32 × 1024, numerics fast",
        GPT2,
        "data.seq_len=1024 batch.global=32 batch.micro=32 numerics=fast",
    ),
    timed(
        "Qwen2.5-0.5B, 4 × (16 × 1024), numerics fast",
        QWEN_05B,
        "data.seq_len=1024 batch.global=64 batch.micro=16 numerics=fast",
    ),
    timed(
        "Qwen2.5-1.5B, 4 × (16 × 1024), numerics fast",
        QWEN_15B,
        "data.seq_len=1024 batch.global=64 batch.micro=16 numerics=fast",
    ),
];
const TINY: &str =
    "vocab_size: 257, hidden_size: 8, intermediate_size: 12, num_hidden_layers: 1, num_attention_heads: 2";
const OF_6: &str = "data.seq_len=6 batch.global=1 batch.micro=1";
const TIMED_TINY: [Timed; 5] = [
    Timed { saves: true, ..timed("a tiny Llama, 1 × 6", TINY, OF_6) },
    Timed { saves: true, offload: true, ..timed("the same, states on the host", TINY, OF_6) },
    timed(
        "a tiny Llama, products in fp8",
        "vocab_size: 257, hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1, num_attention_heads: 1",
        "data.seq_len=6 batch.global=1 batch.micro=1 precision=fp8",
    ),
    timed(
        "the first, numerics fast, no master weights",
        TINY,
        "data.seq_len=6 batch.global=1 batch.micro=1 numerics=fast master_weights=false",
    ),
    timed("the first, CUDA graphs", TINY, "data.seq_len=6 batch.global=1 batch.micro=1 cuda_graphs=true"),
];

/// Dense bf16 operations per second, by NVIDIA's data sheets (SXM).
const PEAKS: [(&str, f64); 4] = [("H100", 989.5e12), ("H200", 989.5e12), ("A100", 312e12), ("B200", 2250e12)];

/// The models, and how long each is timed.
fn all(tiny: bool) -> (&'static [Timed], Duration) {
    if tiny { (&TIMED_TINY, Duration::ZERO) } else { (&TIMED, Duration::from_secs(10)) }
}

/// Speed, memory, and what saving costs.
pub(super) fn show_speed(open: Open, tiny: bool) {
    println!(
        "| training in bf16, AdamW | tokens/s | TFLOP/s | MFU, of bf16's peak | GPU memory | save: stall, write, dip |"
    );
    println!("|---|---|---|---|---|---|");
    let (models, long) = all(tiny);
    for timed in models {
        let row = measured(timed, open, long).map(|m| m.row());
        println!("| {} | {} |", timed.what, row.unwrap_or_else(|why| format!("{why} | | | |")));
    }
    println!();
}

/// What the models are, for a peer that trains them too: each with its `config.json`.
pub(super) fn describe(tiny: bool) -> Result<Value, String> {
    let each = all(tiny).0.iter().map(|timed| {
        let spec = timed.spec()?.1;
        let model = resolve(&spec.model, spec.model.vocab_size, spec.data.seq_len).map_err(|f| f.message)?;
        let model = model::build(&model, spec.data.seq_len)?;
        Ok(json!({
            "what": timed.what,
            "config": model.hf_config(),
            "samples": spec.batch.micro,
            "accumulated": spec.batch.global / spec.batch.micro,
            "seq_len": spec.data.seq_len,
            "recompute": spec.recompute != Recompute::None,
            "precision": spec.precision.name(),
            "offload": timed.offload,
            "master_weights": spec.master_weights,
            "numerics": spec.numerics.name(),
            "cuda_graphs": spec.cuda_graphs.name(),
        }))
    });
    each.collect()
}

/// Speed and memory of the model with this number.
pub(super) fn one(open: Open, tiny: bool, number: usize) -> Result<Value, String> {
    let (timed, long) = (by_number(tiny, number)?, all(tiny).1);
    let Measured { tokens_per_s, flops, mfu, memory, .. } =
        measured(&Timed { saves: false, ..*timed }, open, long)?;
    Ok(json!({
        "what": timed.what, "tokens_per_s": tokens_per_s, "flops": flops, "mfu": mfu, "memory": memory,
    }))
}

/// What was found of a model.
struct Measured {
    tokens_per_s: f64,
    /// Operations per second.
    flops: f64,
    /// Their share of the card's peak, where that is known.
    mfu: Option<f64>,
    /// Bytes.
    memory: u64,
    save: Option<String>,
}

impl Measured {
    fn row(&self) -> String {
        let mfu = self.mfu.map_or_else(|| "?".to_owned(), |mfu| format!("{:.1} %", 100.0 * mfu));
        let memory = self.memory as f64 / f64::from(1 << 30);
        let save = self.save.as_deref().unwrap_or("-");
        format!("{:.0} | {:.1} | {mfu} | {memory:.2} GiB | {save}", self.tokens_per_s, self.flops / 1e12)
    }
}

impl Timed {
    fn spec(&self) -> Result<(JobSpec, TrainSpec), String> {
        let job = job(self.model, &format!("precision=bf16 zero.stage=0 {}", self.rest))?;
        let mut spec = train(&job)?.clone();
        spec.zero = ZeroSpec { offload: self.offload.then_some(Offload::Cpu), ..spec.zero };
        Ok((job, spec))
    }

    /// Opens the card, builds the model there and takes its first steps.
    fn warm(&self, open: Open) -> Result<Warm, String> {
        let text = |e: Error| e.message;
        let (job, spec) = self.spec()?;
        let cuda = open()?;
        if spec.precision == Precision::Fp8 {
            cuda.check_fp8().map_err(|e| e.to_string())?;
        }
        if spec.numerics == Numerics::Fast {
            cuda.time_products();
        }
        let places = places(&[], Path::new(""));
        // Why one that is there can't be used is said before all tables.
        let _unusable = cuda.choose_attention(attention(&spec), &places).map_err(|e| e.to_string())?;
        // Of the others all are compared call by call.
        cuda.use_graphs(spec.cuda_graphs == CudaGraphs::Always);
        let comm: Arc<dyn Comm> = Arc::new(local::group(1).remove(0));
        let comm = Arc::new(Staged::new(comm, cuda.clone()));
        let mut running = build(&spec, comm, cuda.clone()).map_err(text)?.fresh();
        for _ in 0..3 {
            take_step(&mut running).map_err(text)?;
        }
        Ok(Warm { job, spec, cuda, running })
    }
}

/// A model that has taken its first steps.
struct Warm {
    job: JobSpec,
    spec: TrainSpec,
    cuda: Arc<Cuda>,
    running: Running,
}

/// Prints what the time of a step of this model goes to.
pub(super) fn profile(open: Open, tiny: bool, number: usize) -> Result<(), String> {
    let timed = by_number(tiny, number)?;
    let shown = catch_unwind(AssertUnwindSafe(|| show_profile(timed, open)));
    shown.unwrap_or_else(|panic| Err(said(panic.as_ref())))
}

fn show_profile(timed: &Timed, open: Open) -> Result<(), String> {
    let text = |e: Error| e.message;
    let Warm { cuda, mut running, .. } = timed.warm(open)?;
    let each = time_steps(&mut running, &mut |steps, _| steps >= 5).map_err(text)?;
    cuda.begin_profile();
    take_step(&mut running).map_err(text)?;
    let all = cuda.end_profile().map_err(|e| e.to_string())?;
    let sum: f64 = all.iter().map(|spent| spent.seconds).sum();
    println!(
        "{}: a step takes {:.2} ms; measured piece by piece {:.2} ms\n",
        timed.what,
        1e3 * each,
        1e3 * sum
    );
    println!("| work | calls | ms | share |\n|---|---|---|---|");
    for spent in all {
        let share = 100.0 * spent.seconds / sum.max(f64::MIN_POSITIVE);
        println!("| {} | {} | {:.3} | {share:.1} % |", spent.what, spent.calls, 1e3 * spent.seconds);
    }
    Ok(())
}

fn by_number(tiny: bool, number: usize) -> Result<&'static Timed, String> {
    let models = all(tiny).0;
    models.get(number).ok_or_else(|| format!("there are {} models, from 0 on", models.len()))
}

fn measured(timed: &Timed, open: Open, long: Duration) -> Result<Measured, String> {
    let measured = catch_unwind(AssertUnwindSafe(|| measure(timed, open, long)));
    measured.unwrap_or_else(|panic| Err(said(panic.as_ref())))
}

fn measure(timed: &Timed, open: Open, long: Duration) -> Result<Measured, String> {
    let text = |e: Error| e.message;
    let Warm { job, spec, cuda, mut running } = timed.warm(open)?;
    let each = time_steps(&mut running, &mut |steps, elapsed| steps >= 3 && elapsed >= long).map_err(text)?;
    let tokens_per_s = running.trainer.global_batch() as f64 * f64::from(spec.data.seq_len) / each;
    let flops = tokens_per_s * running.trainer.model.flops_per_token(spec.data.seq_len as usize);
    let peak = PEAKS.iter().find(|(name, _)| cuda.facts().name.contains(name));
    let mfu = peak.map(|(_, peak)| flops / peak);
    let memory = cuda.peak_memory();
    let save = timed.saves.then(|| save(&mut running, &job, each)).transpose()?;
    Ok(Measured { tokens_per_s, flops, mfu, memory, save })
}

/// Seconds of a step; steps are taken until `enough` of them, in so much time.
fn time_steps(running: &mut Running, enough: &mut dyn FnMut(u32, Duration) -> bool) -> Result<f64, Error> {
    let (began, mut steps) = (Instant::now(), 0);
    while !enough(steps, began.elapsed()) {
        take_step(running)?;
        steps += 1;
    }
    running.trainer.ops.wait();
    Ok(began.elapsed().as_secs_f64() / f64::from(steps.max(1)))
}

/// A folder that goes with this.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        // What can't be removed is seen by who looks; the check's result is another matter.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Saves once in the background of training; `each`: seconds of a step otherwise.
fn save(running: &mut Running, job: &JobSpec, each: f64) -> Result<String, String> {
    let text = |e: Error| e.message;
    let here = std::env::current_dir().map_err(|e| e.to_string())?;
    let folder = Folder(here.join(format!("gpu-check-{}", std::process::id())));
    let mut saver = saver(running, job, &folder.0);
    saver.wait_for_room(running).map_err(text)?; // a run makes it at its start
    running.trainer.ops.wait();
    let began = Instant::now();
    saver.begin(running).map_err(text)?;
    let stall = began.elapsed().as_secs_f64();
    let during = time_steps(running, &mut |steps, _| steps > 0 && !saver.writing()).map_err(text)?;
    let saved = saver.finish(running).map_err(text)?.ok_or("nothing was saved")?;
    let dip = 100.0 * (1.0 - each / during);
    Ok(format!("{:.0} ms, {:.1} s, {dip:.1} %", 1e3 * stall, saved.seconds))
}

fn saver(running: &Running, job: &JobSpec, folder: &Path) -> Saver {
    let units: Vec<_> = running.trainer.engine.shards.iter().map(|s| s.unit.clone()).collect();
    let identity = Identity {
        model: model_card(running.trainer.model.as_ref(), &units, running.train(), 0),
        tokenizer: Vec::new(),
        job: job.clone(),
        data_digest: "made up".into(),
        rng_generation: 0,
        rng_decision: serde_json::Value::Null,
    };
    Saver::new(folder.into(), job.checkpoint.clone(), identity, None, Layout::shared(1))
}
