"""An ordinary training script with HF Trainer. The script uses only LAUNCH_RESUME_FROM of launch.

    trainer.py OUTPUT_DIR REPORT_DIR STEPS [--resume_from_checkpoint DIR] [--deepspeed CONFIG.json] [--bf16]
               [--fsdp full|sharded]

A step has eight samples for any number of ranks, and there is no dropout, so losses do not depend on
the number of ranks. Each rank writes its state at the first step to REPORT_DIR/rank-R.json. Rank 0
writes the history to REPORT_DIR/history.json.
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

arguments = argparse.ArgumentParser()
arguments.add_argument("output_dir"), arguments.add_argument("report_dir"), arguments.add_argument("steps", type=int)
arguments.add_argument("--resume_from_checkpoint", default=None)
arguments.add_argument("--deepspeed", default=None), arguments.add_argument("--bf16", action="store_true")
arguments.add_argument("--fsdp", default=None)
arguments = arguments.parse_args()
resume = arguments.resume_from_checkpoint or os.environ.get("LAUNCH_RESUME_FROM") or None
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
torch.set_num_threads(1)
if arguments.deepspeed:
    import deepspeed.comm.torch

    # Skips the compilation of DeepSpeed's shared-memory op; gloo reduces instead.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
os.makedirs(arguments.report_dir, exist_ok=True)


class TokenDataset(torch.utils.data.Dataset):
    """72 samples of 12 random tokens, each from a fixed seed."""

    def __len__(self):
        return 72

    def __getitem__(self, i):
        ids = torch.randint(0, 128, (12,), generator=torch.Generator().manual_seed(500 + i))
        return dict(input_ids=ids, labels=ids.clone())


class FirstStepReporter(transformers.TrainerCallback):
    """Writes the state of this rank at the first step of the run."""

    reported = False

    def on_step_begin(self, args, state, control, **objects):
        if self.reported:
            return
        self.reported = True
        digest = lambda data: hashlib.sha256(data).hexdigest()
        groups = objects["optimizer"].param_groups
        report = dict(
            step=state.global_step, lr=[g["lr"] for g in groups], weight_decay=[g["weight_decay"] for g in groups], resume=resume,
            torch=digest(torch.get_rng_state().numpy().tobytes()), numpy=digest(np.random.get_state()[1].tobytes()),
            python=digest(repr(random.getstate()).encode()))
        with open(f"{arguments.report_dir}/rank-{rank}.json", "w") as f:
            json.dump(report, f)
        # Each rank draws a different amount of random numbers, as with dropout and augmentation.
        torch.rand(1 + rank)


class FsdpTrainer(transformers.Trainer):
    """A Trainer that enables FSDP on CPUs if --fsdp is given."""

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        if arguments.fsdp:
            import fsdp_on_cpu

            fsdp_on_cpu.enable_fsdp(self.accelerator, arguments.fsdp)
            self.is_fsdp_enabled = True


torch.manual_seed(1)
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
    vocab_size=128, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=32, attn_implementation="eager"))
trainer = FsdpTrainer(
    model=model, train_dataset=TokenDataset(), callbacks=[FirstStepReporter()],
    args=transformers.TrainingArguments(
        output_dir=arguments.output_dir, per_device_train_batch_size=8 // world, max_steps=arguments.steps, save_steps=3, logging_steps=1,
        learning_rate=1e-2, weight_decay=0.1, warmup_steps=2, lr_scheduler_type="linear", use_cpu=True, report_to=[], seed=3,
        deepspeed=arguments.deepspeed, bf16=arguments.bf16, ddp_backend="gloo" if world > 1 or arguments.deepspeed or arguments.fsdp else None, disable_tqdm=True, dataloader_pin_memory=False, optim="adamw_torch"))
trainer.train(resume_from_checkpoint=resume)
if rank == 0:
    with open(f"{arguments.report_dir}/history.json", "w") as f:
        json.dump([line for line in trainer.state.log_history if "loss" in line], f)
if torch.distributed.is_initialized():
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
# Exits without finalization: up to Python 3.13, torch's threads abort the process if they wait for
# the interpreter's lock while it ends.
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)
