#!/usr/bin/env python3
"""Checks that torch and transformers can train a model and generate text. Exits with 0 if they can."""
import torch
from transformers import LlamaConfig, LlamaForCausalLM

model = LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                     num_attention_heads=2, max_position_embeddings=32))
ids = torch.arange(8)[None]
model(input_ids=ids, labels=ids).loss.backward()
torch.optim.AdamW(model.parameters()).step()
assert model.generate(ids, min_new_tokens=2, max_new_tokens=2, do_sample=False, pad_token_id=0).shape == (1, 10)
assert torch.distributed.is_gloo_available() and not torch.cuda.is_available()
