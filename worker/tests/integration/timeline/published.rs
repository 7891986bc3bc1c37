//! Prints the estimates of `docs/benchmarks/gpu.md`.
use super::*;

const GPT2: (&str, [u32; 6], bool) = ("gpt2", [50257, 768, 3072, 12, 12, 12], true);
const QWEN_05B: (&str, [u32; 6], bool) = ("qwen2", [151_936, 896, 4864, 24, 14, 2], true);
const QWEN_15B: (&str, [u32; 6], bool) = ("qwen2", [151_936, 1536, 8960, 28, 12, 2], true);
const QWEN_7B: (&str, [u32; 6], bool) = ("qwen2", [152_064, 3584, 18944, 28, 28, 4], false);
const LLAMA_1B: (&str, [u32; 6], bool) = ("llama", [128_256, 2048, 8192, 16, 32, 8], true);
const LLAMA_8B: (&str, [u32; 6], bool) = ("llama", [128_256, 4096, 14336, 32, 32, 8], false);

/// A training whose step is estimated: the name, the model, the ranks, the ZeRO stage, the
/// micro-batches per rank, sequences per micro-batch and positions, and other settings.
type BenchmarkCase = (&'static str, (&'static str, [u32; 6], bool), usize, u8, [u32; 3], Settings);

#[derive(Clone, Copy, Default)]
struct Settings {
    is_fast: bool,
    graphs: bool,
    recompute: bool,
    h100: bool,
}

const DEFAULT: Settings = Settings { is_fast: false, graphs: false, recompute: false, h100: false };
const FAST: Settings = Settings { is_fast: true, ..DEFAULT };

const CASES: [BenchmarkCase; 27] = [
    // measured
    ("GPT-2 124M", GPT2, 1, 0, [1, 32, 1024], DEFAULT),
    ("Llama-3.2-1B", LLAMA_1B, 1, 0, [4, 8, 2048], DEFAULT),
    ("Qwen2.5-1.5B", QWEN_15B, 1, 0, [4, 16, 1024], DEFAULT),
    ("GPT-2 124M", GPT2, 1, 0, [1, 2, 256], DEFAULT),
    ("GPT-2 124M, graphs", GPT2, 1, 0, [1, 2, 256], Settings { graphs: true, ..DEFAULT }),
    // scaling
    ("GPT-2 124M", GPT2, 8, 0, [1, 32, 1024], DEFAULT),
    ("GPT-2 124M, fast", GPT2, 8, 0, [1, 32, 1024], FAST),
    ("GPT-2 124M", GPT2, 64, 0, [1, 32, 1024], DEFAULT),
    ("GPT-2 124M, fast", GPT2, 64, 0, [1, 32, 1024], FAST),
    ("Llama-3.2-1B", LLAMA_1B, 8, 2, [4, 8, 2048], DEFAULT),
    ("Llama-3.2-1B, fast", LLAMA_1B, 8, 2, [4, 8, 2048], FAST),
    ("Llama-3.2-1B", LLAMA_1B, 64, 2, [4, 8, 2048], DEFAULT),
    ("Llama-3.2-1B, fast", LLAMA_1B, 64, 2, [4, 8, 2048], FAST),
    ("Llama-3.1-8B", LLAMA_8B, 1, 3, [8, 2, 2048], DEFAULT),
    ("Llama-3.1-8B, fast", LLAMA_8B, 1, 3, [8, 2, 2048], FAST),
    ("Llama-3.1-8B, recompute", LLAMA_8B, 8, 3, [1, 2, 8192], Settings { recompute: true, ..DEFAULT }),
    ("Llama-3.1-8B, recompute, fast", LLAMA_8B, 8, 3, [1, 2, 8192], Settings { recompute: true, ..FAST }),
    ("Llama-3.1-8B, recompute", LLAMA_8B, 64, 3, [1, 2, 8192], Settings { recompute: true, ..DEFAULT }),
    ("Llama-3.1-8B, recompute, fast", LLAMA_8B, 64, 3, [1, 2, 8192], Settings { recompute: true, ..FAST }),
    ("Llama-3.1-8B", LLAMA_8B, 8, 3, [1, 1, 8192], DEFAULT),
    ("Llama-3.1-8B, fast", LLAMA_8B, 8, 3, [1, 1, 8192], FAST),
    // LLMQ
    ("Qwen2.5-0.5B, H100", QWEN_05B, 1, 0, [16, 32, 1024], Settings { h100: true, ..FAST }),
    ("Qwen2.5-1.5B, H100", QWEN_15B, 1, 0, [16, 32, 1024], Settings { h100: true, ..FAST }),
    ("Qwen2.5-0.5B, H100", QWEN_05B, 8, 1, [2, 32, 1024], Settings { h100: true, ..FAST }),
    ("Qwen2.5-1.5B, H100", QWEN_15B, 8, 1, [2, 32, 1024], Settings { h100: true, ..FAST }),
    ("Qwen2.5-7B, H100", QWEN_7B, 8, 1, [8, 8, 1024], Settings { h100: true, ..FAST }),
    (
        "Llama-3.1-8B, recompute, fast, H100",
        LLAMA_8B,
        8,
        3,
        [1, 2, 8192],
        Settings { recompute: true, h100: true, ..FAST },
    ),
];

fn create_spec((_, (family, sizes, tied), world, stage, batch, settings): BenchmarkCase) -> TrainSpec {
    let model = create_sized_model(family, sizes, tied, batch[2]);
    let global = batch[0] * batch[1] * world as u32;
    TrainSpec {
        precision: Precision::Bf16,
        deterministic: !settings.is_fast,
        recompute: if settings.recompute { RecomputeMode::Block } else { RecomputeMode::None },
        ..create_train_spec(model, stage, global, batch[1], batch[2])
    }
}

/// Prints the estimates of all cases of one kind of GPU. `EMULATED_GPU_TIMELINE` selects the GPU.
#[test]
#[ignore = "prints estimates: cargo nextest run -p worker --run-ignored only --no-capture timeline"]
fn estimate_the_benchmarked_models() {
    if !is_own_process("timeline::published::estimate_the_benchmarked_models") {
        return;
    }
    let gpu = std::env::var("EMULATED_GPU_TIMELINE").unwrap_or_else(|_| "h200".into());
    use_virtual_clock(&gpu);
    println!(
        "| model | GPUs, stage, micro-batches | step, ms | tokens/s/GPU | MFU | matmuls | attention | other work | optimizer | idle | collectives (overlapped) | GiB |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|---|");
    for case in CASES.into_iter().filter(|case| case.5.h100 == (gpu == "h100")) {
        USE_CUDA_GRAPHS.store(case.5.graphs, Relaxed);
        let estimate = estimate_step(&create_spec(case), case.2);
        let ms = |ns: f64| format!("{:.1}", ns / 1e6);
        let [matmuls, attention, optimizer] =
            ["matmuls", "attention", "optimizer"].map(|kind| estimate.part_time(&format!("main:{kind}")));
        let idle = estimate.sum_parts("main:idle");
        let other = estimate.sum_parts("main:") - matmuls - attention - optimizer - idle;
        println!(
            "| {} | {}, {}, {} × ({} × {}) | {} | {:.0} | {:.1} % | {} | {} | {} | {} | {} | {} ({}) | {:.1} |",
            case.0,
            case.2,
            case.3,
            case.4[0],
            case.4[1],
            case.4[2],
            ms(estimate.step),
            estimate.tokens_per_second,
            100.0 * estimate.mfu,
            ms(matmuls),
            ms(attention),
            ms(other),
            ms(optimizer),
            ms(idle),
            ms(estimate.part_time("side:collectives")),
            ms(estimate.overlap),
            estimate.peak_bytes / f64::from(1 << 30),
        );
        if std::env::var_os("TIMELINE_PARTS").is_some() {
            estimate.parts.iter().for_each(|(name, ns)| println!("    {name}: {}", ms(*ns)));
        }
    }
}
