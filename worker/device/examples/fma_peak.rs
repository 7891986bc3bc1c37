//! `fma_peak THREADS SECONDS` measures the peak of f32 multiply-add in GFLOP/s, which benchmarks
//! compare with.
use std::{env, time::Duration};

fn main() {
    let number = |i: usize, default: f64| env::args().nth(i).and_then(|a| a.parse().ok()).unwrap_or(default);
    let peak =
        device::Cpu::new(number(1, 1.0) as usize).measure_peak_flops(Duration::from_secs_f64(number(2, 1.0)));
    println!("{:.1}", peak / 1e9);
}
