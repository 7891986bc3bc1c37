//! The keys of DeepSpeed's configuration that job.yaml's section `train` (training without a user
//! program) cannot express. Each has the reason, which a note shows to the user.

/// The explanation that the user gets if a DeepSpeed key is not converted because its value is
/// `auto`.
pub(super) const AUTO_VALUE_REASON: &str = "HF Trainer replaces `auto`";

/// The top-level keys of a DeepSpeed configuration that launch does not support, each with the
/// reason.
pub(super) const UNSUPPORTED_KEYS: &[(&str, &str)] = &[
    ("steps_per_print", "every step is reported"),
    ("wall_clock_breakdown", "the tokens per second of each step are reported"),
    ("memory_breakdown", "the peak memory of each step is reported"),
    ("dump_state", "`launch plan` shows what runs"),
    ("communication_data_type", "gradients are summed in their own type, in a fixed order"),
    ("seq_parallel_communication_data_type", "sequence parallelism is not supported"),
    ("data_types", "gradients are summed in fp32"),
    ("torch_autocast", "the built-in training does not use torch"),
    ("amp", "the built-in training does not use torch"),
    ("prescale_gradients", "gradients are summed in a fixed order for any number of workers"),
    ("gradient_predivide_factor", "gradients are summed in a fixed order for any number of workers"),
    ("sparse_gradients", "gradients are dense"),
    ("zero_allow_untested_optimizer", "every optimizer is tested with every stage"),
    ("zero_force_ds_cpu_optimizer", "each optimizer has one implementation"),
    ("dataloader_drop_last", "every step has `batch.global` samples"),
    ("disable_allgather", "the runtime decides how weights are gathered"),
    ("graph_harvesting", "`train.cuda_graphs` controls CUDA graphs"),
    ("activation_checkpointing", "`train.recompute: block` recomputes each block"),
    ("elasticity", "`run.min_hosts` and `run.restarts` continue with fewer hosts and the same losses"),
    ("checkpoint", "launch has its own checkpoint format (docs/checkpoints.md)"),
    ("load_universal_checkpoint", "`resume.from` detects the format of a checkpoint"),
    ("use_node_local_storage", "host-local storage is detected at the start"),
    ("aio", "files are written and read with O_DIRECT without settings"),
    (
        "flops_profiler",
        "there is no FLOPS profiler; `launch gpu-check --profile` measures the time of each operation",
    ),
    ("comms_logger", "there is no log of collectives"),
    ("tensorboard", "the run directory always has TensorBoard events and metrics.jsonl"),
    ("wandb", "metrics.jsonl and TensorBoard events in the run directory have every step"),
    ("comet", "metrics.jsonl and TensorBoard events in the run directory have every step"),
    ("csv_monitor", "metrics.jsonl in the run directory has every step"),
    ("data_efficiency", "`train.data` controls the sampling"),
    ("curriculum_learning", "`train.data` controls the sampling"),
    ("progressive_layer_drop", "every layer is trained in every step"),
    ("eigenvalue", "quantization during training is not supported"),
    ("quantize_training", "quantization during training is not supported"),
    ("compression_training", "compression during training is not supported"),
    ("sparse_attention", "attention is dense"),
    ("autotuning", "settings are not tuned automatically"),
    ("pipeline", "pipeline parallelism is not supported"),
    ("tensor_parallel", "tensor parallelism is not supported"),
    ("compile", "the built-in training is compiled ahead of time"),
    ("hybrid_engine", "training only generates the samples of `train.eval.sample`"),
    ("nebula", "launch has its own checkpoint format (docs/checkpoints.md)"),
    ("datastates_ckpt", "launch has its own checkpoint format (docs/checkpoints.md)"),
    ("timers", "the tokens per second of each step are reported"),
    ("train_steps", "`train.steps` sets the number of steps"),
];

/// The keys of DeepSpeed's section `zero_optimization` that launch does not support, each with the
/// reason.
pub(super) const UNSUPPORTED_ZERO_KEYS: &[(&str, &str)] = &[
    ("contiguous_gradients", TRANSFER_SIZE_KEYS_REASON),
    ("reduce_scatter", "gradients are always sent to their owners only"),
    ("reduce_bucket_size", TRANSFER_SIZE_KEYS_REASON),
    ("use_multi_rank_bucket_allreduce", TRANSFER_SIZE_KEYS_REASON),
    ("allgather_partitions", TRANSFER_SIZE_KEYS_REASON),
    ("allgather_bucket_size", TRANSFER_SIZE_KEYS_REASON),
    ("overlap_comm", "communication and computation always overlap"),
    ("load_from_fp32_weights", "checkpoints have fp32 weights"),
    ("elastic_checkpoint", "every checkpoint resumes on any number of workers"),
    ("sub_group_size", "the optimizer updates each worker's shard in one pass"),
    ("stage3_prefetch_bucket_size", "`train.zero.prefetch` counts blocks, not elements"),
    ("prefetch_bucket_size", "`train.zero.prefetch` counts blocks, not elements"),
    ("stage3_param_persistence_threshold", TRANSFER_SIZE_KEYS_REASON),
    ("param_persistence_threshold", TRANSFER_SIZE_KEYS_REASON),
    ("stage3_model_persistence_threshold", TRANSFER_SIZE_KEYS_REASON),
    ("model_persistence_threshold", TRANSFER_SIZE_KEYS_REASON),
    ("stage3_max_reuse_distance", "the order in which blocks are used is known"),
    ("max_reuse_distance", "the order in which blocks are used is known"),
    ("stage3_module_granularity_threshold", TRANSFER_SIZE_KEYS_REASON),
    ("stage3_use_all_reduce_for_fetch_params", TRANSFER_SIZE_KEYS_REASON),
    ("stage3_allgather_sequential", TRANSFER_SIZE_KEYS_REASON),
    ("ignore_unused_parameters", "every parameter of a model is used"),
    ("round_robin_gradients", TRANSFER_SIZE_KEYS_REASON),
    ("zero_hpz_partition_size", "weights are sharded over all workers at one level"),
    ("zero_quantized_weights", "weights are sent without quantization"),
    ("zero_quantized_nontrainable_weights", "weights are sent without quantization"),
    ("zero_quantized_gradients", "gradients are sent without quantization"),
    ("zeropp_loco_param", "gradients are sent without quantization"),
    ("mics_shard_size", "weights are sharded over all workers at one level"),
    ("mics_hierarchical_params_gather", "weights are sharded over all workers at one level"),
    ("memory_efficient_linear", "the weights of a layer are never copied"),
    ("pipeline_loading_checkpoint", "checkpoints are read in ranges"),
    ("override_module_apply", "the built-in training does not use torch"),
    ("log_trace_cache_warnings", "the order in which blocks are used is known"),
    ("enable_sanity_checks", "shapes and checksums are always checked"),
    ("save_muon_momentum_buffer_in_memory", "Muon's momentum is an ordinary optimizer state"),
    ("leaf_module", "every model defines its blocks"),
    ("zenflow", "ZenFlow is not supported"),
];

/// The explanation that the user gets if a DeepSpeed key for the size of transfers between workers
/// is not converted.
const TRANSFER_SIZE_KEYS_REASON: &str = "weights and gradients are transferred in whole blocks of the model";
