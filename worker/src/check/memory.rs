//! How much memory each rank will need, part by part.
use crate::{
    model::Model,
    optim::{room_len, state_vectors, whole_matrices},
    params::Unit,
    stages::weights_of,
    train::{experts, workspace::Workspace},
    trained::first_backward,
    zero::{Policy, Slots, partition::Partition},
};
use contract::{
    job::{JobSpec, Precision, TrainSpec},
    preflight::MemoryEstimate,
};
use device::{
    Dtype,
    cuda::Attention,
    ops::{AttentionShape, FP8_COLUMNS},
};

/// Executable, allocator, thread stacks, tokenizer, bytes. With a model of a few elements a process takes 21 MiB, most of them pages of the
/// executable; this is less by what operators' scratch is planned too large for small products.
const PROCESS: u64 = 18 << 20;
/// Aligned windows between a shard and its file, while a checkpoint is written or read, bytes (`ckpt::write_shard`).
const CHECKPOINT_WINDOWS: u64 = 24 << 20;

/// The inputs of one estimate.
pub(super) struct Memory<'a> {
    pub(super) job: &'a JobSpec,
    pub(super) train: &'a TrainSpec,
    pub(super) model: &'a dyn Model,
    pub(super) units: &'a [Unit],
    pub(super) world: usize,
    pub(super) threads: usize,
    pub(super) tokens: u64,
}

impl Memory<'_> {
    pub(super) fn estimate(&self, rank: u32) -> MemoryEstimate {
        let policy = Policy::of(self.train);
        let weights = weights_of(self.train);
        let dtype = weights.dtype;
        let own: u64 = self.own_lengths(rank as usize).iter().sum::<usize>() as u64;
        let own_trained: u64 = self.own_trained(rank as usize).iter().sum::<usize>() as u64;
        let all: u64 = self.mine(rank as usize).map(|u| u.len() as u64).sum();
        let all_trained: u64 = self.mine(rank as usize).map(|u| u.trained_len() as u64).sum();
        let states = {
            let (first, second) = state_vectors(&self.train.optimizer);
            u64::from(first) + u64::from(second)
        };
        let (b, t) = (self.train.batch.micro as usize, self.train.data.seq_len as usize);
        let layers = self.units.iter().filter(|u| !u.holds_experts()).count() - 2;
        let computed = match policy.shard_parameters {
            true if self.rounds_on_fetch(policy) => 0,
            true => own,
            false => all,
        };
        let master = if policy.keeps_own(true) { own } else { all };
        let half = dtype != Dtype::F32;
        let updated = if policy.shard_optimizer { own_trained } else { all_trained };
        let (gathered, gradients) =
            (self.gathered(policy, rank as usize), self.gradients(policy, rank as usize));
        let saved = weights.updated.size() as u64 * own + 4 * own_trained * states;
        let offload = self.train.zero.offload.is_some();
        let in_background = self.job.checkpoint.r#async;
        let copies = if in_background && !offload { saved } else { 0 };
        let first = first_backward(self.units);
        let on_gpu = self.job.cluster.trains_on_gpus();
        let windows = CHECKPOINT_WINDOWS.min(saved);
        // What is mapped of peers' parts is let go of before a checkpoint is written, so windows may take its place.
        let mapped =
            if self.reads_in_common() && !in_background { dtype.size() as u64 * gathered } else { 0 };
        let mut parts = vec![
            ("parameters".to_string(), dtype.size() as u64 * computed),
            ("master weights".into(), if weights.has_masters() { 4 * master } else { 0 }),
            ("weights being updated".into(), 4 * self.widened_weights(policy, rank as usize)),
            (
                "optimizer states".into(),
                4 * states * if offload { self.at_hand(policy, rank as usize) } else { updated },
            ),
            ("gathered parameters".into(), dtype.size() as u64 * gathered),
            ("gradients".into(), 4 * gradients),
            ("whole matrices".into(), 4 * self.whole_matrices(policy, rank as usize)),
            (
                "activations".into(),
                Workspace::bytes(self.model, layers, b, t, self.train.recompute, first, dtype),
            ),
            ("rows of experts".into(), self.experts(b * t, dtype)),
            ("messages of experts".into(), self.messages(policy, rank as usize, dtype)),
        ];
        if on_gpu {
            parts.push(("logits and operator scratch".into(), self.gpu_scratch(b, t)));
        } else {
            parts.push(("operands in fp8".into(), dtype.size() as u64 * self.rounded(b * t)));
            parts.extend([
                ("operator scratch".into(), self.scratch(b, t) + if half { self.widened(b, t) } else { 0 }),
                ("collectives' staging".into(), self.staging(policy, rank as usize)),
                (
                    "copy of an updated part".into(),
                    dtype.size() as u64 * self.published(policy, rank as usize),
                ),
                ("checkpoint copy (async)".into(), copies),
                ("checkpoint windows".into(), windows.saturating_sub(mapped)),
                ("tokens (mapped)".into(), self.tokens * if self.model.vocab() <= 1 << 16 { 2 } else { 4 }),
                ("process".into(), PROCESS),
            ]);
        }
        parts.retain(|(_, bytes)| *bytes > 0);
        parts.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        MemoryEstimate { rank, total: parts.iter().map(|(_, b)| b).sum(), parts }
    }

    /// Elements of weights in bf16 without masters that are updated as f32 at a time.
    fn widened_weights(&self, policy: Policy, rank: usize) -> u64 {
        if !self.train.rounds_stochastically() {
            return 0;
        }
        let updated = |u: &Unit| match policy.shard_optimizer {
            true => Partition::new(u, self.world).range(rank),
            false => 0..u.len(),
        };
        room_len(self.mine(rank).map(|u| (u, updated(u)))) as u64
    }

    /// Of layers with experts: rows.
    fn experts(&self, rows: usize, dtype: Dtype) -> u64 {
        let parallel = self.train.experts.parallel as usize;
        experts::bytes(self.model, self.units, rows, self.train.recompute, dtype, parallel) as u64
    }

    pub(super) fn slots(&self, policy: Policy) -> Slots {
        let slots = (self.train.batch.global / self.train.batch.micro) as usize;
        Slots { slots, world: self.world, interleaved: policy.shard_gradients }
    }

    /// Units that this rank has a part of.
    pub(super) fn mine(&self, rank: usize) -> impl DoubleEndedIterator<Item = &Unit> {
        self.units.iter().filter(move |u| u.owners.has(rank))
    }

    pub(super) fn own_lengths(&self, rank: usize) -> Vec<usize> {
        self.units.iter().map(|u| Partition::new(u, self.world).range(rank).len()).collect()
    }

    /// Elements of gradients that the rank owns, by unit.
    pub(super) fn own_trained(&self, rank: usize) -> Vec<usize> {
        let of = |u: &Unit| u.trained_range(Partition::new(u, self.world).range(rank)).len();
        self.units.iter().map(of).collect()
    }

    /// Elements of one state vector that are in memory at once when states lie in files: those of one unit and the next.
    fn at_hand(&self, policy: Policy, rank: usize) -> u64 {
        let sharded = self.own_trained(rank);
        let whole: Vec<usize> = self.mine(rank).map(Unit::trained_len).collect();
        let lengths = if policy.shard_optimizer { sharded } else { whole };
        let two = lengths.windows(2).map(|w| w[0] + w[1]).max().or(lengths.first().copied()).unwrap_or(0);
        // A GPU's rooms have the size of the largest unit.
        let rooms = 2 * lengths.iter().max().copied().unwrap_or(0);
        if self.job.cluster.trains_on_gpus() { rooms as u64 } else { two as u64 }
    }

    /// What Muon needs to move the matrices of a unit: their directions, and then the own part of those, which travels, or of the
    /// largest matrix the iteration.
    fn whole_matrices(&self, policy: Policy, rank: usize) -> u64 {
        let iteration = |shape: &[usize]| {
            let (small, large) = (shape[0].min(shape[1]), shape[0].max(shape[1]));
            2 * small * small + 2 * small * large
        };
        let of_unit = |((unit, whole), own): ((&Unit, Vec<bool>), usize)| {
            let shapes =
                unit.params.iter().zip(whole).filter(|(_, whole)| *whole).map(|(p, _)| iteration(&p.shape));
            let part = if policy.shard_optimizer && self.world > 1 { own } else { 0 };
            shapes.max().map(|largest| unit.trained_len() + largest.max(part))
        };
        let moved = whole_matrices(&self.train.optimizer, self.units);
        let units = self.units.iter().zip(moved).zip(self.own_trained(rank));
        let mine = units.filter(|((u, _), _)| u.owners.has(rank));
        mine.filter_map(of_unit).max().unwrap_or(0) as u64
    }

    /// What the backend keeps in `f32` of a 16-bit result that it sums up: a million elements or 256 rows, at most the whole,
    /// of a product; the whole gradient of q, k and v.
    fn widened(&self, b: usize, t: usize) -> u64 {
        let largest = self.model.scratch_lengths(b, t).into_iter().max().unwrap_or(0);
        let rows = largest.div_ceil((b * t).max(1)) * 256;
        4 * largest.min(rows.max(1 << 20)).max(b * t * self.model.attention_width()) as u64
    }

    /// What the backend for GPUs has at once beside buffers of the engine: a chunk of logits with their gradients (and the
    /// rotary tables, which are small) or what attention by cuDNN may need, and the largest workspace of a product.
    fn gpu_scratch(&self, b: usize, t: usize) -> u64 {
        let logits = device::cuda::logits_bytes(b * t, self.model.vocab()) as u64;
        let attention = match crate::gpu::attention(self.train) {
            Attention::Own => 0,
            Attention::Fastest | Attention::Dnn => {
                let [heads, kv_heads, head_dim] = self.model.heads();
                device::cuda::attention_bytes(AttentionShape::new(b, t, heads, kv_heads, head_dim)) as u64
            }
        };
        logits.max(self.rounded(b * t)).max(attention) + device::cuda::WORKSPACE as u64
    }

    /// Elements of both operands of the largest product in fp8, which are rounded before.
    fn rounded(&self, rows: usize) -> u64 {
        if self.train.precision != Precision::Fp8 {
            return 0;
        }
        let padded = rows.next_multiple_of(FP8_COLUMNS);
        let of = |(inp, out): (usize, usize)| (rows * inp.max(out) + inp * out).max(padded * (inp + out));
        self.model.linears().into_iter().map(of).max().unwrap_or(0) as u64
    }

    /// What the backend keeps for tiles, packed panels and chunks of logits.
    fn scratch(&self, b: usize, t: usize) -> u64 {
        let logits = 4 * device::cpu::classifier_rows(b * t, self.model.vocab()) * self.model.vocab();
        (logits + (2 << 20) * (1 + self.threads)) as u64
    }
}
