//! [`MemoryPlan`]: the estimated peak memory of each rank, by purpose.
use crate::{
    model::Model,
    optim::{compute_update_chunk_len, find_muon_matrices, needs_state_vectors},
    param_groups::find_first_backward_layer,
    params::ParamUnit,
    train::{activations::MicroBatchActivations, moe},
    zero::{MicroBatchSchedule, ShardingPolicy, engine::ParamDtypes, partition::Partition},
};
use device::{
    Dtype,
    cuda::AttentionBackend,
    ops::{AttentionShape, FP8_COLUMN_MULTIPLE},
};
use jobspec::{JobSpec, Precision, TrainSpec};
use protocol::preflight::MemoryEstimate;

/// The memory of executable, allocator, thread stacks and tokenizer, in bytes.
///
/// A process with a tiny model takes 21 MiB. This constant is 3 MiB smaller, because the estimate
/// of the operators' workspace is 3 MiB too high for small matmuls.
const PROCESS_BYTES: u64 = 18 << 20;
/// The size of the aligned buffers between a shard and its file while a checkpoint is written or
/// read (`ckpt::write_shard`).
const CHECKPOINT_BUFFER_BYTES: u64 = 24 << 20;

/// The inputs of a memory estimate: a job, its model and the number of ranks.
pub(super) struct MemoryPlan<'a> {
    pub(super) job: &'a JobSpec,
    pub(super) train: &'a TrainSpec,
    pub(super) model: &'a dyn Model,
    pub(super) units: &'a [ParamUnit],
    pub(super) world: usize,
    pub(super) threads: usize,
    /// The number of tokens of the training data.
    pub(super) tokens: u64,
}

impl MemoryPlan<'_> {
    /// Estimates the peak memory of one rank. Counts GPU memory if the rank trains on a GPU,
    /// otherwise host memory.
    pub(super) fn estimate_rank_memory(&self, rank: u32) -> MemoryEstimate {
        let policy = ShardingPolicy::for_job(self.train);
        let mut parts = self.list_training_parts(policy, rank as usize);
        parts.extend(match self.job.cluster.trains_on_gpus() {
            true => self.list_gpu_parts(),
            false => self.list_host_parts(policy, rank as usize),
        });
        let mut parts: Vec<(String, u64)> =
            parts.into_iter().filter(|(_, bytes)| *bytes > 0).map(|(name, n)| (name.to_owned(), n)).collect();
        parts.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        MemoryEstimate { rank, total: parts.iter().map(|(_, b)| b).sum(), parts }
    }

    /// Returns the number of samples in a micro-batch and the number of tokens in a sample.
    fn micro_batch_shape(&self) -> (usize, usize) {
        (self.train.batch.micro as usize, self.train.data.seq_len as usize)
    }

    /// Returns the number of the optimizer's state vectors, from 0 to 2.
    fn count_state_vectors(&self) -> u64 {
        let (first, second) = needs_state_vectors(&self.train.optimizer);
        u64::from(first) + u64::from(second)
    }

    /// Lists the memory that is needed on both CPUs and GPUs, in bytes by purpose.
    fn list_training_parts(&self, policy: ShardingPolicy, rank: usize) -> Vec<(&'static str, u64)> {
        let weights = ParamDtypes::for_job(self.train);
        let (dtype, bytes) = (weights.compute, weights.compute.size() as u64);
        let sum = |lengths: Vec<usize>| lengths.iter().sum::<usize>() as u64;
        let (shards, trained_shards) =
            (sum(self.list_shard_lengths(rank)), sum(self.list_trained_shard_lengths(rank)));
        let full: u64 = self.list_units_of_rank(rank).map(|u| u.len() as u64).sum();
        let full_trained: u64 = self.list_units_of_rank(rank).map(|u| u.trained_len() as u64).sum();
        let (b, t) = self.micro_batch_shape();
        let layers = self.units.iter().filter(|u| !u.holds_experts()).count() - 2;
        let first = find_first_backward_layer(self.units);
        let parameters = match policy.shard_parameters {
            true if self.casts_on_gather(policy) => 0,
            true => shards,
            false => full,
        };
        let master_weights = match weights.has_masters() {
            true if policy.shards_updated_params(true) => shards,
            true => full,
            false => 0,
        };
        let states = match policy.shard_optimizer {
            _ if self.train.zero.offload.is_some() => self.count_offload_staging_elements(policy, rank),
            true => trained_shards,
            false => full_trained,
        };
        let activations = MicroBatchActivations::count_activation_bytes(
            self.model,
            layers,
            b,
            t,
            self.train.recompute,
            first,
            dtype,
        );
        vec![
            ("parameters", bytes * parameters),
            ("master weights", 4 * master_weights),
            ("fp32 copy of updated weights", 4 * self.count_fp32_update_elements(policy, rank)),
            ("optimizer states", 4 * self.count_state_vectors() * states),
            ("gathered parameters", bytes * self.estimate_peak_gathered_elements(policy, rank)),
            ("gradients", 4 * self.count_gradient_elements(policy, rank)),
            ("Muon matrices", 4 * self.count_muon_elements(policy, rank)),
            ("activations", activations),
            ("MoE activations", self.count_moe_activation_bytes(b * t, dtype)),
            ("MoE collectives", self.count_moe_message_bytes(policy, rank, dtype)),
        ]
    }

    /// Lists the memory that is only needed on a GPU, in bytes by purpose.
    fn list_gpu_parts(&self) -> Vec<(&'static str, u64)> {
        let (b, t) = self.micro_batch_shape();
        vec![("logits and operator workspace", self.count_gpu_workspace_bytes(b, t))]
    }

    /// Lists the memory that is only needed on CPUs, in bytes by purpose.
    fn list_host_parts(&self, policy: ShardingPolicy, rank: usize) -> Vec<(&'static str, u64)> {
        let weights = ParamDtypes::for_job(self.train);
        let (dtype, bytes) = (weights.compute, weights.compute.size() as u64);
        let (b, t) = self.micro_batch_shape();
        let widened = if dtype == Dtype::F32 { 0 } else { self.count_widened_result_bytes(b, t) };
        let shards = self.list_shard_lengths(rank).iter().sum::<usize>() as u64;
        let trained_shards = self.list_trained_shard_lengths(rank).iter().sum::<usize>() as u64;
        let saved = weights.updated.size() as u64 * shards + 4 * trained_shards * self.count_state_vectors();
        let in_background = self.job.checkpoint.r#async;
        let has_copy = in_background && self.train.zero.offload.is_none();
        // Mapped shards of peers are unmapped before a checkpoint is written in the foreground, so
        // the write buffers can take their place.
        let unmapped = match self.shares_parameters() && !in_background {
            true => bytes * self.estimate_peak_gathered_elements(policy, rank),
            false => 0,
        };
        let token_bytes = if self.model.sizes().vocab <= 1 << 16 { 2 } else { 4 };
        vec![
            ("fp8 operands", bytes * self.count_fp8_operand_elements(b * t)),
            ("operator workspace", self.count_cpu_workspace_bytes(b, t) + widened),
            ("collective staging buffers", self.count_collective_staging_bytes(policy, rank)),
            ("updated shard in flight", bytes * self.count_shard_elements_in_flight(policy, rank)),
            ("checkpoint copy (async)", if has_copy { saved } else { 0 }),
            ("checkpoint I/O buffers", CHECKPOINT_BUFFER_BYTES.min(saved).saturating_sub(unmapped)),
            ("token cache (mapped)", self.tokens * token_bytes),
            ("process", PROCESS_BYTES),
        ]
    }

    /// Computes the number of elements in the fp32 buffer through which the optimizer updates bf16
    /// weights chunk by chunk. Returns 0 if updates are not rounded stochastically.
    fn count_fp32_update_elements(&self, policy: ShardingPolicy, rank: usize) -> u64 {
        if !self.train.rounds_stochastically() {
            return 0;
        }
        let updated = |u: &ParamUnit| match policy.shard_optimizer {
            true => Partition::new(u, self.world).range(rank),
            false => 0..u.len(),
        };
        compute_update_chunk_len(self.list_units_of_rank(rank).map(|u| (u, updated(u)))) as u64
    }

    /// Computes the bytes of the activation buffers of all MoE layers, for `rows` tokens.
    fn count_moe_activation_bytes(&self, rows: usize, dtype: Dtype) -> u64 {
        let parallel = self.train.experts.expert_parallel_size as usize;
        moe::count_moe_buffer_bytes(self.model, self.units, rows, self.train.recompute, dtype, parallel)
            as u64
    }

    /// Returns the schedule that assigns micro-batches to ranks and rounds.
    pub(super) fn build_micro_batch_schedule(&self, policy: ShardingPolicy) -> MicroBatchSchedule {
        let micro_batches = (self.train.batch.global / self.train.batch.micro) as usize;
        MicroBatchSchedule { micro_batches, world: self.world, interleaved: policy.shard_gradients }
    }

    /// Returns the units of which `rank` has a shard.
    pub(super) fn list_units_of_rank(&self, rank: usize) -> impl DoubleEndedIterator<Item = &ParamUnit> {
        self.units.iter().filter(move |u| u.owners.contains(rank))
    }

    /// Computes, for each unit, the number of elements of the rank's shard.
    pub(super) fn list_shard_lengths(&self, rank: usize) -> Vec<usize> {
        self.units.iter().map(|u| Partition::new(u, self.world).range(rank).len()).collect()
    }

    /// Computes, for each unit, the number of trained elements of the rank's shard.
    pub(super) fn list_trained_shard_lengths(&self, rank: usize) -> Vec<usize> {
        let trained =
            |u: &ParamUnit| u.compute_trained_range(Partition::new(u, self.world).range(rank)).len();
        self.units.iter().map(trained).collect()
    }

    /// Computes the peak number of offloaded optimizer-state elements that are in the memory where
    /// the optimizer computes, for one state vector of `rank`.
    ///
    /// On the CPU, the states of two consecutive units are in memory at the same time, because
    /// those of the next unit are read while a unit is updated. The result is the largest number of
    /// elements of two consecutive units. On a GPU, there are two staging buffers, and each has the
    /// length of the largest unit.
    fn count_offload_staging_elements(&self, policy: ShardingPolicy, rank: usize) -> u64 {
        let shards = self.list_trained_shard_lengths(rank);
        let full: Vec<usize> = self.list_units_of_rank(rank).map(ParamUnit::trained_len).collect();
        let lengths = if policy.shard_optimizer { shards } else { full };
        if self.job.cluster.trains_on_gpus() {
            // Each of two staging buffers has the size of the largest unit.
            return 2 * lengths.iter().max().copied().unwrap_or(0) as u64;
        }
        let pairs = lengths.windows(2).map(|w| w[0] + w[1]).max();
        pairs.or(lengths.first().copied()).unwrap_or(0) as u64
    }

    /// Computes the largest number of elements that Muon needs in addition to its states while it
    /// updates a unit.
    ///
    /// These are the update directions of the whole unit, and the larger of two buffers. One buffer
    /// contains the shard of the directions that this rank sends, the other the Newton–Schulz
    /// iteration of the unit's largest matrix.
    fn count_muon_elements(&self, policy: ShardingPolicy, rank: usize) -> u64 {
        let iteration = |shape: &[usize]| {
            let (small, large) = (shape[0].min(shape[1]), shape[0].max(shape[1]));
            2 * small * small + 2 * small * large
        };
        let of_unit = |((unit, is_muon), shard): ((&ParamUnit, Vec<bool>), usize)| {
            let matrices = unit.params.iter().zip(is_muon).filter(|(_, is_muon)| *is_muon);
            let sent = if policy.shard_optimizer && self.world > 1 { shard } else { 0 };
            let largest = matrices.map(|(p, _)| iteration(&p.shape)).max();
            largest.map(|largest| unit.trained_len() + largest.max(sent))
        };
        let is_muon = find_muon_matrices(&self.train.optimizer, self.units);
        let units = self.units.iter().zip(is_muon).zip(self.list_trained_shard_lengths(rank));
        let owned = units.filter(|((u, _), _)| u.owners.contains(rank));
        owned.filter_map(of_unit).max().unwrap_or(0) as u64
    }

    /// Computes the bytes of the largest buffer in which the CPU backend accumulates a 16-bit
    /// result in fp32.
    ///
    /// For a matmul, the buffer contains 256 rows or 2²⁰ elements of the result at a time,
    /// whichever are more. For the gradient of q, k and v, the buffer contains the whole result.
    fn count_widened_result_bytes(&self, b: usize, t: usize) -> u64 {
        let largest = self.model.scratch_buffers(b, t).iter().map(|buffer| buffer.len).max().unwrap_or(0);
        let rows = largest.div_ceil((b * t).max(1)) * 256;
        4 * largest.min(rows.max(1 << 20)).max(b * t * self.model.sizes().qkv_width()) as u64
    }

    /// Computes the bytes of temporary GPU memory: the workspace of matmuls, and the largest of
    /// three buffers that are never needed at the same time.
    ///
    /// These are a chunk of logits with their gradients, the fp8 operands, and the workspace of
    /// cuDNN's attention.
    fn count_gpu_workspace_bytes(&self, b: usize, t: usize) -> u64 {
        let logits = device::cuda::count_classifier_workspace_bytes(b * t, self.model.sizes().vocab) as u64;
        let attention = match crate::gpu::select_attention_backend(self.train) {
            AttentionBackend::BuiltIn => 0,
            AttentionBackend::Auto | AttentionBackend::Cudnn => {
                let s = self.model.sizes();
                let shape = AttentionShape::new(b, t, s.heads, s.kv_heads, s.head_dim);
                device::cuda::estimate_cudnn_workspace_bytes(shape) as u64
            }
        };
        logits.max(self.count_fp8_operand_elements(b * t)).max(attention)
            + device::cuda::MATMUL_WORKSPACE_BYTES as u64
    }

    /// Computes the number of elements of both operands of the largest fp8 matmul, which are copied
    /// to fp8 before the matmul.
    fn count_fp8_operand_elements(&self, rows: usize) -> u64 {
        if self.train.precision != Precision::Fp8 {
            return 0;
        }
        let padded = rows.next_multiple_of(FP8_COLUMN_MULTIPLE);
        let operands =
            |(inp, out): (usize, usize)| (rows * inp.max(out) + inp * out).max(padded * (inp + out));
        self.model.linear_shapes().into_iter().map(operands).max().unwrap_or(0) as u64
    }

    /// Computes the bytes of tiles, packed panels and chunks of logits of the CPU backend.
    fn count_cpu_workspace_bytes(&self, b: usize, t: usize) -> u64 {
        let logits = 4
            * device::cpu::choose_classifier_chunk_rows(b * t, self.model.sizes().vocab)
            * self.model.sizes().vocab;
        (logits + (2 << 20) * (1 + self.threads)) as u64
    }
}
