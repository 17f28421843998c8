"""A checkpoint as Hugging Face's transformers and what reads its folders (vLLM, llama.cpp's converter) load it.

    export(Path("runs/stories"), Path("stories-hf"))
    AutoModelForCausalLM.from_pretrained("stories-hf"), AutoTokenizer.from_pretrained("stories-hf")

The architecture is Llama's, under other names. One thing differs in the numbers: rotary positions here turn components
2i and 2i + 1 of a head together, as their paper has it, there i and i + d/2. So the rows of q and k change places;
their products, and all logits, stay.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from tokenizers.processors import TemplateProcessing

from cs336_systems.store import files
from cs336_systems.training import pipeline
from cs336_systems.training.outputs import Say

_NAMES = {
    "token_embeddings": "model.embed_tokens", "ln_final": "model.norm", "lm_head": "lm_head",
    "ln1": "input_layernorm", "ln2": "post_attention_layernorm",
    "attn.q_proj": "self_attn.q_proj", "attn.k_proj": "self_attn.k_proj", "attn.v_proj": "self_attn.v_proj",
    "attn.output_proj": "self_attn.o_proj",
    "ffn.w1": "mlp.gate_proj", "ffn.w2": "mlp.down_proj", "ffn.w3": "mlp.up_proj",
}  # fmt: skip


def export(place: Path, folder: str | Path, say: Say = print) -> list[Path]:
    """Writes config.json, generation_config.json, model.safetensors, tokenizer.json and tokenizer_config.json.

    place, say: as of `pipeline.trained`. Errors: its own; ValueError for the folder of a run or a checkpoint, which has
    files of these names, and where it cannot be written. Where there is no model, no folder is made.
    """
    if any((Path(folder) / name).exists() for name in ("checkpoints", "checkpoint.json")):
        raise ValueError(f"{folder} holds a run or a checkpoint; choose another folder")
    model, tokenizer, end_of_text = pipeline.trained(place, "cpu", say)
    folder = files.make_folder(folder)
    end = tokenizer.id_to_token(end_of_text)
    # a prompt begins as documents do, after the end of another (by an id of its own: a token's may look like `$A`)
    begin = {"id": "begin", "ids": [end_of_text], "tokens": [end]}
    tokenizer.post_processor = TemplateProcessing(single=["begin", "$A"], special_tokens=[begin])
    weights, sizes = llama_weights(model.state_dict(), model.config.d_head), model.config
    special = {"bos_token_id": end_of_text, "eos_token_id": end_of_text}
    told: dict[str, Any] = {
        "config.json": {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32",
            "vocab_size": sizes.vocab_size, "max_position_embeddings": sizes.context_length,
            "hidden_size": sizes.d_model, "intermediate_size": sizes.d_ff, "num_hidden_layers": sizes.num_layers,
            "num_attention_heads": sizes.num_heads, "num_key_value_heads": sizes.kv_heads, "head_dim": sizes.d_head,
            "hidden_act": "silu", "rms_norm_eps": model.ln_final.eps, "attention_bias": False, "mlp_bias": False,
            "tie_word_embeddings": False, **special,
            # before transformers 5, and since
            "rope_theta": sizes.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": sizes.rope_theta},
        },
        "generation_config.json": special,
        "tokenizer.json": json.loads(tokenizer.to_str()),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": end, "eos_token": end,
            "model_max_length": sizes.context_length, "clean_up_tokenization_spaces": False,
        },
    }  # fmt: skip
    files.replace({folder / name: json.dumps(about, indent=1) + "\n" for name, about in told.items()})
    files.replace({folder / "model.safetensors": safetensors.torch.save(weights, {"format": "pt"})})
    return [folder / name for name in (*told, "model.safetensors")]


def llama_weights(weights: Mapping[str, torch.Tensor], d_head: int) -> dict[str, torch.Tensor]:
    """A `TransformerLM`'s weights under the names of LlamaForCausalLM, q and k in its order of rotary pairs."""
    out = {}
    for name, tensor in weights.items():
        layer, own = re.fullmatch(r"(layers\.\d+\.)?(.+)\.weight", name).groups("")
        if own in ("attn.q_proj", "attn.k_proj"):  # (heads, d/2, 2, D) → (heads, 2, d/2, D)
            tensor = tensor.unflatten(0, (-1, d_head // 2, 2)).transpose(1, 2).flatten(0, 2)
        out[f"{'model.' * bool(layer)}{layer}{_NAMES[own]}.weight"] = tensor.contiguous()
    return out
