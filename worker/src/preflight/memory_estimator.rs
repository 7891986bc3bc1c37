//! [`MemoryEstimator`]: estimates the peak memory of each rank, listed by purpose such as
//! gradients.
use crate::{
    model::Model,
    optim::{
        UpdateMethod, compute_update_chunk_len, count_state_elements, list_state_roles, select_update_methods,
    },
    params::ParamUnit,
    train::{activations::ActivationPlan, moe},
    zero::{MicroBatchSchedule, ShardingPolicy, param_dtypes::ParamDtypes, partition::Partition},
};
use device::{
    Dtype,
    cuda::AttentionBackend,
    ops::{AttentionShape, FP8_COLUMN_MULTIPLE},
};
use jobspec::{CommBackend, JobSpec, Precision, TrainSpec};
use protocol::preflight::MemoryEstimate;

/// The memory in bytes that a rank's process needs for the executable, the allocator, thread stacks
/// and the tokenizer.
///
/// A process with a tiny model takes 21 MiB. This constant is 3 MiB smaller, because the estimate
/// of the operators' workspace is 3 MiB too high for small matmuls.
const PROCESS_BYTES: u64 = 18 << 20;
/// The size in bytes of the buffers, aligned for direct I/O, through which a rank reads and writes
/// its shard of a checkpoint.
const CHECKPOINT_BUFFER_BYTES: u64 = 24 << 20;

/// The GPU memory in bytes that is reserved for the CUDA context of a rank's process and for the
/// code of kernels, which the driver allocates outside of the memory pool. An assumption, which was
/// not measured.
pub const CUDA_CONTEXT_BYTES: u64 = 1 << 30;
/// The GPU memory in bytes that is reserved for the buffers of NCCL, which NCCL allocates outside
/// of the memory pool. The real number depends on the number of ranks and on the network. An
/// assumption, which was not measured.
const NCCL_BYTES: u64 = 3 << 29;

/// Estimates the peak memory of the ranks of a job, from the job, its model and the number of
/// ranks.
pub(super) struct MemoryEstimator<'a> {
    pub(super) job: &'a JobSpec,
    pub(super) train: &'a TrainSpec,
    pub(super) model: &'a Model,
    pub(super) units: &'a [ParamUnit],
    pub(super) world: usize,
    pub(super) threads: usize,
    /// The number of tokens of the training data.
    pub(super) tokens: u64,
}

impl MemoryEstimator<'_> {
    /// Estimates the peak memory of one rank of the job, as a list of purposes (such as gradients),
    /// each with its bytes. Counts GPU memory if the rank trains on a GPU, otherwise host memory.
    pub(super) fn estimate_rank_memory(&self, rank: u32) -> MemoryEstimate {
        let policy = ShardingPolicy::for_job(self.train);
        let mut parts = self.list_memory_of_any_device(policy, rank as usize);
        parts.extend(match self.job.cluster.trains_on_gpus() {
            true => self.list_gpu_only_memory(policy, rank as usize),
            false => self.list_cpu_only_memory(policy, rank as usize),
        });
        let mut parts: Vec<(String, u64)> =
            parts.into_iter().filter(|(_, bytes)| *bytes > 0).map(|(name, n)| (name.to_owned(), n)).collect();
        parts.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        MemoryEstimate { rank, total: parts.iter().map(|(_, b)| b).sum(), parts }
    }

    /// Returns the number of samples per micro-batch and the number of tokens per sample that the
    /// job file sets.
    fn micro_batch_shape(&self) -> (usize, usize) {
        (self.train.batch.micro as usize, self.train.data.seq_len as usize)
    }

    /// Computes, for each parameter unit (tensors that are gathered together), the number of
    /// elements of the optimizer states that `rank` keeps. These are the states of the rank's
    /// shards or, if states are not sharded, of all units that the rank owns.
    fn list_state_lengths(&self, rank: usize, sharded: bool) -> Vec<usize> {
        let roles = list_state_roles(&self.train.optimizer);
        let range = |u: &ParamUnit| match sharded {
            true => Partition::new(u, self.world).shard_range(rank),
            false => 0..u.len(),
        };
        let units = self.units.iter().filter(|u| sharded || u.owners.contains(rank));
        units.map(|u| count_state_elements(&roles, u, range(u))).collect()
    }

    /// Lists the memory that a rank needs both on CPUs and on GPUs, as purposes (such as
    /// gradients), each with its bytes.
    fn list_memory_of_any_device(&self, policy: ShardingPolicy, rank: usize) -> Vec<(&'static str, u64)> {
        let weights = ParamDtypes::for_job(self.train);
        let (dtype, bytes) = (weights.compute, weights.compute.size() as u64);
        let sum = |lengths: Vec<usize>| lengths.iter().sum::<usize>() as u64;
        let shards = sum(self.list_shard_lengths(rank));
        let full: u64 = self.list_units_of_rank(rank).map(|u| u.len() as u64).sum();
        let parameters = match policy.shard_parameters {
            true if self.casts_params_on_gather(policy) => 0,
            true => shards,
            false => full,
        };
        let master_weights = match weights.has_master_weights() {
            true if policy.shards_updated_params(true) => shards,
            true => full,
            false => 0,
        };
        let states = self.list_state_lengths(rank, policy.shard_optimizer);
        let states = match self.train.zero.offload {
            Some(_) => self.count_offload_staging_elements(&states),
            None => sum(states),
        };
        let (tensors_label, tensors) = self.count_whole_tensor_elements(policy, rank);
        let on_host = !self.job.cluster.trains_on_gpus();
        vec![
            ("parameters", bytes * parameters),
            ("master weights", 4 * master_weights),
            ("fp32 copy of updated weights", 4 * self.count_fp32_update_elements(policy, rank)),
            ("optimizer states", 4 * states),
            ("gathered parameters", bytes * self.estimate_peak_gathered_elements(policy, rank)),
            ("gradients", 4 * self.count_gradient_elements(policy, rank)),
            (tensors_label, 4 * tensors),
            ("activations", ActivationPlan::new(self.model, self.train, self.units).count_bytes()),
            ("MoE activations", moe::count_moe_buffer_bytes(self.model, self.train, dtype, on_host) as u64),
            ("MoE collectives", self.count_moe_message_bytes(policy, rank, dtype)),
        ]
    }

    /// Lists the memory that a rank needs on a GPU but not on CPUs, as purposes, each with its
    /// bytes.
    fn list_gpu_only_memory(&self, policy: ShardingPolicy, rank: usize) -> Vec<(&'static str, u64)> {
        let (b, t) = self.micro_batch_shape();
        let has_own_gpu = self.job.cluster.workers_per_gpu <= 1;
        let uses_nccl = match self.job.cluster.comm_backend {
            CommBackend::Auto => self.world > 1 && has_own_gpu,
            CommBackend::Nccl => true,
            CommBackend::Host => false,
        };
        let reduced = if uses_nccl { self.count_reduction_buffer_elements(policy, rank) } else { 0 };
        vec![
            ("gradients of other ranks", 4 * reduced),
            ("logits and operator workspace", self.count_gpu_workspace_bytes(b, t)),
            ("CUDA context and kernels", CUDA_CONTEXT_BYTES),
            ("NCCL buffers", if uses_nccl { NCCL_BYTES } else { 0 }),
        ]
    }

    /// Lists the memory that a rank needs on CPUs but not on a GPU, as purposes, each with its
    /// bytes.
    fn list_cpu_only_memory(&self, policy: ShardingPolicy, rank: usize) -> Vec<(&'static str, u64)> {
        let weights = ParamDtypes::for_job(self.train);
        let (dtype, bytes) = (weights.compute, weights.compute.size() as u64);
        let (b, t) = self.micro_batch_shape();
        let widened = if dtype == Dtype::F32 { 0 } else { self.count_fp32_accumulation_bytes(b, t) };
        let saved = self.count_checkpoint_shard_bytes(rank);
        let in_background = self.job.checkpoint.r#async;
        let has_copy = in_background && self.train.zero.offload.is_none();
        // Mapped shards of peers are unmapped before a checkpoint is written in the foreground, so
        // the write buffers can take their place.
        let unmapped = match self.shares_params_in_memory() && !in_background {
            true => bytes * self.estimate_peak_gathered_elements(policy, rank),
            false => 0,
        };
        let token_bytes = if self.model.sizes().vocab <= 1 << 16 { 2 } else { 4 };
        vec![
            ("fp8 operands", bytes * self.count_fp8_operand_elements(b * t)),
            ("operator workspace", self.count_cpu_workspace_bytes(b, t) + widened),
            ("collective staging buffers", self.count_collective_resident_bytes(policy, rank)),
            ("updated shard in flight", bytes * self.count_sent_shard_elements(policy, rank)),
            ("checkpoint copy (async)", if has_copy { saved } else { 0 }),
            ("checkpoint I/O buffers", CHECKPOINT_BUFFER_BYTES.min(saved).saturating_sub(unmapped)),
            ("token cache (mapped)", self.tokens * token_bytes),
            ("process", PROCESS_BYTES),
        ]
    }

    /// Computes the size in bytes of the weights and optimizer states that one rank writes to a
    /// checkpoint.
    pub(super) fn count_checkpoint_shard_bytes(&self, rank: usize) -> u64 {
        let shards = self.list_shard_lengths(rank).iter().sum::<usize>() as u64;
        let states = self.list_state_lengths(rank, true).iter().sum::<usize>() as u64;
        ParamDtypes::for_job(self.train).updated.size() as u64 * shards + 4 * states
    }

    /// Computes the number of elements in the fp32 buffer through which the optimizer updates bf16
    /// weights chunk by chunk. Returns 0 if updates are not rounded stochastically.
    fn count_fp32_update_elements(&self, policy: ShardingPolicy, rank: usize) -> u64 {
        if !self.train.rounds_stochastically() {
            return 0;
        }
        let updated = |u: &ParamUnit| match policy.shard_optimizer {
            true => Partition::new(u, self.world).shard_range(rank),
            false => 0..u.len(),
        };
        compute_update_chunk_len(self.list_units_of_rank(rank).map(|u| (u, updated(u)))) as u64
    }

    /// Returns the schedule that decides which rank computes which micro-batches of a step.
    pub(super) fn build_micro_batch_schedule(&self, policy: ShardingPolicy) -> MicroBatchSchedule {
        let micro_batches = (self.train.batch.global / self.train.batch.micro) as usize;
        MicroBatchSchedule { micro_batches, world: self.world, interleaved: policy.shard_gradients }
    }

    /// Returns the parameter units (tensors that are gathered together) of which `rank` has a
    /// shard.
    pub(super) fn list_units_of_rank(&self, rank: usize) -> impl DoubleEndedIterator<Item = &ParamUnit> {
        self.units.iter().filter(move |u| u.owners.contains(rank))
    }

    /// Computes, for each parameter unit (tensors that are gathered together), the number of
    /// elements of the shard of `rank`.
    pub(super) fn list_shard_lengths(&self, rank: usize) -> Vec<usize> {
        self.units.iter().map(|u| Partition::new(u, self.world).shard_range(rank).len()).collect()
    }

    /// Computes, for each parameter unit (tensors that are gathered together), the number of
    /// trained elements of the shard of `rank`.
    pub(super) fn list_trained_shard_lengths(&self, rank: usize) -> Vec<usize> {
        let trained =
            |u: &ParamUnit| u.to_trained_range(Partition::new(u, self.world).shard_range(rank)).len();
        self.units.iter().map(trained).collect()
    }

    /// Computes the largest number of offloaded optimizer state elements that are in device memory
    /// at the same time during parameter updates. `lengths` has the number of elements of each
    /// unit.
    ///
    /// On the CPU, the states of two consecutive units are in memory at the same time, because
    /// those of the next unit are read while a unit is updated. The result is the largest number of
    /// elements of two consecutive units. On a GPU, there are two staging buffers, and each has the
    /// length of the largest unit.
    fn count_offload_staging_elements(&self, lengths: &[usize]) -> u64 {
        if self.job.cluster.trains_on_gpus() {
            return 2 * lengths.iter().max().copied().unwrap_or(0) as u64;
        }
        let pairs = lengths.windows(2).map(|w| w[0] + w[1]).max();
        pairs.or(lengths.first().copied()).unwrap_or(0) as u64
    }

    /// Computes how many elements of memory an optimizer such as Muon, which updates whole tensors,
    /// needs for gathered gradients and temporary values. Also returns the purpose of this memory.
    ///
    /// These are the gathered gradient of the unit, and the larger of two buffers. One buffer
    /// contains the shard of the gradient that this rank sends, the other the direction of the
    /// unit's largest tensor and its temporary values.
    fn count_whole_tensor_elements(&self, policy: ShardingPolicy, rank: usize) -> (&'static str, u64) {
        let gathers = policy.shard_optimizer && self.world > 1;
        let methods = select_update_methods(&self.train.optimizer, self.units);
        let units = self.units.iter().zip(methods).zip(self.list_trained_shard_lengths(rank));
        let owned = units.filter(|((unit, _), _)| unit.owners.contains(rank));
        let of_unit = |((unit, methods), shard): ((&ParamUnit, Vec<UpdateMethod>), usize)| {
            let (gathered, sent) = if gathers { (unit.trained_len(), shard) } else { (0, 0) };
            let trained = unit.params.iter().zip(methods).enumerate().filter(|(i, _)| unit.is_trained(*i));
            let directions = trained.filter_map(|(_, (p, method))| Some((p, method.direction?)));
            let elements = directions.map(|(p, direction)| {
                let allocated = direction.count_allocated_elements(&p.shape);
                (direction.memory_label(), (gathered + allocated.max(sent)) as u64)
            });
            elements.max_by_key(|(_, elements)| *elements)
        };
        owned.filter_map(of_unit).max_by_key(|(_, elements)| *elements).unwrap_or_default()
    }

    /// Computes the size in bytes of the largest fp32 buffer in which the CPU backend sums a result
    /// before it is rounded to 16 bits.
    ///
    /// For a matmul, the buffer contains 256 rows or 2²⁰ elements of the result at a time,
    /// whichever are more. For the gradient of q, k and v, the buffer contains the whole result.
    fn count_fp32_accumulation_bytes(&self, b: usize, t: usize) -> u64 {
        let largest =
            self.model.declare_scratch_buffers(b, t).iter().map(|buffer| buffer.len).max().unwrap_or(0);
        let rows = largest.div_ceil((b * t).max(1)) * 256;
        4 * largest.min(rows.max(1 << 20)).max(b * t * self.model.sizes().qkv_width()) as u64
    }

    /// Computes how many bytes of temporary memory the operations of a training step need on a GPU,
    /// for matmuls, logits, fp8 operands and attention. Counts the workspace of matmuls, and the
    /// largest of three buffers that are never used at once.
    ///
    /// These are a chunk of logits with their gradients, the fp8 operands, and the workspace of
    /// cuDNN's attention.
    fn count_gpu_workspace_bytes(&self, b: usize, t: usize) -> u64 {
        let (sizes, dtype) = (self.model.sizes(), ParamDtypes::for_job(self.train).compute);
        let shape = [b * t, sizes.hidden, sizes.vocab];
        let logits = device::cuda::count_classifier_workspace_bytes(shape, dtype) as u64;
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
        self.model.list_matmul_sizes().into_iter().map(operands).max().unwrap_or(0) as u64
    }

    /// Computes the size in bytes of the temporary memory of the CPU backend: tiles, packed
    /// operands of matmuls, and chunks of logits.
    fn count_cpu_workspace_bytes(&self, b: usize, t: usize) -> u64 {
        let logits = 4
            * device::cpu::choose_classifier_chunk_rows(b * t, self.model.sizes().vocab)
            * self.model.sizes().vocab;
        (logits + (2 << 20) * (1 + self.threads)) as u64
    }
}
