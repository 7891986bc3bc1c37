//! Training on a card for `launch gpu-check`: curves beside the CPU's. Models have random weights, data is made up.
use super::NCCL_LIMIT;
use crate::{
    error::Error,
    model::Batch,
    stages::{Running, ScheduleBound, Spec},
    train::step::{Source, Word},
};
use comm::{
    Comm, local,
    nccl::{Nccl, NcclComm},
    staged::Staged,
};
use contract::{
    env,
    job::{JobSpec, TrainSpec},
};
use device::{Cpu, Cuda, Ops, storage::said};
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
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
pub(super) fn job(model: &str, rest: &str) -> Result<JobSpec, String> {
    let text = format!("name: gpu-check\ntrain: {{data: {{files: [none]}}, model: {{{model}}}}}\n");
    let set: Vec<String> = rest.split_whitespace().map(|s| format!("train.{s}")).collect();
    let loaded = contract::load(contract::Source::Text { name: "gpu-check".into(), text }, &set);
    let (mut job, ..) = loaded.map_err(|problems| format!("{problems:?}"))?;
    job.checkpoint.keep = 1;
    Ok(job)
}

pub(super) fn train(job: &JobSpec) -> Result<&TrainSpec, String> {
    job.train.as_ref().ok_or_else(|| "the job has no `train` section".to_owned())
}

pub(super) fn build(
    train: &TrainSpec,
    comm: Arc<dyn Comm>,
    ops: Arc<dyn Ops>,
) -> Result<ScheduleBound, Error> {
    let parameters = Spec::new(train, train.model.vocab_size)?.parameters()?;
    Ok(parameters.shard(comm, ops)?.bind_optimizer()?.bind_schedule())
}

pub(super) fn take_step(running: &mut Running) -> Result<(f64, f64), Error> {
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
