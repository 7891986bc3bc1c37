//! Command lines from the documentation of PyTorch, Accelerate and DeepSpeed, for CPUs.

/// A command line that is run both with the original launcher (torchrun, accelerate or deepspeed)
/// and with launch.
#[derive(Default)]
pub(super) struct Case {
    pub(super) line: &'static str,
    /// Environment variables that the user has set when the command line runs.
    pub(super) variables: &'static [(&'static str, &'static str)],
    /// The text of Accelerate's configuration file default_config.yaml.
    pub(super) default_config: Option<&'static str>,
    /// Environment variables whose values are compared although they usually depend on the run.
    pub(super) compared: &'static [&'static str],
}

/// Creates a case from a command line, without variables and without a configuration.
const fn case_with_command_line(line: &'static str) -> Case {
    Case { line, variables: &[], default_config: None, compared: &[] }
}

/// Creates a case in the environment `variables`.
const fn case_with_variables(line: &'static str, variables: &'static [(&'static str, &'static str)]) -> Case {
    Case { line, variables, default_config: None, compared: &[] }
}

/// Creates a case with `config` as the default configuration of Accelerate.
const fn case_with_config(line: &'static str, config: &'static str) -> Case {
    Case { line, variables: &[], default_config: Some(config), compared: &[] }
}

/// The files that the command lines of the test cases refer to, as pairs of name and text.
pub(super) const FILES: [(&str, &str); 4] = [
    ("fsdp.yaml", FSDP_CONFIG),
    ("deepspeed.yaml", DEEPSPEED_CONFIG),
    ("hostfile", "localhost slots=2\n"),
    ("ds.json", "{\"train_batch_size\": 8}"),
];

/// A configuration of Accelerate for FSDP.
const FSDP_CONFIG: &str = "compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_forward_prefetch: false
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_use_orig_params: true
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
";

/// A configuration of Accelerate for DeepSpeed.
const DEEPSPEED_CONFIG: &str = "compute_environment: LOCAL_MACHINE
deepspeed_config:
  gradient_accumulation_steps: 1
  gradient_clipping: 1.0
  offload_optimizer_device: none
  offload_param_device: none
  zero3_init_flag: true
  zero3_save_16bit_model: true
  zero_stage: 3
distributed_type: DEEPSPEED
machine_rank: 0
main_training_function: main
mixed_precision: fp16
num_machines: 1
num_processes: 2
use_cpu: false
";

/// A configuration of Accelerate for CPUs.
const CPU_CONFIG: &str = "compute_environment: LOCAL_MACHINE
distributed_type: 'NO'
mixed_precision: 'no'
num_machines: 1
num_processes: 1
use_cpu: true
";

/// A configuration of Accelerate for several GPUs, with dynamo.
const GPU_CONFIG: &str = "compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
dynamo_config:
  dynamo_backend: INDUCTOR
  dynamo_mode: default
  dynamo_use_dynamic: false
  dynamo_use_fullgraph: true
mixed_precision: fp16
num_machines: 1
num_processes: 2
use_cpu: false
";

/// The command lines that are run both with the original launchers and with launch.
pub(super) const CASES: &[Case] = &[
    case_with_command_line("torchrun dump.py"),
    case_with_command_line("torchrun --nproc-per-node=2 dump.py --arg1 --arg2=3 x"),
    case_with_command_line("torchrun --nproc_per_node 2 dump.py -- --nnodes 3"),
    case_with_command_line("torchrun --standalone --nnodes=1 --nproc-per-node=2 dump.py"),
    case_with_command_line(
        "torchrun --rdzv-backend=c10d --rdzv-endpoint=localhost:0 --nnodes=1 --nproc-per-node=2 dump.py",
    ),
    Case {
        line: "torchrun --nnodes=1:1 --nproc-per-node=2 --max-restarts=3 --rdzv-id=100 --rdzv-backend=c10d dump.py",
        variables: &[],
        default_config: None,
        compared: &["TORCHELASTIC_RUN_ID"],
    },
    case_with_command_line("torchrun --nproc-per-node 2 --role trainer --monitor-interval 1 dump.py"),
    case_with_command_line("torchrun --nproc-per-node 2 -m dump a $$x"),
    case_with_command_line("torchrun --nproc-per-node 2 --no-python ./dump.sh a b"),
    case_with_command_line("torchrun --nproc-per-node 2 dump.py file=${local_rank}.txt it's $HOME"),
    case_with_command_line("torchrun --nproc-per-node 2 --rdzv-conf join_timeout=9 dump.py"),
    case_with_command_line("python -m torch.distributed.run --nproc-per-node 2 dump.py x"),
    case_with_command_line("python -u -m torch.distributed.launch --nproc_per_node=2 dump.py x"),
    case_with_command_line("python -m torch.distributed.launch --use_env --nproc_per_node=2 -m dump x"),
    case_with_command_line("torchrun --nproc-per-node 2 --tee 3 --log-dir logs dump.py"),
    case_with_command_line("torchrun --nproc-per-node 2 -r 3 --log-dir logs dump.py"),
    case_with_command_line("torchrun --nproc-per-node 2 --local-ranks-filter 0 --start-method spawn dump.py"),
    case_with_command_line("torchrun --nproc-per-node 2 --logs-specs default dump.py"),
    case_with_command_line("torchrun --nproc-per-node cpu dump.py"),
    case_with_command_line("torchrun --nproc-per-node auto dump.py"),
    case_with_variables("torchrun dump.py", &[("PET_NPROC_PER_NODE", "2"), ("PET_STANDALONE", "1")]),
    case_with_variables("torchrun --nproc-per-node 2 dump.py", &[("OMP_NUM_THREADS", "3")]),
    case_with_variables("torchrun --nproc-per-node 2 dump.py", &[("EXIT_CODE", "7")]),
    case_with_variables("torchrun --nproc-per-node 2 dump.py", &[("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")]),
    case_with_command_line("accelerate launch --cpu dump.py --lr 1"),
    case_with_command_line(
        "accelerate launch --cpu --num_processes 1 --num-machines 1 --mixed-precision bf16 dump.py",
    ),
    case_with_command_line("accelerate launch --cpu --num_processes 2 dump.py"),
    case_with_command_line("accelerate launch --num_processes 1 --cpu -m dump x"),
    case_with_command_line("accelerate launch --cpu --no_python ./dump.sh x"),
    case_with_command_line(
        "accelerate launch --num_processes=1 --dynamo_backend inductor --dynamo_use_fullgraph --cpu dump.py",
    ),
    case_with_command_line("python -m accelerate.commands.launch --cpu dump.py x"),
    case_with_command_line("accelerate-launch --cpu dump.py x"),
    case_with_variables("accelerate launch --cpu dump.py", &[("RANK", "5"), ("MASTER_PORT", "1234")]),
    case_with_variables("accelerate launch --cpu dump.py", &[("EXIT_CODE", "7")]),
    case_with_command_line("accelerate launch --multi_gpu --num_processes 2 dump.py"),
    case_with_command_line(
        "accelerate launch --multi_gpu --num_processes 2 --mixed_precision fp16 --debug --role r dump.py",
    ),
    case_with_command_line(
        "accelerate launch --multi_gpu --num_processes 2 --num_cpu_threads_per_process 4 --enable_cpu_affinity dump.py",
    ),
    case_with_command_line(
        "accelerate launch --use_fsdp --num_processes 2 --fsdp_version 2 --fsdp_offload_params True dump.py",
    ),
    case_with_command_line(
        "accelerate launch --use_fsdp --num_processes=2 --fsdp-auto-wrap-policy TRANSFORMER_BASED_WRAP \
         --fsdp_transformer_layer_cls_to_wrap BertLayer --fsdp_min_num_params 2000 --fsdp_state_dict_type FULL_STATE_DICT dump.py",
    ),
    case_with_command_line(
        "accelerate launch --use_fsdp --fsdp_version=2 --use_parallelism_config --parallelism_config_tp_size 2 \
         --num_processes 2 dump.py",
    ),
    case_with_command_line(
        "accelerate launch --use_deepspeed --num_processes 2 --zero_stage 3 --gradient_clipping 1 \
         --offload_optimizer_device cpu --mixed_precision bf16 dump.py",
    ),
    case_with_command_line(
        "accelerate launch --use_deepspeed --num_processes 2 --deepspeed_config_file ds.json dump.py",
    ),
    case_with_command_line(
        "accelerate launch --use_megatron_lm --num_processes 2 --megatron_lm_tp_degree 2 \
         --megatron_lm_no_load_optim False --megatron_lm_gradient_clipping 0.5 dump.py",
    ),
    case_with_command_line("accelerate launch --config_file fsdp.yaml dump.py x"),
    case_with_command_line(
        "accelerate launch --config_file fsdp.yaml --fsdp_offload_params true --mixed_precision no dump.py",
    ),
    case_with_command_line("accelerate launch --config_file deepspeed.yaml --zero_stage 2 dump.py"),
    case_with_command_line("accelerate launch --config_file deepspeed.yaml --mixed_precision bf16 dump.py"),
    case_with_config("accelerate launch dump.py", CPU_CONFIG),
    case_with_config("accelerate launch dump.py", GPU_CONFIG),
    case_with_config("accelerate launch --dynamo_backend eager --num_processes 3 dump.py", GPU_CONFIG),
    case_with_config("accelerate launch --cpu dump.py", GPU_CONFIG),
    case_with_command_line("deepspeed --num_gpus 2 dump.py --deepspeed --deepspeed_config ds.json"),
    case_with_command_line("deepspeed --num_gpus=2 --num_nodes=1 --master_port 29511 dump.py x"),
    case_with_command_line("python -m deepspeed.launcher.runner --num_gpus 2 dump.py x"),
    case_with_command_line("deepspeed --no_local_rank --num_gpus 2 dump.py"),
    case_with_command_line("deepspeed --module --num_gpus 2 dump x"),
    case_with_command_line("deepspeed --no_python --no_local_rank --num_gpus 2 ./dump.sh x"),
    case_with_variables("deepspeed dump.py", &[("LOCAL_SIZE", "2")]),
    case_with_variables("deepspeed --include localhost:0,1 dump.py", &[("LOCAL_SIZE", "3")]),
    case_with_variables("deepspeed --exclude localhost:2 dump.py", &[("LOCAL_SIZE", "3")]),
    case_with_command_line(
        "deepspeed --hostfile hostfile --no_ssh --node_rank 0 --master_addr 127.0.0.1 dump.py",
    ),
    case_with_variables("deepspeed --num_gpus 2 dump.py", &[("EXIT_CODE", "7")]),
];

/// Command lines that launch rejects, each with a text that the error contains.
pub(super) const REJECTED_COMMAND_LINES: &[(&str, &str)] = &[
    ("torchrun --nnodes 4:1 --rdzv-backend c10d --rdzv-endpoint h:1 dump.py", "--nnodes"),
    ("torchrun --nnodes 2 --node-rank 2 --master-addr h dump.py", "--node-rank"),
    ("torchrun --node-rank 1 dump.py", "--node-rank"),
    ("torchrun --nproc-per-node xpu dump.py", "--nproc-per-node"),
    ("torchrun --nproc-per-node 2 --redirects 1 dump.py", "--redirects"),
    ("torchrun --event-log-handler console dump.py", "--event-log-handler"),
    ("torchrun --duplicate-stdout-filters x dump.py", "--duplicate-stdout-filters"),
    ("torchrun --logs-specs x dump.py", "--logs-specs"),
    ("torchrun --log-line-prefix-template x dump.py", "--log-line-prefix-template"),
    ("torchrun -m --no-python dump", "--module"),
    ("torchrun --nproc-per-node 2 --virtual-local-rank dump.py ${local_rank}", "${local_rank}"),
    ("python -m torch.distributed.launch --no-python ./dump.sh", "--no-python"),
    ("torchrun --frobnicate dump.py", "--frobnicate"),
    ("torchrun --nproc-per-node", "nproc-per-node"),
    ("torchrun", "no script"),
    ("accelerate launch --tpu dump.py", "--tpu"),
    ("accelerate launch --num_machines 2 --num_processes 4 --cpu dump.py", "--num_machines"),
    ("accelerate launch --num_machines 2 --multi_gpu --num_processes 3 dump.py", "--num_processes"),
    ("accelerate launch --multi_gpu --num_processes 1 dump.py", "--num_processes"),
    ("accelerate launch --cpu --use_fsdp dump.py", "--cpu"),
    ("accelerate launch --mixed_precision fp32 dump.py", "mixed_precision"),
    ("accelerate launch --use_parallelism_config dump.py", "--use_parallelism_config"),
    ("accelerate launch --cpu --module --no_python dump", "--module"),
    ("accelerate launch --aws_access_key_id x --cpu dump.py", "--aws_access_key_id"),
    ("accelerate launch --config_file missing.yaml dump.py", "missing.yaml"),
    ("deepspeed --autotuning tune --num_gpus 1 dump.py", "--autotuning"),
    ("deepspeed --num_gpus 1 --include localhost:0 dump.py", "--num_gpus"),
    ("deepspeed --num_nodes 2 dump.py", "--num_nodes"),
    ("deepspeed --include localhost:99 dump.py", "--include"),
    ("deepspeed --bind_cores_to_rank --bind_core_list 0-3 --num_gpus 1 dump.py", "--bind_core_list"),
    ("deepspeed --launcher mpich --hostfile hostfile --force_multi dump.py", "mpich"),
    ("deepspeed --venv_script x --num_gpus 1 dump.py", "--venv_script"),
    ("deepspeed --num-gpus 1 dump.py", "--num-gpus"),
];
