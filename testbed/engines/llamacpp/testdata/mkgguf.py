#!/usr/bin/env python3
"""Makes a tiny random model with the llama architecture: mkgguf.py OUT.gguf

Two layers of 64 dimensions and a byte-level BPE of 512 entries; the weights are
noise from a fixed seed, so what it writes means nothing, but every token is
computed. Needs the packages gguf and numpy.
"""
import sys

import gguf
import numpy as np

LAYERS, WIDTH, HEADS, KV_HEADS, HIDDEN, CONTEXT, ENTRIES = 2, 64, 4, 2, 128, 32768, 512
TEMPLATE = (
    "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)


def byte_characters():
    """The printable character that stands for each byte in a byte-level BPE."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    out = {b: chr(b) for b in shown}
    for n, b in enumerate(b for b in range(256) if b not in out):
        out[b] = chr(256 + n)
    return out


def vocabulary():
    of = byte_characters()
    tokens, merges = [of[b] for b in range(256)], []
    for word in (" the", " and", " of", " to", " in", " is", " you", " that", "ing", "tion", " chat", "assistant", "system", "user"):
        symbols = [of[b] for b in word.encode()]
        current = symbols[0]
        for symbol in symbols[1:]:
            if current + symbol not in tokens:
                tokens.append(current + symbol)
                merges.append(f"{current} {symbol}")
            current += symbol
    types = [gguf.TokenType.NORMAL] * len(tokens)
    for special in ("<|endoftext|>", "<|im_start|>", "<|im_end|>"):
        tokens.append(special)
        types.append(gguf.TokenType.CONTROL)
    while len(tokens) < ENTRIES:
        tokens.append(f"[PAD{len(tokens)}]")
        types.append(gguf.TokenType.UNUSED)
    return tokens, types, merges


def main(path):
    tokens, types, merges = vocabulary()
    ids = {t: i for i, t in enumerate(tokens)}
    w = gguf.GGUFWriter(path, "llama")
    w.add_name("tiny-random-llama")
    w.add_context_length(CONTEXT)
    w.add_embedding_length(WIDTH)
    w.add_block_count(LAYERS)
    w.add_feed_forward_length(HIDDEN)
    w.add_head_count(HEADS)
    w.add_head_count_kv(KV_HEADS)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_rope_dimension_count(WIDTH // HEADS)
    w.add_rope_freq_base(10000.0)
    w.add_vocab_size(ENTRIES)
    w.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("gpt-2")
    w.add_token_list(tokens)
    w.add_token_types(types)
    w.add_token_merges(merges)
    w.add_eos_token_id(ids["<|im_end|>"])
    w.add_bos_token_id(ids["<|endoftext|>"])
    w.add_pad_token_id(ids["<|endoftext|>"])
    w.add_add_bos_token(False)
    w.add_chat_template(TEMPLATE)
    random = np.random.default_rng(1)

    def noise(name, *shape, scale=0.08):
        w.add_tensor(name, (random.standard_normal(shape) * scale).astype(np.float16))

    def ones(name):
        w.add_tensor(name, np.ones(WIDTH, np.float32))

    noise("token_embd.weight", ENTRIES, WIDTH, scale=0.5)
    kv = WIDTH // HEADS * KV_HEADS
    for i in range(LAYERS):
        b = f"blk.{i}."
        ones(b + "attn_norm.weight")
        ones(b + "ffn_norm.weight")
        noise(b + "attn_q.weight", WIDTH, WIDTH)
        noise(b + "attn_k.weight", kv, WIDTH)
        noise(b + "attn_v.weight", kv, WIDTH)
        noise(b + "attn_output.weight", WIDTH, WIDTH)
        noise(b + "ffn_gate.weight", HIDDEN, WIDTH)
        noise(b + "ffn_up.weight", HIDDEN, WIDTH)
        noise(b + "ffn_down.weight", WIDTH, HIDDEN)
    ones("output_norm.weight")
    # Only printable ASCII can be the answer: a random model would write broken
    # UTF-8, which the server refuses to pass on, and end when it likes.
    out = (random.standard_normal((ENTRIES, WIDTH)) * 0.08).astype(np.float16)
    for i, (token, kind) in enumerate(zip(tokens, types)):
        if kind != gguf.TokenType.NORMAL or not all(33 <= ord(c) < 127 or c == "\u0120" for c in token):
            out[i] = 0
    w.add_tensor("output.weight", out)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


if __name__ == "__main__":
    main(sys.argv[1])
