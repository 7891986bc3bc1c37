#!/usr/bin/env python3
"""Trains the models of scripts/bench/throughput with PyTorch. Prints tokens/s and peak memory as JSON.

    python torch_baseline.py --mode plain --threads 2
    python -m torch.distributed.run --standalone --nproc-per-node 2 torch_baseline.py --mode fsdp2 --threads 1

Modes:
- plain: one process.
- compile: one process with torch.compile, which needs a C++ compiler.
- fsdp2: fully_shard for each block.
- deepspeed: ZeRO stage 3; needs deepspeed.

Models:
- baseline: LlamaForCausalLM with hidden size 384, 6 layers, 6 heads, intermediate size 1024,
  vocabulary 8192, untied (16.9M parameters); 8 sequences of 256 tokens in a global batch.
- gpt2-124m: GPT2LMHeadModel without dropout; 4 sequences of 64 tokens in a global batch.
- moe: the baseline as Qwen3MoeForCausalLM with 8 experts of width 512, 2 for each token, with its
  load-balancing loss; transformers' default implementation of experts.
- moe-128: the proportions of Qwen3-30B-A3B: 128 experts of width 144 (3/8 of the hidden size), 8 for
  each token.

All train in fp32 on random tokens with SDPA attention and torch's AdamW (lr 1e-3, betas 0.9 and 0.95,
weight decay 0.1), without clipping and activation checkpointing. The ranks share a global batch. The
result is the median of the measured steps.
"""
import argparse
import json
import os
import resource
import statistics
import time

# name: vocabulary size, tokens of a sequence, sequences of a global batch
MODELS = {"baseline": (8192, 256, 8), "gpt2-124m": (50257, 64, 4), "moe": (8192, 256, 8), "moe-128": (8192, 256, 8)}
# name: experts, experts per token, width of an expert
EXPERT_SIZES = {"moe": (8, 2, 512), "moe-128": (128, 8, 144)}


def parse_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=["plain", "compile", "fsdp2", "deepspeed"], required=True)
    parser.add_argument("--model", choices=MODELS, default="baseline")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    return parser.parse_args()


def create_model(name):
    """Creates a model. Returns the model and its list of blocks."""
    from transformers import (GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig,
                              Qwen3MoeForCausalLM)

    vocab, seq, _ = MODELS[name]
    if name == "gpt2-124m":
        model = GPT2LMHeadModel(GPT2Config(vocab_size=vocab, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, use_cache=False,
                                           attn_implementation="sdpa"))
        return model, model.transformer.h
    shared = dict(vocab_size=vocab, hidden_size=384, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=6,
                  num_key_value_heads=6, max_position_embeddings=seq, tie_word_embeddings=False, use_cache=False,
                  attn_implementation="sdpa")
    if name in EXPERT_SIZES:
        experts, per_token, width = EXPERT_SIZES[name]
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(
            **shared, head_dim=64, num_experts=experts, num_experts_per_tok=per_token, moe_intermediate_size=width, norm_topk_prob=True,
            output_router_logits=True, router_aux_loss_coef=0.001))
    else:
        model = LlamaForCausalLM(LlamaConfig(**shared))
    return model, model.model.layers


def build_train_step(name, mode, world):
    """Creates the model for a mode. Returns the model and a function that trains on one batch and
    returns the loss."""
    import torch

    torch.manual_seed(0)
    model, blocks = create_model(name)
    global_batch = MODELS[name][2]
    settings = dict(lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    if mode == "deepspeed":
        import deepspeed
        deepspeed.init_distributed("gloo")
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=torch.optim.AdamW(model.parameters(), **settings),
            config={"train_micro_batch_size_per_gpu": global_batch // world, "gradient_accumulation_steps": 1,
                    "steps_per_print": 1 << 30, "zero_optimization": {"stage": 3}})

        def train_step(ids):
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            return loss.item()
        return model, train_step

    if mode == "fsdp2":
        import torch.distributed as dist
        from torch.distributed.fsdp import fully_shard
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        mesh = dist.device_mesh.init_device_mesh("cpu", (world,))
        for block in blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    if mode == "compile":
        model = torch.compile(model)

    def train_step(ids):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()
    return model, train_step


def main():
    args = parse_arguments()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import torch
    import torch.distributed as dist
    torch.set_num_threads(args.threads)
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    vocab, seq, global_batch = MODELS[args.model]
    if args.mode in ("plain", "compile") and world > 1:
        raise SystemExit(f"mode {args.mode} needs a single process, but there are {world}")
    if global_batch % world:
        raise SystemExit(f"the {global_batch} sequences of a batch cannot be divided among {world} ranks")
    _, train_step = build_train_step(args.model, args.mode, world)
    generator, per_rank = torch.Generator().manual_seed(1), global_batch // world
    times, losses = [], []
    for _ in range(args.warmup + args.steps):
        ids = torch.randint(0, vocab, (global_batch, seq), generator=generator)[rank * per_rank:(rank + 1) * per_rank]
        if dist.is_initialized():
            dist.barrier()
        began = time.perf_counter()
        losses.append(train_step(ids))
        if dist.is_initialized():
            dist.barrier()
        times.append(time.perf_counter() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peaks = [peak]
    if dist.is_initialized():
        peaks = [None] * world
        dist.all_gather_object(peaks, peak)
    if rank == 0:
        seconds = statistics.median(times[args.warmup:])
        print(json.dumps({"mode": args.mode, "world": world, "threads": args.threads,
                          "tokens_per_s": global_batch * seq / seconds, "peak_rss": max(peaks),
                          "losses": [losses[0], losses[-1]]}), flush=True)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
