//! Training on a card for `launch gpu-check`: curves beside the CPU's, and speed. Models have random weights, data is made up.
use super::NCCL_LIMIT;
use crate::{
    error::Error,
    model::Batch,
    save::{Identity, Saver},
    stages::{Running, ScheduleBound, Spec},
    state::model_card,
    storage::Layout,
    train::step::{Source, Word},
};
use comm::{
    Comm, local,
    nccl::{Nccl, NcclComm},
    staged::Staged,
};
use contract::{
    env,
    job::{JobSpec, Offload, TrainSpec, ZeroSpec},
};
use device::{Cpu, Cuda, Ops, Storage, storage::said};
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

/// Opens the card anew, for each run and rank.
pub(super) type Open<'a> = &'a (dyn Fn() -> Result<Arc<Cuda>, String> + Sync);

/// Losses and gradient norms, step by step.
type Curve = Vec<(f64, f64)>;

/// Tokens that depend on the sample's number alone.
struct MadeUp {
    vocab: u32,
}

impl Source for MadeUp {
    fn fill(&self, first: u64, batch: &mut Batch) -> Result<(), Error> {
        let t = batch.t;
        for i in 0..batch.b * t {
            let position = (first + (i / t) as u64) * (t as u64 + 1) + (i % t) as u64;
            let token = |n: u64| (n.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40) as u32 % self.vocab;
            (batch.tokens[i], batch.labels[i], batch.starts[i]) = (token(position), token(position + 1), 0);
        }
        Ok(())
    }
}

/// A job that trains this model; what isn't said is as in every job.
fn job(model: &str, rest: &str) -> Result<JobSpec, String> {
    let text = format!("name: gpu-check\ntrain: {{data: {{files: [none]}}, model: {{{model}}}}}\n");
    let set: Vec<String> = rest.split_whitespace().map(|s| format!("train.{s}")).collect();
    let loaded = contract::load(contract::Source::Text { name: "gpu-check".into(), text }, &set);
    let (mut job, ..) = loaded.map_err(|problems| format!("{problems:?}"))?;
    job.checkpoint.keep = 1;
    Ok(job)
}

fn train(job: &JobSpec) -> Result<&TrainSpec, String> {
    job.train.as_ref().ok_or_else(|| "the job has no `train` section".to_owned())
}

fn build(train: &TrainSpec, comm: Arc<dyn Comm>, ops: Arc<dyn Ops>) -> Result<ScheduleBound, Error> {
    let parameters = Spec::new(train, train.model.vocab_size)?.parameters()?;
    Ok(parameters.shard(comm, ops)?.bind_optimizer()?.bind_schedule())
}

fn take_step(running: &mut Running) -> Result<(f64, f64), Error> {
    let source = MadeUp { vocab: running.train().model.vocab_size };
    let (outcome, _) = running.step(&source, Word::default())?;
    Ok((outcome.loss, outcome.grad_norm))
}

fn curve(train: &TrainSpec, comm: Arc<dyn Comm>, ops: Arc<dyn Ops>, steps: usize) -> Result<Curve, String> {
    let run = || -> Result<Curve, Error> {
        let mut running = build(train, comm, ops)?.fresh();
        (0..steps).map(|_| take_step(&mut running)).collect()
    };
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(done) => done.map_err(|e| e.message),
        Err(panic) => Err(said(panic.as_ref())),
    }
}

/// How ranks that are threads of this process reach each other.
#[derive(Clone, Copy)]
enum Road<'a> {
    Host,
    Nccl(&'a Nccl),
}

/// The curve that all ranks agree about.
fn on_card(train: &TrainSpec, open: Open, road: Road, world: usize, steps: usize) -> Result<Curve, String> {
    let rank = |hosts: Arc<dyn Comm>| -> Result<Curve, String> {
        let cuda = open()?;
        let comm: Arc<dyn Comm> = match road {
            Road::Host => Arc::new(Staged::new(hosts, cuda.clone())),
            Road::Nccl(nccl) => {
                let met = NcclComm::meet(nccl, cuda.clone(), hosts, NCCL_LIMIT);
                Arc::new(met.map_err(|e| e.to_string())?)
            }
        };
        curve(train, comm, cuda, steps)
    };
    let all: Vec<Result<Curve, String>> = std::thread::scope(|s| {
        let ranks = local::group(world).into_iter().map(|c| s.spawn(|| rank(Arc::new(c))));
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().map(|t| t.join().unwrap_or_else(|panic| Err(said(panic.as_ref())))).collect()
    });
    let mut curves = all.into_iter().collect::<Result<Vec<_>, _>>()?;
    let first = curves.swap_remove(0);
    if curves.iter().any(|other| *other != first) {
        return Err("the ranks disagree".into());
    }
    Ok(first)
}

/// A model whose curves are compared.
struct Beside {
    what: &'static str,
    model: &'static str,
    rest: &'static str,
}

const BESIDE: [Beside; 2] = [
    Beside {
        what: "Llama of the quickstart",
        model: "vocab_size: 257, hidden_size: 128, intermediate_size: 352, num_key_value_heads: 2, tie_word_embeddings: true",
        rest: "data.seq_len=128 batch.global=16 batch.micro=4",
    },
    Beside {
        what: "GPT-2, 4 layers of 256",
        model: "family: gpt2, vocab_size: 1000, hidden_size: 256, intermediate_size: 1024, tie_word_embeddings: true",
        rest: "data.seq_len=128 batch.global=8 batch.micro=2",
    },
];
const BESIDE_TINY: [Beside; 1] = [Beside {
    what: "a tiny Llama",
    model: "vocab_size: 257, hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1, num_attention_heads: 2, tie_word_embeddings: true",
    rest: "data.seq_len=6 batch.global=4 batch.micro=1",
}];

/// Curves beside the CPU's; are they as they should be?
pub(super) fn show_curves(open: Open, nccl: Option<&Nccl>, tiny: bool, fp8: bool) -> bool {
    println!("| training beside the CPU's | precision | ranks | apart | |\n|---|---|---|---|---|");
    let (models, steps) = if tiny { (&BESIDE_TINY[..], 2) } else { (&BESIDE[..], 10) };
    let mut fits = true;
    for model in models {
        // In fp8 an operand now and then rounds to another number for the last bit of a sum.
        let eight = fp8.then_some(("fp8", 5e-2));
        for (precision, limit) in [("fp32", 1e-4), ("bf16", 2e-2)].into_iter().chain(eight) {
            let rest = format!("{} precision={precision} zero.stage=3 optimizer.lr=1e-3", model.rest);
            let spec = match job(model.model, &rest).and_then(|job| train(&job).cloned()) {
                Ok(spec) => spec,
                Err(why) => {
                    println!("| {} | {precision} | | | {why} |", model.what);
                    return false;
                }
            };
            fits &= rows(model.what, precision, limit, &spec, open, nccl, steps);
        }
    }
    println!();
    fits
}

fn rows(
    what: &str,
    precision: &str,
    limit: f64,
    spec: &TrainSpec,
    open: Open,
    nccl: Option<&Nccl>,
    steps: usize,
) -> bool {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let alone: Arc<dyn Comm> = Arc::new(local::group(1).remove(0));
    let cpu = curve(spec, alone, Arc::new(Cpu::new(threads)), steps);
    let own = nccl.map(|nccl| ("1, NCCL", Road::Nccl(nccl), 1));
    let allowed = std::env::var_os(env::NCCL_MULTI_RANK_GPU_ENABLE).is_some_and(|set| set == "1");
    let shared =
        nccl.filter(|n| allowed && n.shares_gpus()).map(|n| ("2, NCCL on this GPU", Road::Nccl(n), 2));
    let roads = [("1", Road::Host, 1), ("2 on this GPU", Road::Host, 2), ("4 on this GPU", Road::Host, 4)];
    let (mut first, mut fits): (Option<Curve>, bool) = (None, true);
    for (ranks, road, world) in roads.into_iter().chain(own).chain(shared) {
        let found = cpu.clone().and_then(|cpu| {
            let got = on_card(spec, open, road, world, steps)?;
            let first = first.get_or_insert_with(|| got.clone());
            let (apart, same) = (apart(&got, &cpu), *first == got);
            let said = match (apart <= limit, same) {
                (false, _) => "not the CPU's curve",
                (_, false) => "not the bits of one rank",
                _ => "ok",
            };
            Ok((apart, said.to_owned()))
        });
        let (apart, said) = found.map_or_else(|why| (String::new(), why), |(a, s)| (format!("{a:.1e}"), s));
        fits &= said == "ok";
        println!("| {what} | {precision} | {ranks} | {apart} | {said} |");
    }
    fits
}

/// The largest relative difference of two curves' losses.
fn apart(a: &Curve, b: &Curve) -> f64 {
    a.iter().zip(b).map(|((a, _), (b, _))| ((a - b) / b).abs()).fold(0.0, f64::max)
}

/// A model whose training is timed.
struct Timed {
    what: &'static str,
    model: &'static str,
    rest: &'static str,
    saves: bool,
    /// Optimizer states lie in the host's memory.
    offload: bool,
}

const TIMED: [Timed; 6] = [
    Timed {
        what: "GPT-2 124M, 32 × 1024",
        model: "family: gpt2, vocab_size: 50257, hidden_size: 768, intermediate_size: 3072, num_hidden_layers: 12, num_attention_heads: 12, tie_word_embeddings: true",
        rest: "data.seq_len=1024 batch.global=32 batch.micro=32",
        saves: true,
        offload: false,
    },
    Timed {
        what: "Qwen2.5-0.5B, 8 × 2048",
        model: "family: qwen2, vocab_size: 151936, hidden_size: 896, intermediate_size: 4864, num_hidden_layers: 24, num_attention_heads: 14, num_key_value_heads: 2, tie_word_embeddings: true",
        rest: "data.seq_len=2048 batch.global=8 batch.micro=8",
        saves: false,
        offload: false,
    },
    Timed {
        what: "Qwen2.5-1.5B, 4 × 2048",
        model: "family: qwen2, vocab_size: 151936, hidden_size: 1536, intermediate_size: 8960, num_hidden_layers: 28, num_attention_heads: 12, num_key_value_heads: 2, tie_word_embeddings: true",
        rest: "data.seq_len=2048 batch.global=4 batch.micro=4",
        saves: true,
        offload: false,
    },
    Timed {
        what: "Qwen2.5-1.5B, 4 × 2048, states on the host",
        model: "family: qwen2, vocab_size: 151936, hidden_size: 1536, intermediate_size: 8960, num_hidden_layers: 28, num_attention_heads: 12, num_key_value_heads: 2, tie_word_embeddings: true",
        rest: "data.seq_len=2048 batch.global=4 batch.micro=4",
        saves: false,
        offload: true,
    },
    Timed {
        what: "Llama-3.2-1B, 4 × 2048",
        model: "vocab_size: 128256, hidden_size: 2048, intermediate_size: 8192, num_hidden_layers: 16, num_attention_heads: 32, num_key_value_heads: 8, tie_word_embeddings: true",
        rest: "data.seq_len=2048 batch.global=4 batch.micro=4",
        saves: false,
        offload: false,
    },
    Timed {
        what: "Llama-3.1-8B, 1 × 2048, recompute",
        model: "vocab_size: 128256, hidden_size: 4096, intermediate_size: 14336, num_hidden_layers: 32, num_attention_heads: 32, num_key_value_heads: 8",
        rest: "data.seq_len=2048 batch.global=1 batch.micro=1 recompute=block",
        saves: false,
        offload: false,
    },
];
const TIMED_TINY: [Timed; 2] = [TINY, Timed { what: "the same, states on the host", offload: true, ..TINY }];
const TINY: Timed = Timed {
    what: "a tiny Llama, 1 × 6",
    model: "vocab_size: 257, hidden_size: 8, intermediate_size: 12, num_hidden_layers: 1, num_attention_heads: 2",
    rest: "data.seq_len=6 batch.global=1 batch.micro=1",
    saves: true,
    offload: false,
};

/// Dense bf16 operations per second, by NVIDIA's data sheets (SXM).
const PEAKS: [(&str, f64); 4] = [("H100", 989.5e12), ("H200", 989.5e12), ("A100", 312e12), ("B200", 2250e12)];

/// Speed, memory, and what saving costs.
pub(super) fn show_speed(open: Open, tiny: bool) {
    println!("| training in bf16, AdamW | tokens/s | TFLOP/s | MFU | GPU memory | save: stall, write, dip |");
    println!("|---|---|---|---|---|---|");
    let (all, long) =
        if tiny { (&TIMED_TINY[..], Duration::ZERO) } else { (&TIMED[..], Duration::from_secs(10)) };
    for timed in all {
        let row = catch_unwind(AssertUnwindSafe(|| speed(timed, open, long)));
        let row = row.unwrap_or_else(|panic| Err(said(panic.as_ref())));
        println!("| {} | {} |", timed.what, row.unwrap_or_else(|why| format!("{why} | | | |")));
    }
    println!();
}

fn speed(timed: &Timed, open: Open, long: Duration) -> Result<String, String> {
    let text = |e: Error| e.message;
    let job = job(timed.model, &format!("{} precision=bf16 zero.stage=0", timed.rest))?;
    let place = timed.offload.then_some(Offload::Cpu);
    let spec =
        &TrainSpec { zero: ZeroSpec { offload: place, ..train(&job)?.zero.clone() }, ..train(&job)?.clone() };
    let cuda = open()?;
    let comm: Arc<dyn Comm> = Arc::new(local::group(1).remove(0));
    let comm = Arc::new(Staged::new(comm, cuda.clone()));
    let mut running = build(spec, comm, cuda.clone()).map_err(text)?.fresh();
    for _ in 0..3 {
        take_step(&mut running).map_err(text)?;
    }
    let each = time_steps(&mut running, &mut |steps, elapsed| steps >= 3 && elapsed >= long).map_err(text)?;
    let tokens = running.trainer.global_batch() as f64 * f64::from(spec.data.seq_len);
    let flops = tokens * running.trainer.model.flops_per_token(spec.data.seq_len as usize) / each;
    let peak = PEAKS.iter().find(|(name, _)| cuda.facts().name.contains(name));
    let mfu = peak.map_or_else(|| "?".to_owned(), |(_, peak)| format!("{:.1} %", 100.0 * flops / peak));
    let memory = cuda.peak_memory() as f64 / f64::from(1 << 30);
    let save = if timed.saves { save(&mut running, &job, each)? } else { "-".to_owned() };
    Ok(format!("{:.0} | {:.1} | {mfu} | {memory:.2} GiB | {save}", tokens / each, flops / 1e12))
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
