//! A few tokens that the model goes on with: a smoke signal beside the held-out loss, no way to serve a model. Each token
//! costs a whole forward pass.
use super::step::Trainer;
use crate::{
    error::Result,
    model::HeadParams,
    rng::{Purpose, Stream},
    zero::engine::Held,
};
use device::{Buf, Dtype, ops::IGNORE};

/// What is asked for.
#[derive(Clone, Debug)]
pub struct Sampling {
    /// The prompt's tokens, at least one.
    pub prompt: Vec<u32>,
    /// How many more.
    pub tokens: u32,
    /// 0: always the likeliest token.
    pub temperature: f64,
    /// Which numbers decide otherwise.
    pub stream: Stream,
}

impl Sampling {
    /// `seed`: the run's.
    pub fn new(prompt: Vec<u32>, tokens: u32, temperature: f64, seed: u64) -> Self {
        Sampling { prompt, tokens, temperature, stream: Stream::new(seed, Purpose::Sample, "") }
    }

    /// The `i`-th token after the prompt, at an optimizer step.
    fn choose(&self, logits: &[f32], i: u64, step: u64) -> u32 {
        let better = |best: usize, x: usize| if logits[x] > logits[best] { x } else { best };
        let likeliest = (1..logits.len()).fold(0, better);
        if self.temperature == 0.0 {
            return likeliest as u32;
        }
        let most = f64::from(logits[likeliest]);
        let share = |l: &f32| libm::exp((f64::from(*l) - most) / self.temperature);
        let all: f64 = logits.iter().map(share).sum();
        // one number decides: where it falls among the shares laid side by side
        let word = self.stream.words(i, 0, step)[0];
        let mut left = (f64::from(word) + 0.5) / 4_294_967_296.0 * all;
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
    /// The tokens after the prompt, on rank 0; the others help and get none. Where prompt and tokens are longer than a
    /// sample, the model sees as many of the last as a sample holds. Collective.
    pub fn sample(&mut self, asked: &Sampling, step: u64) -> Result<Vec<u32>> {
        let (compute, t) = (self.engine.rank() == 0, self.batch.t);
        let order: Vec<usize> = (0..asked.tokens).flat_map(|_| self.pass_order(false)).collect();
        self.engine.announce(order);
        self.batch.first = None;
        let (mut tokens, mut logits) =
            (asked.prompt.clone(), self.ops.zeroed(Dtype::F32, self.model.vocab()));
        let mut room = Buf::default();
        for i in 0..u64::from(asked.tokens) {
            let seen = tokens.len().min(t);
            if compute {
                self.show(&tokens[tokens.len() - seen..]);
            }
            self.forward(compute)?;
            self.last_logits(compute.then_some(seen - 1), &mut logits)?;
            if compute {
                let logits = self.ops.shown(logits.view(), &mut room).host();
                tokens.push(asked.choose(logits, i, step));
            }
        }
        Ok(tokens.split_off(asked.prompt.len()))
    }

    /// A micro-batch whose first sequence begins with these tokens; what follows isn't seen by them.
    fn show(&mut self, tokens: &[u32]) {
        let b = &mut self.batch;
        b.tokens.fill(0);
        b.labels.fill(IGNORE);
        b.starts.fill(0);
        b.tokens[..tokens.len()].copy_from_slice(tokens);
        if let Some(window) = self.model.window() {
            b.slide(window);
        }
    }

    /// Logits of the given row, where there is one to compute.
    fn last_logits(&mut self, row: Option<usize>, out: &mut Buf) -> Result<()> {
        let head = self.engine.fetch(self.head_unit())?;
        let embedding = if self.model.tied() { Some(self.engine.fetch(0)?) } else { None };
        if let Some(row) = row {
            self.logits_of(row, &head, embedding.as_ref(), out);
        }
        self.engine.release(head);
        embedding.into_iter().for_each(|held| self.engine.release(held));
        Ok(())
    }

    fn logits_of(&mut self, row: usize, head: &Held, embedding: Option<&Held>, out: &mut Buf) {
        let (w, m, ops, engine) = (&mut self.work, &self.model, self.ops.as_ref(), &self.engine);
        let d = m.hidden();
        let x = w.x.last().expect("a workspace has the head's input").view().slice(row * d..(row + 1) * d);
        engine.with_params(head, |head| match embedding {
            Some(held) => engine.with_params(held, |e| {
                m.logits(ops, HeadParams { head, embedding: Some(e) }, x, out.view_mut(), &mut w.scratch);
            }),
            None => m.logits(ops, HeadParams { head, embedding: None }, x, out.view_mut(), &mut w.scratch),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_come_as_often_as_their_shares_say() {
        let logits = [0.0, 1.0, -2.0, 1.5, f32::NEG_INFINITY];
        let greedy = Sampling::new(vec![0], 1, 0.0, 7);
        assert_eq!(greedy.choose(&logits, 5, 9), 3);
        assert_eq!(greedy.choose(&[2.0, 2.0], 0, 0), 0, "the first of equals");
        let warm = Sampling { temperature: 0.8, ..greedy };
        let mut counts = [0u32; 5];
        for i in 0..20_000 {
            counts[warm.choose(&logits, i, 3) as usize] += 1;
        }
        let shares: Vec<f64> = logits.iter().map(|l| (f64::from(*l) / 0.8).exp()).collect();
        let all: f64 = shares.iter().sum();
        for (count, share) in counts.iter().zip(&shares) {
            assert!((f64::from(*count) / 20_000.0 - share / all).abs() < 0.01, "{counts:?}");
        }
        assert_eq!(warm.choose(&logits, 11, 3), warm.choose(&logits, 11, 3));
        let at = |step| (0..50).map(|i| warm.choose(&logits, i, step)).collect::<Vec<_>>();
        assert_ne!(at(3), at(4), "another step, other tokens");
    }
}
