//! Compares the losses of training on a GPU with those of training on the CPU, for `launch
//! gpu-check`. Models have random weights, and the data are generated.
use super::{
    check_job::{GpuOpener, build_check_job, require_train_section},
    curve_cases::{CURVE_PRECISIONS, CurveRanks, select_curve_cases},
    curve_training::{TrainingCurve, train_for_curve, train_on_gpu_for_curve},
    message::{PartOutput, ResultRow, RowResult},
    nccl_ranks::TwoRankTraining,
};
use crate::gpu::collect_library_search_paths;
use comm::{Comm, nccl::NcclLibrary, thread_comm};
use device::{Cpu, cuda::CudaLibrary};
use serde_json::json;
use std::{path::Path, sync::Arc};

/// Trains a small model on the GPU and on the CPU for a few steps, and reports how much the losses
/// differ, with one row for each tested number of ranks. With [`CurveRanks::NcclTwoRanks`],
/// `second_rank` is the other rank.
pub(super) fn compare_curves(
    output: &PartOutput,
    open: GpuOpener,
    (case, precision): (usize, usize),
    transport: CurveRanks,
    second_rank: &TwoRankTraining,
) -> diagnostic::Result<()> {
    let tiny = second_rank.filter.tiny;
    let (case, (precision, tolerance)) = (&select_curve_cases(tiny)[case], CURVE_PRECISIONS[precision]);
    let subject = |ranks: &str| format!("{}, {precision}, {ranks}", case.name);
    if precision == "fp8" && !open()?.properties().has_fp8() {
        output.send_row(ResultRow::skipped(subject("all ranks"), "the GPU has no fp8"));
        return Ok(());
    }
    let nccl = match transport {
        CurveRanks::OneRank | CurveRanks::SeveralRanks => None,
        CurveRanks::NcclOneRank | CurveRanks::NcclTwoRanks => {
            match open_nccl_or_skip(output, &subject("NCCL"), transport) {
                Some(nccl) => Some(nccl),
                None => return Ok(()),
            }
        }
    };
    // A scale at which no gradient overflows, so that GPU and CPU skip no step.
    let scale = if precision == "fp16" { " loss_scale.initial_scale_power=8" } else { "" };
    let rest = format!("{} precision={precision} zero.stage=3 optimizer.lr=1e-3{scale}", case.rest);
    let spec = require_train_section(&build_check_job(case.model, &rest)?)?.clone();
    let steps = if tiny { 2 } else { 10 };
    // Training with one rank first also loads every kernel that the ranks need.
    let one_rank = match transport {
        CurveRanks::OneRank => None,
        _ => Some(train_on_gpu_for_curve(&spec, open, None, 1, steps)?),
    };
    if second_rank.memory.is_some() {
        return second_rank.train_as_rank_one(output, &spec, open, nccl.as_ref(), steps);
    }
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let cpu_comm: Arc<dyn Comm> = Arc::new(thread_comm::create_thread_group(1).remove(0));
    let cpu = train_for_curve(&spec, cpu_comm, Arc::new(Cpu::new(threads)), steps)?;
    let compared: &[(&str, usize)] = match transport {
        CurveRanks::OneRank => &[("1 rank", 1)],
        CurveRanks::SeveralRanks => &[("2 ranks on this GPU", 2), ("4 ranks on this GPU", 4)],
        CurveRanks::NcclOneRank => &[("1 rank, NCCL", 1)],
        CurveRanks::NcclTwoRanks => &[("2 ranks on this GPU, NCCL", 2)],
    };
    for (ranks, world) in compared {
        let curve = match transport {
            CurveRanks::NcclTwoRanks => second_rank.train_as_rank_zero(&spec, open, nccl.as_ref(), steps),
            _ => train_on_gpu_for_curve(&spec, open, nccl.as_ref(), *world, steps),
        };
        output.send_row(match curve {
            Ok(gpu) => compare_losses(subject(ranks), tolerance, &gpu, &cpu, one_rank.as_ref()),
            Err(error) => {
                ResultRow::failed(subject(ranks), format!("{}: {}", error.code().name(), error.message()))
            }
        });
    }
    Ok(())
}

/// Opens the NCCL library, or reports in the result table that the comparison named `subject` is
/// skipped because NCCL is unusable, and returns `None`.
fn open_nccl_or_skip(output: &PartOutput, subject: &str, transport: CurveRanks) -> Option<NcclLibrary> {
    let directories = collect_library_search_paths(&[], Path::new("")).list_directories(CudaLibrary::Nccl);
    let reason = match NcclLibrary::open(&directories) {
        Ok(nccl) if transport == CurveRanks::NcclTwoRanks && !nccl.supports_gpu_sharing() => {
            format!("{} does not support two ranks on one GPU", nccl.describe())
        }
        Ok(nccl) => return Some(nccl),
        Err(error) => error.to_string(),
    };
    output.send_row(ResultRow::skipped(subject, reason));
    None
}

/// Checks that the GPU's losses differ from the CPU's by at most the relative `tolerance`, and
/// equal the losses of one GPU rank if those are given. Returns the row of the comparison.
fn compare_losses(
    subject: String,
    tolerance: f64,
    gpu: &TrainingCurve,
    cpu: &TrainingCurve,
    one_rank: Option<&TrainingCurve>,
) -> ResultRow {
    let error = compute_max_loss_difference(gpu, cpu);
    let cause = if error > tolerance || error.is_nan() {
        Some(format!("the losses differ from those of the CPU by {error:.1e}, more than {tolerance:.0e}"))
    } else if one_rank.is_some_and(|expected| expected != gpu) {
        Some("the losses are not bit-equal to those of 1 rank".to_owned())
    } else {
        None
    };
    ResultRow {
        subject,
        values: format!("loss error {error:.1e}"),
        result: if cause.is_some() { RowResult::Failed } else { RowResult::Ok },
        cause,
        data: json!({"loss_error": error, "gpu": gpu, "cpu": cpu}),
    }
}

/// Computes the largest relative difference between the losses of two training runs.
fn compute_max_loss_difference(a: &TrainingCurve, b: &TrainingCurve) -> f64 {
    a.iter()
        .zip(b)
        .map(|((a, _), (b, _))| ((a - b) / b).abs())
        .fold(0.0, |largest, error| if error.is_nan() { error } else { error.max(largest) })
}
