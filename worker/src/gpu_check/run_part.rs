//! Runs one part of `launch gpu-check` in the process that was started for the part.
use super::{
    check_job::catch_panic,
    curves::compare_curves,
    environment::{report_environment, report_kernel_loading, report_used_kernels},
    memory_file::open_memory_file,
    message::{PartMessage, PartOutput, ResultRow, RowResult},
    nccl_ranks::TwoRankTraining,
    op_speed::measure_op_speed,
    part_filter::PartFilter,
    parts::{PartWork, list_parts, select_parts},
    restart::check_restart,
    throughput::{report_model_profile, report_model_speed, report_save_cost},
};
use crate::gpu::{collect_library_search_paths, find_kernel_cache_directory, to_unusable_gpu_error};
use device::{
    Cuda,
    conformance::{self, MaxErrors, OpFamilyReport},
    cuda::{AttentionBackend, CudaError, log_launches_to},
};
use diagnostic::{Diagnostic, codes};
use serde_json::json;
use std::{path::Path, sync::Arc};

/// The number of random shapes for which the GPU check compares each family of operations on the
/// GPU with the CPU.
const RANDOM_SHAPES: usize = 40;
/// The number of random shapes for which the GPU check with `--quick` compares each family of
/// operations on the GPU with the CPU.
const QUICK_RANDOM_SHAPES: usize = 2;

/// The divisor that makes operands smaller in the GPU check with `--tiny`, for the comparison of
/// operations on shapes of real models.
const TINY_SHAPE_DIVISOR: usize = 1 << 9;

/// Runs the part `name` of the GPU check in this process, and sends its table rows and its final
/// success or error to the parent process. Logs the launches in the file `launch_log`. With
/// `rank_memory`, runs the part as rank 1, which shares that memory with rank 0. Returns whether
/// the part ended without an error.
pub(super) fn run_part(
    name: &str,
    device: usize,
    filter: PartFilter,
    launch_log: Option<&Path>,
    rank_memory: Option<&Path>,
) -> diagnostic::Result<bool> {
    if let Some(path) = launch_log {
        open_memory_file(path).and_then(|file| log_launches_to(&file)).map_err(|error| {
            let message = format!("cannot open the launch log {}: {error}", path.display());
            Diagnostic::error(codes::run::INTERNAL, message)
        })?;
    }
    let output = PartOutput;
    let result = catch_panic(|| do_part_work(&output, name, device, filter, rank_memory));
    let is_ok = result.is_ok();
    output.print_message(&match result {
        Ok(()) => PartMessage::Done,
        Err(error) => PartMessage::Failed { error: Box::new(error) },
    });
    Ok(is_ok)
}

/// Opens GPU number `device` with the kernels and CUDA libraries of launch's built-in training. An
/// error has the category `Cluster`.
pub(super) fn open_gpu(device: usize) -> diagnostic::Result<Arc<Cuda>> {
    Cuda::open(&collect_library_search_paths(&[], Path::new("")), device, find_kernel_cache_directory())
        .map(Arc::new)
        .map_err(to_unusable_gpu_error)
}

/// Does the work of the part `name` of the GPU check, and sends its table rows to the parent
/// process.
fn do_part_work(
    output: &PartOutput,
    name: &str,
    device: usize,
    filter: PartFilter,
    rank_memory: Option<&Path>,
) -> diagnostic::Result<()> {
    let open = || open_gpu(device);
    let parts = select_parts(list_parts(filter), &[name.to_owned()])?;
    let rounds = if filter.quick { QUICK_RANDOM_SHAPES } else { RANDOM_SHAPES };
    for part in parts {
        match part.work {
            PartWork::Environment => report_environment(output, &open)?,
            PartWork::Kernels => report_kernel_loading(output, &*open()?)?,
            PartWork::Speed(group) => {
                let (cuda, cudnn) = (open()?, open_gpu_with_cudnn(device));
                measure_op_speed(output, group, &cuda, cudnn.ok().as_ref())?;
                report_used_kernels(output, &cuda)?;
            }
            PartWork::Family(number) => {
                let (name, cuda) = (conformance::OP_FAMILY_NAMES[number], open()?);
                output.send_row(match conformance::compare_family_with_cpu(&cuda, number, 1, rounds) {
                    Some(report) => to_family_row(&report),
                    None => ResultRow::skipped(name, format!("{} has no fp8", cuda.describe_gpu())),
                });
            }
            PartWork::Shape(number) => {
                let (cuda, threads) = (open()?, std::thread::available_parallelism().map_or(1, usize::from));
                let divisor = if filter.tiny { TINY_SHAPE_DIVISOR } else { 1 };
                let report = conformance::compare_realistic_shape_with_cpu(&cuda, number, divisor, threads);
                output.send_row(report.as_ref().map_or_else(
                    || ResultRow::skipped(conformance::REALISTIC_SHAPE_NAMES[number], "the GPU has no fp8"),
                    to_family_row,
                ));
                report_used_kernels(output, &cuda)?;
            }
            PartWork::CudnnAttention => output.send_row(match open_gpu_with_cudnn(device) {
                Ok(cudnn) => to_family_row(&conformance::compare_cudnn_attention_with_cpu(&cudnn, 1, rounds)),
                Err(error @ CudaError::LibraryNotFound { .. }) => {
                    ResultRow::skipped(conformance::CUDNN_ATTENTION_FAMILY, error.to_string())
                }
                Err(error) => return Err(error.into()),
            }),
            PartWork::Curve { case, precision, transport } => {
                let second_rank = TwoRankTraining { part: name, device, filter, memory: rank_memory };
                compare_curves(output, &open, (case, precision), transport, &second_rank)?;
            }
            PartWork::Restart => check_restart(output, &open, filter.tiny)?,
            PartWork::Model(number) => report_model_speed(output, &open, filter.tiny, number)?,
            PartWork::Profile(number) => report_model_profile(output, &open, filter.tiny, number)?,
            PartWork::Save(number) => report_save_cost(output, &open, filter.tiny, number)?,
        }
    }
    Ok(())
}

/// Opens GPU number `device` with cuDNN for attention.
fn open_gpu_with_cudnn(device: usize) -> Result<Cuda, CudaError> {
    let paths = collect_library_search_paths(&[], Path::new(""));
    let cuda = Cuda::open(&paths, device, find_kernel_cache_directory())?;
    cuda.set_attention_backend(AttentionBackend::Cudnn, &paths)?;
    Ok(cuda)
}

/// Converts the errors of the GPU's results, compared with the CPU's, for one family of operations
/// (such as norms) to a row of the result table.
fn to_family_row(report: &OpFamilyReport) -> ResultRow {
    let MaxErrors { f32, bf16, f16 } = report.max_errors;
    let failure = report.failure.clone().map(Diagnostic::from);
    ResultRow {
        subject: report.family.to_owned(),
        values: format!("{} shapes, errors: f32 {f32:.1e}, bf16 {bf16:.1e}, f16 {f16:.1e}", report.cases),
        result: if failure.is_some() { RowResult::Failed } else { RowResult::Ok },
        cause: failure.map(|error| format!("{}: {}", error.code().name(), error.message())),
        data: json!({"cases": report.cases, "f32": f32, "bf16": bf16, "f16": f16}),
    }
}
