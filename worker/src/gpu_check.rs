//! Implements `launch gpu-check`, which compares a GPU's operations and training with the CPU and
//! measures their speed. Needs a driver, NVRTC and cuBLASLt. `scripts/gpu-check` runs this command.
mod check_job;
mod curves;
mod op_speed;
mod throughput;
mod timed_models;

use crate::gpu::{collect_library_search_paths, find_kernel_cache_directory, to_unusable_gpu_error};
use check_job::{OpenGpu, run_check};
use comm::nccl::NcclLibrary;
use curves::compare_and_print_curves;
use device::{
    Cuda, conformance,
    cuda::{self, AttentionBackend, CudaError, CudaLibrary, LibrarySearchPaths},
};
use diagnostic::Diagnostic;
use op_speed::measure_and_print_op_speed;
use std::{path::Path, sync::Arc, time::Instant};
use throughput::{measure_and_print_speed, measure_model, profile_model};
use timed_models::describe_models;

/// The number of random shapes with which each family of operations is compared.
const ROUNDS: usize = 40;
/// The number of random shapes with which each family of operations is compared if `--quick` is
/// given.
const QUICK_ROUNDS: usize = 2;
/// The options of `launch gpu-check`.
#[derive(Clone, Copy, Debug)]
pub struct GpuCheckOptions {
    /// The index of the GPU.
    pub device: usize,
    /// Whether the models have few parameters, for slow GPUs.
    pub tiny: bool,
    /// The work to do.
    pub task: GpuCheckTask,
}

/// The work that `launch gpu-check` does.
#[derive(Clone, Copy, Debug)]
pub enum GpuCheckTask {
    /// Compares operations and training with the CPU, and measures their speed.
    Check {
        /// Whether to compare only a few shapes and time no operation. Training is skipped unless
        /// [`GpuCheckOptions::tiny`] is set.
        quick: bool,
        /// Whether to skip the training checks.
        ops_only: bool,
    },
    /// Prints, as JSON, the models whose training is timed, for `scripts/bench/compare_torch`.
    ListModels,
    /// Times the training of the model with this index, and prints the result as JSON.
    MeasureModel(usize),
    /// Prints the time of each operation of a training step of the model with this index.
    ProfileModel(usize),
}

/// Runs `launch gpu-check` and prints the results to standard output. Returns whether all results
/// agree with the CPU.
///
/// # Errors
///
/// Fails with the category `Cluster` if the GPU or a library is not usable, and with the category
/// `Failed` if an operation of a check fails.
pub fn run_gpu_check(options: GpuCheckOptions) -> diagnostic::Result<bool> {
    let GpuCheckOptions { device, tiny, task } = options;
    let open = || {
        Cuda::open(&collect_library_search_paths(&[], Path::new("")), device, find_kernel_cache_directory())
            .map(Arc::new)
            .map_err(to_unusable_gpu_error)
    };
    match task {
        GpuCheckTask::Check { quick, ops_only } => {
            let cuda = open()?;
            return run_check(|| run_and_print_checks(&cuda, options, quick, ops_only, &open));
        }
        GpuCheckTask::ListModels => println!("{}", describe_models(tiny)?),
        GpuCheckTask::MeasureModel(number) => println!("{}", measure_model(&open, tiny, number)?),
        GpuCheckTask::ProfileModel(number) => profile_model(&open, tiny, number)?,
    }
    Ok(true)
}

/// Checks and times the GPU according to `options`, and prints the results as tables. Returns
/// whether every result agrees with the CPU.
fn run_and_print_checks(
    cuda: &Cuda,
    options: GpuCheckOptions,
    quick: bool,
    ops_only: bool,
    open: OpenGpu,
) -> diagnostic::Result<bool> {
    let paths = collect_library_search_paths(&[], Path::new(""));
    print_properties(cuda)?;
    let nccl = NcclLibrary::open(&paths.list_directories(CudaLibrary::Nccl));
    match &nccl {
        Ok(nccl) => println!("{}", nccl.describe()),
        Err(e) => println!("NCCL is not available: {e}"),
    }
    let cudnn = open_with_cudnn(&paths, options.device)?;
    let began = Instant::now();
    cuda.load_kernels()?;
    println!("kernels loaded in {:.2} s\n", began.elapsed().as_secs_f64());
    if let Some(why) = cuda.kernel_cache_error() {
        println!("compiled kernels are not cached: {why}\n");
    }
    let tiny = options.tiny;
    let agrees = compare_and_print_ops(cuda, cudnn.as_ref(), if quick { QUICK_ROUNDS } else { ROUNDS });
    if agrees && !quick {
        measure_and_print_op_speed(cuda, cudnn.as_ref())?;
    }
    drop(cudnn);
    if ops_only || (quick && !tiny) {
        return Ok(agrees);
    }
    let has_fp8 = cuda.properties().has_fp8();
    let agrees = agrees && compare_and_print_curves(open, nccl.as_ref().ok(), tiny, has_fp8);
    if agrees && (!quick || tiny) {
        measure_and_print_speed(open, tiny);
    }
    Ok(agrees)
}

/// Prints the GPU's name, its memory, and the versions of its libraries.
fn print_properties(cuda: &Cuda) -> Result<(), CudaError> {
    let (gpu, libraries) = (cuda.properties(), cuda.loaded_libraries());
    let (free, total) = cuda.query_memory_info()?;
    let gib = |bytes: usize| bytes as f64 / f64::from(1 << 30);
    println!("GPU {}: {}, {} multiprocessors", gpu.index, cuda.describe_gpu(), gpu.multiprocessor_count);
    println!("memory: {:.1} of {:.1} GiB free", gib(free), gib(total));
    println!(
        "driver: CUDA {}.{} ({})",
        gpu.driver_version.0,
        gpu.driver_version.1,
        gpu.driver_path.display()
    );
    let ((major, minor), path) = libraries.nvrtc;
    println!("NVRTC {major}.{minor} ({})", path.display());
    println!("cuBLASLt {} ({})", libraries.cublas_lt.0, libraries.cublas_lt.1.display());
    Ok(())
}

/// Opens the GPU with cuDNN for attention, or returns `None` if cuDNN is not available. Prints the
/// version of cuDNN, or why it is not available.
fn open_with_cudnn(paths: &LibrarySearchPaths, device: usize) -> Result<Option<Cuda>, CudaError> {
    let cudnn = cuda::query_library_versions(paths).into_iter().find(|(name, _)| *name == "cuDNN");
    match cudnn.map(|(_, found)| found) {
        Some(Ok((version, path))) => println!("cuDNN {version} ({})", path.display()),
        Some(Err(e)) => {
            println!("cuDNN is not available: {e}");
            return Ok(None);
        }
        None => return Ok(None),
    }
    let cuda = Cuda::open(paths, device, find_kernel_cache_directory())?;
    cuda.set_attention_backend(AttentionBackend::Cudnn, paths)?;
    Ok(Some(cuda))
}

/// Compares every operation on the GPU with the CPU as the reference and prints a table of the
/// errors. Returns whether all operations agree.
fn compare_and_print_ops(cuda: &Cuda, cudnn: Option<&Cuda>, rounds: usize) -> bool {
    println!("| operation, compared with the CPU | shapes | f32 error | bf16 error | f16 error | result |");
    println!("|---|---|---|---|---|---|");
    let mut reports = conformance::compare_ops_with_cpu(cuda, 1, rounds);
    reports.extend(cudnn.map(|cuda| conformance::compare_cudnn_attention_with_cpu(cuda, 1, rounds)));
    for report in &reports {
        let conformance::MaxErrors { f32, bf16, f16 } = report.max_errors;
        let result = if report.failure.is_some() { "FAILED" } else { "ok" };
        println!("| {} | {} | {f32:.1e} | {bf16:.1e} | {f16:.1e} | {result} |", report.family, report.cases);
    }
    println!();
    for report in &reports {
        if let Some(failure) = &report.failure {
            let diagnostic = Diagnostic::from(failure.clone());
            let message = format!("{}: {}", report.family, diagnostic.message());
            print!("{}", diagnostic::render(&diagnostic.with_message(message), false));
        }
    }
    reports.iter().all(|report| report.failure.is_none())
}
