//! `launch gpu-check`: compares the operations and training of a GPU with the CPU and measures
//! their speed. Needs a driver, NVRTC and cuBLASLt. `scripts/gpu-check` calls it.
mod curves;
mod throughput;

use crate::gpu::{kernel_cache, library_search, unusable_gpu};
use comm::nccl::Nccl;
use contract::exit;
use device::{
    Buf, Cuda, Dtype, Ops,
    cuda::{self, AttentionBackend, CudaError, CudaLibrary, LibraryPaths},
    ops::{AdamW, AttentionShape, Write},
    parity,
    storage::{DeviceError, panic_message},
};
use diagnostic::{Diagnostic, codes};
use std::{
    any::Any,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

/// Random shapes of each family of operations.
const ROUNDS: usize = 40;
/// Random shapes of each family of operations with `--quick`.
const QUICK_ROUNDS: usize = 2;
/// How long an operation is repeated while it is timed.
const TIMED_DURATION: Duration = Duration::from_millis(300);
/// Longest wait until the ranks of a training check have joined the NCCL communicator.
const NCCL_TIMEOUT: Duration = Duration::from_secs(60);

/// The command-line options.
#[derive(Clone, Copy, Debug, Default)]
struct Options {
    /// The index of the GPU.
    device: usize,
    /// Few shapes and no timing.
    quick: bool,
    /// Training of models with a few elements, for slow GPUs.
    tiny: bool,
    /// No training.
    ops_only: bool,
    /// Prints the models that are timed, and nothing else.
    list_models: bool,
    /// Times training of this model, and nothing else.
    model: Option<usize>,
    /// Profiles a training step of this model, and nothing else.
    profile: Option<usize>,
}

const USAGE: &str =
    "launch gpu-check [--device N] [--quick] [--tiny] [--ops | --models | --model N | --profile N]";

/// Runs `launch gpu-check` with these arguments, see [`USAGE`]. Returns the exit code of the
/// process.
///
/// `--models` lists the models that are timed and `--model N` times one of them, both as JSON for
/// `scripts/bench/compare_torch`. `--profile N` shows the time of each operation of a training
/// step.
pub fn main(arguments: impl Iterator<Item = String>) -> u8 {
    let options = match parse(arguments) {
        Ok(options) => options,
        Err(e) => return report(&e),
    };
    if options.list_models {
        return print_json(throughput::describe_models(options.tiny));
    }
    let open = || {
        Cuda::open(&library_search(&[], Path::new("")), options.device, kernel_cache())
            .map(Arc::new)
            .map_err(unusable_gpu)
    };
    let cuda = match open() {
        Ok(cuda) => cuda,
        Err(e) => return report(&e),
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
        None => check(&cuda, options, &open),
    };
    match passed {
        Ok(true) => exit::DONE,
        Ok(false) => exit::FAILED,
        Err(e) => {
            report(&e);
            exit::FAILED
        }
    }
}

fn parse(mut arguments: impl Iterator<Item = String>) -> diagnostic::Result<Options> {
    let usage = |message: String| {
        Diagnostic::error(codes::command::USAGE, message).with_help(format!("usage: {USAGE}"))
    };
    let mut options = Options::default();
    while let Some(argument) = arguments.next() {
        let mut number = || {
            let value = arguments.next().and_then(|n| n.parse().ok());
            value.ok_or_else(|| usage(format!("option {argument} needs a number")))
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

/// Prints an error and its help. Returns the exit code of its category.
fn report(error: &Diagnostic) -> u8 {
    println!("gpu-check: {error}");
    for help in error.help() {
        println!("  help: {help}");
    }
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
            println!("gpu-check: {e}");
            exit::FAILED
        }
    }
}

/// Converts the panic of a check to its error. A failed device operation panics with a
/// [`DeviceError`].
fn from_panic(panic: &(dyn Any + Send)) -> Diagnostic {
    match panic.downcast_ref::<DeviceError>() {
        Some(error) => error.0.clone(),
        None => Diagnostic::error(codes::run::INTERNAL, panic_message(panic)),
    }
}

/// Prints all tables. Returns whether every result agrees with the CPU.
fn check(cuda: &Cuda, options: Options, open: curves::Open) -> diagnostic::Result<bool> {
    let paths = library_search(&[], Path::new(""));
    print_properties(cuda)?;
    let nccl = Nccl::open(&paths.directories(CudaLibrary::Nccl));
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
    let Options { quick, tiny, ops_only, .. } = options;
    let agrees = print_conformance(cuda, cudnn.as_ref(), if quick { QUICK_ROUNDS } else { ROUNDS });
    if agrees && !quick {
        print_op_speed(cuda, cudnn.as_ref())?;
    }
    drop(cudnn);
    if ops_only || (quick && !tiny) {
        return Ok(agrees);
    }
    let has_fp8 = cuda.properties().has_fp8();
    let agrees = agrees && curves::print_curves(open, nccl.as_ref().ok(), tiny, has_fp8);
    if agrees && (!quick || tiny) {
        throughput::print_speed(open, tiny);
    }
    Ok(agrees)
}

/// Prints the GPU, its memory and the versions of its libraries.
fn print_properties(cuda: &Cuda) -> Result<(), CudaError> {
    let (gpu, libraries) = (cuda.properties(), cuda.loaded_libraries());
    let (free, total) = cuda.memory_info()?;
    let gib = |bytes: usize| bytes as f64 / f64::from(1 << 30);
    println!("GPU {}: {}, {} multiprocessors", gpu.index, cuda.describe(), gpu.multiprocessor_count);
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

/// Prints the version of cuDNN, and opens the GPU with its attention if it is available.
fn open_with_cudnn(paths: &LibraryPaths, device: usize) -> Result<Option<Cuda>, CudaError> {
    let cudnn = cuda::library_versions(paths).into_iter().find(|(name, _)| *name == "cuDNN");
    match cudnn.map(|(_, found)| found) {
        Some(Ok((version, path))) => println!("cuDNN {version} ({})", path.display()),
        Some(Err(e)) => {
            println!("cuDNN is not available: {e}");
            return Ok(None);
        }
        None => return Ok(None),
    }
    let cuda = Cuda::open(paths, device, kernel_cache())?;
    cuda.set_attention_backend(AttentionBackend::Cudnn, paths)?;
    Ok(Some(cuda))
}

/// Compares every operation with the CPU's. Returns whether all agree.
fn print_conformance(cuda: &Cuda, cudnn: Option<&Cuda>, rounds: usize) -> bool {
    println!("| operation, compared with the CPU | shapes | f32 error | bf16 error | f16 error | result |");
    println!("|---|---|---|---|---|---|");
    let mut rows = parity::run(cuda, 1, rounds);
    rows.extend(cudnn.map(|cuda| parity::by_cudnn(cuda, 1, rounds)));
    for row in &rows {
        let parity::Worst { f32, bf16, f16 } = row.worst;
        let result = row.failed.as_deref().unwrap_or("ok");
        println!("| {} | {} | {f32:.1e} | {bf16:.1e} | {f16:.1e} | {result} |", row.what, row.shapes);
    }
    println!();
    rows.iter().all(|row| row.failed.is_none())
}

/// An operation that is timed.
struct TimedOp<'a> {
    name: String,
    /// Floating-point operations or bytes of one call.
    amount: f64,
    /// The unit of `amount` per second, divided by 10¹².
    unit: &'static str,
    run: Box<dyn FnMut() + 'a>,
}

fn print_op_speed(cuda: &Cuda, cudnn: Option<&Cuda>) -> Result<(), CudaError> {
    println!("| operation | time | rate |\n|---|---|---|");
    for (m, n, k) in [(4096, 4096, 4096), (8192, 2304, 768), (8192, 768, 3072), (8192, 50_304, 768)] {
        time_op(cuda, matmul(cuda, m, n, k)?)?;
    }
    for shape in ATTENTION_SHAPES {
        for (cuda, backend) in [(Some(cuda), ""), (cudnn, " by cuDNN")] {
            let Some(cuda) = cuda else { continue };
            for op in attention(cuda, shape, backend)? {
                time_op(cuda, op)?;
            }
        }
    }
    for op in memory_bound_ops(cuda)? {
        time_op(cuda, op)?;
    }
    Ok(())
}

/// Times an operation and prints its row.
fn time_op(cuda: &Cuda, mut op: TimedOp) -> Result<(), CudaError> {
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

fn matmul<'a>(cuda: &'a Cuda, m: usize, n: usize, k: usize) -> Result<TimedOp<'a>, CudaError> {
    let [mut y, x, w] = buffers(cuda, Dtype::Bf16, [m * n, m * k, n * k])?;
    Ok(TimedOp {
        name: format!("matmul, bf16, {m} × {n} × {k}"),
        amount: 2.0 * (m * n * k) as f64,
        unit: "TFLOP/s",
        run: Box::new(move || cuda.matmul_forward(y.view_mut(), x.view(), w.view(), m, n, k, Write::Set)),
    })
}

/// Sequences, tokens, query heads, key heads, and head size: the attention of GPT-2 and
/// Llama-3.1-8B.
const ATTENTION_SHAPES: [[usize; 5]; 2] = [[8, 1024, 12, 12, 64], [2, 2048, 32, 8, 128]];

fn attention<'a>(cuda: &'a Cuda, sizes: [usize; 5], backend: &str) -> Result<[TimedOp<'a>; 2], CudaError> {
    let [b, t, heads, kv_heads, head_dim] = sizes;
    let shape = AttentionShape::new(b, t, heads, kv_heads, head_dim);
    let [out_len, qkv_len] = [heads, heads + 2 * kv_heads].map(|heads| b * t * heads * head_dim);
    let [mut o, qkv] = buffers(cuda, Dtype::Bf16, [out_len, qkv_len])?;
    let [mut lse] = buffers(cuda, Dtype::F32, [b * heads * t])?;
    let [o2, d_o, qkv2, mut dqkv] = buffers(cuda, Dtype::Bf16, [out_len, out_len, qkv_len, qkv_len])?;
    let [lse2] = buffers(cuda, Dtype::F32, [b * heads * t])?;
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

/// Operations whose speed is limited by memory bandwidth.
fn memory_bound_ops(cuda: &Cuda) -> Result<[TimedOp<'_>; 3], CudaError> {
    const N: usize = 64 << 20;
    let (m, d) = (8192, 4096);
    let [mut y, x] = buffers(cuda, Dtype::Bf16, [N, N])?;
    let [mut normed, rows, w] = buffers(cuda, Dtype::Bf16, [m * d, m * d, d])?;
    let [mut rstd] = buffers(cuda, Dtype::F32, [m])?;
    let [mut p, g, mut avg, mut avg_sq] = buffers(cuda, Dtype::F32, [N, N, N, N])?;
    let h =
        AdamW { lr: 1e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, step: 1, grad_scale: 1.0 };
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

fn buffers<const N: usize>(cuda: &Cuda, dtype: Dtype, lens: [usize; N]) -> Result<[Buf; N], CudaError> {
    let mut buffers = Vec::with_capacity(N);
    for len in lens {
        buffers.push(cuda.try_zeroed(dtype, len)?);
    }
    Ok(buffers.try_into().unwrap_or_else(|_| unreachable!("one buffer per length")))
}
