//! Judges a `train:` section without running it: does it hold together, and how much memory will each rank need?
use crate::{
    data::{self, DataError},
    experts::Placement,
    gpu::places,
    life::STAGING,
    model::{self, Model},
    optim::{room_len, state_vectors, whole_matrices},
    params::Unit,
    resume::check_adapters,
    stages::{resolve, resolve_lora, weights_of},
    train::{experts, workspace::Workspace},
    trained::{self, LORA_FROM, first_backward},
    zero::{
        Policy, Slots,
        engine::{REDUCTIONS_IN_FLIGHT, rounds_on_fetch},
        fold::{Run, buffers, maximal_runs},
        groups,
        live::{self, Fetch},
        partition::Partition,
        pool::PoolPlan,
    },
};
use contract::{
    job::{Count, Hosts, JobSpec, Precision, TrainSpec},
    judge::{Finding, MemoryEstimate, TrainJudge, Verdict},
    probe::LibraryLook,
};
use device::{Dtype, ops::FP8_COLUMNS};
use std::{
    collections::{HashMap, VecDeque},
    path::{Path, PathBuf},
};

/// The worker's judgement, handed to the launcher.
pub struct Judge;

/// Executable, allocator, thread stacks, tokenizer, bytes. With a model of a few elements a process takes 21 MiB, most of them pages of the
/// executable; this is less by what operators' scratch is planned too large for small products.
const PROCESS: u64 = 18 << 20;
/// Of each peer's two slots the chunks that a gather reads, bytes.
const PEER_CHUNKS: usize = 1 << 20;
/// Aligned windows between a shard and its file, while a checkpoint is written or read, bytes (`ckpt::write_shard`).
const CHECKPOINT_WINDOWS: u64 = 24 << 20;

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

/// The inputs of one estimate.
struct Memory<'a> {
    job: &'a JobSpec,
    train: &'a TrainSpec,
    model: &'a dyn Model,
    units: &'a [Unit],
    world: usize,
    threads: usize,
    tokens: u64,
}

impl Memory<'_> {
    fn estimate(&self, rank: u32) -> MemoryEstimate {
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
        let (gathered, gradients) = self.moving(policy, rank as usize);
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

    /// Messages that are put together for the owners of a unit of experts, and what arrives.
    fn messages(&self, policy: Policy, rank: usize, dtype: Dtype) -> u64 {
        let slots = self.slots(policy);
        let (mut gathered, mut sent, mut received) = (0, 0, 0);
        for unit in self.units {
            let own = Partition::new(unit, self.world).range(rank);
            let own = (own.len(), unit.trained_range(own).len());
            let of = groups::messages(unit, &slots, rank, own);
            (gathered, sent, received) = (gathered.max(of.0), sent.max(of.1), received.max(of.2));
        }
        let sent = match dtype {
            Dtype::F32 => 4 * sent.max(gathered),
            Dtype::Bf16 | Dtype::F16 => 4 * sent + dtype.size() * gathered,
        };
        (sent + 4 * received) as u64
    }

    fn slots(&self, policy: Policy) -> Slots {
        let slots = (self.train.batch.global / self.train.batch.micro) as usize;
        Slots { slots, world: self.world, interleaved: policy.shard_gradients }
    }

    /// Units that this rank has a part of.
    fn mine(&self, rank: usize) -> impl DoubleEndedIterator<Item = &Unit> {
        self.units.iter().filter(move |u| u.owners.has(rank))
    }

    fn own_lengths(&self, rank: usize) -> Vec<usize> {
        self.units.iter().map(|u| Partition::new(u, self.world).range(rank).len()).collect()
    }

    /// Elements of gradients that the rank owns, by unit.
    fn own_trained(&self, rank: usize) -> Vec<usize> {
        let of = |u: &Unit| u.trained_range(Partition::new(u, self.world).range(rank)).len();
        self.units.iter().map(of).collect()
    }

    /// Elements of gathered parameters and of gradients at their peak, by the decisions that the engine's pools take.
    fn moving(&self, policy: Policy, rank: usize) -> (u64, u64) {
        let gradients = match policy.shard_gradients && self.world > 1 {
            true => self.sharded_gradients(policy, rank),
            false => self.whole_gradients(policy, rank),
        };
        (self.gathered(policy, rank), gradients as u64)
    }

    /// Elements of gradients that a rank keeps whole until the last slot.
    fn whole_gradients(&self, policy: Policy, rank: usize) -> usize {
        let s = self.slots(policy);
        let whole: usize = self.mine(rank).map(Unit::trained_len).sum();
        let own: usize = self.own_trained(rank).iter().sum();
        let mine = (0..s.rounds()).filter(|&r| s.slot(rank, r).is_some()).count();
        // The finished part of every unit waits for the update.
        let finished = if self.world == 1 { 0 } else { own };
        if policy.in_order && mine > 1 {
            return whole + finished + self.written_gradients(policy, rank, 0, |_| true);
        }
        // What a backward writes of a unit that is frozen in part, before its trained tensors are put together.
        let mixed = self.written_gradients(policy, rank, 0, |u| !u.all_trained());
        whole * buffers((0..mine).map(Run::slot), true) + finished + mixed
    }

    /// Elements of gradients that travel to their owners during each backward: of the owned part one partial sum for each level of
    /// the tree, and the gradients that are written and travel.
    fn sharded_gradients(&self, policy: Policy, rank: usize) -> usize {
        let slots = self.slots(policy);
        let own = self.units.iter().zip(self.own_trained(rank));
        let sums = own.map(|(u, own)| match policy.in_order {
            true => own,
            false => own * groups::buffers_of_owner(&slots, u.owners),
        });
        sums.sum::<usize>() + self.written_gradients(policy, rank, REDUCTIONS_IN_FLIGHT, |_| true)
    }

    /// Elements of the buffers for gradients that backwards write beside the sums, of the units that have some: while
    /// `in_flight` of them travel, the next one is written.
    fn written_gradients(
        &self,
        policy: Policy,
        rank: usize,
        in_flight: usize,
        has: impl Fn(&Unit) -> bool,
    ) -> usize {
        let mut written = Written { in_flight, ..Written::default() };
        let (head, layers) = self.layers(rank);
        let trains = |u: usize| self.units[u].any_trained();
        let slots = self.slots(policy);
        // The second round finds the last gradient of the first one on its way.
        for _ in 0..slots.rounds().min(2) {
            let take =
                |w: &mut Written, u: usize| has(&self.units[u]).then(|| w.pool.take(self.units[u].len()));
            let of_head = take(&mut written, head);
            // The head begins the gradient of an embedding that is tied to it.
            let tied = self.model.tied() && trains(0);
            let mut of_embedding = if tied { take(&mut written, 0) } else { None };
            written.leave(of_head, trains(head));
            for &u in layers[first_backward(self.units)..].iter().rev().flat_map(|l| l.iter().rev()) {
                let unit = &self.units[u];
                if unit.owners.all() {
                    // Experts that are frozen get no gradient.
                    let asked = trains(u) || !unit.holds_experts();
                    let gradient = if asked { take(&mut written, u) } else { None };
                    written.leave(gradient, trains(u));
                    continue;
                }
                let mixed = if unit.all_trained() || !trains(u) { None } else { take(&mut written, u) };
                written.leave(mixed, false);
                written.leave_stack(unit.trained_len() * groups::buffers_of_group(&slots, unit.owners, rank));
            }
            if trains(0) {
                let gradient = of_embedding.take().or_else(|| take(&mut written, 0));
                written.leave(gradient, true);
            }
        }
        written.pool.allocated + written.stacks
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

    /// Where several ranks keep all parameters: the copy of an updated part that travels.
    fn published(&self, policy: Policy, rank: usize) -> u64 {
        let travels = !policy.shard_parameters && self.world > 1;
        let largest = self.own_lengths(rank).into_iter().max().unwrap_or(0) as u64;
        if travels { largest } else { 0 }
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

    /// The head, and of each layer its unit and that of its experts that this rank has a part of.
    fn layers(&self, rank: usize) -> (usize, Vec<Vec<usize>>) {
        let head = self.units.iter().filter(|u| !u.holds_experts()).count() - 1;
        let sparse = |l: usize| self.model.sparse().is_some_and(|s| s.is_sparse(l));
        let mut experts =
            (head + 1..self.units.len()).filter(|&u| self.units[u].owners.has(rank)).collect::<Vec<_>>();
        experts.reverse();
        let of = |u: usize, experts: Option<usize>| std::iter::once(u).chain(experts).collect();
        (head, (1..head).map(|u| of(u, experts.pop_if(|_| sparse(u - 1)))).collect())
    }

    /// Units in the order of a step's fetches.
    fn fetches(&self, rank: usize) -> Vec<usize> {
        let (head, layers) = self.layers(rank);
        let forward = layers.iter().flatten().copied();
        let backward = layers[first_backward(self.units)..].iter().rev().flatten().copied();
        let tied = self.model.tied().then_some(0);
        std::iter::once(0).chain(forward).chain([head]).chain(tied).chain(backward).collect()
    }

    /// Elements of gathered parameters, by the decisions that the engine takes.
    fn gathered(&self, policy: Policy, rank: usize) -> u64 {
        let rounds = self.rounds_on_fetch(policy);
        if !policy.shard_parameters || (self.world == 1 && !rounds) {
            return 0;
        }
        let own = self.own_lengths(rank);
        let len = |u: usize| self.units[u].len();
        // What stays after one slot is there for the next.
        let once = self.fetches(rank);
        let order = if self.train.batch.global > self.train.batch.micro { once.repeat(2) } else { once };
        let order = order.into_iter().filter(|&u| rounds || self.units[u].owners.below(self.world) > 1);
        let fetches = live::plan(order, len, self.train.zero.max_live_parameters);
        if self.reads_in_common() {
            return self.peers_parts(&fetches, |u| len(u) - own[u]);
        }
        let mut ahead: VecDeque<usize> = fetches.iter().filter(|f| !f.here).map(|f| f.unit).collect();
        let mut pool = PoolPlan::default();
        let (mut gathering, mut staying, mut used) = (VecDeque::new(), HashMap::new(), Vec::new());
        for (fetch, together) in self.held_together(&fetches) {
            while gathering.len() <= self.train.zero.prefetch as usize {
                let Some(next) = ahead.pop_front() else { break };
                gathering.push_back(pool.take(len(next)));
            }
            let buf = if fetch.here { staying.remove(&fetch.unit) } else { gathering.pop_front() };
            used.push((fetch, buf.unwrap_or(0)));
            if together {
                continue;
            }
            for (fetch, buf) in used.drain(..) {
                match fetch.stays {
                    true => drop(staying.insert(fetch.unit, buf)),
                    false => pool.give(buf),
                }
            }
        }
        // The own part, where it is rounded before it travels.
        let part = if rounds && self.world > 1 { own.into_iter().max().unwrap_or(0) } else { 0 };
        (pool.allocated + part) as u64
    }

    /// Each fetch, and whether its unit is still held when the next one comes: the head's for the tied embedding, and in a
    /// backward a layer's for its experts.
    fn held_together(&self, fetches: &[Fetch]) -> Vec<(Fetch, bool)> {
        let head = self.units.iter().filter(|u| !u.holds_experts()).count() - 1;
        let mut backward = false;
        let next = fetches.iter().skip(1).map(|f| f.unit).chain([0]);
        let held = fetches.iter().zip(next).map(|(fetch, next)| {
            backward = (backward || fetch.unit == head) && next != 1;
            let tied = self.model.tied() && fetch.unit == head && next == 0;
            (*fetch, tied || (backward && next > head))
        });
        held.collect()
    }

    fn rounds_on_fetch(&self, policy: Policy) -> bool {
        rounds_on_fetch(policy, weights_of(self.train), !self.job.cluster.trains_on_gpus())
    }

    /// Do the ranks read each other's parameters where those lie? On one host they have memory in common.
    fn reads_in_common(&self) -> bool {
        let cluster = &self.job.cluster;
        let one_host = match cluster.workers_per_host {
            Count::Exactly(n) => self.world <= n as usize,
            Count::Auto => matches!(cluster.hosts, Hosts::Auto | Hosts::Local),
        };
        one_host && !cluster.trains_on_gpus()
    }

    /// The most elements of other ranks' parts that are mapped at once, `theirs` of each unit.
    fn peers_parts(&self, fetches: &[Fetch], theirs: impl Fn(usize) -> usize) -> u64 {
        let (mut mapped, mut most, mut used) = (0, 0, Vec::new());
        for (fetch, together) in self.held_together(fetches) {
            mapped += if fetch.here { 0 } else { theirs(fetch.unit) };
            most = most.max(mapped);
            used.push(fetch);
            if !together {
                mapped -= used.drain(..).filter(|f| !f.stays).map(|f| theirs(f.unit)).sum::<usize>();
            }
        }
        most as u64
    }

    /// Shared memory that collectives touch, and the private memory in which a fold puts together what exceeds it.
    fn staging(&self, policy: Policy, rank: usize) -> u64 {
        if self.world == 1 {
            return 0;
        }
        // This rank's two slots, and of its peers' as much, where pieces for this rank lie; a gather reads all of a chunk.
        let gathers = !(policy.shard_parameters && self.reads_in_common());
        let chunks = if gathers { (self.world - 1) * PEER_CHUNKS } else { 0 };
        let shared = 2 * STAGING + chunks.max(2 * STAGING);
        let slots = self.slots(policy);
        let of = |r: usize| (0..slots.rounds()).filter_map(|round| slots.slot(r, round)).collect::<Vec<_>>();
        let partials = |r: usize| match of(r)[..] {
            [] => 0,
            [first, .., last] if !policy.shard_gradients && !policy.in_order => {
                maximal_runs(first..last + 1).len()
            }
            _ => 1,
        };
        let numbers: Vec<usize> = (0..self.world).map(partials).collect();
        let private = self.units.iter().filter(|u| u.owners.all()).map(|u| {
            let part = Partition::new(u, self.world);
            let counts: Vec<usize> = (0..self.world).map(|r| u.trained_range(part.range(r)).len()).collect();
            comm::shm::assembled(rank, &numbers, &counts, STAGING)
        });
        (shared + 4 * private.max().unwrap_or(0)) as u64
    }

    /// What the backend keeps in `f32` of a 16-bit result that it sums up: a million elements or 256 rows, at most the whole,
    /// of a product; the whole gradient of q, k and v.
    fn widened(&self, b: usize, t: usize) -> u64 {
        let largest = self.model.scratch_lengths(b, t).into_iter().max().unwrap_or(0);
        let rows = largest.div_ceil((b * t).max(1)) * 256;
        4 * largest.min(rows.max(1 << 20)).max(b * t * self.model.attention_width()) as u64
    }

    /// What the backend for GPUs has at once beside buffers of the engine: a chunk of logits with their gradients (and the
    /// rotary tables, which are small), and the largest workspace of a product.
    fn gpu_scratch(&self, b: usize, t: usize) -> u64 {
        let logits = device::cuda::logits_bytes(b * t, self.model.vocab()) as u64;
        logits.max(self.rounded(b * t)) + device::cuda::WORKSPACE as u64
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

/// Gradients that are written in the buffers of a pool, and leave.
#[derive(Default)]
struct Written {
    pool: PoolPlan,
    /// How many may travel when the next one is written.
    in_flight: usize,
    /// Oldest first: the elements of its buffer, or none of a stack of several slots' gradients.
    travelling: VecDeque<Option<usize>>,
    /// Elements of all such stacks, and how many of them are free.
    stacks: usize,
    free_stacks: usize,
}

impl Written {
    /// A gradient is done, if there is one. What isn't reduced is given back at once.
    fn leave(&mut self, gradient: Option<usize>, reduced: bool) {
        let Some(len) = gradient else { return };
        match reduced {
            true => self.travel(Some(len)),
            false => self.pool.give(len),
        }
    }

    /// A stack of `len` elements is filled and leaves.
    fn leave_stack(&mut self, len: usize) {
        match self.free_stacks.checked_sub(1) {
            Some(left) => self.free_stacks = left,
            None => self.stacks += len,
        }
        self.travel(None);
    }

    fn travel(&mut self, what: Option<usize>) {
        self.travelling.push_back(what);
        while self.travelling.len() > self.in_flight {
            match self.travelling.pop_front().flatten() {
                Some(len) => self.pool.give(len),
                None => self.free_stacks += 1,
            }
        }
    }
}
