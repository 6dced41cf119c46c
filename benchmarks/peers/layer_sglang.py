"""SGLang's EAGLE-3 loader and layer on an exported head, without its server. Run by SGLang's own
Python.

    python layer_sglang.py HEAD INPUTS    # folder; safetensors: embeddings [T, H], aux_hidden
                                          # [T, 3 Ht], hidden [T, H], logits [T, W]

With sglang_cpu/ on the path, for what a CPU install does not have. A causal attention of torch's
stands in its kernel's place, behind SGLang's own projections and rotary embedding. Loading starts
from NaN: what its loader skips shows. Prints one JSON: names that were not loaded; of the fed-back
states and the logits the greatest difference from those given, as a share of the greatest value.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import safetensors.torch
import torch


class CausalAttention(torch.nn.Module):
    """In RadixAttention's place: queries, keys and values [T, heads * D] of one sequence."""

    def __init__(self, heads: int, key_heads: int, head_dim: int) -> None:
        super().__init__()
        self.shape = heads, key_heads, head_dim

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: Any) -> torch.Tensor:
        heads, key_heads, D = self.shape
        q, k, v = (
            x.view(len(x), count, D).transpose(0, 1)
            for x, count in ((q, heads), (k, key_heads), (v, key_heads))
        )
        out = torch.nn.functional.scaled_dot_product_attention(
            q[None], k[None], v[None], is_causal=True, enable_gqa=True
        )[0]
        return out.transpose(0, 1).flatten(1)


def model_of(head: Path) -> Any:
    """SGLang's own class, built from the head's config and loaded with its own loader, float32."""
    server_args = importlib.import_module("sglang.srt.server_args")
    parallel_state = importlib.import_module("sglang.srt.distributed.parallel_state")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    arguments = server_args.ServerArgs(model_path=str(head), device="cpu")
    server_args.set_global_server_args_for_scheduler(arguments)
    parallel_state.init_distributed_environment(1, 0, local_rank=0, backend="gloo")
    parallel_state.initialize_model_parallel("gloo")
    context = importlib.import_module("sglang.srt.runtime_context")
    alone = {"rank": 0, "size": 1}
    context.get_parallel().override_permanently(
        **{
            name: alone[name.split("_")[-1]]
            for name in context._parallel_fields()
            if name.split("_")[-1] in alone
        }
    )
    eagle3 = importlib.import_module("sglang.srt.models.llama_eagle3")
    model = eagle3.LlamaForCausalLMEagle3(
        importlib.import_module("transformers").AutoConfig.from_pretrained(head)
    )
    model.float()
    for weight in model.parameters():
        torch.nn.init.constant_(weight, float("nan"))
    model.load_weights(safetensors.torch.load_file(head / "model.safetensors").items())
    attention = model.model.layers[0].self_attn
    attention.attn = CausalAttention(
        attention.num_heads, attention.num_kv_heads, attention.head_dim
    )
    return model


@torch.inference_mode()
def main() -> None:
    head, inputs = Path(sys.argv[1]), safetensors.torch.load_file(sys.argv[2])
    model = model_of(head)
    unloaded = [
        name
        for name, weight in model.named_parameters()
        if weight.isnan().any() and "embed_tokens" not in name  # the target's, shared later
    ]
    batch = types.SimpleNamespace(
        spec_info=types.SimpleNamespace(hidden_states=inputs["aux_hidden"])
    )
    positions = torch.arange(len(inputs["embeddings"]))
    normed, (fed_back,) = model.model(None, positions, batch, inputs["embeddings"])
    found = {"hidden": fed_back, "logits": normed @ model.lm_head.weight.T}
    off = {
        name: float((given - inputs[name]).abs().max() / inputs[name].abs().max())
        for name, given in found.items()
    }
    print(json.dumps({"unloaded": unloaded, "off": off, "draft_ids": len(model.hot_token_id)}))


if __name__ == "__main__":
    main()
