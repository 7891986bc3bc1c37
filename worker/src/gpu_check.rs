//! `launch gpu-check`: compares the operations and training of a GPU with the CPU and measures
//! their speed. Needs a driver, NVRTC and cuBLASLt. `scripts/gpu-check` runs this command.
mod curves;
mod throughput;

use crate::{
    gpu::{collect_library_search_paths, find_kernel_cache_directory, to_unusable_gpu_error},
    runtime::silence_device_panics,
};
use comm::nccl::NcclLibrary;
use contract::exit;
use device::{
    Buf, Cuda, Dtype, Ops, conformance,
    cuda::{self, AttentionBackend, CudaError, CudaLibrary, LibrarySearchPaths},
    ops::{AdamWHyperparams, AttentionShape, WriteMode},
    storage::{DeviceError, extract_panic_message},
};
use diagnostic::{Diagnostic, codes};
use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

/// The number of random shapes of each family of operations.
const ROUNDS: usize = 40;
/// The number of random shapes of each family of operations with `--quick`.
const QUICK_ROUNDS: usize = 2;
/// The duration for which an operation is repeated while it is timed.
const TIMED_DURATION: Duration = Duration::from_millis(300);
/// The longest wait until the ranks of a training check have joined the NCCL communicator.
const NCCL_TIMEOUT: Duration = Duration::from_secs(60);

/// The command-line options of `launch gpu-check`.
#[derive(Clone, Copy, Debug, Default)]
struct GpuCheckOptions {
    /// The index of the GPU.
    device: usize,
    /// Whether to compare only a few shapes and time no operation. Training is skipped unless
    /// `tiny` is set.
    quick: bool,
    /// Whether to train models with only a few elements, for slow GPUs.
    tiny: bool,
    /// Whether to skip the training checks.
    ops_only: bool,
    /// Whether to print the models that are timed, and nothing else.
    list_models: bool,
    /// The index of the only model whose training is timed; no checks are run.
    model: Option<usize>,
    /// The index of the only model of which a training step is profiled; no checks are run.
    profile: Option<usize>,
}

/// The usage line of `launch gpu-check`.
const USAGE: &str =
    "launch gpu-check [--device N] [--quick] [--tiny] [--ops | --models | --model N | --profile N]";

/// The description of `launch gpu-check` in its help.
const HELP: &str = "Compare operations and training on a GPU with the CPU, and measure their speed";

/// The descriptions of the options of `launch gpu-check` in its help.
const OPTIONS_HELP: &str = "\
Options:
      --device <N>   Number of the GPU, from 0 [default: 0]
      --quick        Compare only a few shapes, and time no operation; without --tiny, skip training
      --tiny         Train very small models, for slow GPUs
      --ops          Compare operations only; skip training
      --models       Print a JSON list of the models whose training is timed
      --model <N>    Time the training of model N of this list, from 0; print the result as JSON
      --profile <N>  Print the time of each operation of a training step of model N
  -h, --help         Print help";

/// Runs `launch gpu-check` with these arguments (see [`USAGE`]). Returns the exit code of the
/// process.
///
/// `--models` lists the models that are timed and `--model N` times one of them, both as JSON for
/// `scripts/bench/compare_torch`. `--profile N` shows the time of each operation of a training
/// step.
pub fn main(arguments: impl Iterator<Item = String>) -> u8 {
    let arguments: Vec<String> = arguments.collect();
    if arguments.iter().any(|argument| argument == "--help" || argument == "-h") {
        println!("{HELP}\n\nUsage: {USAGE}\n\n{OPTIONS_HELP}");
        return exit::DONE;
    }
    let options = match parse_options(arguments.into_iter()) {
        Ok(options) => options,
        Err(e) => return print_error(&e),
    };
    if options.list_models {
        return print_json(throughput::describe_models(options.tiny));
    }
    silence_device_panics();
    let open = || {
        Cuda::open(
            &collect_library_search_paths(&[], Path::new("")),
            options.device,
            find_kernel_cache_directory(),
        )
        .map(Arc::new)
        .map_err(to_unusable_gpu_error)
    };
    let cuda = match open() {
        Ok(cuda) => cuda,
        Err(e) => return print_error(&e),
    };
    if let Some(number) = options.model {
        drop(cuda);
        return print_json(throughput::measure_model(&open, options.tiny, number));
    }
    let passed = match options.profile {
        Some(number) => {
            drop(cuda);
            throughput::profile_model(&open, options.tiny, number).map(|()| true)
        }
        None => {
            let checked = catch_unwind(AssertUnwindSafe(|| run_and_print_checks(&cuda, options, &open)));
            checked.unwrap_or_else(|panic| Err(panic_to_diagnostic(panic.as_ref())))
        }
    };
    match passed {
        Ok(true) => exit::DONE,
        Ok(false) => exit::FAILED,
        Err(e) => {
            print_error(&e);
            exit::FAILED
        }
    }
}

/// Parses the command-line options.
fn parse_options(mut arguments: impl Iterator<Item = String>) -> diagnostic::Result<GpuCheckOptions> {
    let usage = |message: String| {
        Diagnostic::error(codes::command::USAGE, message).with_help(format!("usage: {USAGE}"))
    };
    let mut options = GpuCheckOptions::default();
    while let Some(argument) = arguments.next() {
        let mut number = || {
            let value = arguments.next().and_then(|n| n.parse().ok());
            value.ok_or_else(|| usage(format!("`{argument}` requires a number")))
        };
        match argument.as_str() {
            "--quick" => options.quick = true,
            "--tiny" => options.tiny = true,
            "--ops" => options.ops_only = true,
            "--models" => options.list_models = true,
            "--device" => options.device = number()?,
            "--model" => options.model = Some(number()?),
            "--profile" => options.profile = Some(number()?),
            _ => return Err(usage(format!("unknown option `{argument}`"))),
        }
    }
    Ok(options)
}

/// Prints an error and its help to standard output. Returns the exit code of the error's category.
fn print_error(error: &Diagnostic) -> u8 {
    print!("{}", diagnostic::render(error, false));
    error.category().exit_code()
}

/// Prints a result as JSON, or its error on one line. Returns the exit code of the process.
fn print_json(result: diagnostic::Result<serde_json::Value>) -> u8 {
    match result {
        Ok(value) => {
            println!("{value}");
            exit::DONE
        }
        Err(e) => {
            print!("{}", diagnostic::render(&e, false));
            exit::FAILED
        }
    }
}

/// Converts a panic of a check to an error. A failed device operation panics with a
/// [`DeviceError`].
fn panic_to_diagnostic(panic: &(dyn Any + Send)) -> Diagnostic {
    match panic.downcast_ref::<DeviceError>() {
        Some(error) => error.0.clone(),
        None => Diagnostic::error(codes::run::INTERNAL, extract_panic_message(panic)),
    }
}

/// Checks and times the GPU according to `options`, and prints the results as tables. Returns
/// whether every result agrees with the CPU.
fn run_and_print_checks(
    cuda: &Cuda,
    options: GpuCheckOptions,
    open: curves::OpenGpu,
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
    let GpuCheckOptions { quick, tiny, ops_only, .. } = options;
    let agrees = compare_and_print_ops(cuda, cudnn.as_ref(), if quick { QUICK_ROUNDS } else { ROUNDS });
    if agrees && !quick {
        measure_and_print_op_speed(cuda, cudnn.as_ref())?;
    }
    drop(cudnn);
    if ops_only || (quick && !tiny) {
        return Ok(agrees);
    }
    let has_fp8 = cuda.properties().has_fp8();
    let agrees = agrees && curves::compare_and_print_curves(open, nccl.as_ref().ok(), tiny, has_fp8);
    if agrees && (!quick || tiny) {
        throughput::measure_and_print_speed(open, tiny);
    }
    Ok(agrees)
}

/// Prints the GPU, its memory and the versions of its libraries.
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

/// Prints the version of cuDNN. Opens the GPU with cuDNN's attention if cuDNN is available.
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

/// Compares every operation on the GPU with the CPU and prints a table of the errors. Returns
/// whether all operations agree.
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
            print_error(&diagnostic.with_message(message));
        }
    }
    reports.iter().all(|report| report.failure.is_none())
}

/// An operation to time, with the amount of work from which its rate is computed.
struct TimedOp<'a> {
    name: String,
    /// The number of floating-point operations or bytes of one call.
    amount: f64,
    /// The unit of the rate that is printed, which is `amount` per second divided by 10¹².
    unit: &'static str,
    run: Box<dyn FnMut() + 'a>,
}

/// Times single operations and prints a table of their rates.
fn measure_and_print_op_speed(cuda: &Cuda, cudnn: Option<&Cuda>) -> Result<(), CudaError> {
    println!("| operation | time | rate |\n|---|---|---|");
    for (m, n, k) in [(4096, 4096, 4096), (8192, 2304, 768), (8192, 768, 3072), (8192, 50_304, 768)] {
        measure_and_print_op(cuda, prepare_timed_matmul(cuda, m, n, k)?)?;
    }
    for shape in ATTENTION_SHAPES {
        for (cuda, backend) in [(Some(cuda), ""), (cudnn, " by cuDNN")] {
            let Some(cuda) = cuda else { continue };
            for op in prepare_timed_attention(cuda, shape, backend)? {
                measure_and_print_op(cuda, op)?;
            }
        }
    }
    for op in prepare_memory_bound_ops(cuda)? {
        measure_and_print_op(cuda, op)?;
    }
    Ok(())
}

/// Times an operation and prints its row of the table.
fn measure_and_print_op(cuda: &Cuda, mut op: TimedOp) -> Result<(), CudaError> {
    for _ in 0..3 {
        (op.run)();
    }
    cuda.synchronize_checked()?;
    let (mut runs, mut chunk, began) = (0u32, 4, Instant::now());
    while began.elapsed() < TIMED_DURATION {
        (0..chunk).for_each(|_| (op.run)());
        cuda.synchronize_checked()?;
        runs += chunk;
        chunk = (chunk * 2).min(256);
    }
    let seconds = began.elapsed().as_secs_f64() / f64::from(runs);
    println!("| {} | {:.1} µs | {:.2} {} |", op.name, seconds * 1e6, op.amount / seconds / 1e12, op.unit);
    Ok(())
}

/// Prepares a bf16 matmul of `[m, k]` and `[n, k]` for timing.
fn prepare_timed_matmul<'a>(cuda: &'a Cuda, m: usize, n: usize, k: usize) -> Result<TimedOp<'a>, CudaError> {
    let [mut y, x, w] = allocate_buffers(cuda, Dtype::Bf16, [m * n, m * k, n * k])?;
    Ok(TimedOp {
        name: format!("matmul, bf16, {m} × {n} × {k}"),
        amount: 2.0 * (m * n * k) as f64,
        unit: "TFLOP/s",
        run: Box::new(move || {
            cuda.matmul_forward(y.view_mut(), x.view(), w.view(), m, n, k, WriteMode::Overwrite)
        }),
    })
}

/// The attention shapes of GPT-2 and of Llama-3.1-8B: sequences, tokens, query heads, key heads,
/// and head size.
const ATTENTION_SHAPES: [[usize; 5]; 2] = [[8, 1024, 12, 12, 64], [2, 2048, 32, 8, 128]];

/// Prepares the forward and the backward pass of bf16 attention for timing.
fn prepare_timed_attention<'a>(
    cuda: &'a Cuda,
    sizes: [usize; 5],
    backend: &str,
) -> Result<[TimedOp<'a>; 2], CudaError> {
    let [b, t, heads, kv_heads, head_dim] = sizes;
    let shape = AttentionShape::new(b, t, heads, kv_heads, head_dim);
    let [out_len, qkv_len] = [heads, heads + 2 * kv_heads].map(|heads| b * t * heads * head_dim);
    let [mut o, qkv] = allocate_buffers(cuda, Dtype::Bf16, [out_len, qkv_len])?;
    let [mut lse] = allocate_buffers(cuda, Dtype::F32, [b * heads * t])?;
    let [o2, d_o, qkv2, mut dqkv] =
        allocate_buffers(cuda, Dtype::Bf16, [out_len, out_len, qkv_len, qkv_len])?;
    let [lse2] = allocate_buffers(cuda, Dtype::F32, [b * heads * t])?;
    let starts = vec![0; b * t];
    let starts2 = starts.clone();
    // Causal attention computes half of the scores.
    let flops = 2.0 * (b * heads * t * t * head_dim) as f64;
    let text =
        format!("{backend}, bf16, {b} × {t} tokens, {heads} query and {kv_heads} key heads of {head_dim}");
    Ok([
        TimedOp {
            name: format!("attention forward{text}"),
            amount: flops,
            unit: "TFLOP/s",
            run: Box::new(move || {
                cuda.attention_forward(o.view_mut(), lse.view_mut(), qkv.view(), &starts, shape)
            }),
        },
        TimedOp {
            name: format!("attention backward{text}"),
            amount: 2.5 * flops,
            unit: "TFLOP/s",
            run: Box::new(move || {
                let (lse, qkv) = (lse2.view(), qkv2.view());
                cuda.attention_backward(dqkv.view_mut(), d_o.view(), o2.view(), lse, qkv, &starts2, shape);
            }),
        },
    ])
}

/// Prepares memory-bound operations for timing: an addition, RMSNorm and AdamW.
fn prepare_memory_bound_ops(cuda: &Cuda) -> Result<[TimedOp<'_>; 3], CudaError> {
    const N: usize = 64 << 20;
    let (m, d) = (8192, 4096);
    let [mut y, x] = allocate_buffers(cuda, Dtype::Bf16, [N, N])?;
    let [mut normed, rows, w] = allocate_buffers(cuda, Dtype::Bf16, [m * d, m * d, d])?;
    let [mut rstd] = allocate_buffers(cuda, Dtype::F32, [m])?;
    let [mut p, g, mut avg, mut avg_sq] = allocate_buffers(cuda, Dtype::F32, [N, N, N, N])?;
    let h = AdamWHyperparams {
        lr: 1e-3,
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.1,
        step: 1,
        grad_scale: 1.0,
    };
    Ok([
        TimedOp {
            name: format!("add, bf16, {N} elements"),
            amount: (6 * N) as f64,
            unit: "TB/s",
            run: Box::new(move || cuda.add(y.view_mut(), x.view())),
        },
        TimedOp {
            name: format!("RMSNorm, bf16, {m} × {d}"),
            amount: (4 * m * d) as f64,
            unit: "TB/s",
            run: Box::new(move || {
                cuda.rmsnorm_forward(normed.view_mut(), rstd.view_mut(), rows.view(), w.view(), m, d, 1e-5);
            }),
        },
        TimedOp {
            name: format!("AdamW, f32, {N} elements"),
            amount: (28 * N) as f64,
            unit: "TB/s",
            run: Box::new(move || cuda.adamw(p.view_mut(), g.view(), avg.view_mut(), avg_sq.view_mut(), &h)),
        },
    ])
}

/// Allocates zeroed buffers of these lengths, in elements, on the GPU.
fn allocate_buffers<const N: usize>(
    cuda: &Cuda,
    dtype: Dtype,
    lens: [usize; N],
) -> Result<[Buf; N], CudaError> {
    let mut buffers = Vec::with_capacity(N);
    for len in lens {
        buffers.push(cuda.try_zeroed(dtype, len)?);
    }
    Ok(buffers.try_into().unwrap_or_else(|_| unreachable!("one buffer per length")))
}
