//! Generates a few tokens after an evaluation (`train.eval.sample`), as a plausibility check next
//! to the eval loss. Each token needs a whole forward pass, so this is not meant for serving a
//! model.
use super::step::Trainer;
use crate::{
    error::Result,
    model::HeadParams,
    rng::{Purpose, RandomStream},
    zero::engine::ParamsGuard,
};
use device::{Buf, Dtype, ops::IGNORE_LABEL};

/// A prompt, the number of tokens to generate after the prompt, and the settings that select
/// tokens.
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
    /// Creates a request whose random numbers derive from the run's seed.
    pub fn new(prompt: Vec<u32>, tokens: u32, temperature: f64, seed: u64) -> Self {
        GenerationRequest {
            prompt,
            tokens,
            temperature,
            stream: RandomStream::new(seed, Purpose::Generation, ""),
        }
    }

    /// Selects the `i`-th token after the prompt from its logits. `step` is the step of the run.
    fn choose_token(&self, logits: &[f32], i: u64, step: u64) -> u32 {
        let better = |best: usize, x: usize| if logits[x] > logits[best] { x } else { best };
        let likeliest = (1..logits.len()).fold(0, better);
        if self.temperature == 0.0 {
            return likeliest as u32;
        }
        let most = f64::from(logits[likeliest]);
        let share = |l: &f32| libm::exp((f64::from(*l) - most) / self.temperature);
        let total: f64 = logits.iter().map(share).sum();
        // one random number selects the token whose interval of the cumulative weights contains it
        let word = self.stream.compute_words(i, 0, step)[0];
        let mut left = (f64::from(word) + 0.5) / 4_294_967_296.0 * total;
        for (token, l) in logits.iter().enumerate() {
            left -= share(l);
            if left < 0.0 {
                return token as u32;
            }
        }
        likeliest as u32
    }
}

impl Trainer {
    /// Generates the tokens after the prompt. Returns these tokens on rank 0, and no tokens on
    /// other ranks.
    ///
    /// The context is the last `train.data.seq_len` tokens. Collective: every rank must call it.
    pub fn generate(&mut self, request: &GenerationRequest, step: u64) -> Result<Vec<u32>> {
        let (is_leader, seq_len) = (self.engine.rank() == 0, self.batch.seq_len);
        let order: Vec<usize> = (0..request.tokens).flat_map(|_| self.plan_pass_order(false)).collect();
        self.engine.begin_pass(order);
        self.batch.first_sample = None;
        let (mut tokens, mut logits) =
            (request.prompt.clone(), self.ops.zeroed(Dtype::F32, self.model.sizes().vocab));
        let mut host_logits = Buf::default();
        for i in 0..u64::from(request.tokens) {
            let context = tokens.len().min(seq_len);
            if is_leader {
                self.set_prompt(&tokens[tokens.len() - context..]);
            }
            self.run_forward(is_leader)?;
            self.compute_last_logits(is_leader.then_some(context - 1), &mut logits)?;
            if is_leader {
                let logits = self.ops.to_host(logits.view(), &mut host_logits);
                self.ops.status()?;
                tokens.push(request.choose_token(logits.host(), i, step));
            }
        }
        Ok(tokens.split_off(request.prompt.len()))
    }

    /// Replaces the micro-batch by one whose first sequence begins with `tokens`. The tokens do not
    /// attend to the padding that follows.
    fn set_prompt(&mut self, tokens: &[u32]) {
        let b = &mut self.batch;
        b.tokens.fill(0);
        b.labels.fill(IGNORE_LABEL);
        b.starts.fill(0);
        b.tokens[..tokens.len()].copy_from_slice(tokens);
        if let Some(window) = self.model.sliding_window() {
            b.set_window_starts(window);
        }
    }

    /// Fetches the parameters of the head and stores the logits of `row` in `out`. If `row` is
    /// `None`, this rank only takes part in collectives.
    fn compute_last_logits(&mut self, row: Option<usize>, out: &mut Buf) -> Result<()> {
        let head = self.engine.fetch_params(self.head_unit())?;
        let embedding =
            if self.model.has_tied_embeddings() { Some(self.engine.fetch_params(0)?) } else { None };
        if let Some(row) = row {
            self.run_head_for_logits(row, &head, embedding.as_ref(), out);
        }
        self.engine.release_params(head);
        embedding.into_iter().for_each(|guard| self.engine.release_params(guard));
        Ok(())
    }

    /// Computes the logits of `row` from the input of the head, and stores them in `out`.
    fn run_head_for_logits(
        &mut self,
        row: usize,
        head: &ParamsGuard,
        embedding: Option<&ParamsGuard>,
        out: &mut Buf,
    ) {
        let (w, m, ops, engine) = (&mut self.activations, &self.model, self.ops.as_ref(), &self.engine);
        let d = m.sizes().hidden;
        let x = w
            .layer_inputs
            .last()
            .expect("the last element is the input of the head")
            .view()
            .slice(row * d..(row + 1) * d);
        engine.with_params(head, |head| match embedding {
            Some(guard) => engine.with_params(guard, |e| {
                m.compute_logits(
                    ops,
                    HeadParams { head, embedding: Some(e) },
                    x,
                    out.view_mut(),
                    &mut w.scratch,
                );
            }),
            None => {
                m.compute_logits(ops, HeadParams { head, embedding: None }, x, out.view_mut(), &mut w.scratch)
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_sampled_with_their_probabilities() {
        let logits = [0.0, 1.0, -2.0, 1.5, f32::NEG_INFINITY];
        let greedy = GenerationRequest::new(vec![0], 1, 0.0, 7);
        assert_eq!(greedy.choose_token(&logits, 5, 9), 3);
        assert_eq!(greedy.choose_token(&[2.0, 2.0], 0, 0), 0, "the first of equal logits");
        let warm = GenerationRequest { temperature: 0.8, ..greedy };
        let mut counts = [0u32; 5];
        for i in 0..20_000 {
            counts[warm.choose_token(&logits, i, 3) as usize] += 1;
        }
        let shares: Vec<f64> = logits.iter().map(|l| (f64::from(*l) / 0.8).exp()).collect();
        let total: f64 = shares.iter().sum();
        for (count, share) in counts.iter().zip(&shares) {
            assert!((f64::from(*count) / 20_000.0 - share / total).abs() < 0.01, "{counts:?}");
        }
        assert_eq!(warm.choose_token(&logits, 11, 3), warm.choose_token(&logits, 11, 3));
        let at = |step| (0..50).map(|i| warm.choose_token(&logits, i, step)).collect::<Vec<_>>();
        assert_ne!(at(3), at(4), "tokens depend on the step");
    }
}
