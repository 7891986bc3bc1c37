//! Measures the peak rate of multiply-adds, to which benchmarks compare matmuls.
use super::backend::Cpu;
use super::instruction_set::multiversion;
use super::simd::{LANES, Simd};
use std::time::{Duration, Instant};

/// Number of multiply-adds that each chain computes in one measurement.
const FMAS_PER_CHAIN: usize = 20_000;

impl Cpu {
    /// Measures multiply-adds on registers for the duration `time`, and returns the best rate in
    /// FLOP/s, summed over all threads.
    pub fn measure_peak_flops(&self, time: Duration) -> f64 {
        let threads = self.pool.threads();
        let barrier = std::sync::Barrier::new(threads);
        let end = Instant::now() + time;
        let best = std::sync::Mutex::new(f64::INFINITY);
        // Every task waits for the others, so each runs on a separate thread.
        self.pool.run(threads, &|_| {
            barrier.wait();
            while Instant::now() < end {
                let begin = Instant::now();
                std::hint::black_box(multiply_add(self.instruction_set, std::hint::black_box(0.5)));
                let seconds = begin.elapsed().as_secs_f64();
                let mut best = best.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                *best = best.min(seconds);
            }
        });
        let seconds = best.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
        (threads * 2 * LANES * FMAS_PER_CHAIN * get_chain_count(self)) as f64 / seconds
    }
}

/// Number of independent chains of multiply-adds on an instruction set with 32 vector registers:
/// enough to hide the latency, and few enough for the registers.
const CHAINS_WITH_32_REGISTERS: usize = 12;
/// Number of independent chains of multiply-adds on an instruction set with 16 vector registers.
const CHAINS_WITH_16_REGISTERS: usize = 6;

/// Returns the number of independent chains that this backend's instruction set computes at a time.
fn get_chain_count(cpu: &Cpu) -> usize {
    if has_32_registers(cpu.instruction_set) { CHAINS_WITH_32_REGISTERS } else { CHAINS_WITH_16_REGISTERS }
}

multiversion! {
    fn multiply_add = run_all_chains(x: f32) -> f32
}
multiversion! {
    fn has_32_registers = has_32_registers_simd() -> bool
}

/// Returns true if the instruction set has 32 vector registers.
#[inline(always)]
fn has_32_registers_simd<S: Simd>(_: S) -> bool {
    S::TILE_VECTORS > 1
}

/// Computes as many independent chains of multiply-adds as the instruction set has registers for.
/// Returns a value that depends on every chain, so that the compiler does not remove any.
#[inline(always)]
fn run_all_chains<S: Simd>(s: S, x: f32) -> f32 {
    if has_32_registers_simd(s) {
        run_fma_chains::<S, CHAINS_WITH_32_REGISTERS>(s, x)
    } else {
        run_fma_chains::<S, CHAINS_WITH_16_REGISTERS>(s, x)
    }
}

/// Computes `N` independent chains of [`FMAS_PER_CHAIN`] multiply-adds each. Returns a value that
/// depends on every chain.
#[inline(always)]
fn run_fma_chains<S: Simd, const N: usize>(s: S, x: f32) -> f32 {
    let factor = s.splat(x);
    let mut acc: [S::V; N] = core::array::from_fn(|i| s.splat(i as f32));
    for _ in 0..FMAS_PER_CHAIN {
        for acc in &mut acc {
            *acc = s.fma(*acc, factor, factor);
        }
    }
    acc.into_iter().map(|v| s.sum(v)).sum()
}
