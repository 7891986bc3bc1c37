"""Real DeepSpeed (CPU, gloo) makes checkpoints, and loads what `launch ckpt convert` made of them.

    deepspeed_cycle.py make PLAN.json       each case trains, saves, notes its whole state, and trains on: the reference
    deepspeed_cycle.py check PLAN.json      each case loads a folder, compares the state bit for bit, trains on, compares losses

PLAN.json: {"world": N, "port": P, "cases": [{"name", "stage", "dtype", "model", "groups", "freeze", "dir", "ref", "universal", "tolerance"}]}
All cases of a plan run in one group of N processes. Every world sees the same 12 samples per step. Prints a JSON line per case.
"""
import gc
import json
import os
import sys

os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["DEEPSPEED_LOG_LEVEL"] = "error"
SAMPLES, BEFORE, AFTER = 12, 3, 2


def build(kind, tied):
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(11)
    if kind == "gpt2":
        return GPT2LMHeadModel(GPT2Config(vocab_size=65, n_positions=32, n_embd=24, n_layer=2, n_head=2, tie_word_embeddings=tied,
                                          resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation="eager"))
    # nothing divides evenly
    return LlamaForCausalLM(LlamaConfig(vocab_size=67, hidden_size=30, intermediate_size=41, num_hidden_layers=2, num_attention_heads=3,
                                        num_key_value_heads=1, max_position_embeddings=32, tie_word_embeddings=tied, attn_implementation="eager"))


def engine_of(case, world):
    import deepspeed
    import torch

    model = build(case["model"], case.get("tied", False))
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
        # DeepSpeed offers it only where the CPU multiplies halves in hardware; torch computes with them on any, and what is compared
        # here (what the files hold, which losses follow) is the same on both.
        deepspeed.get_accelerator().is_fp16_supported = lambda: True
        config["fp16"] = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}
    if case.get("universal"):
        config["checkpoint"] = {"load_universal": True}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)
    return engine


def flat_state_of(engine):
    """Stages 1 and 2: by parameter, where it lies is read off its storage, which is a view of its group's flat buffer."""
    import torch
    import torch.distributed as dist

    zero, found = engine.optimizer, {}
    for flat, part, group in zip(zero.bit16_groups_flat, zero.single_partition_of_fp32_groups, zero.bit16_groups):
        state = zero.optimizer.state[part]
        whole = {}
        for key, own in (("fp32", part.data), ("exp_avg", state["exp_avg"]), ("exp_avg_sq", state["exp_avg_sq"])):
            pieces = [torch.empty_like(own) for _ in range(dist.get_world_size())]
            dist.all_gather(pieces, own.contiguous())
            whole[key] = torch.cat(pieces)
        for p in group:
            at = (p.data_ptr() - flat.data_ptr()) // flat.element_size()
            found[id(p)] = {k: v[at : at + p.numel()].reshape(p.shape) for k, v in whole.items()}
    return found


def state_of(engine):
    """Every tensor by name: fp32 masters and moments, frozen weights, buffers."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found, flat = {}, flat_state_of(engine) if engine.zero_optimization_stage() < 3 else {}
    for name, p in engine.module.named_parameters():
        if id(p) in flat:
            found.update({f"{name}/{k}": v.float() for k, v in flat[id(p)].items()})
        elif p.requires_grad:
            shape = getattr(p, "ds_shape", p.shape)
            found[f"{name}/fp32"] = safe_get_full_fp32_param(p).float().reshape(shape)
            for key in ("exp_avg", "exp_avg_sq"):
                found[f"{name}/{key}"] = safe_get_full_optimizer_state(p, key).float().reshape(shape)
        elif hasattr(p, "ds_id"):
            with deepspeed.zero.GatheredParameters([p]):
                found[f"{name}/frozen"] = p.data.float()
        else:
            found[f"{name}/frozen"] = p.data.float()
    for name, b in engine.module.named_buffers():
        if name in ("counter", "scale"):
            found[f"{name}/buffer"] = b.float()
    return {k: v.detach().cpu().clone() for k, v in found.items()}


def spoil(engine):
    """Other values in everything that loading must restore and that initialisation would make right by chance."""
    for name, b in engine.module.named_buffers():
        if name in ("counter", "scale"):
            b.fill_(1)
    for p in engine.module.parameters():
        if not p.requires_grad:
            (p.ds_tensor if hasattr(p, "ds_tensor") else p).data.fill_(0.25)


def train(engine, steps, world, rank):
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


def groups_of(engine):
    inner = engine.optimizer.optimizer
    return [[g["lr"], g["weight_decay"], list(g["betas"])] for g in inner.param_groups]


def scale_of(engine):
    """The loss scale and where its scaler stands."""
    scaler = engine.optimizer.loss_scaler
    keys = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_window")
    return {key: float(getattr(scaler, key)) for key in keys if hasattr(scaler, key)}


def readable(case, ref):
    """What is wrong for the readers beside the engine: torch.load that runs no code, and DeepSpeed's own zero_to_fp32.

    The globals are those that DeepSpeed's own files name as well.
    """
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


def make(case, world, rank):
    import torch

    engine = engine_of(case, world)
    with torch.no_grad():
        engine.module.counter.fill_(123456789012)
        engine.module.scale.copy_(torch.tensor([1.25, 8.0]))
    losses = train(engine, BEFORE, world, rank)
    engine.save_checkpoint(case["dir"], client_state={"note": "kept", "table": torch.arange(5)})
    state = state_of(engine)
    meta = {"groups": groups_of(engine), "scale": scale_of(engine), "before": losses, "after": train(engine, AFTER, world, rank)}
    if rank == 0:
        torch.save({"state": state, "meta": meta}, case["ref"])
    return {"name": case["name"], **meta}


def check(case, world, rank):
    import torch

    engine = engine_of(case, world)
    spoil(engine)
    path, client = engine.load_checkpoint(case["dir"])
    ref = torch.load(case["ref"], weights_only=False)
    wrong = [] if path else ["nothing was loaded"]
    if client.get("note") != "kept" or client.get("table") is None or client["table"].tolist() != [0, 1, 2, 3, 4]:
        wrong.append(f"client state {client}")
    if rank == 0:
        wrong += readable(case, ref)
    # DeepSpeed keeps the run's own scaler with a universal checkpoint
    if not case.get("universal") and scale_of(engine) != ref["meta"]["scale"]:
        wrong.append(f"scale {scale_of(engine)} not {ref['meta']['scale']}")
    if engine.global_steps != BEFORE:
        wrong.append(f"global_steps {engine.global_steps}")
    state = state_of(engine)
    for key, expected in ref["state"].items():
        # DeepSpeed itself restores neither frozen weights nor buffers of a universal checkpoint
        if case.get("universal") and key.endswith(("/frozen", "/buffer")):
            continue
        got = state.get(key)
        if got is None or not torch.equal(got, expected):
            wrong.append(key)
    if groups_of(engine) != ref["meta"]["groups"]:
        wrong.append(f"groups {groups_of(engine)} not {ref['meta']['groups']}")
    after = train(engine, AFTER, world, rank)
    worst = max(abs(a - b) / abs(b) for a, b in zip(after, ref["meta"]["after"]))
    return {"name": case["name"], "wrong": wrong, "after": after, "expected": ref["meta"]["after"], "relative": worst}


def run(rank, mode, plan):
    world = plan["world"]
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(plan["port"]))
    import torch

    torch.set_num_threads(1)
    import torch._dynamo  # before zero.Init patches torch
    import deepspeed
    import torch.distributed as dist

    # a faster way to reduce on one machine, which DeepSpeed would compile first; gloo does it as well
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    for case in plan["cases"]:
        try:
            result = make(case, world, rank) if mode == "make" else check(case, world, rank)
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
    leave()


def leave():
    """Ends this process at once: torch's threads that want Python's lock while the interpreter ends abort it (Python up to 3.13)."""
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
        run(0, mode, plan)
    else:
        mp.start_processes(run, args=(mode, plan), nprocs=plan["world"], start_method="fork")
