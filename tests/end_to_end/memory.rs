//! Checks that the memory that `launch plan` predicts for each rank is within ten percent of what a
//! run uses, and that both decrease with the world size as ZeRO promises.
use crate::support::JobDirectory;
use std::fs;

/// A job that trains a dense Llama.
const DENSE_JOB: &str = "\
name: tiny
train:
  model: {family: llama, hidden_size: 256, intermediate_size: 688, num_hidden_layers: 8, num_attention_heads: 4, vocab_size: 2048}
  data: {files: [corpus.txt], seq_len: 64}
  batch: {global: 8, micro: 1}
  steps: 2
checkpoint: {every: 1, async: false, gather_16bit_weights_on_model_save: false}
";

/// The largest amount of memory, in bytes, that a development build may use in addition to the
/// planned memory.
const MAX_BUILD_EXCESS_BYTES: f64 = 40e6;

/// Runs `launch plan` and then the job itself, with the settings `set`. Returns the planned and the
/// measured peak memory of the largest rank, in bytes.
fn plan_and_measure_peak(job_dir: &JobDirectory, set: &[&str]) -> (f64, f64) {
    let args: Vec<&str> =
        ["plan", "job.yaml", "--json"].into_iter().chain(set.iter().flat_map(|s| ["--set", s])).collect();
    let plan: serde_json::Value = serde_json::from_slice(&job_dir.run_launch(&args).stdout).expect("a plan");
    let totals = plan["ranks"]
        .as_array()
        .expect("ranks")
        .iter()
        .map(|r| r["memory"]["total"].as_f64().expect("bytes"));
    let planned = totals.fold(0.0, f64::max);
    job_dir.delete_checkpoints();
    let ran = job_dir.run(set).expect_success();
    let peaks = ran.events_named("step").into_iter().map(|e| e["peak_rss"].as_f64().expect("bytes"));
    (planned, peaks.fold(0.0, f64::max))
}

/// Measures how many more bytes of memory a process of a development build uses than planned,
/// because code that is not optimised is larger. The tiny job needs little other memory.
fn measure_excess_of_build() -> f64 {
    if !cfg!(debug_assertions) {
        return 0.0;
    }
    let (planned, measured) = plan_and_measure_peak(&JobDirectory::new(), &["cluster.workers_per_host=1"]);
    assert!(measured < planned + MAX_BUILD_EXCESS_BYTES, "planned {planned}, measured {measured}");
    (measured - planned).max(0.0)
}

/// Plans and measures the memory of the job with the settings `set`. Checks that the plan, with
/// the excess of the build, is within ten percent of the measured memory. Returns the latter.
#[track_caller]
fn check_plan(job_dir: &JobDirectory, excess: f64, set: &[&str]) -> f64 {
    let (planned, measured) = plan_and_measure_peak(job_dir, set);
    let ratio = (planned + excess) / measured;
    println!("{set:?}: planned {planned} + {excess}, measured {measured}, ratio {ratio:.3}");
    assert!((0.9..=1.1).contains(&ratio), "{set:?}: {planned} + {excess}, measured {measured}, {ratio:.3}");
    measured
}

#[test]
fn the_plan_is_within_ten_percent_of_the_run() {
    let job_dir = JobDirectory::new();
    fs::write(job_dir.path("job.yaml"), DENSE_JOB).unwrap();
    let excess = measure_excess_of_build();
    let mut measured_by_world = Vec::new();
    for (world, stage) in [(1, 3), (2, 0), (2, 1), (2, 2), (2, 3), (4, 3), (8, 3)] {
        let (w, s) = (format!("cluster.workers_per_host={world}"), format!("train.zero.stage={stage}"));
        let measured = check_plan(&job_dir, excess, &[&w, &s]);
        if stage == 3 {
            measured_by_world.push(measured);
        }
    }
    assert!(
        measured_by_world.is_sorted_by(|a, b| a > b),
        "stage 3 uses less memory with every doubling: {measured_by_world:?}"
    );
    // eight ranks shard states, parameters and gradients; activations and buffers keep their size
    assert!(measured_by_world[3] < 0.45 * measured_by_world[0], "{measured_by_world:?}");
}

/// Compares the planned with the measured memory for both values of `deterministic`. With `true`,
/// each parameter unit has several gradient buffers for partial sums. With `false`, the gradients
/// of all micro-batches are added in one buffer.
#[test]
fn the_plan_counts_the_gradient_buffers_of_both_reductions() {
    let job_dir = JobDirectory::new();
    fs::write(job_dir.path("job.yaml"), DENSE_JOB).unwrap();
    let excess = measure_excess_of_build();
    let mut measured = Vec::new();
    for deterministic in [true, false] {
        for (world, stage) in [(1, 0), (2, 2)] {
            let (w, s) = (format!("cluster.workers_per_host={world}"), format!("train.zero.stage={stage}"));
            let n = format!("train.deterministic={deterministic}");
            measured.push(check_plan(&job_dir, excess, &[&w, &s, &n]));
        }
    }
    // 8 sample slots: four buffers of each unit, or one and those in flight
    assert!(measured[2] < 0.8 * measured[0] && measured[3] < 0.95 * measured[1], "{measured:?}");
}

#[test]
fn the_plan_counts_activations_and_gradients_of_experts() {
    let job_dir = JobDirectory::new();
    let dense = "{family: llama, hidden_size: 256, intermediate_size: 688, num_hidden_layers: 8,";
    let experts =
        "{family: mixtral, num_experts: 8, hidden_size: 256, intermediate_size: 344, num_hidden_layers: 4,";
    fs::write(job_dir.path("job.yaml"), DENSE_JOB.replace(dense, experts)).unwrap();
    let excess = measure_excess_of_build();
    for parallel in [1, 2, 4] {
        let parallel = format!("train.experts.expert_parallel_size={parallel}");
        let set = ["cluster.workers_per_host=4", "train.batch.micro=2", &parallel];
        check_plan(&job_dir, excess, &set);
    }
}

#[test]
fn the_plan_counts_the_background_copy_and_recomputation() {
    let job_dir = JobDirectory::new();
    fs::write(job_dir.path("job.yaml"), DENSE_JOB).unwrap();
    let excess = measure_excess_of_build();
    for set in [
        &["checkpoint.async=true"][..],
        &["train.recompute=block", "train.batch.micro=4"],
        &["train.batch.micro=4"],
        &["train.optimizer.name=sgd"],
        &["train.precision=bf16", "train.batch.micro=4"],
        &["cluster.workers_per_host=2", "train.zero.max_live_parameters=4000000"],
        &["train.precision=bf16", "train.master_weights=false", "train.batch.micro=4"],
        &["train.precision=bf16", "train.master_weights=false", "cluster.workers_per_host=2"],
        &["train.optimizer.name=muon", "cluster.workers_per_host=2"],
        &["train.precision=bf16", "cluster.workers_per_host=2"],
        &["train.precision=bf16", "cluster.workers_per_host=2", "train.zero.stage=1"],
    ] {
        check_plan(&job_dir, excess, set);
    }
}
