"""An ordinary training loop with Accelerate. The loop uses only LAUNCH_RESUME_FROM of launch.

    accelerate_loop.py OUTPUT_DIR REPORT_DIR STEPS [--resume_from_checkpoint DIR]
                       [--deepspeed CONFIG.json] [--fsdp full|sharded]

A step has eight samples for any number of ranks, and there is no dropout, so losses do not depend on
the number of ranks. The state is saved every third step. Each rank writes its state at the first step
to REPORT_DIR/rank-R.json. Rank 0 writes loss and learning rate of each step to
REPORT_DIR/history.json.
"""
import argparse
import hashlib
import json
import os
import random
import sys

import numpy as np
import torch
import transformers
from accelerate import Accelerator, PartialState
from accelerate.utils import DeepSpeedPlugin, set_seed

arguments = argparse.ArgumentParser()
arguments.add_argument("output_dir"), arguments.add_argument("report_dir"), arguments.add_argument("steps", type=int)
arguments.add_argument("--resume_from_checkpoint", default=None)
arguments.add_argument("--deepspeed", default=None), arguments.add_argument("--fsdp", default=None)
arguments = arguments.parse_args()
resume = arguments.resume_from_checkpoint or os.environ.get("LAUNCH_RESUME_FROM") or None
torch.set_num_threads(1)
options = dict(cpu=True)
if arguments.deepspeed:
    import deepspeed.comm.torch

    # Skips the compilation of DeepSpeed's shared-memory op; gloo reduces instead.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(cpu=True, backend="gloo")  # otherwise Accelerate assumes a single process without GPUs
    config = json.load(open(arguments.deepspeed))
    config["train_micro_batch_size_per_gpu"] = 8 // int(os.environ["WORLD_SIZE"])
    options = dict(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
if arguments.fsdp:
    PartialState(cpu=True, backend="gloo")  # also needed with a single process
accelerator = Accelerator(**options)
if arguments.fsdp:
    import fsdp_on_cpu

    fsdp_on_cpu.enable_fsdp(accelerator, arguments.fsdp)
rank, world = accelerator.process_index, accelerator.num_processes
assert world == int(os.environ.get("WORLD_SIZE", 1))
os.makedirs(arguments.report_dir, exist_ok=True)
set_seed(3)


class TokenDataset(torch.utils.data.Dataset):
    """72 samples of 12 random tokens, each from a fixed seed."""

    def __len__(self):
        return 72

    def __getitem__(self, i):
        ids = torch.randint(0, 128, (12,), generator=torch.Generator().manual_seed(500 + i))
        return dict(input_ids=ids, labels=ids.clone())


model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
    vocab_size=128, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=32, attn_implementation="eager"))
named = list(model.named_parameters())
optimizer = torch.optim.AdamW([dict(params=[p for n, p in named if "norm" not in n], weight_decay=0.1),
                               dict(params=[p for n, p in named if "norm" in n], weight_decay=0.0)], lr=1e-2)
# Accelerate steps the scheduler once per process.
schedule = transformers.get_linear_schedule_with_warmup(optimizer, 2 * world, 9 * world)
loader = torch.utils.data.DataLoader(TokenDataset(), batch_size=8 // world)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
completed_steps = 0
if resume:
    accelerator.load_state(resume)
    completed_steps = int(os.path.basename(resume.rstrip("/")).removeprefix("step_"))
    loader = accelerator.skip_first_batches(loader, completed_steps)

digest = lambda data: hashlib.sha256(data).hexdigest()
with open(f"{arguments.report_dir}/rank-{rank}.json", "w") as f:
    groups = optimizer.param_groups
    json.dump(dict(step=completed_steps, lr=[g["lr"] for g in groups], weight_decay=[g["weight_decay"] for g in groups], resume=resume,
                   torch=digest(torch.get_rng_state().numpy().tobytes()), numpy=digest(np.random.get_state()[1].tobytes()),
                   python=digest(repr(random.getstate()).encode())), f)
# Each rank draws a different amount of random numbers, as with dropout and augmentation.
torch.rand(1 + rank)
history = []
for batch in loader:
    rate = optimizer.param_groups[0]["lr"]
    loss = model(**batch).loss
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step(), schedule.step(), optimizer.zero_grad()
    completed_steps += 1
    mean = float(accelerator.gather(loss.detach().float().reshape(1)).double().mean())
    history.append(dict(step=completed_steps, loss=mean, learning_rate=rate))
    if completed_steps % 3 == 0:
        accelerator.save_state(f"{arguments.output_dir}/step_{completed_steps}")
    if completed_steps == arguments.steps:
        break
if rank == 0:
    with open(f"{arguments.report_dir}/history.json", "w") as f:
        json.dump(history, f)
accelerator.wait_for_everyone()
accelerator.end_training()
