//! Prints the machine's peak rate of `f32` multiply-adds in GFLOP/s, as the reference for the rates
//! of benchmarks. Run as `fma_peak THREADS SECONDS`.
mod peak_flops;

use std::{env, time::Duration};

/// Measures the peak rate of `f32` multiply-adds on the number of threads that the command line
/// gives, and prints the rate in GFLOP/s.
fn main() {
    let number = |i: usize, default: f64| env::args().nth(i).and_then(|a| a.parse().ok()).unwrap_or(default);
    let (threads, time) = (number(1, 1.0) as usize, Duration::from_secs_f64(number(2, 1.0)));
    let peak = peak_flops::measure_peak_flops(&device::Cpu::new(1).describe(), threads, time);
    println!("{:.1}", peak / 1e9);
}
