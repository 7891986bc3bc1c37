//! Tests of text generation: the tokens do not depend on the number of workers and the ZeRO stage,
//! and greedy sampling takes the most likely token.
use crate::common::*;
use jobspec::*;
use worker::{
    model::MicroBatch,
    train::{generation::GenerationRequest, step::SampleSource},
};

/// Creates the `train` section for a small model of this family.
fn create_family_spec(family: &str, stage: u8) -> TrainSpec {
    let mut model = ModelSpec { family: family.into(), initializer_range: 0.3, ..create_odd_sized_model() };
    if family == "gpt2" {
        (model.num_key_value_heads, model.intermediate_size, model.tie_word_embeddings) = (3, 168, true);
    }
    create_train_spec(model, stage, 8, 2, 11)
}

/// Trains one step, generates the tokens that `request` asks for, and trains another step. Asserts
/// that the generation does not change training. Returns the tokens.
fn generate_between_steps(spec: &TrainSpec, world: usize, request: &GenerationRequest) -> Vec<u32> {
    let mut by_rank = run_on_ranks(world, |c| {
        let mut running = build_trainer(spec, c, 1).start_with_random_params();
        train_steps(&mut running, 1);
        let tokens = request.generate(&mut running.trainer, 1, &|| false).unwrap().unwrap();
        (tokens, train_steps(&mut running, 1))
    });
    assert!(by_rank.iter().skip(1).all(|(tokens, _)| tokens.is_empty()), "only rank 0 has the tokens");
    let uninterrupted = train_new_run(spec, world, 1, 2);
    for (_, losses) in &by_rank {
        assert_eq!(*losses, uninterrupted[1..], "sampling changed training");
    }
    by_rank.swap_remove(0).0
}

#[test]
fn sampled_tokens_do_not_depend_on_world_size_and_stage() {
    for (family, temperature) in [("llama", 0.0), ("gpt2", 0.7), ("mixtral", 1.0), ("gemma2", 0.0)] {
        // Prompt and tokens together are longer than the context of 11 tokens.
        let request = GenerationRequest::new(vec![5, 9, 2], 14, temperature, 7);
        let expected = generate_between_steps(&create_family_spec(family, 0), 1, &request);
        assert_eq!(expected.len(), 14);
        for (stage, world) in [(0, 2), (1, 3), (2, 4), (3, 3)] {
            let tokens = generate_between_steps(&create_family_spec(family, stage), world, &request);
            assert_eq!(tokens, expected, "{family}: world {world}, stage {stage}");
        }
    }
}

/// A source of equal samples, whose only label is `label`, at the last position of `prompt`. The
/// loss of the sample is the negative log-likelihood of `label` as the next token.
struct NextTokenSample {
    prompt: Vec<u32>,
    label: u32,
}

impl SampleSource for NextTokenSample {
    fn fill(&self, _: u64, batch: &mut MicroBatch) -> worker::error::Result<()> {
        batch.tokens.fill(0);
        batch.tokens[..self.prompt.len()].copy_from_slice(&self.prompt);
        batch.labels.fill(device::ops::IGNORE_LABEL);
        batch.labels[self.prompt.len() - 1] = self.label;
        batch.starts.fill(0);
        Ok(())
    }
}

#[test]
fn greedy_sampling_takes_the_token_with_the_least_loss() {
    for family in ["llama", "gpt2", "gemma2", "qwen3"] {
        let mut running = build_trainer(&create_family_spec(family, 0), create_single_rank_comm(), 1)
            .start_with_random_params();
        for prompt in [vec![3], vec![17, 4, 99, 0, 0], vec![8; 11]] {
            let losses = (0..131).map(|label| {
                let source = NextTokenSample { prompt: prompt.clone(), label };
                running.trainer.evaluate(&source, 0, 1, &|| false).unwrap().unwrap().loss
            });
            let losses: Vec<f64> = losses.collect();
            let least = (0..131).min_by(|a, b| losses[*a].total_cmp(&losses[*b])).unwrap();
            let request = GenerationRequest::new(prompt.clone(), 1, 0.0, 7);
            assert_eq!(
                request.generate(&mut running.trainer, 0, &|| false).unwrap().unwrap(),
                [least as u32],
                "{family}: {prompt:?}"
            );
        }
    }
}
