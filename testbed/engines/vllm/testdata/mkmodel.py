#!/usr/bin/env python3
"""Writes a tiny random model of the Qwen2 architecture and a tiny random LoRA
adapter for it, the same every time, that vLLM serves on CPU.

usage: mkmodel.py TOKENIZER_DIR MODEL_DIR ADAPTER_DIR
TOKENIZER_DIR holds tokenizer.json and tokenizer_config.json of Qwen2.5.
"""
import json
import os
import shutil
import sys

import torch
from safetensors.torch import save_file
from transformers import Qwen2Config, Qwen2ForCausalLM

tokenizer, model_dir, adapter_dir = sys.argv[1:4]
torch.manual_seed(1)
config = Qwen2Config(
    vocab_size=151936, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=8192,
    tie_word_embeddings=True, bos_token_id=151643, eos_token_id=151645,
)
for d in (model_dir, adapter_dir):
    os.makedirs(d, exist_ok=True)
Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(model_dir, safe_serialization=True)
for name in ("tokenizer.json", "tokenizer_config.json"):
    shutil.copy(os.path.join(tokenizer, name), model_dir)

rank, weights = 8, {}
for layer in range(config.num_hidden_layers):
    for name, out in (("q_proj", 128), ("v_proj", 64)):
        at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
        weights[f"{at}.lora_A.weight"] = torch.randn(rank, 128, dtype=torch.bfloat16) * 0.02
        weights[f"{at}.lora_B.weight"] = torch.randn(out, rank, dtype=torch.bfloat16) * 0.02
save_file(weights, os.path.join(adapter_dir, "adapter_model.safetensors"))
with open(os.path.join(adapter_dir, "adapter_config.json"), "w") as f:
    json.dump({
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 16, "lora_dropout": 0.0,
        "bias": "none", "target_modules": ["q_proj", "v_proj"], "base_model_name_or_path": "tiny",
    }, f)
