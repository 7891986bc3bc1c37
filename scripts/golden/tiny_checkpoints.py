#!/usr/bin/env python3
"""Generates worker/ckpt/tests/golden/tiny: checkpoints of a model with some 200 parameters, saved on two
ranks by the programs themselves. They are small enough that a test can damage every byte in turn.

    PYTHON scripts/golden/tiny_checkpoints.py all      # or `hybrid` only, which is made from z3, or one of:
    PYTHON -m torch.distributed.run --standalone --nproc-per-node 2 scripts/golden/tiny_checkpoints.py z0_tied
    PYTHONPATH=OLD PYTHON -m …                                       z2_old      # OLD: pip install --no-deps --target OLD deepspeed==0.14.5

PYTHON needs torch, transformers, Accelerate and DeepSpeed (scripts/bench/setup creates such an
environment). torch's launcher runs this script in two processes per checkpoint. The optimizer is AdamW
with two groups (weight decay 0.1 and 0) and a linear schedule, for three steps. `reference.json` has the
weights and both moments from the memory of the program that saved the checkpoint.
"""
import json
import os
import pathlib
import shutil
import subprocess
import sys

os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
GOLDEN = pathlib.Path(__file__).resolve().parents[2] / "worker/ckpt/tests/golden/tiny"
KINDS = ["z0_tied", "z1", "z2", "z3", "z2_fp16_moe", "z3_offload", "z3_tiny_group", "accelerate_z2", "fsdp_full", "dcp", "trainer"]
OLD_KIND = "z2_old"  # needs another DeepSpeed version than PYTHON has, so `all` keeps the existing files
STEPS, LR = 3, 1e-2


def create_llama(tied=False):
    """Creates a Llama with some 200 parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(7)
    return LlamaForCausalLM(LlamaConfig(vocab_size=12, hidden_size=4, intermediate_size=5, num_hidden_layers=1, num_attention_heads=1,
                                        num_key_value_heads=1, max_position_embeddings=8, initializer_range=0.5, tie_word_embeddings=tied,
                                        bos_token_id=1, eos_token_id=2, attn_implementation="eager"))


def create_mixtral():
    """Creates a model with experts, which transformers stores as two tensors per layer."""
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM
    torch.manual_seed(7)
    return MixtralForCausalLM(MixtralConfig(vocab_size=12, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
                                            num_key_value_heads=1, num_local_experts=3, num_experts_per_tok=2, max_position_embeddings=8,
                                            initializer_range=0.5, bos_token_id=1, eos_token_id=2, attn_implementation="eager"))


def create_batch(step, rank):
    """Returns the batch of a rank at a step."""
    import torch
    ids = torch.randint(0, 12, (2, 6), generator=torch.Generator().manual_seed(10 * step + rank))
    return dict(input_ids=ids, labels=ids.clone())


def create_optimizer_and_schedule(m):
    """Creates AdamW with two or three parameter groups, and a linear schedule."""
    import torch
    decay = [p for n, p in m.named_parameters() if "norm" not in n]
    rest = [p for n, p in m.named_parameters() if "norm" in n]
    groups = [dict(params=decay, weight_decay=0.1), dict(params=rest, weight_decay=0.0)]
    if hasattr(m, "temperature"):
        groups[0]["params"] = [p for p in decay if p is not m.temperature]
        groups.append(dict(params=[m.temperature], weight_decay=0.0))
    optimizer = torch.optim.AdamW(groups, lr=LR)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, compute_lr_factor)


def compute_lr_factor(step):
    """Returns the factor of the learning rate at a step."""
    return 1 - step / 20


def build_zero_config(stage, **more):
    """Returns a DeepSpeed config for a ZeRO stage. `more` are further keys of
    `zero_optimization`."""
    return dict(train_micro_batch_size_per_gpu=2,
                zero_optimization=dict(stage=stage, overlap_comm=False, stage3_param_persistence_threshold=0, **more), zero_allow_untested_optimizer=True, zero_force_ds_cpu_optimizer=False, steps_per_print=10**9)


def gather_tensor(t):
    """Returns the whole tensor in fp32 on the CPU. Collective for a sharded tensor: every rank must
    call it."""
    return (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().float().cpu()


def write_reference(out, named):
    """Writes reference.json on rank 0. `named` yields (role/name, tensor)."""
    found = {k: dict(dtype="F32", shape=list(t.shape), values=gather_tensor(t).flatten().tolist()) for k, t in named}
    if int(os.environ["RANK"]) == 0:
        (out / "reference.json").write_text("{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in found.items()) + "\n}\n")


def generate_engine_state(engine):
    """Yields the fp32 weights and moments in DeepSpeed's engine."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
    if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    for n, p in engine.module.named_parameters():
        shape = getattr(p, "ds_shape", p.shape)
        yield f"weight/{n}", safe_get_full_fp32_param(p).reshape(shape)
        for key in ("exp_avg", "exp_avg_sq"):
            yield f"{key}/{n}", safe_get_full_optimizer_state(p, key).reshape(shape)


def generate_torch_state(m, optimizer):
    """Yields the fp32 weights and moments of a torch optimizer."""
    for n, p in m.named_parameters():
        yield f"weight/{n}", gather_tensor(p)
        for key in ("exp_avg", "exp_avg_sq"):
            yield f"{key}/{n}", gather_tensor(optimizer.state[p][key])


def save_deepspeed(out, stage, kind):
    """Trains with DeepSpeed, and writes the checkpoint and the reference of one kind."""
    import deepspeed
    import torch
    deepspeed.init_distributed(dist_backend="gloo")
    m = create_mixtral() if kind == "z2_fp16_moe" else create_llama(tied=stage == 0)
    config = build_zero_config(stage, **(dict(offload_optimizer=dict(device="cpu")) if kind == "z3_offload" else {}))
    if kind == "z2_fp16_moe":
        deepspeed.get_accelerator().is_fp16_supported = lambda: True
        config["fp16"] = dict(enabled=True, initial_scale_power=4)
    if kind == "z3_tiny_group":
        # a parameter with fewer elements than ranks, which never gets a gradient
        m.register_parameter("temperature", torch.nn.Parameter(torch.ones(1)))
    optimizer, schedule = create_optimizer_and_schedule(m)
    engine, *_ = deepspeed.initialize(model=m, optimizer=optimizer, lr_scheduler=schedule, config=config)
    for step in range(STEPS):
        engine.backward(engine(**create_batch(step, engine.global_rank)).loss)
        engine.step()
    engine.save_checkpoint(str(out))
    # stage 0 does not wrap the optimizer
    write_reference(out, generate_engine_state(engine) if stage else generate_torch_state(m, optimizer))


def save_accelerate_z2(out):
    """Trains with Accelerate and DeepSpeed at stage 2, and writes checkpoint and reference."""
    from accelerate import Accelerator, PartialState
    from accelerate.utils import DeepSpeedPlugin
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(cpu=True, backend="gloo")  # otherwise Accelerate assumes a single process on a host without GPU
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=build_zero_config(2)))
    m = create_llama()
    optimizer, schedule = create_optimizer_and_schedule(m)
    engine, optimizer, schedule = accelerator.prepare(m, optimizer, schedule)
    for step in range(STEPS):
        accelerator.backward(engine(**create_batch(step, accelerator.process_index)).loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    accelerator.save_state(str(out))
    write_reference(out, generate_engine_state(engine))


def create_sharded(mesh_of=2):
    """Returns a model that FSDP2 shards over two ranks, with its optimizer and schedule."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    m = create_llama()
    mesh = init_device_mesh("cpu", (mesh_of,))
    for layer in m.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(m, mesh=mesh)
    return (m, *create_optimizer_and_schedule(m))


def save_fsdp_full(out):
    """Trains with Accelerate and FSDP, and writes a checkpoint with a full state and the
    reference."""
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
    accelerator = Accelerator(cpu=True)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="FULL_STATE_DICT", cpu_ram_efficient_loading=False,
                                            auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"])

    def enable_fsdp():
        # Accelerate rejects FSDP without GPUs; its code for writing files is unchanged
        accelerator.state.__dict__["fsdp_plugin"] = plugin
        accelerator.state.distributed_type = DistributedType.FSDP

    enable_fsdp()
    m, optimizer, schedule = create_sharded()
    accelerator._models.append(m)
    accelerator._optimizers.append(AcceleratedOptimizer(optimizer))
    for step in range(STEPS):
        m(**create_batch(step, accelerator.process_index)).loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    enable_fsdp()
    accelerator.save_state(str(out))
    write_reference(out, generate_torch_state(m, optimizer))


def save_dcp(out):
    """Trains with FSDP2, and writes a torch distributed checkpoint and the reference."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as saving
    from torch.distributed.checkpoint.state_dict import get_state_dict
    dist.init_process_group("gloo")
    m, optimizer, schedule = create_sharded()
    for step in range(STEPS):
        m(**create_batch(step, dist.get_rank())).loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    weights, states = get_state_dict(m, optimizer)
    saving.save({"model": weights, "optim": states}, checkpoint_id=str(out))
    write_reference(out, generate_torch_state(m, optimizer))


def save_trainer(out):
    """Trains with HF Trainer on two ranks, and writes checkpoint and reference."""
    import torch
    from transformers import Trainer, TrainingArguments

    class BatchDataset(torch.utils.data.Dataset):
        def __len__(self):
            return 16

        def __getitem__(self, i):
            return {k: v[0] for k, v in create_batch(i, 0).items()}

    args = TrainingArguments(output_dir=str(out / "run"), use_cpu=True, max_steps=STEPS, save_steps=STEPS, per_device_train_batch_size=2,
                             learning_rate=LR, weight_decay=0.1, report_to=[], disable_tqdm=True, logging_steps=1)
    run = Trainer(model=create_llama(), args=args, train_dataset=BatchDataset())
    run.train()
    write_reference(out, generate_torch_state(run.model, run.optimizer.optimizer if hasattr(run.optimizer, "optimizer") else run.optimizer))
    if int(os.environ["RANK"]) == 0:
        shutil.move(out / f"run/checkpoint-{STEPS}", out / f"checkpoint-{STEPS}")
        shutil.rmtree(out / "run")


def save_kind(kind):
    """Saves the checkpoint of one kind, in one of its two processes."""
    import torch
    import torch._dynamo  # must come before DeepSpeed patches torch.Tensor.__new__
    import torch.distributed as dist
    import deepspeed
    if hasattr(sys.modules["deepspeed.comm.torch"], "build_shm_op"):
        sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # skip its compilation
    torch.set_num_threads(1)
    out = GOLDEN / kind
    out.mkdir(parents=True, exist_ok=True)
    stage = int(kind[1]) if kind[0] == "z" else None
    globals()[f"save_{kind}"](out) if stage is None else save_deepspeed(out, stage, kind)
    dist.barrier()
    dist.destroy_process_group()


def save_universal():
    """Converts the stage 2 checkpoint with DeepSpeed's ds_to_universal.py."""
    out = GOLDEN / "universal"
    tag = f"global_step{STEPS}"
    subprocess.run([sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state", "--input_folder",
                    GOLDEN / f"z2/{tag}", "--output_folder", out / f"{tag}_universal", "--num_extract_workers", "1", "--num_merge_workers", "1"],
                   check=True)
    shutil.copy(GOLDEN / "z2/reference.json", out)


def save_hybrid():
    """Writes a universal checkpoint with torch.save that has only the entries that DeepSpeed's
    loaders need. The checkpoint does not assign parameters to groups."""
    import torch
    tag = f"global_step{STEPS}"
    z3_state = torch.load(GOLDEN / f"z3/{tag}/zero_pp_rank_0_mp_rank_00_model_states.pt", weights_only=False)
    optimizer_state = torch.load(GOLDEN / f"z3/{tag}/zero_pp_rank_0_mp_rank_00_optim_states.pt", weights_only=False)["optimizer_state_dict"]
    groups = [dict(g, params=[i]) for i, g in enumerate(optimizer_state["optimizer_state_dict"]["param_groups"])]
    step = torch.tensor(float(STEPS))
    shutil.rmtree(GOLDEN / "hybrid", ignore_errors=True)
    out = GOLDEN / f"hybrid/{tag}_universal"
    for name, reference in json.loads((GOLDEN / "z3/reference.json").read_text()).items():
        role, name = name.split("/")
        directory = out / "zero" / name
        directory.mkdir(parents=True, exist_ok=True)
        tensor = torch.tensor(reference["values"], dtype=torch.float32).reshape(reference["shape"])
        torch.save(dict(param=tensor, cat_dim=0), directory / f"{dict(weight='fp32').get(role, role)}.pt")
        torch.save(step, directory / "step.pt")
    # the loader of stage 3 copies these settings to every group
    common = {k: v for k, v in groups[0].items() if k == "params" or all(g[k] == v for g in groups)}
    third = dict(state={0: dict(step=step)}, param_groups=[common])
    torch.save(dict(dynamic_loss_scale=False, overflow=False, clip_grad=1.0, ds_version=z3_state["ds_version"], param_groups=groups, zero_stage=3,
                    optimizer_state_dict=third), out / "zero/optimizer_state.pt")
    copied_keys = ("lr_scheduler", "skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_version")
    states = dict(module={}, buffer_names=[], optimizer=None, param_shapes=[], frozen_param_shapes=None, shared_params={},
                  frozen_param_fragments=None, data_sampler=None, random_ltd=None, ds_config={}, **{key: z3_state[key] for key in copied_keys},
                  universal_checkpoint_info=dict(universal_checkpoint_version=0.4))
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        torch.save(states, out / name)
    (GOLDEN / "hybrid/latest_universal").write_text(out.name)
    shutil.copy(GOLDEN / "z3/reference.json", GOLDEN / "hybrid")


def main():
    if sys.argv[1] == "hybrid":
        return save_hybrid()
    if sys.argv[1] != "all":
        return save_kind(sys.argv[1])
    for directory in GOLDEN.iterdir():
        if directory.name != OLD_KIND:
            shutil.rmtree(directory)
    for kind in KINDS:
        subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__, kind], check=True)
    save_universal()
    save_hybrid()
    for name in ("zero_to_fp32.py", "zero_to_torch.py", "training_args.bin"):
        for file in GOLDEN.rglob(name):
            file.unlink()


if __name__ == "__main__":
    main()
