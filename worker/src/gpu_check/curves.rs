//! Compares the losses of training on a GPU with those of training on the CPU, for `launch
//! gpu-check`. Models have random weights, and the data are generated.
use super::check_job::{
    OpenGpu, build_check_job, build_trainer, require_train_section, run_check, take_step,
};
use crate::gpu::to_unusable_nccl_error;
use comm::{
    Comm, local,
    nccl::{NcclComm, NcclLibrary},
    staged::StagedComm,
};
use device::{Cpu, Ops};
use diagnostic::{Diagnostic, codes};
use jobspec::{TrainSpec, env};
use std::{panic::resume_unwind, sync::Arc, time::Duration};

/// The longest wait until all ranks of a training comparison have joined the NCCL communicator.
const NCCL_TIMEOUT: Duration = Duration::from_secs(60);

/// The results of a training run: the loss and the gradient norm of each step.
type TrainingCurve = Vec<(f64, f64)>;

/// Trains for `steps` steps from initial weights. Returns the loss and the gradient norm of each
/// step.
fn train_for_curve(
    train: &TrainSpec,
    comm: Arc<dyn Comm>,
    ops: Arc<dyn Ops>,
    steps: usize,
) -> diagnostic::Result<TrainingCurve> {
    run_check(|| {
        let mut running = build_trainer(train, comm, ops)?.start_fresh();
        (0..steps).map(|_| Ok(take_step(&mut running)?)).collect()
    })
}

/// How ranks that are threads of this process exchange data.
#[derive(Clone, Copy)]
enum RankTransport<'a> {
    HostMemory,
    Nccl(&'a NcclLibrary),
}

/// Trains on the GPU with `world` ranks, and returns the loss and the gradient norm of each step.
/// Fails if the ranks have different results.
fn train_on_gpu_for_curve(
    train: &TrainSpec,
    open: OpenGpu,
    transport: RankTransport,
    world: usize,
    steps: usize,
) -> diagnostic::Result<TrainingCurve> {
    let run_rank = |hosts: Arc<dyn Comm>| -> diagnostic::Result<TrainingCurve> {
        let cuda = open()?;
        let comm: Arc<dyn Comm> = match transport {
            RankTransport::HostMemory => Arc::new(StagedComm::new(hosts, cuda.clone())),
            RankTransport::Nccl(nccl) => {
                let comm = NcclComm::connect(nccl, cuda.clone(), hosts, NCCL_TIMEOUT);
                Arc::new(comm.map_err(to_unusable_nccl_error)?)
            }
        };
        train_for_curve(train, comm, cuda, steps)
    };
    let results: Vec<diagnostic::Result<TrainingCurve>> = std::thread::scope(|s| {
        let threads: Vec<_> =
            local::create_group(world).into_iter().map(|comm| s.spawn(|| run_rank(Arc::new(comm)))).collect();
        threads.into_iter().map(|t| t.join().unwrap_or_else(|panic| resume_unwind(panic))).collect()
    });
    let mut curves = results.into_iter().collect::<Result<Vec<_>, _>>()?;
    let first = curves.swap_remove(0);
    if curves.iter().any(|other| *other != first) {
        let message = format!("the {world} ranks computed different losses");
        return Err(Diagnostic::error(codes::training::RANKS_DISAGREE, message));
    }
    Ok(first)
}

/// A model that is trained for the comparison, with the keys of `train.model` and further keys of
/// `train`.
struct CurveCase {
    name: &'static str,
    model: &'static str,
    rest: &'static str,
}

/// The models whose losses are compared between GPU and CPU.
const CURVE_CASES: [CurveCase; 2] = [
    CurveCase {
        name: "Llama of the quickstart",
        model: "vocab_size: 257, hidden_size: 128, intermediate_size: 352, num_key_value_heads: 2, tie_word_embeddings: true",
        rest: "data.seq_len=128 batch.global=16 batch.micro=4",
    },
    CurveCase {
        name: "GPT-2, 4 layers of 256",
        model: "family: gpt2, vocab_size: 1000, hidden_size: 256, intermediate_size: 1024, tie_word_embeddings: true",
        rest: "data.seq_len=128 batch.global=8 batch.micro=2",
    },
];
/// The small models whose losses are compared between GPU and CPU in tests.
const TINY_CURVE_CASES: [CurveCase; 1] = [CurveCase {
    name: "a tiny Llama",
    model: "vocab_size: 257, hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1, num_attention_heads: 2, tie_word_embeddings: true",
    rest: "data.seq_len=6 batch.global=4 batch.micro=1",
}];

/// Trains all models on the GPU and on the CPU, and prints a table of the differences in their
/// losses. Returns whether all agree.
pub(super) fn compare_and_print_curves(
    open: OpenGpu,
    nccl: Option<&NcclLibrary>,
    tiny: bool,
    fp8: bool,
) -> bool {
    println!("| training, compared with the CPU | precision | ranks | loss error | result |");
    println!("|---|---|---|---|---|");
    let (cases, steps) = if tiny { (&TINY_CURVE_CASES[..], 2) } else { (&CURVE_CASES[..], 10) };
    let mut agrees = true;
    for case in cases {
        // In fp8 a difference in the last bit of a sum may round an operand to another value, so
        // the tolerance is larger.
        let fp8_case = fp8.then_some(("fp8", 5e-2));
        for (precision, limit) in [("fp32", 1e-4), ("bf16", 2e-2)].into_iter().chain(fp8_case) {
            let rest = format!("{} precision={precision} zero.stage=3 optimizer.lr=1e-3", case.rest);
            let spec = match build_check_job(case.model, &rest)
                .and_then(|job| require_train_section(&job).cloned())
            {
                Ok(spec) => spec,
                Err(why) => {
                    println!("| {} | {precision} | | | {why} |", case.name);
                    return false;
                }
            };
            agrees &= compare_and_print_rows(case.name, precision, limit, &spec, open, nccl, steps);
        }
    }
    println!();
    agrees
}

/// Compares the losses of one model in one precision over several numbers of ranks and transports,
/// and prints a table row for each. Returns whether all agree.
fn compare_and_print_rows(
    name: &str,
    precision: &str,
    tolerance: f64,
    spec: &TrainSpec,
    open: OpenGpu,
    nccl: Option<&NcclLibrary>,
    steps: usize,
) -> bool {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let one_rank: Arc<dyn Comm> = Arc::new(local::create_group(1).remove(0));
    let cpu = train_for_curve(spec, one_rank, Arc::new(Cpu::new(threads)), steps);
    let one_gpu = nccl.map(|nccl| ("1, NCCL", RankTransport::Nccl(nccl), 1));
    let is_allowed = std::env::var_os(env::NCCL_MULTI_RANK_GPU_ENABLE).is_some_and(|set| set == "1");
    let shared_gpu = nccl
        .filter(|n| is_allowed && n.supports_gpu_sharing())
        .map(|n| ("2, NCCL on this GPU", RankTransport::Nccl(n), 2));
    let host_memory = [("1", 1), ("2 on this GPU", 2), ("4 on this GPU", 4)]
        .map(|(ranks, world)| (ranks, RankTransport::HostMemory, world));
    let (mut first, mut agrees): (Option<TrainingCurve>, bool) = (None, true);
    for (ranks, transport, world) in host_memory.into_iter().chain(one_gpu).chain(shared_gpu) {
        let compared = cpu.clone().and_then(|cpu| {
            let gpu = train_on_gpu_for_curve(spec, open, transport, world, steps)?;
            let first = first.get_or_insert_with(|| gpu.clone());
            Ok((compute_loss_error(&gpu, &cpu), *first == gpu))
        });
        let (error, result) = match compared {
            Ok((error, _)) if error > tolerance || error.is_nan() => {
                (Some(error), "differs from the CPU".into())
            }
            Ok((error, false)) => (Some(error), "not bit-equal to 1 rank".into()),
            Ok((error, true)) => (Some(error), "ok".to_owned()),
            Err(e) => (None, e.to_string()),
        };
        agrees &= result == "ok";
        let error = error.map_or_else(String::new, |error| format!("{error:.1e}"));
        println!("| {name} | {precision} | {ranks} | {error} | {result} |");
    }
    agrees
}

/// Computes the largest relative difference between the losses of two training runs.
fn compute_loss_error(a: &TrainingCurve, b: &TrainingCurve) -> f64 {
    a.iter().zip(b).map(|((a, _), (b, _))| ((a - b) / b).abs()).fold(0.0, f64::max)
}
