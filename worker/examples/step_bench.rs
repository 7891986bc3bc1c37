//! Benchmark of training steps of the model in docs/benchmarks, in one process, without the
//! launcher and without data files. Prints tokens per second, GFLOP/s and peak memory.
//!
//!     cargo run --release -p worker --example step_bench -- [threads] [micro] [stage] [recompute]
#![allow(clippy::unwrap_used, reason = "a benchmark that panics has failed")]
#[path = "../tests/integration/common/mod.rs"]
mod common;
use common::*;
use jobspec::{ModelSpec, RecomputeMode};
use std::time::Instant;

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let number = |i: usize, default: u32| args.get(i).and_then(|a| a.parse().ok()).unwrap_or(default);
    let (threads, micro, stage) = (number(1, 1), number(2, 8), number(3, 3));
    let model = ModelSpec {
        vocab_size: 8192,
        hidden_size: 384,
        intermediate_size: 1024,
        num_hidden_layers: 6,
        num_attention_heads: 6,
        num_key_value_heads: 6,
        head_dim: 64,
        max_position_embeddings: 256,
        ..create_odd_sized_model()
    };
    let mut spec = create_train_spec(model, stage as u8, 8, micro, 256);
    if number(4, 0) == 1 {
        spec.recompute = RecomputeMode::Block;
    }
    let mut running =
        build_trainer(&spec, create_single_rank_comm(), threads as usize).start_with_random_params();
    train_steps(&mut running, 2);
    let flops = running.trainer.model.compute_flops_per_token(256);
    let mut rates: Vec<f64> = (0..8)
        .map(|_| {
            let began = Instant::now();
            train_steps(&mut running, 1);
            2048.0 / began.elapsed().as_secs_f64()
        })
        .collect();
    rates.sort_by(f64::total_cmp);
    let median = rates[rates.len() / 2];
    println!(
        "{threads} threads, micro {micro}: {median:.0} tokens/s (min {:.0}, max {:.0}), {:.0} GFLOP/s, peak {} MiB",
        rates[0],
        rates[rates.len() - 1],
        median * flops / 1e9,
        worker::runtime::training_loop::read_peak_resident_bytes() >> 20
    );
}
