"""Writes a case of tests/golden/resume: the training state of a program, and the losses of its next steps.

    PYTHON -m torch.distributed.run --nproc-per-node WORLD scripts/golden/resume.py OUT NAME

scripts/golden/resume runs this script for every case. Each sample is a document; all have the same
length and are used in order, so the batches are those of a job with `pack: false, shuffle: false` and
four samples per step. The optimizer is AdamW with a linear schedule, unless the case has another one.
The script trains three steps, saves the checkpoint, trains three more steps, and writes their losses
to next.json. Where a program trains in bf16, next.json also has the losses with which torch continues
in fp32 from the program's fp32 weights and moments (`next_fp32`).

Accelerate only offers FSDP on GPUs, so its plugin is set directly. The code that writes files is
unchanged.
"""
import json
import os
import shutil
import sys

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import torch
import torch._dynamo  # before DeepSpeed patches torch.Tensor.__new__
import torch.distributed as dist
import transformers

DOCUMENT_CHARACTERS, DOCUMENTS, EOD, STEPS_BEFORE, STEPS_AFTER, BATCH, LR, SCHEDULE_STEPS = 20, 24, 256, 3, 3, 4, 2e-3, 20
FP16_SCALE_POWER = 18  # so large that the first gradients overflow
BETAS, EPS, WEIGHT_DECAY, WARM_UP_STEPS, CLIP_NORM, SGD_LR = (0.9, 0.95), 1e-8, 0.1, 2, 1.0, 5e-2
# Distributed checkpoints have a zip container for each part of each tensor, so these models have one layer.
LAYERS = 1 if sys.argv[2].endswith(("sharded", "dcp", "lion", "fp16", "qwen3_moe")) else 2
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
torch.set_num_threads(1)

# printable text that is not uniform, so that a model can learn from it
letters = torch.Generator().manual_seed(5)
documents = ["".join(chr(97 + int(i)) for i in torch.randint(0, 26, (DOCUMENT_CHARACTERS,), generator=letters) // 3) for _ in range(DOCUMENTS)]


class DocumentDataset(torch.utils.data.Dataset):
    """The documents as a dataset of token ids and labels."""

    def __len__(self):
        return DOCUMENTS

    def __getitem__(self, i):
        ids = torch.tensor([ord(c) for c in documents[i]] + [EOD])
        return dict(input_ids=ids, labels=ids.clone())


def create_batch(first, count):
    """Returns a batch of `count` documents from number `first` on."""
    ids = torch.stack([DocumentDataset()[i % DOCUMENTS]["input_ids"] for i in range(first, first + count)])
    return dict(input_ids=ids, labels=ids.clone())


def build_model(family):
    """Creates a small Llama, a Qwen2 with biases and a tied head, or a mixture of experts. No size
    is a multiple of three."""
    sizes = dict(vocab_size=257, hidden_size=16, intermediate_size=20, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2,
                 max_position_embeddings=64, rms_norm_eps=1e-6, initializer_range=0.1, attn_implementation="eager")
    torch.manual_seed(3)
    if family == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, tie_word_embeddings=False))
    if family == "mixtral":
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, tie_word_embeddings=False, num_local_experts=3, num_experts_per_tok=2))
    if family == "qwen3_moe":
        return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes, tie_word_embeddings=False, num_experts=4, num_experts_per_tok=2,
                                                                            moe_intermediate_size=12, norm_topk_prob=True, head_dim=4))
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes, tie_word_embeddings=True))


def is_decayed(name):
    """Returns whether the parameter has weight decay."""
    return "norm" not in name and not name.endswith("bias")


def create_groups(model, count=2):
    """Returns one parameter group, or two: with and without weight decay."""
    named = list(model.named_parameters())
    if count == 1:
        return [dict(params=[p for _, p in named], weight_decay=WEIGHT_DECAY)]
    return [dict(params=[p for n, p in named if is_decayed(n)], weight_decay=WEIGHT_DECAY),
            dict(params=[p for n, p in named if not is_decayed(n)], weight_decay=0.0)]


def create_adamw(model, count=2):
    return torch.optim.AdamW(create_groups(model, count), lr=LR, betas=BETAS, eps=EPS)


def remove_frozen(optimizer):
    """Removes frozen parameters from the groups of an optimizer, and returns the optimizer."""
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if p.requires_grad]
    return optimizer


def create_sgd(model):
    return torch.optim.SGD(create_groups(model), lr=SGD_LR, momentum=0.9)


class Lion(torch.optim.Optimizer):
    """The optimizer Lion, with one moment that has the name of AdamW's first moment (`exp_avg`)."""

    def __init__(self, groups):
        super().__init__(groups, dict(lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(torch.sign(average * group["betas"][0] + p.grad * (1 - group["betas"][0])), alpha=-group["lr"])
                average.mul_(group["betas"][1]).add_(p.grad, alpha=1 - group["betas"][1])


def create_linear_schedule(optimizer, calls_per_step=1):
    """Returns a learning rate schedule with linear warm-up and decay, which the program steps
    `calls_per_step` times per optimizer step."""
    return transformers.get_linear_schedule_with_warmup(optimizer, WARM_UP_STEPS * calls_per_step, SCHEDULE_STEPS * calls_per_step)


def compute_mean(loss):
    """Returns the mean of a loss over all ranks."""
    total = loss.detach().double()
    if dist.is_initialized():
        dist.all_reduce(total)
    return float(total) / world


def build_zero_config(stage, **more):
    """Returns the ZeRO section of a DeepSpeed config."""
    return dict(stage=stage, overlap_comm=False, reduce_bucket_size=20000, stage3_param_persistence_threshold=0, **more)


def skip_shm_op_compilation():
    """Skips the compilation of DeepSpeed's shared-memory op, so that gloo reduces instead."""
    import deepspeed.comm.torch

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None


def continue_in_fp32(family, engine):
    """Trains with torch in fp32 from the weights and moments of DeepSpeed's engine, and returns the
    losses of the next steps. Collective: every rank gathers the state and computes all losses."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    inner, model = engine.module, build_model(family)
    if engine.zero_optimization_stage() < 3:
        # The engine searched for moments before they existed; it must search again.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    optimizer = create_adamw(model)
    ours = dict(model.named_parameters())
    for name, p in inner.named_parameters():
        mine = ours[name]
        mine.data.copy_(safe_get_full_fp32_param(p).reshape(mine.shape))
        moments = {k: safe_get_full_optimizer_state(p, k).clone().reshape(mine.shape) for k in ("exp_avg", "exp_avg_sq")}
        optimizer.state[mine] = dict(step=torch.tensor(float(STEPS_BEFORE)), **moments)
    schedule = create_linear_schedule(optimizer)
    for _ in range(STEPS_BEFORE):
        schedule.step()
    losses = []
    for n in range(STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER):
        loss = model(**create_batch(n * BATCH, BATCH)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step(), schedule.step(), optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def freeze_layers(model, freeze):
    """Freezes the parameters whose names contain `freeze`."""
    for name, p in model.named_parameters():
        p.requires_grad_(not (freeze and freeze in name))


def save_trainer(family, ds=None, bf16=False, fsdp=None, make_optimizer=None, freeze=None):
    """Trains and saves with HF Trainer, optionally with DeepSpeed or FSDP, a separate optimizer, or
    frozen layers. Returns the checkpoint directory, the losses, and further fields of next.json."""
    extra, model = {}, build_model(family)
    freeze_layers(model, freeze)
    optimizer = make_optimizer and make_optimizer(model)

    class SaveAndStop(transformers.TrainerCallback):
        """Saves after STEPS_BEFORE steps and stops after STEPS_AFTER more."""

        def on_save(self, args, state, control, model=None, **objects):
            if bf16:
                extra["next_fp32"] = continue_in_fp32(family, hf_trainer.model_wrapped)

        def on_step_end(self, args, state, control, **objects):
            control.should_training_stop = state.global_step == STEPS_BEFORE + STEPS_AFTER
            control.should_save = state.global_step == STEPS_BEFORE

    class FsdpTrainer(transformers.Trainer):
        """A Trainer that enables FSDP on CPUs if `fsdp` is given."""

        def create_accelerator_and_postprocess(self):
            super().create_accelerator_and_postprocess()
            if fsdp:
                enable_fsdp(self.accelerator, fsdp)
                self.is_fsdp_enabled = True

    if ds:
        skip_shm_op_compilation()
        ds = dict(train_micro_batch_size_per_gpu="auto", gradient_accumulation_steps="auto", gradient_clipping="auto", bf16=dict(enabled="auto"),
                  zero_optimization=ds, zero_allow_untested_optimizer=True, zero_force_ds_cpu_optimizer=False, steps_per_print=10**9)
    hf_trainer = FsdpTrainer(
        model=model, train_dataset=DocumentDataset(), callbacks=[SaveAndStop()], optimizers=(optimizer, optimizer and create_linear_schedule(optimizer)),
        args=transformers.TrainingArguments(
            output_dir=".", per_device_train_batch_size=BATCH // world, max_steps=SCHEDULE_STEPS, save_strategy="no", logging_steps=1, learning_rate=LR,
            weight_decay=WEIGHT_DECAY, warmup_steps=WARM_UP_STEPS, lr_scheduler_type="linear", adam_beta2=BETAS[1], adam_epsilon=EPS, max_grad_norm=CLIP_NORM,
            train_sampling_strategy="sequential", use_cpu=True, bf16=bf16, report_to=[], seed=3, deepspeed=ds, disable_tqdm=True,
            dataloader_pin_memory=False, optim="adamw_torch", ddp_backend="gloo" if world > 1 or ds else None))
    hf_trainer.train()
    losses = [line["loss"] for line in hf_trainer.state.log_history if "loss" in line]
    return f"checkpoint-{STEPS_BEFORE}", losses, extra


def enable_fsdp(accelerator, kind):
    """Enables FSDP2 in Accelerate on CPUs. `kind` is the form of the saved state: `full` or
    `sharded`."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        state_dict_type=f"{kind.upper()}_STATE_DICT", cpu_ram_efficient_loading=False)
    for shared in (PartialState._shared_state, AcceleratorState._shared_state):
        shared["distributed_type"] = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin


def save_accelerate(family, ds=None, fsdp=None, count=2, freeze=None):
    """Trains in a loop with Accelerate and saves with `save_state`. Accelerate steps the scheduler
    once per process. Returns the values that save_trainer returns."""
    from accelerate import Accelerator, PartialState

    extra, settings = {}, dict(cpu=True)
    if ds:
        from accelerate.utils import DeepSpeedPlugin

        skip_shm_op_compilation()
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        PartialState(cpu=True, backend="gloo")  # otherwise Accelerate assumes a single process without GPUs
        config = dict(train_micro_batch_size_per_gpu=BATCH // world, gradient_accumulation_steps=1, gradient_clipping=CLIP_NORM, bf16=dict(enabled=True),
                      zero_optimization=ds, zero_allow_untested_optimizer=True, zero_force_ds_cpu_optimizer=False, steps_per_print=10**9)
        settings = dict(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    accelerator = Accelerator(**settings)
    if fsdp:
        enable_fsdp(accelerator, fsdp)
    model = build_model(family)
    freeze_layers(model, freeze)
    optimizer = create_adamw(model, count)
    schedule = create_linear_schedule(optimizer, world)
    loader = torch.utils.data.DataLoader(DocumentDataset(), batch_size=BATCH // world)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    losses = []
    for n, batch in enumerate(loader):
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step(), schedule.step(), optimizer.zero_grad()
        losses.append(compute_mean(loss))
        if n + 1 == STEPS_BEFORE:
            accelerator.save_state("state")
            if ds:
                extra["next_fp32"] = continue_in_fp32(family, model)
        if n + 1 == STEPS_BEFORE + STEPS_AFTER:
            break
    return "state", losses, extra


def save_dcp(family):
    """Trains with torch's FSDP2. Saves weights and optimizer with `torch.distributed.checkpoint`.
    Returns the values that save_trainer returns."""
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    mesh, model = init_device_mesh("cpu", (world,)), build_model(family)
    for layer in [*model.model.layers, model]:
        fully_shard(layer, mesh=mesh)
    optimizer = create_adamw(model)
    schedule, losses = create_linear_schedule(optimizer), []
    for n in range(STEPS_BEFORE + STEPS_AFTER):
        loss = model(**create_batch(n * BATCH + rank * (BATCH // world), BATCH // world)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step(), schedule.step(), optimizer.zero_grad()
        losses.append(compute_mean(loss))
        if n + 1 == STEPS_BEFORE:
            weights, states = get_state_dict(model, optimizer)
            checkpoint.save({"model": weights, "optim": states, "scheduler": schedule.state_dict()}, checkpoint_id="state")
    return "state", losses, {}


def save_deepspeed(family, stage, make_optimizer, freeze=None, fp16=False):
    """Trains and saves with DeepSpeed only, with a separate optimizer, optionally with frozen
    layers or in fp16. Returns the values that save_trainer returns."""
    import deepspeed

    skip_shm_op_compilation()
    deepspeed.init_distributed(dist_backend="gloo")
    model, losses, extra = build_model(family), [], {}
    freeze_layers(model, freeze)
    optimizer = make_optimizer(model)
    config = dict(train_micro_batch_size_per_gpu=BATCH // world, gradient_clipping=CLIP_NORM, zero_optimization=build_zero_config(stage), steps_per_print=10**9,
                  zero_allow_untested_optimizer=True, zero_force_ds_cpu_optimizer=False)
    if fp16:
        # The first step overflows and is skipped. The next one uses half the loss scale.
        deepspeed.get_accelerator().is_fp16_supported = lambda: True
        config["fp16"] = dict(enabled=True, initial_scale_power=FP16_SCALE_POWER, hysteresis=1)
    run, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=create_linear_schedule(optimizer), config=config)
    for n in range(STEPS_BEFORE + STEPS_AFTER):
        loss = run(**create_batch(n * BATCH + rank * (BATCH // world), BATCH // world)).loss
        run.backward(loss)
        run.step()
        losses.append(compute_mean(loss))
        if n + 1 == STEPS_BEFORE:
            run.save_checkpoint("state")
            if fp16:
                scale, skipped = run.optimizer.loss_scaler.cur_scale, run.skipped_steps
                extra["loss_scale"] = dict(scale=scale, skipped=skipped, updates=STEPS_BEFORE - skipped)
    return "state", losses, extra


# name: ranks, family, function that trains and saves, its options
CASES = dict(
    trainer_1=(1, "llama", save_trainer, {}),
    trainer_2=(2, "qwen2", save_trainer, {}),
    trainer_z3=(2, "llama", save_trainer, dict(ds=build_zero_config(3, sub_group_size=3000))),
    trainer_z2_bf16=(2, "qwen2", save_trainer, dict(ds=build_zero_config(2), bf16=True)),
    trainer_fsdp_full=(2, "llama", save_trainer, dict(fsdp="full")),
    trainer_fsdp_sharded=(2, "llama", save_trainer, dict(fsdp="sharded")),
    accelerate_ddp=(2, "llama", save_accelerate, dict(count=1)),
    accelerate_fsdp_full=(2, "llama", save_accelerate, dict(fsdp="full")),
    accelerate_fsdp_sharded=(2, "llama", save_accelerate, dict(fsdp="sharded")),
    accelerate_z3_bf16=(2, "llama", save_accelerate, dict(ds=build_zero_config(3))),
    dcp=(2, "qwen2", save_dcp, {}),
    trainer_sgd=(1, "llama", save_trainer, dict(make_optimizer=create_sgd)),
    z2_sgd=(2, "llama", save_deepspeed, dict(stage=2, make_optimizer=create_sgd)),
    z3_sgd=(2, "llama", save_deepspeed, dict(stage=3, make_optimizer=create_sgd)),
    # frozen weights: in the optimizer without a state, or not in the optimizer
    accelerate_frozen=(2, "llama", save_accelerate, dict(freeze="layers.0.")),
    z2_frozen=(2, "llama", save_deepspeed, dict(stage=2, make_optimizer=lambda model: remove_frozen(create_adamw(model)), freeze="layers.0.")),
    z3_frozen=(2, "llama", save_deepspeed, dict(stage=3, make_optimizer=lambda model: remove_frozen(create_adamw(model)), freeze="layers.0.")),
    trainer_frozen=(1, "llama", save_trainer, dict(freeze="layers.0.")),
    # transformers trains the experts of a layer as one tensor, and saves them separately.
    trainer_mixtral=(1, "mixtral", save_trainer, {}),
    trainer_qwen3_moe=(1, "qwen3_moe", save_trainer, {}),
    # DeepSpeed saves the experts of a layer as one tensor.
    z2_mixtral=(2, "mixtral", save_deepspeed, dict(stage=2, make_optimizer=create_adamw)),
    z3_qwen3_moe=(2, "qwen3_moe", save_deepspeed, dict(stage=3, make_optimizer=create_adamw)),
    z2_fp16=(2, "llama", save_deepspeed, dict(stage=2, make_optimizer=create_adamw, fp16=True)),
    # launch cannot resume from this optimizer's state.
    z2_lion=(2, "llama", save_deepspeed, dict(stage=2, make_optimizer=lambda model: Lion(create_groups(model)))),
)
# files that the programs write and no reader needs
UNNEEDED_FILES = ["zero_to_fp32.py", "zero_to_torch.py", "training_args.bin", "README.md"]


def main():
    """Runs one case and writes its checkpoint and next.json. Removes all other files that the
    program wrote."""
    out, name = sys.argv[1], sys.argv[2]
    expected, family, program, options = CASES[name]
    assert world == expected, f"{name} needs {expected} ranks, not {world}"
    os.makedirs(os.path.join(out, name), exist_ok=True)
    os.chdir(os.path.join(out, name))
    directory, losses, extra = program(family, **options)
    assert len(losses) == STEPS_BEFORE + STEPS_AFTER, losses
    if dist.is_initialized():
        dist.barrier()
    if rank == 0:
        for file in UNNEEDED_FILES:
            if os.path.exists(os.path.join(directory, file)):
                os.remove(os.path.join(directory, file))
        for other in set(os.listdir(".")) - {directory}:
            shutil.rmtree(other) if os.path.isdir(other) else os.remove(other)
        versions = {m: __import__(m).__version__ for m in ("torch", "transformers", "accelerate", "deepspeed") if m in sys.modules}
        with open("next.json", "w") as f:
            json.dump(dict(family=family, layers=LAYERS, world=world, directory=directory, losses=losses[:STEPS_BEFORE], next=losses[STEPS_BEFORE:], **extra,
                           documents=documents, versions=versions), f, indent=1)
            f.write("\n")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
