#!/usr/bin/env python3
"""Loads an adapter directory with PEFT and prints what it contains as one line of JSON.

    python evaluate_adapters.py BASE ADAPTER MERGED TEXT SEQ_LEN SAVED

`loss` is the loss of the base model with the adapters (see evaluate_gathered.py), `without` that of
the base model, and `merged_loss` that of the model in MERGED. `merged` is the largest difference
between PEFT's merge_and_unload and MERGED, relative to the largest value of the tensor. PEFT saves the
adapters to the directory SAVED.
"""
import json
import logging
import sys
import warnings
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from evaluate_gathered import WarningRecorder, compute_mean_loss


def main():
    base, adapter, merged, text, seq_len, saved = sys.argv[1:]
    torch.set_num_threads(1)
    recorder = WarningRecorder()
    for name in ("transformers", "peft"):
        logging.getLogger(name).addHandler(recorder)
    load = lambda directory: AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    merged_by_launch, base_model = load(merged), load(base)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = PeftModel.from_pretrained(base_model, adapter).eval()
        tokenizer = AutoTokenizer.from_pretrained(adapter)
    all_warnings = recorder.messages + [str(w.message) for w in caught if not issubclass(w.category, (DeprecationWarning, FutureWarning))]
    ids = [*tokenizer.encode(Path(text).read_text(), add_special_tokens=False), tokenizer.eos_token_id]
    with torch.no_grad():
        loss, windows = compute_mean_loss(model, ids, int(seq_len))
        merged_loss, _ = compute_mean_loss(merged_by_launch, ids, int(seq_len))
        without, _ = compute_mean_loss(load(base), ids, int(seq_len))
    modules = sorted({n.rsplit(".lora_A", 1)[0].rsplit(".", 1)[1] for n, _ in model.named_parameters() if ".lora_A." in n})
    model.save_pretrained(saved)
    merged_by_peft = dict(model.merge_and_unload().named_parameters())
    difference = max(((p - merged_by_peft[n]).abs().max() / merged_by_peft[n].abs().max()).item()
                     for n, p in merged_by_launch.named_parameters())
    print(json.dumps({"loss": loss, "merged_loss": merged_loss, "without": without, "windows": windows, "warnings": all_warnings,
                      "modules": modules, "merged": difference, "tensors": len(merged_by_peft)}))


if __name__ == "__main__":
    main()
