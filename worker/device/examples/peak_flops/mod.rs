//! Measures the machine's peak rate of multiply-adds, as the reference for the rates of matmuls in
//! benchmarks.
use std::{
    hint::black_box,
    sync::Barrier,
    thread,
    time::{Duration, Instant},
};

/// Number of multiply-adds in each dependent sequence that the benchmark runs to measure the
/// machine's peak rate.
const FMAS_PER_CHAIN: usize = 20_000;

/// Type of the functions that measure the peak rate: each computes several independent sequences of
/// dependent multiply-adds in registers, and returns their sum.
type FmaChainsFn = fn(f32) -> f32;

/// Measures the peak rate of multiply-adds on `threads` threads during `time`, and returns the best
/// rate in FLOP/s of all threads together. `instruction_set` begins with the name of the
/// instruction set that is measured, as [`device::Cpu::describe`] returns it.
pub(crate) fn measure_peak_flops(instruction_set: &str, threads: usize, time: Duration) -> f64 {
    let (run_chains, flops) = select_fma_chains_fn(instruction_set);
    measure_rate(run_chains, flops, threads, time)
}

/// Measures the peak rate of AMX tile multiplications in bf16 on `threads` threads during `time`,
/// and returns the rate in FLOP/s of all threads together. Returns `None` if `instruction_set`, as
/// [`device::Cpu::describe`] returns it, is not AMX.
#[allow(dead_code, reason = "one of the examples does not use it")]
pub(crate) fn measure_amx_peak_flops(instruction_set: &str, threads: usize, time: Duration) -> Option<f64> {
    #[cfg(target_arch = "x86_64")]
    if instruction_set.starts_with("amx") {
        // SAFETY: the backend detected AMX, and the kernel has permitted it.
        let run = |_| unsafe { x86::run_amx_products() };
        return Some(measure_rate(run, x86::AMX_FLOPS, threads, time));
    }
    let _ = (instruction_set, threads, time);
    None
}

/// Measures the speed of `run_chains`, which performs `flops` floating-point operations per call,
/// in repeated calls on `threads` threads during `time`. Returns the best rate in FLOP/s of all
/// threads together.
fn measure_rate(run_chains: FmaChainsFn, flops: usize, threads: usize, time: Duration) -> f64 {
    let (barrier, end) = (Barrier::new(threads), Instant::now() + time);
    let measure = || {
        barrier.wait();
        let mut best = f64::INFINITY;
        while Instant::now() < end {
            let begin = Instant::now();
            black_box(run_chains(black_box(0.5)));
            best = best.min(begin.elapsed().as_secs_f64());
        }
        best
    };
    let best = thread::scope(|scope| {
        let measured: Vec<_> = (0..threads).map(|_| scope.spawn(measure)).collect();
        measured.into_iter().map(|thread| thread.join().expect("measured")).fold(f64::INFINITY, f64::min)
    });
    (threads * flops) as f64 / best
}

/// Returns the function that performs multiply-adds with `instruction_set`, and the number of
/// floating-point operations of each call.
fn select_fma_chains_fn(instruction_set: &str) -> (FmaChainsFn, usize) {
    #[cfg(target_arch = "x86_64")]
    if instruction_set.starts_with("avx512") || instruction_set.starts_with("amx") {
        // SAFETY: the backend detected the instructions.
        return (
            |x| unsafe { x86::run_avx512_fma_chains(x) },
            2 * FMAS_PER_CHAIN * x86::AVX512_CHAIN_COUNT * 16,
        );
    } else if instruction_set.starts_with("avx2") {
        // SAFETY: the backend detected the instructions.
        return (|x| unsafe { x86::run_avx2_fma_chains(x) }, 2 * FMAS_PER_CHAIN * x86::AVX2_CHAIN_COUNT * 8);
    }
    let _ = instruction_set;
    (run_portable_fma_chains, 2 * FMAS_PER_CHAIN * PORTABLE_CHAIN_COUNT)
}

/// Number of independent sequences of multiply-adds that are computed at a time without vector
/// instructions, chosen to hide the latency of a multiply-add.
const PORTABLE_CHAIN_COUNT: usize = 64;

/// Computes several independent sequences of dependent multiply-adds (chains) with the target's
/// baseline instructions, and returns their sum.
fn run_portable_fma_chains(x: f32) -> f32 {
    let mut acc: [f32; PORTABLE_CHAIN_COUNT] = std::array::from_fn(|i| i as f32);
    for _ in 0..FMAS_PER_CHAIN {
        acc.iter_mut().for_each(|acc| *acc = *acc * x + x);
    }
    acc.iter().sum()
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::FMAS_PER_CHAIN;
    use std::arch::x86_64::*;

    /// Number of independent sequences of multiply-adds that are computed at a time in AVX-512
    /// registers, chosen to hide the latency of a multiply-add.
    pub(super) const AVX512_CHAIN_COUNT: usize = 12;
    pub(super) const AVX2_CHAIN_COUNT: usize = 12;

    /// Computes several independent sequences of dependent multiply-adds (chains) in AVX-512
    /// registers, and returns their sum.
    #[target_feature(enable = "avx512f")]
    pub(super) fn run_avx512_fma_chains(x: f32) -> f32 {
        let factor = _mm512_set1_ps(x);
        let mut acc = [factor; AVX512_CHAIN_COUNT];
        for _ in 0..FMAS_PER_CHAIN {
            for acc in &mut acc {
                *acc = _mm512_fmadd_ps(*acc, factor, factor);
            }
        }
        acc.iter().map(|acc| _mm512_reduce_add_ps(*acc)).sum()
    }

    /// Number of iterations of the loop that multiplies four pairs of AMX tiles when the peak rate
    /// is measured.
    const AMX_REPETITIONS: usize = 5_000;
    /// Number of floating-point operations of one call of [`run_amx_products`], from which the peak
    /// rate of AMX is computed.
    pub(super) const AMX_FLOPS: usize = AMX_REPETITIONS * 4 * 2 * 16 * 16 * 32;

    /// Multiplies AMX tiles of zeros in four independent sequences of instructions, to measure the
    /// peak rate without memory accesses. Returns 0.
    ///
    /// # Safety
    ///
    /// The caller must ensure that the AMX instructions can be executed.
    pub(super) unsafe fn run_amx_products() -> f32 {
        // palette 1, and eight tiles of 16 rows of 64 bytes
        let mut configuration = [0u8; 64];
        configuration[0] = 1;
        for tile in 0..8 {
            configuration[16 + 2 * tile] = 64;
            configuration[48 + tile] = 16;
        }
        // SAFETY: guaranteed by the caller. The configuration has 64 bytes.
        unsafe {
            std::arch::asm!(
                "ldtilecfg [{configuration}]",
                "2:",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "dec {repetitions}",
                "jnz 2b",
                "tilerelease",
                configuration = in(reg) configuration.as_ptr(),
                repetitions = inout(reg) AMX_REPETITIONS => _,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack, readonly),
            );
        }
        0.0
    }

    /// Computes several independent sequences of dependent multiply-adds (chains) in AVX2
    /// registers, and returns their sum.
    #[target_feature(enable = "avx2,fma")]
    pub(super) fn run_avx2_fma_chains(x: f32) -> f32 {
        let factor = _mm256_set1_ps(x);
        let mut acc = [factor; AVX2_CHAIN_COUNT];
        for _ in 0..FMAS_PER_CHAIN {
            for acc in &mut acc {
                *acc = _mm256_fmadd_ps(*acc, factor, factor);
            }
        }
        acc.iter().map(|acc| _mm256_cvtss_f32(*acc)).sum()
    }
}
