//! Compares the losses of training on a GPU with those of training on the CPU, for `launch
//! gpu-check`. Models have random weights, and the data are generated.
use super::{
    check_job::{OpenGpu, build_check_job, build_trainer, require_train_section, run_check, take_step},
    message::{PartOutput, Row, RowResult},
};
use crate::gpu::{collect_library_search_paths, to_unusable_nccl_error};
use comm::{
    Comm, local,
    nccl::{NcclComm, NcclLibrary},
    staged::StagedComm,
};
use device::{Cpu, Ops, cuda::CudaLibrary};
use diagnostic::{Diagnostic, codes};
use jobspec::TrainSpec;
use serde_json::json;
use std::{panic::resume_unwind, path::Path, sync::Arc, time::Duration};

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
pub(super) struct CurveCase {
    name: &'static str,
    /// The name of the case in the names of parts.
    pub(super) part_name: &'static str,
    model: &'static str,
    rest: &'static str,
}

/// The models whose losses are compared between GPU and CPU.
const CURVE_CASES: [CurveCase; 2] = [
    CurveCase {
        name: "Llama of the quickstart",
        part_name: "llama",
        model: "vocab_size: 257, hidden_size: 128, intermediate_size: 352, num_key_value_heads: 2, tie_word_embeddings: true",
        rest: "data.seq_len=128 batch.global=16 batch.micro=4",
    },
    CurveCase {
        name: "GPT-2, 4 layers of 256",
        part_name: "gpt2",
        model: "family: gpt2, vocab_size: 1000, hidden_size: 256, intermediate_size: 1024, tie_word_embeddings: true",
        rest: "data.seq_len=128 batch.global=8 batch.micro=2",
    },
];
/// The small models whose losses are compared between GPU and CPU in tests.
const TINY_CURVE_CASES: [CurveCase; 1] = [CurveCase {
    name: "a tiny Llama",
    part_name: "llama",
    model: "vocab_size: 257, hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1, num_attention_heads: 2, tie_word_embeddings: true",
    rest: "data.seq_len=6 batch.global=4 batch.micro=1",
}];

/// The precisions in which training is compared, with the largest accepted relative difference of a
/// loss. In fp8 a difference in the last bit of a sum may round an operand to another value, so the
/// tolerance is larger.
pub(super) const CURVE_PRECISIONS: [(&str, f64); 3] = [("fp32", 1e-4), ("bf16", 2e-2), ("fp8", 5e-2)];

/// Returns the models whose losses are compared.
pub(super) fn select_curve_cases(tiny: bool) -> &'static [CurveCase] {
    if tiny { &TINY_CURVE_CASES } else { &CURVE_CASES }
}

/// The numbers of ranks of a comparison, and how the ranks exchange data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CurveTransport {
    /// One rank.
    OneRank,
    /// Two ranks, and then four, which exchange data through host memory.
    SeveralRanks,
    /// One rank with NCCL.
    NcclOneRank,
    /// Two ranks that share the GPU, with NCCL.
    NcclTwoRanks,
}

impl CurveTransport {
    /// Returns the group of the parts with these ranks.
    pub(super) fn part_group(self) -> &'static str {
        match self {
            CurveTransport::OneRank => "curves",
            CurveTransport::SeveralRanks => "ranks",
            CurveTransport::NcclOneRank => "nccl",
            CurveTransport::NcclTwoRanks => "nccl-2",
        }
    }

    /// Returns about how many seconds such a part takes.
    pub(super) fn expected_seconds(self) -> u64 {
        match self {
            CurveTransport::OneRank => 3,
            CurveTransport::SeveralRanks => 5,
            CurveTransport::NcclOneRank => 5,
            CurveTransport::NcclTwoRanks => 10,
        }
    }
}

/// Trains a model on the GPU and on the CPU, and reports a row for each number of ranks.
pub(super) fn compare_curves(
    output: &PartOutput,
    open: OpenGpu,
    tiny: bool,
    (case, precision): (usize, usize),
    transport: CurveTransport,
) -> diagnostic::Result<()> {
    let (case, (precision, tolerance)) = (&select_curve_cases(tiny)[case], CURVE_PRECISIONS[precision]);
    let subject = |ranks: &str| format!("{}, {precision}, {ranks}", case.name);
    if precision == "fp8" && !open()?.properties().has_fp8() {
        output.row(Row::skipped(subject("all ranks"), "the GPU has no fp8"));
        return Ok(());
    }
    let nccl = match transport {
        CurveTransport::OneRank | CurveTransport::SeveralRanks => None,
        CurveTransport::NcclOneRank | CurveTransport::NcclTwoRanks => match open_nccl(transport) {
            Ok(nccl) => Some(nccl),
            Err(why) => {
                output.row(Row::skipped(subject("NCCL"), why));
                return Ok(());
            }
        },
    };
    let compared: &[(&str, usize)] = match transport {
        CurveTransport::OneRank => &[("1 rank", 1)],
        CurveTransport::SeveralRanks => &[("2 ranks on this GPU", 2), ("4 ranks on this GPU", 4)],
        CurveTransport::NcclOneRank => &[("1 rank, NCCL", 1)],
        CurveTransport::NcclTwoRanks => &[("2 ranks on this GPU, NCCL", 2)],
    };
    let rest = format!("{} precision={precision} zero.stage=3 optimizer.lr=1e-3", case.rest);
    let spec = require_train_section(&build_check_job(case.model, &rest)?)?.clone();
    let steps = if tiny { 2 } else { 10 };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let one_rank: Arc<dyn Comm> = Arc::new(local::create_group(1).remove(0));
    let cpu = train_for_curve(&spec, one_rank, Arc::new(Cpu::new(threads)), steps)?;
    let expected = match transport {
        CurveTransport::OneRank => None,
        _ => Some(train_on_gpu_for_curve(&spec, open, RankTransport::HostMemory, 1, steps)?),
    };
    for (ranks, world) in compared {
        let transport = nccl.as_ref().map_or(RankTransport::HostMemory, RankTransport::Nccl);
        let row = match train_on_gpu_for_curve(&spec, open, transport, *world, steps) {
            Ok(gpu) => compare_losses(subject(ranks), tolerance, &gpu, &cpu, expected.as_ref()),
            Err(error) => Row::failed(subject(ranks), error.to_string()),
        };
        output.row(row);
    }
    Ok(())
}

/// Opens NCCL. Fails with the reason why it cannot be used for these ranks.
fn open_nccl(transport: CurveTransport) -> Result<NcclLibrary, String> {
    let directories = collect_library_search_paths(&[], Path::new("")).list_directories(CudaLibrary::Nccl);
    let nccl = NcclLibrary::open(&directories).map_err(|error| error.to_string())?;
    if transport == CurveTransport::NcclTwoRanks && !nccl.supports_gpu_sharing() {
        return Err(format!("{} does not support two ranks on one GPU", nccl.describe()));
    }
    Ok(nccl)
}

/// Compares the losses of a training run on the GPU with those on the CPU, and with those of one
/// rank on the GPU, to which they must be bit-equal. Returns the row of the comparison.
fn compare_losses(
    subject: String,
    tolerance: f64,
    gpu: &TrainingCurve,
    cpu: &TrainingCurve,
    one_rank: Option<&TrainingCurve>,
) -> Row {
    let error = compute_loss_error(gpu, cpu);
    let cause = if error > tolerance || error.is_nan() {
        Some(format!("the losses differ from those of the CPU by {error:.1e}, more than {tolerance:.0e}"))
    } else if one_rank.is_some_and(|expected| expected != gpu) {
        Some("the losses are not bit-equal to those of 1 rank".to_owned())
    } else {
        None
    };
    Row {
        subject,
        values: format!("loss error {error:.1e}"),
        result: if cause.is_some() { RowResult::Failed } else { RowResult::Ok },
        cause,
        data: json!({"loss_error": error, "gpu": gpu, "cpu": cpu}),
    }
}

/// Computes the largest relative difference between the losses of two training runs.
fn compute_loss_error(a: &TrainingCurve, b: &TrainingCurve) -> f64 {
    a.iter()
        .zip(b)
        .map(|((a, _), (b, _))| ((a - b) / b).abs())
        .fold(0.0, |largest, error| if error.is_nan() { error } else { error.max(largest) })
}
