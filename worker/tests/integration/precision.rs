//! Tests of training in 16 bits: errors compared with fp32 are no larger than the errors of PyTorch
//! in 16 bits (tests/golden/precision/README.md). Losses of every family have the same bits for
//! every number of workers, stage and recomputation.
use crate::common::{
    families,
    golden::{GoldenCase, compute_logits, read_json},
    llama, *,
};
use jobspec::{Precision, RecomputeMode, TrainSpec};
use std::{collections::BTreeMap, path::Path};
use worker::train::{running_trainer::RunningTrainer, step::RankStepReport};

/// The largest accepted ratio of launch's error to PyTorch's error for one tensor. Rounding errors
/// are random, and a gradient that is the small difference of large terms can have any error.
const MAX_TENSOR_RATIO: f64 = 5.0;
/// The largest accepted geometric mean, over the tensors of one golden case, of the ratio of
/// launch's error to PyTorch's error.
const MAX_CASE_RATIO: f64 = 1.25;
/// The largest accepted geometric mean, over the tensors of all golden cases, of the ratio of
/// launch's error to PyTorch's error.
const MAX_TOTAL_RATIO: f64 = 1.05;
/// The tensors that have too few elements to compare their errors within one golden case. Their
/// errors are summed over the cases without experts: a router near a tie may select another expert
/// because of a rounding, and then ten steps are not comparable.
const SMALL_TENSORS: [&str; 3] = ["loss", "losses", "grad_norms"];
/// The largest accepted ratio of √Σ error² of launch to that of PyTorch, for a small tensor.
const MAX_SMALL_TENSOR_RATIO: f64 = 1.1;

/// The largest accepted number of tokens of a golden case that a router sends to another expert
/// than in fp32. A rounding near a tie has this effect. One such token changes gradients by several
/// percent, so the errors of the case are then compared only together with those of all cases.
const MAX_CHANGED_SELECTIONS: u64 = 2;

/// A function that starts the run of a golden case.
type StartRunFn = fn(&GoldenCase) -> RunningTrainer;

/// Reads all golden cases. Returns for each case its name, the case, and the function that starts
/// its run.
fn load_golden_cases() -> Vec<(String, GoldenCase, StartRunFn)> {
    let llama_cases = ["mha", "gqa_tied", "odd", "packed"].into_iter();
    let start: StartRunFn = |case| families::start_from_pretrained(&case.spec, create_single_rank_comm());
    llama_cases
        .map(|name| {
            (name.into(), llama::load_llama_case(name), llama::start_with_golden_weights as StartRunFn)
        })
        .chain(families::list_family_cases().into_iter().map(|name| {
            let case = families::load_family_case(&name);
            (name, case, start)
        }))
        .collect()
}

/// Computes |ours − exact| / |exact| of a whole tensor (L2 norms).
fn compute_relative_error(ours: &[f32], exact: &[f32]) -> f64 {
    assert_eq!(ours.len(), exact.len());
    let pairs = || ours.iter().zip(exact).map(|(a, b)| (f64::from(*a), f64::from(*b)));
    let difference: f64 = pairs().map(|(a, b)| (a - b) * (a - b)).sum();
    (difference / pairs().map(|(_, b)| b * b).sum::<f64>()).sqrt()
}

/// Replaces the matrices of single experts by one tensor for all experts of a layer:
/// `….experts.0.MATRIX`, `….experts.1.MATRIX` and so on are concatenated as `….experts.MATRIX`.
/// Other tensors do not change.
///
/// The router may send no token to an expert. The gradient of this expert is then zero, so that a
/// relative error of this expert alone would be undefined.
fn concatenate_experts(tensors: BTreeMap<String, Vec<f32>>) -> BTreeMap<String, Vec<f32>> {
    let mut out: BTreeMap<String, Vec<f32>> = BTreeMap::new();
    for (name, values) in tensors {
        let parts = name.split_once(".experts.").and_then(|(a, rest)| Some((a, rest.split_once('.')?.1)));
        let name = parts.map_or(name.clone(), |(before, matrix)| format!("{before}.experts.{matrix}"));
        out.entry(name).or_default().extend(values);
    }
    out
}

/// Computes loss, logits, gradients, and the losses and gradient norms of ten steps of a golden
/// case. Returns the values by the names that the case uses.
fn compute_results(case: &GoldenCase, start: StartRunFn) -> BTreeMap<String, Vec<f32>> {
    let mut out = BTreeMap::new();
    let mut running = start(case);
    let outcome = running.trainer.compute_global_batch_gradients(case, 0, RankStepReport::default()).unwrap();
    out.insert("loss".to_string(), vec![outcome.loss as f32]);
    out.insert("loss_per_token".into(), running.trainer.activations.row_losses.host_slice().to_vec());
    out.insert("logits".into(), compute_logits(&running, case));
    let positions = (case.spec.batch.global * case.spec.data.seq_len) as f32;
    let mean = positions / outcome.targets as f32 / running.trainer.loss_scale.factor();
    for u in 0..running.trainer.engine.shards.len() {
        let g = running.trainer.engine.finish_gradient(u).unwrap().owned;
        let unit = &running.trainer.engine.shards[u].unit;
        for (i, spec) in unit.params.iter().enumerate() {
            let ours = g.host_slice()[unit.tensor_range(i)].iter().map(|x| x * mean).collect();
            out.insert(format!("grad/{}", spec.name), ours);
        }
    }
    let mut running = start(case);
    let (losses, norms): (Vec<_>, Vec<_>) = (0..10)
        .map(|_| running.run_step(case, RankStepReport::default()).unwrap().0)
        .map(|o| (o.loss as f32, o.grad_norm as f32))
        .unzip();
    out.insert("losses".into(), losses);
    out.insert("grad_norms".into(), norms);
    concatenate_experts(out)
}

/// Counts for each layer with experts how often the router selects each expert in the first global
/// batch of a golden case. Returns no counts for a model without experts. The batch is one
/// micro-batch, because the trainer knows the counts of the most recent one.
fn count_expert_selections(case: &mut GoldenCase, start: StartRunFn, precision: Precision) -> Vec<Vec<u64>> {
    let spec = case.spec.clone();
    (case.spec.precision, case.spec.batch.micro) = (precision, spec.batch.global);
    let mut running = start(case);
    running.trainer.compute_global_batch_gradients(case, 0, RankStepReport::default()).unwrap();
    case.spec = spec;
    running.trainer.experts.as_ref().map_or_else(Vec::new, |experts| experts.expert_selection_counts())
}

/// Returns how many tokens a router sends to another expert in `precision` than in fp32, in all
/// layers with experts of a golden case together.
fn count_changed_selections(case: &mut GoldenCase, start: StartRunFn, precision: Precision) -> u64 {
    let [exact, ours] =
        [Precision::Fp32, precision].map(|precision| count_expert_selections(case, start, precision));
    let pairs = exact.iter().flatten().zip(ours.iter().flatten());
    pairs.map(|(exact, ours)| exact.saturating_sub(*ours)).sum()
}

/// Asserts that the errors of launch in a precision are no larger than those of PyTorch. `name` is
/// the name of the precision in errors.json.
fn assert_errors_match_pytorch(precision: Precision, name: &str) {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/precision/errors.json");
    let theirs = read_json(&golden);
    let mean = |ratios: &[f64]| (ratios.iter().map(|r| r.ln()).sum::<f64>() / ratios.len() as f64).exp();
    let (mut small_tensors, mut all_ratios, mut failures) = (BTreeMap::new(), Vec::new(), Vec::new());
    for (case_name, mut case, start) in load_golden_cases() {
        case.spec.precision = precision;
        // Use the loss scale of the golden files.
        case.spec.loss_scale.initial_scale_power = 10;
        let changed = count_changed_selections(&mut case, start, precision);
        println!("{case_name}: {changed} selections of experts differ");
        if changed > MAX_CHANGED_SELECTIONS {
            failures.push(format!("{case_name}: {changed} selections of experts differ from fp32"));
        }
        let (ours, exact) =
            (compute_results(&case, start), concatenate_experts(std::mem::take(&mut case.tensors)));
        let theirs = &theirs[&case_name][name];
        assert_eq!(ours.len(), theirs.as_object().map_or(0, serde_json::Map::len), "{case_name}");
        let mut ratios = Vec::new();
        for (key, ours) in &ours {
            let (ours, theirs) =
                (compute_relative_error(ours, &exact[key]), theirs[key]["rms"].as_f64().unwrap());
            println!("{case_name} {key} {:.2}", ours / theirs);
            assert!(ours > 0.0, "{case_name} {key}: no error compared with fp32");
            if let Some(name) = SMALL_TENSORS.into_iter().find(|name| name == key) {
                if !exact.keys().any(|name| name.contains(".experts.")) {
                    let sums: &mut (f64, f64) = small_tensors.entry(name).or_default();
                    *sums = (sums.0 + ours * ours, sums.1 + theirs * theirs);
                }
                continue;
            }
            ratios.push(ours / theirs);
            if changed == 0 && ours > MAX_TENSOR_RATIO * theirs {
                failures.push(format!("{case_name} {key}: {ours}, PyTorch {theirs}"));
            }
        }
        println!("{case_name}: {:.3} times PyTorch's", mean(&ratios));
        if changed == 0 && mean(&ratios) > MAX_CASE_RATIO {
            failures.push(format!("{case_name}: {:.3} times PyTorch's", mean(&ratios)));
        }
        all_ratios.extend(ratios);
    }
    println!("{name}, all tensors: {:.3} times PyTorch's", mean(&all_ratios));
    for (tensor, (ours, theirs)) in small_tensors {
        println!("{name}, {tensor}: {:.3} times PyTorch's", (ours / theirs).sqrt());
        if ours.sqrt() > MAX_SMALL_TENSOR_RATIO * theirs.sqrt() {
            failures.push(format!("{tensor}: {:.3} times PyTorch's", (ours / theirs).sqrt()));
        }
    }
    assert!(
        failures.is_empty() && mean(&all_ratios) <= MAX_TOTAL_RATIO,
        "{:.3}, {failures:#?}",
        mean(&all_ratios)
    );
}

#[test]
fn bf16_errors_are_no_larger_than_those_of_pytorch() {
    assert_errors_match_pytorch(Precision::Bf16, "bf16");
}

#[test]
fn fp16_errors_are_no_larger_than_those_of_pytorch() {
    assert_errors_match_pytorch(Precision::Fp16, "fp16");
}

#[test]
fn every_family_has_the_same_bits_on_every_world_size_stage_and_recomputation() {
    for name in &families::list_family_cases() {
        let spec = |stage, precision| {
            let mut s = create_train_spec(
                families::create_pretrained_model_spec(&families::golden_model_directory(name)),
                stage,
                6,
                1,
                13,
            );
            (s.steps, s.precision) = (4, precision);
            s
        };
        let run = |spec: &TrainSpec, world| {
            expect_equal_on_all_ranks(run_on_ranks(world, |c| {
                train_steps(&mut families::start_from_pretrained(spec, c), 3)
            }))
        };
        let expected = run(&spec(0, Precision::Bf16), 1);
        assert_ne!(expected, run(&spec(0, Precision::Fp32), 1), "{name}: 16-bit training differs from fp32");
        for (stage, world) in [(0, 3), (1, 2), (1, 8), (2, 3), (3, 2), (3, 4)] {
            let mut spec = spec(stage, Precision::Bf16);
            spec.recompute = if world % 2 == 0 { RecomputeMode::Block } else { RecomputeMode::None };
            assert_eq!(run(&spec, world), expected, "{name}: world {world}, stage {stage}");
        }
        let expected = run(&spec(0, Precision::Fp16), 1);
        assert_eq!(run(&spec(3, Precision::Fp16), 3), expected, "{name}: fp16");
    }
}
