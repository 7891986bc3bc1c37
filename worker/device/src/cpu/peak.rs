//! What the machine can do at most, to compare with.
use super::Cpu;
use super::simd::{LANES, Simd, multiversion};
use std::time::{Duration, Instant};

/// Vector operations on each accumulator in one go.
const ROUNDS: usize = 20_000;

impl Cpu {
    /// Multiply-adds on registers only, best of what fits into `time`: FLOP/s of all threads together.
    pub fn measure_peak(&self, time: Duration) -> f64 {
        let threads = self.pool.threads();
        let gone = std::sync::Barrier::new(threads);
        let end = Instant::now() + time;
        let best = std::sync::Mutex::new(f64::INFINITY);
        // Every task waits for the others, so each runs on a thread of its own.
        self.pool.run(threads, &|_| {
            gone.wait();
            while Instant::now() < end {
                let begin = Instant::now();
                std::hint::black_box(multiply_add(self.level, std::hint::black_box(0.5)));
                let seconds = begin.elapsed().as_secs_f64();
                let mut best = best.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                *best = best.min(seconds);
            }
        });
        let seconds = best.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
        (threads * 2 * LANES * ROUNDS * chains(self)) as f64 / seconds
    }
}

/// Independent chains: enough to hide the latency, few enough for the registers.
const MANY: usize = 12;
const FEW: usize = 6;

fn chains(cpu: &Cpu) -> usize {
    if has_many_registers(cpu.level) { MANY } else { FEW }
}

multiversion! {
    fn multiply_add = multiply_add_chains(x: f32) -> f32
}
multiversion! {
    fn has_many_registers = many_registers() -> bool
}

#[inline(always)]
fn many_registers<S: Simd>(_: S) -> bool {
    S::NV > 1
}

#[inline(always)]
fn multiply_add_chains<S: Simd>(s: S, x: f32) -> f32 {
    if many_registers(s) { chain::<S, MANY>(s, x) } else { chain::<S, FEW>(s, x) }
}

#[inline(always)]
fn chain<S: Simd, const N: usize>(s: S, x: f32) -> f32 {
    let factor = s.splat(x);
    let mut acc: [S::V; N] = core::array::from_fn(|i| s.splat(i as f32));
    for _ in 0..ROUNDS {
        for acc in &mut acc {
            *acc = s.fma(*acc, factor, factor);
        }
    }
    acc.into_iter().map(|v| s.sum(v)).sum()
}
