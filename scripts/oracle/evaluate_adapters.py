#!/usr/bin/env python3
"""Loads an adapter folder as any user of PEFT would, and says what it found: one JSON line.

    python evaluate_adapters.py BASE ADAPTER MERGED TEXT SEQ_LEN AGAIN

loss: of the base with the adapters, as evaluate_gathered.py finds it. merged: largest difference between merge_and_unload and the folder MERGED,
relative to the tensor's largest value. The adapters are saved anew in AGAIN, by PEFT.
"""
import json
import logging
import sys
import warnings
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from gathered import Kept, mean_loss


def main():
    base, adapter, merged, text, seq_len, again = sys.argv[1:]
    torch.set_num_threads(1)
    kept = Kept()
    for name in ("transformers", "peft"):
        logging.getLogger(name).addHandler(kept)
    load = lambda folder: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ours, plain = load(merged), load(base)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = PeftModel.from_pretrained(plain, adapter).eval()
        tokenizer = AutoTokenizer.from_pretrained(adapter)
    warned = kept.messages + [str(w.message) for w in caught if not issubclass(w.category, (DeprecationWarning, FutureWarning))]
    ids = [*tokenizer.encode(Path(text).read_text(), add_special_tokens=False), tokenizer.eos_token_id]
    with torch.no_grad():
        loss, windows = mean_loss(model, ids, int(seq_len))
        ours_loss, _ = mean_loss(ours, ids, int(seq_len))
        without, _ = mean_loss(load(base), ids, int(seq_len))
    modules = sorted({n.rsplit(".lora_A", 1)[0].rsplit(".", 1)[1] for n, _ in model.named_parameters() if ".lora_A." in n})
    model.save_pretrained(again)
    theirs = dict(model.merge_and_unload().named_parameters())
    far = max(((p - theirs[n]).abs().max() / theirs[n].abs().max()).item() for n, p in ours.named_parameters())
    print(json.dumps({"loss": loss, "merged_loss": ours_loss, "without": without, "windows": windows, "warnings": warned,
                      "modules": modules, "merged": far, "tensors": len(theirs)}))


if __name__ == "__main__":
    main()
