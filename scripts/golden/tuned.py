#!/usr/bin/env python3
"""Writes tests/golden/tuned/<case>/ with torch and transformers on the CPU: partial training, optimizers.

    python scripts/golden/tuned.py [OUT]        # OUT: tests/golden/tuned

Each case begins with the weights of a directory of tests/golden/families, which have the same seed, so
it stores only results. tests/golden/tuned/README.md describes the files.
"""
import fnmatch
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers.optimization import Adafactor

import families
import llama as base

FAMILIES = Path(__file__).resolve().parents[2] / "tests/golden/families"

CASES = {
    # no gradient below layer 1
    "frozen_prefix": dict(family="llama_linear", freeze=["model.embed_tokens.*", "model.layers.0.*"]),
    # one matrix with two names
    "frozen_tied": dict(family="qwen2", freeze=["lm_head.weight", "*.gate_proj.weight"]),
    # some of the matrices that launch multiplies as one
    "train_only": dict(family="qwen3_biases", train_only=["*.k_proj.*", "*norm*", "*.1.mlp.down_proj.weight"]),
    "head_alone": dict(family="mistral_window", train_only=["lm_head.*"]),
    "groups": dict(family="llama_biases_tied", groups=[
        dict(match=["*.bias", "*.layers.1.*norm*"], lr=5e-3, weight_decay=0.3),
        dict(match=["*.layers.1.*"], lr_scale=0.25, betas=[0.8, 0.99]),
        dict(match=["lm_head*"], lr_scale=0.0, weight_decay=0.0)]),
    "lion": dict(family="qwen3", optimizer="lion"),
    "muon": dict(family="llama_llama3", optimizer="muon", freeze=["*.0.mlp.up_proj.*"]),
    "adafactor": dict(family="qwen3", optimizer="adafactor", freeze=["*.0.mlp.up_proj.*"], groups=[
        dict(match=["*.layers.1.*"], lr_scale=0.5, weight_decay=0.0)]),
    "adafactor_beta1": dict(family="llama_biases_tied", optimizer="adafactor",
                            options=dict(beta1=0.9, decay_rate=-0.6, clip_threshold=0.5, eps=1e-8)),
    "muon_gpt2": dict(family="gpt2", optimizer="muon", freeze=["*.bias"], groups=[dict(match=["*.c_fc.weight"], lr_scale=0.5, weight_decay=0.0)]),
}


class Muon:
    """torch.optim.Muon for the matrices of layers, and AdamW for the rest. Muon's iteration runs in
    the type of the matrices instead of bfloat16."""

    def __init__(self, groups, named):
        matrices = {p for n, p in named if p.ndim == 2 and (".layers." in n or ".h." in n)}
        select = lambda is_matrix: [g | {"params": [p for p in g["params"] if (p in matrices) == is_matrix]} for g in groups]
        by_kind = [[g for g in select(is_matrix) if g["params"]] for is_matrix in (True, False)]
        lr = base.ADAMW["lr"]
        self.optimizers = [torch.optim.Muon(by_kind[0], lr=lr, momentum=0.9, nesterov=True, adjust_lr_fn="match_rms_adamw"),
                      torch.optim.AdamW(by_kind[1], foreach=False, fused=False, **base.ADAMW)]

    def step(self):
        # torch.optim.Muon casts to torch.bfloat16, so this name is replaced for the duration of the step.
        bfloat16, torch.bfloat16 = torch.bfloat16, self.optimizers[0].param_groups[0]["params"][0].dtype
        try:
            for optimizer in self.optimizers:
                optimizer.step()
        finally:
            torch.bfloat16 = bfloat16

    def zero_grad(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()


class Lion(torch.optim.Optimizer):
    """The optimizer Lion as in the paper (Chen et al. 2023, program 1), line by line."""

    def step(self):
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for p in group["params"]:
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                update = torch.sign(m * beta1 + p.grad * (1 - beta1))
                p.data.mul_(1 - lr * group["weight_decay"]).add_(update, alpha=-lr)
                m.mul_(beta2).add_(p.grad, alpha=1 - beta2)


def is_match(patterns, name, model):
    """Returns whether a pattern matches a parameter. A tied embedding also matches as
    `lm_head.weight`."""
    tied = model.config.tie_word_embeddings and name == "model.embed_tokens.weight"
    names = [name, "lm_head.weight"] if tied else [name]
    return any(fnmatch.fnmatchcase(n, p) for n in names for p in patterns)


def create_model(case, dtype):
    """Creates the model of a case, with its frozen parameters."""
    model = families.create_model(families.CASES[case["family"]])
    for name, p in model.named_parameters():
        frozen = is_match(case.get("freeze", []), name, model)
        p.requires_grad = not frozen and ("train_only" not in case or is_match(case["train_only"], name, model))
    return model.to(dtype)


def list_trained(model):
    """Returns the names and tensors of the trained parameters."""
    return [(n, p) for n, p in model.named_parameters() if p.requires_grad]


def create_optimizer(case, model):
    """Creates the optimizer of a case with one group per parameter."""
    rules = case.get("groups", [])
    groups = []
    for name, p in list_trained(model):
        group = dict(params=[p], weight_decay=0.0 if base.NO_DECAY_PATTERN in name else base.WEIGHT_DECAY)
        rule = next((g for g in rules if is_match(g["match"], name, model)), {})
        group |= {k: v for k, v in rule.items() if k in ("lr", "weight_decay")}
        if "lr_scale" in rule:
            group["lr"] = base.ADAMW["lr"] * rule["lr_scale"]
        if "betas" in rule:
            group["betas"] = tuple(rule["betas"])
        groups.append(group)
    if case.get("optimizer") == "lion":
        return Lion(groups, dict(lr=base.ADAMW["lr"], betas=(0.9, 0.99)))
    if case.get("optimizer") == "adafactor":
        options = dict(case.get("options", {}))
        eps = (options.pop("eps", 1e-30), 1e-3)
        return Adafactor(groups, lr=base.ADAMW["lr"], eps=eps, scale_parameter=False, relative_step=False,
                         warmup_init=False, **options)
    if case.get("optimizer") == "muon":
        return Muon(groups, list_trained(model))
    return torch.optim.AdamW(groups, foreach=False, fused=False, **base.ADAMW)


def get_model_config(case):
    """Returns the config of a case's model."""
    return {"vocab_size": families.SIZES["vocab_size"], **families.CASES[case["family"]]["config"]}


def compute_case(case, about, dtype):
    """Computes a case. Returns its results by name."""
    model = create_model(case, dtype)
    batches = base.create_batches(about)
    tokens, labels, starts = batches[0]
    logits = families.compute_logits(model, tokens, starts, dtype)
    per_token, mean = base.compute_loss(logits, labels)
    mean.backward()
    out = {"logits": logits.detach().clone(), "loss_per_token": per_token.detach().clone(),
           "loss": mean.detach().reshape(1).clone()}
    out |= {f"grad/{n}": p.grad.clone() for n, p in list_trained(model)}
    model.zero_grad()
    optimizer = create_optimizer(case, model)
    losses, norms = [], []
    for tokens, labels, starts in batches:
        _, mean = base.compute_loss(families.compute_logits(model, tokens, starts, dtype), labels)
        mean.backward()
        params = [p for _, p in list_trained(model)]
        norm = torch.nn.utils.clip_grad_norm_(params, about["clip_norm"] or float("inf"), foreach=False)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean.detach())
        norms.append(norm.detach())
    out |= {"losses": torch.stack(losses), "grad_norms": torch.stack(norms)}
    return out | {f"after10/{n}": p.detach().clone() for n, p in list_trained(model)}


def write_case(name, case, out):
    """Computes a case in fp32 and float64, and writes its results. Fails if the two results differ
    too much."""
    family = families.CASES[case["family"]]
    shape = dict(batch=2, seq=20, seed=family["seed"], clip_norm=family["clip_norm"], config=get_model_config(case))
    single, double = compute_case(case, shape, torch.float32), compute_case(case, shape, torch.float64)
    error = max(base.compute_distance(single[k], double[k]) for k in single if k != "loss_per_token")
    assert error < 5e-6, f"{name}: ill-conditioned: {error}"
    directory = out / name
    directory.mkdir(parents=True, exist_ok=True)
    save_file({k: v.contiguous() for k, v in single.items()}, directory / "answers.safetensors")
    for file in directory.iterdir():
        file.chmod(0o644)
    flat = lambda x: [base.IGNORED_LABEL if n == -100 else n for n in x.flatten().tolist()]
    about = dict(batch=2, seq=20, family=case["family"],
                optimizer=dict(name=case.get("optimizer", "adamw"), lr=base.ADAMW["lr"],
                               weight_decay=base.WEIGHT_DECAY, clip_norm=family["clip_norm"], **case.get("options", {})),
                freeze=case.get("freeze", []), train_only=case.get("train_only", []), groups=case.get("groups", []),
                torch=torch.__version__, float64_distance=error,
                batches=[dict(tokens=flat(t), labels=flat(l), starts=flat(s)) for t, l, s in base.create_batches(shape)])
    (directory / "case.json").write_text(json.dumps(about) + "\n")
    print(f"{name}: loss {single['losses'][0].item():.6f} -> {single['losses'][-1].item():.6f}, float64 distance {error:.1e}")


def main():
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[2] / "tests/golden/tuned"
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    for name, case in CASES.items():
        write_case(name, case, out)


if __name__ == "__main__":
    main()
