"""DeepSpeed (CPU, gloo) saves checkpoints, and loads those that `launch ckpt convert` wrote.

    deepspeed_cycle.py make PLAN.json       each case trains, saves a checkpoint, records its state as
                                            the reference, and trains further
    deepspeed_cycle.py check PLAN.json      each case loads a checkpoint, compares the state bit for bit,
                                            trains further and compares the losses

PLAN.json: {"world": N, "port": P, "cases": [{"name", "stage", "dtype", "model", "groups", "freeze",
"dir", "ref", "universal", "tolerance"}]}

One group of N processes runs all cases of a plan. A step has the same 12 samples for any N. Prints one
line of JSON per case.
"""
import gc
import json
import os
import sys

os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["DEEPSPEED_LOG_LEVEL"] = "error"
SAMPLES, STEPS_BEFORE, STEPS_AFTER = 12, 3, 2


def create_model(kind, tied):
    """Creates a small GPT-2 or Llama."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(11)
    if kind == "gpt2":
        return GPT2LMHeadModel(GPT2Config(vocab_size=65, n_positions=32, n_embd=24, n_layer=2, n_head=2, tie_word_embeddings=tied,
                                          resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation="eager"))
    # sizes without common divisors
    return LlamaForCausalLM(LlamaConfig(vocab_size=67, hidden_size=30, intermediate_size=41, num_hidden_layers=2, num_attention_heads=3,
                                        num_key_value_heads=1, max_position_embeddings=32, tie_word_embeddings=tied, attn_implementation="eager"))


def create_engine(case, world):
    """Creates DeepSpeed's engine with the model, optimizer and config of a case."""
    import deepspeed
    import torch

    model = create_model(case["model"], case.get("tied", False))
    model.register_buffer("counter", torch.tensor(7, dtype=torch.int64))
    model.register_buffer("scale", torch.tensor([0.5, -3.0]))
    for name, p in model.named_parameters():
        if any(part in name for part in case.get("freeze", [])):
            p.requires_grad_(False)
    decay = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    rest = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    if case["groups"] == 1:
        groups = [{"params": decay + rest, "weight_decay": 0.1}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.98))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    config = {"train_micro_batch_size_per_gpu": SAMPLES // world, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0,
              "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False, "steps_per_print": 10**9,
              "zero_optimization": {"stage": case["stage"], "stage3_param_persistence_threshold": 0, "overlap_comm": False,
                                    "sub_group_size": case.get("sub_group_size", 10**9)}}
    if case["dtype"] == "bf16":
        config["bf16"] = {"enabled": True}
    if case["dtype"] == "fp16":
        # DeepSpeed only offers fp16 on CPUs that multiply fp16 numbers in hardware. torch computes with
        # them on any CPU, with the same files and losses.
        deepspeed.get_accelerator().is_fp16_supported = lambda: True
        config["fp16"] = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}
    if case.get("universal"):
        config["checkpoint"] = {"load_universal": True}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)
    return engine


def gather_flat_states(engine):
    """Returns the states of stages 1 and 2 by the id of their parameter. A parameter is a view of
    the flat buffer of its group, so its address gives its position in the flat states. Collective:
    every rank must call it."""
    import torch
    import torch.distributed as dist

    zero, states = engine.optimizer, {}
    for flat, part, group in zip(zero.bit16_groups_flat, zero.single_partition_of_fp32_groups, zero.bit16_groups):
        state = zero.optimizer.state[part]
        whole = {}
        for key, shard in (("fp32", part.data), ("exp_avg", state["exp_avg"]), ("exp_avg_sq", state["exp_avg_sq"])):
            shards = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
            dist.all_gather(shards, shard.contiguous())
            whole[key] = torch.cat(shards)
        for p in group:
            at = (p.data_ptr() - flat.data_ptr()) // flat.element_size()
            states[id(p)] = {k: v[at : at + p.numel()].reshape(p.shape) for k, v in whole.items()}
    return states


def gather_tensors(engine):
    """Returns every tensor by name: fp32 master weights and moments, frozen weights, and buffers.
    Collective: every rank must call it."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    tensors, flat = {}, gather_flat_states(engine) if engine.zero_optimization_stage() < 3 else {}
    for name, p in engine.module.named_parameters():
        if id(p) in flat:
            tensors.update({f"{name}/{k}": v.float() for k, v in flat[id(p)].items()})
        elif p.requires_grad:
            shape = getattr(p, "ds_shape", p.shape)
            tensors[f"{name}/fp32"] = safe_get_full_fp32_param(p).float().reshape(shape)
            for key in ("exp_avg", "exp_avg_sq"):
                tensors[f"{name}/{key}"] = safe_get_full_optimizer_state(p, key).float().reshape(shape)
        elif hasattr(p, "ds_id"):
            with deepspeed.zero.GatheredParameters([p]):
                tensors[f"{name}/frozen"] = p.data.float()
        else:
            tensors[f"{name}/frozen"] = p.data.float()
    for name, b in engine.module.named_buffers():
        if name in ("counter", "scale"):
            tensors[f"{name}/buffer"] = b.float()
    return {k: v.detach().cpu().clone() for k, v in tensors.items()}


def overwrite_initial_values(engine):
    """Overwrites buffers and frozen weights, because their initial values equal those of the
    checkpoint."""
    for name, b in engine.module.named_buffers():
        if name in ("counter", "scale"):
            b.fill_(1)
    for p in engine.module.parameters():
        if not p.requires_grad:
            (p.ds_tensor if hasattr(p, "ds_tensor") else p).data.fill_(0.25)


def train_steps(engine, steps, world, rank):
    """Trains `steps` steps and returns the mean loss of all ranks at each step."""
    import torch
    import torch.distributed as dist

    losses = []
    for _ in range(steps):
        step = engine.global_steps
        ids = torch.randint(0, 60, (SAMPLES, 12), generator=torch.Generator().manual_seed(500 + step))
        mine = ids[rank * SAMPLES // world : (rank + 1) * SAMPLES // world]
        loss = engine(input_ids=mine, labels=mine).loss
        engine.backward(loss)
        engine.step()
        whole = loss.detach().float().clone()
        dist.all_reduce(whole)
        losses.append(float(whole) / world)
    return losses


def list_hyper_parameters(engine):
    """Returns learning rate, weight decay and betas of each parameter group."""
    inner = engine.optimizer.optimizer
    return [[g["lr"], g["weight_decay"], list(g["betas"])] for g in inner.param_groups]


def read_loss_scaler(engine):
    """Returns the loss scale and the counters of its scaler."""
    scaler = engine.optimizer.loss_scaler
    keys = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_window")
    return {key: float(getattr(scaler, key)) for key in keys if hasattr(scaler, key)}


def check_other_readers(case, ref):
    """Reads the checkpoint with torch.load (weights_only) and DeepSpeed's zero_to_fp32, and returns
    the errors and differences. torch.load allows only the globals that DeepSpeed's own files also
    have."""
    import glob

    import torch
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    wrong = []
    allowed = [LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]
    for path in glob.glob(f"{case['dir']}/**/*.pt", recursive=True):
        try:
            with torch.serialization.safe_globals(allowed):
                torch.load(path, weights_only=True)
        except Exception as e:
            wrong.append(f"{os.path.basename(path)}: {e}")
    if not case.get("universal"):
        whole = get_fp32_state_dict_from_zero_checkpoint(case["dir"])
        for key, expected in ref["state"].items():
            name, kind = key.rsplit("/", 1)
            if kind in ("fp32", "frozen") and not torch.equal(whole[name].float().reshape(expected.shape), expected):
                wrong.append(f"zero_to_fp32: {name}")
    return wrong


def save_case(case, world, rank):
    """Trains a case, saves its checkpoint and reference, and trains further. Returns the losses and
    settings."""
    import torch

    engine = create_engine(case, world)
    with torch.no_grad():
        engine.module.counter.fill_(123456789012)
        engine.module.scale.copy_(torch.tensor([1.25, 8.0]))
    losses = train_steps(engine, STEPS_BEFORE, world, rank)
    engine.save_checkpoint(case["dir"], client_state={"note": "kept", "table": torch.arange(5)})
    state = gather_tensors(engine)
    meta = {"groups": list_hyper_parameters(engine), "scale": read_loss_scaler(engine), "before": losses, "after": train_steps(engine, STEPS_AFTER, world, rank)}
    if rank == 0:
        torch.save({"state": state, "meta": meta}, case["ref"])
    return {"name": case["name"], **meta}


def check_case(case, world, rank):
    """Loads the checkpoint of a case, compares the state with the reference, and trains further.
    Returns the differences."""
    import torch

    engine = create_engine(case, world)
    overwrite_initial_values(engine)
    path, client = engine.load_checkpoint(case["dir"])
    ref = torch.load(case["ref"], weights_only=False)
    wrong = [] if path else ["no checkpoint was loaded"]
    if client.get("note") != "kept" or client.get("table") is None or client["table"].tolist() != [0, 1, 2, 3, 4]:
        wrong.append(f"client state {client}")
    if rank == 0:
        wrong += check_other_readers(case, ref)
    # DeepSpeed does not load the scaler of a universal checkpoint.
    if not case.get("universal") and read_loss_scaler(engine) != ref["meta"]["scale"]:
        wrong.append(f"loss scaler {read_loss_scaler(engine)}, expected {ref['meta']['scale']}")
    if engine.global_steps != STEPS_BEFORE:
        wrong.append(f"global_steps {engine.global_steps}, expected {STEPS_BEFORE}")
    state = gather_tensors(engine)
    for key, expected in ref["state"].items():
        # DeepSpeed restores neither frozen weights nor buffers of a universal checkpoint.
        if case.get("universal") and key.endswith(("/frozen", "/buffer")):
            continue
        got = state.get(key)
        if got is None or not torch.equal(got, expected):
            wrong.append(key)
    if list_hyper_parameters(engine) != ref["meta"]["groups"]:
        wrong.append(f"groups {list_hyper_parameters(engine)}, expected {ref['meta']['groups']}")
    after = train_steps(engine, STEPS_AFTER, world, rank)
    worst = max(abs(a - b) / abs(b) for a, b in zip(after, ref["meta"]["after"]))
    return {"name": case["name"], "wrong": wrong, "after": after, "expected": ref["meta"]["after"], "relative": worst}


def run_rank(rank, mode, plan):
    """Runs all cases of a plan as one rank of the group, and ends the process. Rank 0 prints the
    results."""
    world = plan["world"]
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(plan["port"]))
    import torch

    torch.set_num_threads(1)
    import torch._dynamo  # before zero.Init patches torch
    import deepspeed
    import torch.distributed as dist

    # Skips the compilation of DeepSpeed's shared-memory op; gloo reduces instead.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    for case in plan["cases"]:
        try:
            result = save_case(case, world, rank) if mode == "make" else check_case(case, world, rank)
        except Exception as e:
            if rank == 0:
                import traceback

                traceback.print_exc()
            result = {"name": case["name"], "wrong": [f"{type(e).__name__}: {e}"], "relative": 1e9}
        if rank == 0:
            print("RESULT " + json.dumps(result), flush=True)
        gc.collect()
    dist.barrier()
    dist.destroy_process_group()
    exit_without_finalization()


def exit_without_finalization():
    """Ends this process without finalization of the interpreter. Up to Python 3.13, threads of
    torch that wait for the interpreter's lock would abort the process."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    import torch._dynamo  # before DeepSpeed patches torch.Tensor.__new__
    import deepspeed  # imported once, for all processes
    import torch.multiprocessing as mp
    import transformers.models.gpt2.modeling_gpt2, transformers.models.llama.modeling_llama

    mode, plan = sys.argv[1], json.load(open(sys.argv[2]))
    if plan["world"] == 1:
        run_rank(0, mode, plan)
    else:
        mp.start_processes(run_rank, args=(mode, plan), nprocs=plan["world"], start_method="fork")
