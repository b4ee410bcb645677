"""A Llama of two layers with random weights, whose heads can be shared between ranks, as the embedded model's cannot.

What it says means nothing, and is the same each time. The tokenizer is the embedded model's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

LAYERS: Final = 2
HIDDEN: Final = 256
HEADS: Final = 8
KV_HEADS: Final = 4
INNER: Final = 512
SPREAD: Final = 0.05
"""Of the weights: small enough that nothing overflows, large enough that one token does not follow all others."""


def make(folder: Path) -> Path:
    """Write the model into an empty folder."""
    import torch
    from safetensors.torch import save_file

    from workers.engines.vllm.smollm2 import ensure_embedded_model

    embedded = ensure_embedded_model()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_bytes((embedded / name).read_bytes())
    config = json.loads((embedded / "config.json").read_bytes())
    config |= {
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS,
    }
    numbers = torch.Generator().manual_seed(6)

    def drawn(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=numbers) * SPREAD).to(torch.bfloat16)

    width = HIDDEN // HEADS * KV_HEADS
    weights = {
        "model.embed_tokens.weight": drawn(config["vocab_size"], HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16),
    }
    for layer in range(LAYERS):
        parts = {
            "self_attn.q_proj": drawn(HIDDEN, HIDDEN),
            "self_attn.k_proj": drawn(width, HIDDEN),
            "self_attn.v_proj": drawn(width, HIDDEN),
            "self_attn.o_proj": drawn(HIDDEN, HIDDEN),
            "mlp.gate_proj": drawn(INNER, HIDDEN),
            "mlp.up_proj": drawn(INNER, HIDDEN),
            "mlp.down_proj": drawn(HIDDEN, INNER),
            "input_layernorm": torch.ones(HIDDEN, dtype=torch.bfloat16),
            "post_attention_layernorm": torch.ones(HIDDEN, dtype=torch.bfloat16),
        }
        weights |= {f"model.layers.{layer}.{name}.weight": values for name, values in parts.items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder
