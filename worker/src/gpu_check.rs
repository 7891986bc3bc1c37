//! `launch gpu-check`: what a GPU does with our kernels, beside the CPU. Needs the executable, a driver, NVRTC and cuBLASLt, and
//! nothing else: no Rust, no network, no root. `scripts/gpu-check` calls it.
mod timed;
mod training;

use crate::gpu::{kernel_cache, places};
use comm::nccl::Nccl;
use device::{
    Buf, Cuda, Dtype, Ops,
    cuda::{self, Attention, CudaError, Wanted},
    ops::{AdamW, AttentionShape, Write},
    parity,
};
use std::{
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

const OK: u8 = 0;
const FAILED: u8 = 1;
const WRONG: u8 = 2;
const NO_GPU: u8 = 3;

/// Random shapes of each family of ops.
const ROUNDS: usize = 40;
const FEW_ROUNDS: usize = 2;
/// What is timed is repeated for so long.
const LONG_ENOUGH: Duration = Duration::from_millis(300);

/// For the training part.
const NCCL_LIMIT: Duration = Duration::from_secs(60);

/// How much is done.
#[derive(Clone, Copy, Debug, Default)]
struct Extent {
    index: usize,
    /// Few shapes, no speeds.
    quick: bool,
    /// Training, its speed included, of models of a few elements: what a slow card can do.
    tiny: bool,
    /// No training.
    ops_alone: bool,
    /// Nothing but the speed of training this one of the models.
    model: Option<usize>,
    /// Nothing but where a step of this one's time goes.
    profile: Option<usize>,
}

const USAGE: &str =
    "launch gpu-check [--device N] [--quick] [--tiny] [--ops | --models | --model N | --profile N]";

/// See [`USAGE`]; returns the process exit code. `--models` says what models are timed, `--model N` times one of them: both as JSON,
/// for `scripts/bench/beside_torch`. `--profile N` shows what a step of one is made of.
pub fn main(arguments: impl Iterator<Item = String>) -> u8 {
    let mut extent = Extent::default();
    let (mut arguments, mut list) = (arguments, false);
    while let Some(argument) = arguments.next() {
        let mut number = || arguments.next().and_then(|n| n.parse().ok());
        match argument.as_str() {
            "--quick" => extent.quick = true,
            "--tiny" => extent.tiny = true,
            "--ops" => extent.ops_alone = true,
            "--models" => list = true,
            "--device" | "--model" | "--profile" => match (number(), argument.as_str()) {
                (Some(n), "--device") => extent.index = n,
                (Some(n), "--profile") => extent.profile = Some(n),
                (Some(n), _) => extent.model = Some(n),
                _ => return wrong(&format!("{argument} needs a number")),
            },
            _ => return wrong(&format!("`{argument}` isn't known")),
        }
    }
    if list {
        return said(timed::describe(extent.tiny));
    }
    let open = || Cuda::open(&places(&[], Path::new("")), extent.index, kernel_cache());
    let cuda = match open() {
        Ok(cuda) => cuda,
        Err(e) => {
            println!("gpu-check: no GPU can be used here: {e}");
            return NO_GPU;
        }
    };
    let open = || open().map(Arc::new).map_err(|e| e.to_string());
    if let Some(number) = extent.model {
        drop(cuda);
        return said(timed::one(&open, extent.tiny, number));
    }
    if let Some(number) = extent.profile {
        drop(cuda);
        return match timed::profile(&open, extent.tiny, number) {
            Ok(()) => OK,
            Err(why) => {
                println!("gpu-check: {why}");
                FAILED
            }
        };
    }
    match check(&cuda, extent, &open) {
        Ok(true) => OK,
        Ok(false) => FAILED,
        Err(e) => {
            println!("gpu-check: {e}");
            FAILED
        }
    }
}

/// Prints what was asked for alone.
fn said(found: Result<serde_json::Value, String>) -> u8 {
    match found {
        Ok(value) => {
            println!("{value}");
            OK
        }
        Err(why) => {
            println!("gpu-check: {why}");
            FAILED
        }
    }
}

fn wrong(why: &str) -> u8 {
    println!("gpu-check: {why}; usage: {USAGE}");
    WRONG
}

/// Prints everything; is it as it should be?
fn check(cuda: &Cuda, extent: Extent, open: training::Open) -> Result<bool, CudaError> {
    let (facts, libraries) = (cuda.facts(), cuda.libraries());
    let (free, total) = cuda.memory()?;
    let gib = |bytes: usize| bytes as f64 / f64::from(1 << 30);
    println!("GPU {}: {}, {} multiprocessors", facts.index, cuda.describe(), facts.multiprocessors);
    println!("memory: {:.1} of {:.1} GiB are free", gib(free), gib(total));
    println!("driver: CUDA {}.{} ({})", facts.driver.0, facts.driver.1, facts.driver_path.display());
    let ((major, minor), path) = libraries.compiler;
    println!("NVRTC {major}.{minor} ({})", path.display());
    println!("cuBLASLt {} ({})", libraries.blas.0, libraries.blas.1.display());
    let nccl = Nccl::open(&places(&[], Path::new("")).folders(Wanted::Nccl));
    match &nccl {
        Ok(nccl) => println!("{}", nccl.describe()),
        Err(e) => println!("no NCCL: {e}"),
    }
    let by_cudnn = with_cudnn(extent.index)?;
    let began = Instant::now();
    cuda.warm_up()?;
    println!("kernels are loaded after {:.2} s\n", began.elapsed().as_secs_f64());
    if let Some(why) = cuda.unkept_kernels() {
        println!("compiled kernels aren't kept: {why}\n");
    }
    let Extent { quick, tiny, ops_alone, .. } = extent;
    let fits = show_parity(cuda, by_cudnn.as_ref(), if quick { FEW_ROUNDS } else { ROUNDS });
    if fits && !quick {
        show_speed(cuda, by_cudnn.as_ref())?;
    }
    drop(by_cudnn);
    if ops_alone || (quick && !tiny) {
        return Ok(fits);
    }
    let fits = fits && training::show_curves(open, nccl.as_ref().ok(), tiny, facts.has_fp8());
    if fits && (!quick || tiny) {
        timed::show_speed(open, tiny);
    }
    Ok(fits)
}

/// The card with cuDNN's attention, where that is found; says which.
fn with_cudnn(index: usize) -> Result<Option<Cuda>, CudaError> {
    let places = places(&[], Path::new(""));
    let found = cuda::libraries(&places).into_iter().find(|(name, _)| *name == "cuDNN");
    match found.map(|(_, found)| found) {
        Some(Ok((version, path))) => println!("cuDNN {version} ({})", path.display()),
        Some(Err(e)) => {
            println!("no cuDNN: {e}");
            return Ok(None);
        }
        None => return Ok(None),
    }
    let cuda = Cuda::open(&places, index, kernel_cache())?;
    cuda.choose_attention(Attention::Dnn, &places)?;
    Ok(Some(cuda))
}

/// Every op beside the CPU's.
fn show_parity(cuda: &Cuda, by_cudnn: Option<&Cuda>, rounds: usize) -> bool {
    println!("| ops beside the CPU's | shapes | f32 | bf16 | f16 | |\n|---|---|---|---|---|---|");
    let mut rows = parity::run(cuda, 1, rounds);
    rows.extend(by_cudnn.map(|cuda| parity::by_cudnn(cuda, 1, rounds)));
    for row in &rows {
        let parity::Worst { f32, bf16, f16 } = row.worst;
        let said = row.failed.as_deref().unwrap_or("ok");
        println!("| {} | {} | {f32:.1e} | {bf16:.1e} | {f16:.1e} | {said} |", row.what, row.shapes);
    }
    println!();
    rows.iter().all(|row| row.failed.is_none())
}

/// A thing that is timed: what it is, its operations or bytes, and itself.
struct Timed<'a> {
    what: String,
    amount: f64,
    unit: &'static str,
    run: Box<dyn FnMut() + 'a>,
}

fn show_speed(cuda: &Cuda, by_cudnn: Option<&Cuda>) -> Result<(), CudaError> {
    println!("| measured | time | rate |\n|---|---|---|");
    for (m, n, k) in [(4096, 4096, 4096), (8192, 2304, 768), (8192, 768, 3072), (8192, 50_304, 768)] {
        show(cuda, product(cuda, m, n, k)?)?;
    }
    for shape in ATTENDED {
        for (cuda, by) in [(Some(cuda), ""), (by_cudnn, " by cuDNN")] {
            let Some(cuda) = cuda else { continue };
            for timed in attention(cuda, shape, by)? {
                show(cuda, timed)?;
            }
        }
    }
    for timed in streams(cuda)? {
        show(cuda, timed)?;
    }
    Ok(())
}

fn show(cuda: &Cuda, mut timed: Timed) -> Result<(), CudaError> {
    for _ in 0..3 {
        (timed.run)();
    }
    cuda.try_wait()?;
    let (mut runs, mut chunk, began) = (0u32, 4, Instant::now());
    while began.elapsed() < LONG_ENOUGH {
        (0..chunk).for_each(|_| (timed.run)());
        cuda.try_wait()?;
        runs += chunk;
        chunk = (chunk * 2).min(256);
    }
    let each = began.elapsed().as_secs_f64() / f64::from(runs);
    println!("| {} | {:.1} µs | {:.2} {} |", timed.what, each * 1e6, timed.amount / each / 1e12, timed.unit);
    Ok(())
}

fn product<'a>(cuda: &'a Cuda, m: usize, n: usize, k: usize) -> Result<Timed<'a>, CudaError> {
    let [mut y, x, w] = buffers(cuda, Dtype::Bf16, [m * n, m * k, n * k])?;
    Ok(Timed {
        what: format!("product bf16 {m} × {n} × {k}"),
        amount: 2.0 * (m * n * k) as f64,
        unit: "TFLOP/s",
        run: Box::new(move || cuda.matmul_forward(y.view_mut(), x.view(), w.view(), m, n, k, Write::Set)),
    })
}

/// Sequences, tokens, heads of queries, of keys, elements of a head: GPT-2's attention and Llama-3.1-8B's.
const ATTENDED: [[usize; 5]; 2] = [[8, 1024, 12, 12, 64], [2, 2048, 32, 8, 128]];

fn attention<'a>(cuda: &'a Cuda, sizes: [usize; 5], by: &str) -> Result<[Timed<'a>; 2], CudaError> {
    let [b, t, heads, kv_heads, head_dim] = sizes;
    let shape = AttentionShape::new(b, t, heads, kv_heads, head_dim);
    let [out, all] = [heads, heads + 2 * kv_heads].map(|heads| b * t * heads * head_dim);
    let [mut o, qkv] = buffers(cuda, Dtype::Bf16, [out, all])?;
    let [mut lse] = buffers(cuda, Dtype::F32, [b * heads * t])?;
    let [o2, d_o, qkv2, mut dqkv] = buffers(cuda, Dtype::Bf16, [out, out, all, all])?;
    let [lse2] = buffers(cuda, Dtype::F32, [b * heads * t])?;
    let starts = vec![0; b * t];
    let starts2 = starts.clone();
    // Causal: half of the scores.
    let flops = 2.0 * (b * heads * t * t * head_dim) as f64;
    let text = format!("{by}, bf16, {b} × {t} tokens, {heads} and {kv_heads} heads of {head_dim}");
    Ok([
        Timed {
            what: format!("attention forward{text}"),
            amount: flops,
            unit: "TFLOP/s",
            run: Box::new(move || {
                cuda.attention_forward(o.view_mut(), lse.view_mut(), qkv.view(), &starts, shape)
            }),
        },
        Timed {
            what: format!("attention backward{text}"),
            amount: 2.5 * flops,
            unit: "TFLOP/s",
            run: Box::new(move || {
                let (lse, qkv) = (lse2.view(), qkv2.view());
                cuda.attention_backward(dqkv.view_mut(), d_o.view(), o2.view(), lse, qkv, &starts2, shape);
            }),
        },
    ])
}

/// Ops that wait for memory.
fn streams(cuda: &Cuda) -> Result<[Timed<'_>; 3], CudaError> {
    const N: usize = 64 << 20;
    let (m, d) = (8192, 4096);
    let [mut y, x] = buffers(cuda, Dtype::Bf16, [N, N])?;
    let [mut normed, rows, w] = buffers(cuda, Dtype::Bf16, [m * d, m * d, d])?;
    let [mut rstd] = buffers(cuda, Dtype::F32, [m])?;
    let [mut p, g, mut avg, mut avg_sq] = buffers(cuda, Dtype::F32, [N, N, N, N])?;
    let h =
        AdamW { lr: 1e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, step: 1, grad_scale: 1.0 };
    Ok([
        Timed {
            what: format!("add bf16, {N} elements"),
            amount: (6 * N) as f64,
            unit: "TB/s",
            run: Box::new(move || cuda.add(y.view_mut(), x.view())),
        },
        Timed {
            what: format!("RMSNorm bf16 {m} × {d}"),
            amount: (4 * m * d) as f64,
            unit: "TB/s",
            run: Box::new(move || {
                cuda.rmsnorm_forward(normed.view_mut(), rstd.view_mut(), rows.view(), w.view(), m, d, 1e-5);
            }),
        },
        Timed {
            what: format!("AdamW f32, {N} elements"),
            amount: (28 * N) as f64,
            unit: "TB/s",
            run: Box::new(move || cuda.adamw(p.view_mut(), g.view(), avg.view_mut(), avg_sq.view_mut(), &h)),
        },
    ])
}

fn buffers<const N: usize>(cuda: &Cuda, dtype: Dtype, lens: [usize; N]) -> Result<[Buf; N], CudaError> {
    let mut all = Vec::with_capacity(N);
    for len in lens {
        all.push(cuda.try_zeroed(dtype, len)?);
    }
    Ok(all.try_into().unwrap_or_else(|_| unreachable!("as many as were asked for")))
}
