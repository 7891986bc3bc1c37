//! 16 bits against the golden answers in fp32: no further away than torch in 16 bits is (tests/golden/precision/README.md); and
//! the same bits for any number of workers, stage and recomputation, for every family.
#![allow(clippy::unwrap_used)] // a test that panics has failed
mod common;
use common::{
    families,
    golden::{Case, json, logits},
    llama, *,
};
use contract::job::{Precision, Recompute, TrainSpec};
use std::{collections::BTreeMap, path::Path, sync::Arc};
use worker::{stages::RunningTrainer, train::step::StepReport};

/// Rounding errors are random, and a gradient that is the small rest of large terms has any error: a tensor alone may have this
/// many times torch's.
const TENSOR: f64 = 5.0;
/// Geometric mean over the tensors of a case, and over those of all cases.
const CASE: f64 = 1.25;
const TOGETHER: f64 = 1.05;
/// Too few numbers to be judged in one case: √Σ² over the cases without experts. A router that is near a tie may send a token
/// elsewhere for a rounding, and then ten steps are those of another run.
const FEW: [&str; 3] = ["loss", "losses", "grad_norms"];
const FEW_TOGETHER: f64 = 1.1;

/// A golden case, and how its run begins.
type Start = fn(&Case) -> RunningTrainer;

fn cases() -> Vec<(&'static str, Case, Start)> {
    let of_llama = ["mha", "gqa_tied", "odd", "packed"].into_iter();
    let begin: Start = |case| families::started(&case.spec, Arc::new(comm::local::group(1).remove(0)));
    of_llama
        .map(|name| (name, llama::load(name), llama::with_golden_weights as Start))
        .chain(families::CASES.into_iter().map(|name| (name, families::load(name), begin)))
        .collect()
}

/// |a − b| / |b| of a whole tensor.
fn far(ours: &[f32], exact: &[f32]) -> f64 {
    assert_eq!(ours.len(), exact.len());
    let wide = || ours.iter().zip(exact).map(|(a, b)| (f64::from(*a), f64::from(*b)));
    let difference: f64 = wide().map(|(a, b)| (a - b) * (a - b)).sum();
    (difference / wide().map(|(_, b)| b * b).sum::<f64>()).sqrt()
}

/// The experts of a layer as one tensor for each of their matrices: an expert alone may have no row.
fn together(all: BTreeMap<String, Vec<f32>>) -> BTreeMap<String, Vec<f32>> {
    let mut out: BTreeMap<String, Vec<f32>> = BTreeMap::new();
    for (name, values) in all {
        let parts = name.split_once(".experts.").and_then(|(a, rest)| Some((a, rest.split_once('.')?.1)));
        let name = parts.map_or(name.clone(), |(before, matrix)| format!("{before}.experts.{matrix}"));
        out.entry(name).or_default().extend(values);
    }
    out
}

/// Everything that the golden file has an answer for.
fn answers(case: &Case, start: Start) -> BTreeMap<String, Vec<f32>> {
    let mut out = BTreeMap::new();
    let mut running = start(case);
    let outcome = running.trainer.accumulate(case, 0, StepReport::default()).unwrap();
    out.insert("loss".to_string(), vec![outcome.loss as f32]);
    out.insert("loss_per_token".into(), running.trainer.work.loss.host().to_vec());
    out.insert("logits".into(), logits(&running, case));
    let positions = (case.spec.batch.global * case.spec.data.seq_len) as f32;
    let mean = positions / outcome.targets as f32 / running.trainer.loss_scale.factor();
    for u in 0..running.trainer.engine.shards.len() {
        let g = running.trainer.engine.finish_gradient(u).unwrap();
        let unit = &running.trainer.engine.shards[u].unit;
        for (i, spec) in unit.params.iter().enumerate() {
            let ours = g.host()[unit.range(i)].iter().map(|x| x * mean).collect();
            out.insert(format!("grad/{}", spec.name), ours);
        }
    }
    let mut running = start(case);
    let (losses, norms): (Vec<_>, Vec<_>) = (0..10)
        .map(|_| running.step(case, StepReport::default()).unwrap().0)
        .map(|o| (o.loss as f32, o.grad_norm as f32))
        .unzip();
    out.insert("losses".into(), losses);
    out.insert("grad_norms".into(), norms);
    together(out)
}

fn check(precision: Precision, name: &str) {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/precision/errors.json");
    let theirs = json(&golden);
    let mean = |ratios: &[f64]| (ratios.iter().map(|r| r.ln()).sum::<f64>() / ratios.len() as f64).exp();
    let (mut few, mut all, mut wrong) = (BTreeMap::new(), Vec::new(), Vec::new());
    for (case_name, mut case, start) in cases() {
        case.spec.precision = precision;
        // That of the golden answers.
        case.spec.loss_scale.initial_scale_power = 10;
        let (ours, exact) = (answers(&case, start), together(std::mem::take(&mut case.tensors)));
        let theirs = &theirs[case_name][name];
        assert_eq!(ours.len(), theirs.as_object().map_or(0, serde_json::Map::len), "{case_name}");
        let mut ratios = Vec::new();
        for (key, ours) in &ours {
            let (ours, theirs) = (far(ours, &exact[key]), theirs[key]["rms"].as_f64().unwrap());
            println!("{case_name} {key} {:.2}", ours / theirs);
            assert!(ours > 0.0, "{case_name} {key}: as exact as fp32");
            if let Some(kind) = FEW.into_iter().find(|few| few == key) {
                if !exact.keys().any(|name| name.contains(".experts.")) {
                    let sums: &mut (f64, f64) = few.entry(kind).or_default();
                    *sums = (sums.0 + ours * ours, sums.1 + theirs * theirs);
                }
                continue;
            }
            ratios.push(ours / theirs);
            if ours > TENSOR * theirs {
                wrong.push(format!("{case_name} {key}: {ours}, torch {theirs}"));
            }
        }
        println!("{case_name}: {:.3} times torch's", mean(&ratios));
        if mean(&ratios) > CASE {
            wrong.push(format!("{case_name}: {:.3} times torch's", mean(&ratios)));
        }
        all.extend(ratios);
    }
    println!("{name}, all tensors: {:.3} times torch's", mean(&all));
    for (kind, (ours, theirs)) in few {
        println!("{name}, {kind}: {:.3} times torch's", (ours / theirs).sqrt());
        if ours.sqrt() > FEW_TOGETHER * theirs.sqrt() {
            wrong.push(format!("{kind}: {:.3} times torch's", (ours / theirs).sqrt()));
        }
    }
    assert!(wrong.is_empty() && mean(&all) <= TOGETHER, "{:.3}, {wrong:#?}", mean(&all));
}

#[test]
fn bf16_is_as_near_to_fp32_as_torch_bf16() {
    check(Precision::Bf16, "bf16");
}

#[test]
fn fp16_is_as_near_to_fp32_as_torch_fp16() {
    check(Precision::Fp16, "fp16");
}

#[test]
fn every_family_for_any_world_stage_and_recomputation() {
    for name in families::CASES {
        let spec = |stage, precision| {
            let mut s = train_spec(families::from(&families::folder(name)), stage, 6, 1, 13);
            (s.steps, s.precision) = (4, precision);
            s
        };
        let run = |spec: &TrainSpec, world| {
            let all = on_ranks(world, |c| steps(&mut families::started(spec, c), 3));
            assert!(all.iter().all(|r| *r == all[0]), "ranks disagree");
            all.into_iter().next().unwrap()
        };
        let expected = run(&spec(0, Precision::Bf16), 1);
        assert_ne!(expected, run(&spec(0, Precision::Fp32), 1), "{name}: 16 bits are not 32");
        for (stage, world) in [(0, 3), (1, 2), (1, 8), (2, 3), (3, 2), (3, 4)] {
            let mut spec = spec(stage, Precision::Bf16);
            spec.recompute = if world % 2 == 0 { Recompute::Block } else { Recompute::None };
            assert_eq!(run(&spec, world), expected, "{name}: world {world}, stage {stage}");
        }
        let expected = run(&spec(0, Precision::Fp16), 1);
        assert_eq!(run(&spec(3, Precision::Fp16), 3), expected, "{name}: fp16");
    }
}
