"""The models of `benchmarks.zoo`: of timm and transformers, from configurations, small.

A plain step of most takes 60 to 200 ms on one thread.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from benchmarks._timm import load_timm

os.environ.setdefault("HF_HUB_OFFLINE", "1")

_NARROW = {"channels": (32, 64, 128, 256)}
# Name: batch, size of images, further arguments.
TIMM: dict[str, tuple[int, int, dict[str, Any]]] = {
    "resnet18": (8, 64, {}),
    "resnest14d": (6, 48, _NARROW),
    "res2net50_26w_4s": (6, 48, {"channels": (16, 32, 64, 128)}),
    "densenet121": (6, 48, {"growth_rate": 16}),
    "dla34": (6, 64, {"channels": [16, 16, 32, 64, 128, 128]}),
    "mobilenetv2_050": (16, 64, {}),
    "mobilenetv3_small_050": (32, 64, {}),
    "efficientnet_b0": (6, 48, {"drop_path_rate": 0.2}),
    "regnetx_002": (8, 64, {}),
    "ghostnet_050": (16, 64, {}),
    "hrnet_w18_small": (2, 64, {}),
    "convnext_atto": (8, 64, {"drop_path_rate": 0.1}),
    "poolformer_s12": (2, 64, {}),
    "mobilevit_xxs": (6, 64, {}),
    "edgenext_xx_small": (10, 64, {}),
    "vit_tiny_patch16_224": (10, 96, {"img_size": 96, "embed_dim": 96, "drop_path_rate": 0.1}),
    "cait_xxs24_224": (12, 64, {"img_size": 64, "embed_dim": 96, "depth": 12}),
    "swin_tiny_patch4_window7_224": (6, 56, {"img_size": 56, "embed_dim": 48}),
    "resmlp_12_224": (2, 96, {"img_size": 96}),
    "xcit_nano_12_p16_224": (4, 96, {"img_size": 96}),
}

_SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {"num_key_value_heads": 2, "use_cache": False}
_OLD_NAMES = {"n_embd": 128, "n_layer": 6, "n_head": 4, "use_cache": False}

# Name of the configuration and the model, and what differs from the above.
TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Bert": ("BertModel", {}),
    "BertForMaskedLM": ("BertForMaskedLM", {}),
    "Roberta": ("RobertaModel", {}),
    "Electra": ("ElectraModel", {"embedding_size": 32}),
    "Albert": ("AlbertModel", {"embedding_size": 32}),
    "DistilBert": ("DistilBertModel", {"dim": 128, "n_layers": 6, "n_heads": 4, "hidden_dim": 256}),
    "GPT2": ("GPT2LMHeadModel", _OLD_NAMES),
    "GPTNeoX": ("GPTNeoXModel", {"use_cache": False}),
    "OPT": ("OPTModel", {"ffn_dim": 256, "word_embed_proj_dim": 128, "use_cache": False}),
    "Bloom": ("BloomModel", {"n_layer": 6, "n_head": 4, "use_cache": False}),
    "Falcon": ("FalconModel", {"use_cache": False}),
    "Llama": ("LlamaForCausalLM", _GROUPED),
    "Mistral": ("MistralModel", _GROUPED),
    "Mixtral": ("MixtralModel", {**_GROUPED, "num_local_experts": 4}),
    "Qwen2": ("Qwen2Model", _GROUPED),
    "Qwen3": ("Qwen3Model", {**_GROUPED, "head_dim": 32}),
    "Phi3": ("Phi3Model", _GROUPED),
    "Gemma": ("GemmaModel", {**_GROUPED, "head_dim": 32}),
    "ViT": ("ViTModel", {"image_size": 96, "patch_size": 8}),
    "Mamba": ("MambaModel", {"state_size": 8, "use_cache": False}),
    "T5Encoder": (
        "T5EncoderModel",
        {"d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 6, "num_heads": 4},
    ),
}


def names() -> list[str]:
    """Return the names of all models, with their library."""
    return [*(f"transformers {n}" for n in TRANSFORMERS), *(f"timm {n}" for n in TIMM)]


def build(name: str) -> tuple[nn.Module, dict[str, Any] | torch.Tensor]:
    """Return a model in training mode, and a batch: a tensor, or keyword arguments."""
    library, _, name = name.partition(" ")
    if library == "timm":
        batch, size, more = TIMM[name]
        model = load_timm().create_model(name, num_classes=10, **more)
        return model.train(), torch.randn(batch, 3, size, size)
    import transformers

    kind, more = TRANSFORMERS[name]
    family = kind.removesuffix("Model").removesuffix("Encoder")
    for ending in ("LMHead", "ForCausalLM", "ForMaskedLM"):
        family = family.removesuffix(ending)
    config = getattr(transformers, f"{family}Config")(**{**_SMALL, **more})
    model = getattr(transformers, kind)(config).train()
    if name == "ViT":
        return model, {"pixel_values": torch.randn(6, 3, 96, 96)}
    tokens = torch.randint(3, 128, (4, 12) if name == "Mamba" else (6, 112))
    if kind.endswith("Model") and not kind.startswith(("Bert", "Roberta")):
        return model, {"input_ids": tokens}
    mask = torch.ones_like(tokens)
    mask[1, 70:] = 0
    return model, {"input_ids": tokens, "attention_mask": mask}
