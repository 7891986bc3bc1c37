//! Generates a short text with the trained model after an evaluation (`train.eval.sample`), so that
//! the user can check the model. Each token needs a whole forward pass, so this is not meant for
//! serving a model.
use super::step::{HeadGuards, Trainer};
use crate::{
    error::Result,
    model::HeadInput,
    rng::{Purpose, RandomStream},
};
use device::{Buf, Dtype, ops::IGNORE_LABEL};

/// A request to generate text: a prompt, the number of tokens to generate, and the settings by
/// which tokens are selected.
#[derive(Clone, Debug)]
pub struct GenerationRequest {
    /// The tokens of the prompt, at least one.
    pub prompt: Vec<u32>,
    /// The number of tokens to generate.
    pub tokens: u32,
    /// The sampling temperature; with 0, always the most probable token is selected.
    pub temperature: f64,
    /// The random numbers that select tokens.
    pub stream: RandomStream,
}

impl GenerationRequest {
    /// Creates a request to generate text, whose random numbers are derived from the run's seed.
    pub fn new(prompt: Vec<u32>, tokens: u32, temperature: f64, seed: u64) -> Self {
        GenerationRequest {
            prompt,
            tokens,
            temperature,
            stream: RandomStream::new(seed, Purpose::Generation, ""),
        }
    }

    /// Selects the generated token number `i` from `logits`: the most probable token, or a random
    /// token if the temperature is above 0. `step` is the step of the run.
    fn select_next_token(&self, logits: &[f32], i: u64, step: u64) -> u32 {
        let better = |best: usize, x: usize| if logits[x] > logits[best] { x } else { best };
        let likeliest = (1..logits.len()).fold(0, better);
        if self.temperature == 0.0 {
            return likeliest as u32;
        }
        let most = f64::from(logits[likeliest]);
        let share = |l: &f32| libm::exp((f64::from(*l) - most) / self.temperature);
        let total: f64 = logits.iter().map(share).sum();
        // one random number selects the token whose interval of the cumulative weights contains it
        let word = self.stream.compute_random_words(i, 0, step)[0];
        let mut left = (f64::from(word) + 0.5) / 4_294_967_296.0 * total;
        for (token, l) in logits.iter().enumerate() {
            left -= share(l);
            if left < 0.0 {
                return token as u32;
            }
        }
        likeliest as u32
    }

    /// Generates the tokens that follow the prompt with the current parameters of `trainer`.
    /// Returns them on rank 0, and no tokens on other ranks. The context is the last
    /// `train.data.seq_len` tokens.
    ///
    /// Calls `is_stopping` before each token. Returns `None` without further tokens if the result
    /// is true on any rank. Collective: every rank must call it.
    pub fn generate(
        &self,
        trainer: &mut Trainer,
        step: u64,
        is_stopping: &dyn Fn() -> bool,
    ) -> Result<Option<Vec<u32>>> {
        let (is_leader, seq_len) = (trainer.engine.rank() == 0, trainer.batch.seq_len);
        let order: Vec<usize> =
            (0..self.tokens).flat_map(|_| trainer.list_units_in_pass_order(false)).collect();
        trainer.engine.begin_pass(order);
        trainer.batch.first_sample = None;
        let (mut tokens, mut logits) =
            (self.prompt.clone(), trainer.ops.zeroed(Dtype::F32, trainer.model.sizes().vocab));
        let mut host_logits = Buf::default();
        for i in 0..u64::from(self.tokens) {
            if trainer.cancel_pass_if_stopping_on_any_rank(is_stopping())? {
                return Ok(None);
            }
            let context = tokens.len().min(seq_len);
            if is_leader {
                set_prompt_batch(trainer, &tokens[tokens.len() - context..]);
            }
            trainer.run_forward(is_leader)?;
            trainer.with_head_params(|trainer, head| {
                if is_leader {
                    compute_row_logits(trainer, head, context - 1, &mut logits);
                }
            })?;
            if is_leader {
                let logits = trainer.ops.to_host(logits.view(), &mut host_logits);
                trainer.ops.check_status()?;
                tokens.push(self.select_next_token(logits.host_slice(), i, step));
            }
        }
        Ok(Some(tokens.split_off(self.prompt.len())))
    }
}

/// Writes the prompt and the tokens generated so far (`tokens`) to the beginning of the trainer's
/// micro-batch, and pads the rest. The tokens do not attend to the padding that follows.
fn set_prompt_batch(trainer: &mut Trainer, tokens: &[u32]) {
    let b = &mut trainer.batch;
    b.tokens.fill(0);
    b.labels.fill(IGNORE_LABEL);
    b.starts.fill(0);
    b.tokens[..tokens.len()].copy_from_slice(tokens);
    if let Some(window) = trainer.model.sliding_window() {
        b.set_window_starts(window);
    }
}

/// Computes the logits that predict the token after position `row` of the text, and writes them to
/// `out`.
fn compute_row_logits(trainer: &mut Trainer, guards: HeadGuards, row: usize, out: &mut Buf) {
    let (w, model, ops) = (&mut trainer.activations, &trainer.model, trainer.ops.as_ref());
    let d = model.sizes().hidden;
    let x = w.layer_inputs.last().expect("the last element is the input of the head").view();
    let x = x.slice(row * d..(row + 1) * d);
    trainer.engine.with_params_of_units(guards, |params, embedding| {
        model.compute_single_row_logits(
            &HeadInput { ops, params, embedding, x },
            out.view_mut(),
            &mut w.scratch,
        );
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_sampled_with_their_probabilities() {
        let logits = [0.0, 1.0, -2.0, 1.5, f32::NEG_INFINITY];
        let greedy = GenerationRequest::new(vec![0], 1, 0.0, 7);
        assert_eq!(greedy.select_next_token(&logits, 5, 9), 3);
        assert_eq!(greedy.select_next_token(&[2.0, 2.0], 0, 0), 0, "the first of equal logits");
        let warm = GenerationRequest { temperature: 0.8, ..greedy };
        let mut counts = [0u32; 5];
        for i in 0..20_000 {
            counts[warm.select_next_token(&logits, i, 3) as usize] += 1;
        }
        let shares: Vec<f64> = logits.iter().map(|l| (f64::from(*l) / 0.8).exp()).collect();
        let total: f64 = shares.iter().sum();
        for (count, share) in counts.iter().zip(&shares) {
            assert!((f64::from(*count) / 20_000.0 - share / total).abs() < 0.01, "{counts:?}");
        }
        assert_eq!(warm.select_next_token(&logits, 11, 3), warm.select_next_token(&logits, 11, 3));
        let at = |step| (0..50).map(|i| warm.select_next_token(&logits, i, step)).collect::<Vec<_>>();
        assert_ne!(at(3), at(4), "tokens depend on the step");
    }
}
