//! Whose attention a shape gets: this program's kernels or the fastest of cuDNN's plans, as the job and the clock say.
use super::super::Cuda;
use super::super::card::Card;
use super::super::error::{CudaError, Result};
use super::super::libs::Places;
use super::attention::Operands;
use super::plan::{Asked, Plan};
use super::{Dnn, Mask, Pass};
use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, PoisonError},
};

/// Runs of each that are timed together, after one that isn't.
const RUNS: usize = 4;
/// Results of cuDNN may be so far from ours, relative to the largest: both are rounded to bf16, and so is what lies between.
const TOLERANCE: f64 = 2e-2;

/// Whose kernels attention is computed by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Attention {
    /// This program's.
    #[default]
    Own,
    /// cuDNN's, where it is there and faster.
    Fastest,
    /// cuDNN's alone.
    Dnn,
}

/// What tells passes apart: sizes, scale, mask, direction.
type Key = ([usize; 5], u32, Mask, bool);

/// The open library and what was chosen.
pub(in super::super) struct Attentions {
    how: Attention,
    dnn: Arc<Dnn>,
    /// None: this program's kernels.
    chosen: Mutex<HashMap<Key, Option<Arc<Plan>>>>,
    /// Not said yet.
    found: Mutex<VecDeque<String>>,
}

fn key(pass: &Pass) -> Key {
    let s = pass.shape;
    ([s.b, s.t, s.heads, s.kv_heads, s.head_dim], s.scale.to_bits(), pass.mask, pass.is_backward)
}

impl Attentions {
    /// The card's context must be the thread's. None where cuDNN isn't wanted.
    pub(in super::super) fn open(how: Attention, places: &Places) -> Result<Option<Attentions>> {
        match how {
            Attention::Own => Ok(None),
            Attention::Fastest | Attention::Dnn => {
                let dnn = Arc::new(Dnn::open(places)?);
                Ok(Some(Attentions { how, dnn, chosen: Mutex::default(), found: Mutex::default() }))
            }
        }
    }

    /// What was found out since somebody last asked.
    pub(in super::super) fn found(&self) -> Option<String> {
        self.found.lock().unwrap_or_else(PoisonError::into_inner).pop_front()
    }

    /// Asks for a pass that graphs can say; false where it is for this program's kernels, `own`.
    pub(in super::super) fn run(
        &self,
        cuda: &Cuda,
        pass: std::result::Result<Pass, &'static str>,
        at: &Operands,
        own: &dyn Fn(),
    ) -> Result<bool> {
        let pass = match pass {
            Ok(pass) => pass,
            Err(why) if self.how == Attention::Dnn => return Err(self.no_plan(why)),
            Err(_) => return Ok(false),
        };
        let Some(plan) = self.chosen(cuda, &pass, at, own)? else { return Ok(false) };
        let title = || format!("{} by cuDNN, {}", pass.describe(), direction(&pass));
        cuda.piece(title, || self.ask(&cuda.card, &plan, &pass, at));
        Ok(true)
    }

    fn chosen(&self, cuda: &Cuda, pass: &Pass, at: &Operands, own: &dyn Fn()) -> Result<Option<Arc<Plan>>> {
        let mut all = self.chosen.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(chosen) = all.get(&key(pass)) {
            return Ok(chosen.clone());
        }
        cuda.card.enter()?;
        let plans = self.dnn.plans(pass);
        let chosen = match (self.how, plans) {
            (Attention::Dnn, plans) => {
                let first = plans?.next().transpose()?;
                Some(Arc::new(first.ok_or_else(|| self.no_plan(&pass.describe()))?))
            }
            (_, Ok(plans)) => self.fastest(cuda, pass, at, plans, own)?,
            (_, Err(error)) => {
                self.go_without(pass, &error.to_string());
                None
            }
        };
        all.insert(key(pass), chosen.clone());
        Ok(chosen)
    }

    /// By the clock, of those whose results are ours; none where this program's own kernels are the fastest.
    fn fastest(
        &self,
        cuda: &Cuda,
        pass: &Pass,
        at: &Operands,
        plans: impl Iterator<Item = Result<Plan>>,
        own: &dyn Fn(),
    ) -> Result<Option<Arc<Plan>>> {
        let card = &cuda.card;
        let run_own = || {
            own();
            true
        };
        let Some(mine) = time(card, run_own)? else { return Ok(None) };
        let expected = pass.results(card, at)?;
        let mut best: Option<(f64, Arc<Plan>)> = None;
        let mut fault = "no plan".to_owned();
        for plan in plans {
            match plan.map_err(|e| e.to_string()).and_then(|plan| self.tried(card, plan, pass, at, &expected))
            {
                Ok((took, plan)) if best.as_ref().is_none_or(|(least, _)| took < *least) => {
                    best = Some((took, plan))
                }
                Ok(_) => {}
                Err(why) => fault = why,
            }
        }
        let Some((took, plan)) = best else {
            self.go_without(pass, &fault);
            return Ok(None);
        };
        self.say_chosen(pass, took, mine);
        Ok((took < mine).then_some(plan))
    }

    /// What a plan takes, seconds, or why it can't be had: it fails, or its results aren't ours.
    fn tried(
        &self,
        card: &Arc<Card>,
        plan: Plan,
        pass: &Pass,
        at: &Operands,
        expected: &[Vec<f32>; 3],
    ) -> std::result::Result<(f64, Arc<Plan>), String> {
        let plan = Arc::new(plan);
        let run = || self.ask(card, &plan, pass, at);
        let results = run().and_then(|()| pass.results(card, at)).map_err(|e| e.to_string())?;
        let apart = apart(&results, expected);
        if apart > TOLERANCE {
            return Err(format!("its results are {apart:.0e} apart from launch's"));
        }
        let took = time(card, || run().is_ok()).map_err(|e| e.to_string())?;
        Ok((took.ok_or("it couldn't be timed")?, plan))
    }

    fn say_chosen(&self, pass: &Pass, took: f64, mine: f64) {
        let cudnn = format!("cuDNN {}", self.dnn.describe());
        let whose = if took < mine { &cudnn } else { "launch's own kernels" };
        let [mine, took] = [mine, took].map(|seconds| 1e6 * seconds);
        let times = format!("{took:.0} µs by cuDNN, {mine:.0} µs by launch");
        self.say(format!("{}: {} by {whose} ({times})", pass.describe(), direction(pass)));
    }

    fn go_without(&self, pass: &Pass, why: &str) {
        self.say(format!("{}: {} goes without cuDNN: {why}", pass.describe(), direction(pass)));
    }

    fn ask(&self, card: &Arc<Card>, plan: &Arc<Plan>, pass: &Pass, at: &Operands) -> Result<()> {
        // Given back in the stream's order, after this pass.
        let workspace = card.scratch(plan.workspace.max(1))?;
        let mut tensors = pass.tensors(at);
        let mut sums = Vec::new();
        for (id, elements, zeros) in pass.sums() {
            let bytes = elements * size_of::<f32>();
            let memory = card.scratch(bytes)?;
            if zeros {
                card.fill_zero(memory.at(), bytes)?;
            }
            tensors.push((id, memory.at()));
            sums.push(memory);
        }
        let asked = Asked { dnn: self.dnn.clone(), plan: plan.clone(), tensors, workspace: workspace.at() };
        let now = asked.clone();
        card.ask(|piece| piece.plan(asked), |stream| now.issue(stream))
    }

    fn say(&self, what: String) {
        self.found.lock().unwrap_or_else(PoisonError::into_inner).push_back(what);
    }

    fn no_plan(&self, what: &str) -> CudaError {
        CudaError::TooOld {
            what: format!("cuDNN {} has no plan for {what}", self.dnn.describe()),
            needed: "`train.attention: auto`, which takes launch's own kernels there".to_owned(),
        }
    }
}

fn direction(pass: &Pass) -> &'static str {
    if pass.is_backward { "backward" } else { "forward" }
}

/// The largest difference relative to the largest expected number, of each result; infinite where one is no number and the other is one.
fn apart(found: &[Vec<f32>; 3], expected: &[Vec<f32>; 3]) -> f64 {
    let of = |(found, expected): (&Vec<f32>, &Vec<f32>)| {
        let finite = expected.iter().map(|x| x.abs()).filter(|x| x.is_finite());
        let largest = f64::from(finite.fold(f32::MIN_POSITIVE, f32::max));
        let each = found.iter().zip(expected).map(|(f, e)| match f.is_finite() == e.is_finite() {
            true if f.is_finite() => f64::from((f - e).abs()) / largest,
            true => 0.0,
            false => f64::INFINITY,
        });
        each.fold(0.0, f64::max)
    };
    found.iter().zip(expected).map(of).fold(0.0, f64::max)
}

/// Seconds of some runs; none where one fails.
fn time(card: &Arc<Card>, run: impl Fn() -> bool) -> Result<Option<f64>> {
    if !run() {
        return Ok(None);
    }
    let begin = card.record_timed()?;
    if !(0..RUNS).all(|_| run()) {
        return Ok(None);
    }
    let end = card.record_timed()?;
    end.wait()?;
    Ok(end.since(&begin)?.map(|seconds| seconds / RUNS as f64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_result_is_compared_with_its_own_size() {
        let of = |o: f32, sum: f32| [vec![o, 0.5], vec![sum, 8.0], Vec::new()];
        assert_eq!(apart(&of(1.0, 2.0), &of(1.0, 2.0)), 0.0);
        assert!((apart(&of(1.25, 2.0), &of(1.0, 2.0)) - 0.25).abs() < 1e-9);
        assert!((apart(&of(1.0, 4.0), &of(1.0, 2.0)) - 0.25).abs() < 1e-9);
        assert_eq!(apart(&of(f32::NAN, 2.0), &of(1.0, 2.0)), f64::INFINITY);
        assert_eq!(apart(&of(f32::NAN, 2.0), &of(f32::NAN, 2.0)), 0.0, "both went wrong before");
    }
}
