//! Judges a `train:` section without running it: does it hold together, and how much memory will each rank need?
use crate::{
    data::{self, DataError},
    experts::Placement,
    gpu::places,
    model,
    resume::check_adapters,
    stages::{resolve, resolve_lora},
    trained::{self, LORA_FROM},
};
use contract::{
    job::{JobSpec, TrainSpec},
    preflight::{Finding, TrainJudge, Verdict},
    probe::LibraryLook,
};
use memory::Memory;
use std::path::{Path, PathBuf};

mod collectives;
mod gradients;
mod memory;
mod parameters;

/// The worker's judgement, handed to the launcher.
pub struct Judge;

impl TrainJudge for Judge {
    fn gpus(&self, job: &JobSpec) -> Result<(), String> {
        device::cuda::find(&places(&job.cluster.cuda_libs, &job.run.workdir)).map_err(|e| e.to_string())
    }

    fn libraries(&self, folders: &[PathBuf]) -> Vec<LibraryLook> {
        crate::gpu::libraries(&places(folders, Path::new("/")))
    }

    fn judge(&self, job: &JobSpec, world: u32, threads: u32) -> Verdict {
        let mut verdict = Verdict::default();
        if let Some(train) = &job.train {
            judge(job, train, world, threads, &mut verdict);
        }
        verdict
    }
}

fn finding(path: &str, message: impl Into<String>, hint: Option<String>) -> Finding {
    Finding { path: path.into(), message: message.into(), hint }
}

fn judge(job: &JobSpec, train: &TrainSpec, world: u32, threads: u32, v: &mut Verdict) {
    let dir = &job.run.workdir;
    let facts = data::estimate(&train.data, dir);
    let problem = |e: &DataError| finding(e.key(), e.to_string(), e.hint());
    v.problems.extend(facts.as_ref().err().into_iter().flatten().map(problem));
    if let Some(eval) = train.eval.as_ref().filter(|e| !e.files.is_empty()) {
        let faults = data::look_at_held_out(&train.data, &eval.files, dir);
        let of_eval = |e: &DataError| match e.key() {
            "train.data.files" => finding("train.eval.files", e.to_string(), e.hint()),
            key => finding(key, e.to_string(), e.hint()),
        };
        v.problems.extend(faults.iter().map(of_eval));
    }
    // Without the data the model can still be judged, all but its vocabulary.
    let (vocab, tokens) =
        facts.as_ref().map_or((train.model.vocab_size.max(1), 0), |f| (f.vocab_size, f.tokens));
    let named = train.model.at(dir);
    let spec = match resolve(&named, vocab, train.data.seq_len) {
        Ok(spec) => spec,
        Err(f) => return v.problems.push(finding(f.key, f.message, None)),
    };
    let mut model = match model::build_with(&spec, &train.experts, train.data.seq_len) {
        Ok(model) => model,
        Err(e) => {
            let key = if spec.from.is_some() { "train.model.from" } else { "train.model.family" };
            return v.problems.push(finding(key, e, None));
        }
    };
    let lora = train.lora.as_ref().map(|l| l.at(dir));
    let train = &match resolve_lora(lora.as_ref()) {
        Ok(lora) => TrainSpec { lora, ..train.clone() },
        Err(f) => return v.problems.push(finding(f.key, f.message, None)),
    };
    let layers = model.units().len() - 2;
    let placement = match Placement::new(&train.experts, model.as_ref(), layers, world as usize) {
        Ok(placement) => placement,
        Err((key, why)) => return v.problems.push(finding(key, why, None)),
    };
    let units = match trained::units(model.as_mut(), placement.as_ref(), train) {
        Ok(units) => units,
        Err(faults) => {
            let findings = faults.into_iter().map(|f| finding(f.key, f.message, None));
            return v.problems.extend(findings);
        }
    };
    if let Some(folder) = train.lora.as_ref().and_then(|l| l.from.as_ref())
        && let Err(why) = check_adapters(folder, &units)
    {
        return v.problems.push(finding(LORA_FROM, why, None));
    }
    v.parameters = units.iter().map(|u| u.trained_len() as u64).sum();
    let faults = trained::groups(&train.optimizer, &units, &model.ties()).err().unwrap_or_default();
    v.problems.extend(faults.into_iter().map(|f| finding(f.key, f.message, None)));
    if facts.is_err() {
        return;
    }
    let slots = train.batch.global / train.batch.micro;
    if slots < world {
        let message = format!(
            "{slots} slots (global / micro) for {world} workers: {} of them only hold shards",
            world - slots
        );
        v.warnings.push(finding(
            "train.batch",
            message,
            Some("raise batch.global or lower batch.micro".into()),
        ));
    }
    let m = Memory {
        job,
        train,
        model: model.as_ref(),
        units: &units,
        world: world as usize,
        threads: threads as usize,
        tokens,
    };
    v.memory = (0..world).map(|rank| m.estimate(rank)).collect();
}
