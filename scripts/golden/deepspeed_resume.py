"""Writes tests/golden/deepspeed: training states of DeepSpeed, and the losses of its next steps.

    PYTHON -m torch.distributed.run --nproc-per-node 2 scripts/golden/deepspeed_resume.py OUT --stage 2 [--tied]

PYTHON needs torch, transformers and DeepSpeed (scripts/bench/setup prints one). Each sample is a
document; all have the same length and are used in order, so the batches are those of a job with
`pack: false, shuffle: false`. Training is in fp32 with two groups (weight decay 0.1 and 0) and linear
warm-up and decay. The script trains three steps, saves the checkpoint, trains three more steps, and
writes their losses to next.json.
"""
import argparse
import json
import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import torch
import torch._dynamo  # before DeepSpeed patches torch.Tensor.__new__
import torch.distributed as dist
import deepspeed
import transformers

args = argparse.ArgumentParser()
args.add_argument("out")
args.add_argument("--stage", type=int, required=True)
args.add_argument("--tied", action="store_true")
args = args.parse_args()

LENGTH, DOCUMENTS, EOD, BEFORE, AFTER, MICRO, LR = 20, 24, 256, 3, 3, 2, 2e-3
torch.set_num_threads(1)
deepspeed.init_distributed(dist_backend="gloo")
rank, world = dist.get_rank(), dist.get_world_size()

# printable text that is not uniform, so that a model can learn from it
letters = torch.Generator().manual_seed(5)
documents = ["".join(chr(97 + int(i)) for i in torch.randint(0, 26, (LENGTH,), generator=letters) // 3) for _ in range(DOCUMENTS)]


def create_batch(step):
    """Returns the batch of this rank at a step."""
    first = (step * world + rank) * MICRO
    rows = [[ord(c) for c in documents[(first + i) % DOCUMENTS]] + [EOD] for i in range(MICRO)]
    ids = torch.tensor(rows)
    return dict(input_ids=ids, labels=ids.clone())


torch.manual_seed(3)
config = transformers.LlamaConfig(
    vocab_size=257, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=64, rms_norm_eps=1e-6, initializer_range=0.1, tie_word_embeddings=args.tied, attn_implementation="eager")
model = transformers.LlamaForCausalLM(config)
decay = [p for n, p in model.named_parameters() if "norm" not in n]
no_decay = [p for n, p in model.named_parameters() if "norm" in n]
optimizer = torch.optim.AdamW(
    [dict(params=decay, weight_decay=0.1), dict(params=no_decay, weight_decay=0.0)], lr=LR, betas=(0.9, 0.95), eps=1e-8)
schedule = transformers.get_linear_schedule_with_warmup(optimizer, 2, 20)
zero = dict(stage=args.stage, overlap_comm=False, stage3_param_persistence_threshold=0)
engine, _, _, _ = deepspeed.initialize(
    model=model, optimizer=optimizer, lr_scheduler=schedule,
    config=dict(train_micro_batch_size_per_gpu=MICRO, gradient_clipping=1.0, zero_optimization=zero, zero_allow_untested_optimizer=True,
                zero_force_ds_cpu_optimizer=False, steps_per_print=10**9))


def train_step(number):
    """Trains one step and returns the mean loss of all ranks."""
    loss = engine(**create_batch(number)).loss
    engine.backward(loss)
    engine.step()
    total = loss.detach().double()
    dist.all_reduce(total)
    return float(total) / world


losses = [train_step(n) for n in range(BEFORE)]
engine.save_checkpoint(args.out)
next_losses = [train_step(n) for n in range(BEFORE, BEFORE + AFTER)]
if rank == 0:
    for name in ("zero_to_fp32.py", "zero_to_torch.py"):
        os.remove(os.path.join(args.out, name))
    with open(os.path.join(args.out, "next.json"), "w") as f:
        json.dump(dict(losses=losses, next=next_losses, tied=args.tied, documents=documents, versions=dict(
            torch=torch.__version__, deepspeed=deepspeed.__version__, transformers=transformers.__version__)), f, indent=1)
        f.write("\n")
dist.barrier()
dist.destroy_process_group()
