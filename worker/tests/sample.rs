//! Tokens that a model goes on with are the same for any number of workers and any stage, and those that the logits say.
#![allow(clippy::unwrap_used)] // a test that panics has failed
mod common;
use common::*;
use contract::job::*;
use worker::{
    model::Batch,
    train::{sample::SampleRequest, step::SampleSource},
};

fn spec(family: &str, stage: u8) -> TrainSpec {
    let mut model = ModelSpec { family: family.into(), initializer_range: 0.3, ..odd_model() };
    if family == "gpt2" {
        (model.num_key_value_heads, model.intermediate_size, model.tie_word_embeddings) = (3, 168, true);
    }
    train_spec(model, stage, 8, 2, 11)
}

fn sampled(spec: &TrainSpec, world: usize, asked: &SampleRequest) -> Vec<u32> {
    let all = on_ranks(world, |c| {
        let mut running = build(spec, c, 1).start_fresh();
        steps(&mut running, 1);
        let first = running.trainer.sample(asked, 1).unwrap();
        // and training goes on as if nothing had been
        (first, steps(&mut running, 1))
    });
    assert!(all.iter().skip(1).all(|(tokens, _)| tokens.is_empty()), "rank 0 alone has them");
    assert!(all.iter().all(|(_, after)| *after == all[0].1));
    let whole = on_ranks(world, |c| steps(&mut build(spec, c, 1).start_fresh(), 2)).remove(0);
    assert_eq!(all[0].1, whole[1..], "sampling changes nothing");
    all.into_iter().next().unwrap().0
}

#[test]
fn any_world_and_stage() {
    for (family, temperature) in [("llama", 0.0), ("gpt2", 0.7), ("mixtral", 1.0), ("gemma2", 0.0)] {
        // more than a sample holds
        let asked = SampleRequest::new(vec![5, 9, 2], 14, temperature, 7);
        let expected = sampled(&spec(family, 0), 1, &asked);
        assert_eq!(expected.len(), 14);
        for (stage, world) in [(0, 2), (1, 3), (2, 4), (3, 3)] {
            let found = sampled(&spec(family, stage), world, &asked);
            assert_eq!(found, expected, "{family}: world {world}, stage {stage}");
        }
    }
}

/// The next token of a prompt is the label with the least loss at its last position: asked for one by one.
struct Asked {
    prompt: Vec<u32>,
    label: u32,
}

impl SampleSource for Asked {
    fn fill(&self, _: u64, batch: &mut Batch) -> worker::error::Result<()> {
        batch.tokens.fill(0);
        batch.tokens[..self.prompt.len()].copy_from_slice(&self.prompt);
        batch.labels.fill(device::ops::IGNORE);
        batch.labels[self.prompt.len() - 1] = self.label;
        batch.starts.fill(0);
        Ok(())
    }
}

#[test]
fn the_likeliest_token_has_the_least_loss() {
    for family in ["llama", "gpt2", "gemma2", "qwen3"] {
        let comm = std::sync::Arc::new(comm::local::group(1).remove(0));
        let mut running = build(&spec(family, 0), comm, 1).start_fresh();
        for prompt in [vec![3], vec![17, 4, 99, 0, 0], vec![8; 11]] {
            let losses = (0..131).map(|label| {
                let source = Asked { prompt: prompt.clone(), label };
                running.trainer.evaluate(&source, 0, 1).unwrap().loss
            });
            let losses: Vec<f64> = losses.collect();
            let least = (0..131).min_by(|a, b| losses[*a].total_cmp(&losses[*b])).unwrap();
            let asked = SampleRequest::new(prompt.clone(), 1, 0.0, 7);
            assert_eq!(running.trainer.sample(&asked, 0).unwrap(), [least as u32], "{family}: {prompt:?}");
        }
    }
}
