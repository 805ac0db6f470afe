"""Reference runs of a target with transformers, in float32 on the CPU with plain attention.

Nothing here shares code with the project. Messages of transformers are silenced on import,
because it reports missing optional kernels on every first forward of Qwen3.5.
"""

import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, Mxfp4Config, PreTrainedModel

from tests.reference import checkpoints

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

CONV_LEFT = 3  # a 4-tap causal convolution needs the three inputs before the next token


def load(path: Path | str) -> PreTrainedModel:
    """The causal language model of a folder; nested checkpoints give their text part, and MXFP4 is unpacked."""
    packing = json.loads((Path(path) / "config.json").read_text()).get("quantization_config", {})
    unpacked = {"quantization_config": Mxfp4Config(dequantize=True)} if packing.get("quant_method") == "mxfp4" else {}
    model, info = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True, **unpacked
    )
    for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[key]:
            raise ValueError(f"{key} in {path}: {sorted(info[key])}")
    return model.eval()


def with_cache(module: torch.nn.Module, cache: DynamicCache) -> dict[str, Any]:
    """Return the arguments by which a model, or one of its blocks, keeps keys and values in a cache: transformers named
    the cache `past_key_values` up to 5.23."""
    named = "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"
    return {named: cache, "use_cache": True}


def blocks(model: PreTrainedModel) -> torch.nn.ModuleList:
    """The decoder blocks, in order."""
    return model.model.layers


def embedding(model: PreTrainedModel) -> torch.Tensor:
    """The rows [V, H] that tokens enter the model as, scaled where the model does that."""
    table = model.get_input_embeddings()
    return table(torch.arange(table.num_embeddings)).detach()


def lm_head(model: PreTrainedModel) -> torch.Tensor:
    """The output matrix [V, H], which is the embedding when the checkpoint ties them."""
    return model.get_output_embeddings().weight.detach()


@torch.no_grad()
def greedy(model: PreTrainedModel, prompt_ids: Sequence[int], n: int) -> list[int]:
    """The next `n` argmax tokens; stop tokens are ordinary tokens here."""
    cache = DynamicCache(config=model.config)
    feed = list(prompt_ids)
    produced: list[int] = []
    for _ in range(n):
        out = model(input_ids=torch.tensor([feed]), **with_cache(model, cache))
        produced.append(int(out.logits[0, -1].argmax()))
        feed = produced[-1:]
    return produced


@torch.no_grad()
def logits(model: PreTrainedModel, ids: Sequence[int]) -> torch.Tensor:
    """Logits [n, V] of one uncached pass; row i predicts the token after ids[i]."""
    return model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]


def margins(rows: torch.Tensor) -> torch.Tensor:
    """Distance between the best and the second best logit of every row."""
    best = rows.topk(2, dim=-1).values
    return best[..., 0] - best[..., 1]


def clear_prompt(
    model: PreTrainedModel, length: int, n: int, *, margin: float = 2e-3, seed: int = 0
) -> tuple[list[int], list[int]]:
    """A random prompt and its `n` greedy tokens, none of them a near tie.

    Two correct float32 implementations differ by a few 1e-4 in these logits, so a run whose
    two best logits come closer than that says nothing about correctness.
    """
    vocab = model.config.vocab_size
    for attempt in range(seed, seed + 50):
        (prompt,) = checkpoints.random_prompts(vocab, 1, attempt, [length])
        tokens = greedy(model, prompt, n)
        rows = logits(model, [*prompt, *tokens[:-1]])[length - 1 :]
        if rows.argmax(-1).tolist() == tokens and float(margins(rows).min()) > margin:
            return prompt, tokens
    raise ValueError(f"no prompt of length {length} keeps a margin of {margin} for {n} tokens")


@torch.no_grad()
def block_outputs(model: PreTrainedModel, ids: Sequence[int], layer_ids: Sequence[int]) -> list[torch.Tensor]:
    """Residual stream [n, H] after each named block, in the order of the list.

    Hooks sit on the blocks themselves: the hidden states that transformers returns hold the
    output of the final norm in the place of the last block's.
    """
    seen: dict[int, torch.Tensor] = {}

    def keep(layer: int) -> Any:
        def hook(_module: torch.nn.Module, _args: Any, output: torch.Tensor) -> None:
            seen[layer] = output[0].detach().clone()

        return hook

    handles = [blocks(model)[i].register_forward_hook(keep(i)) for i in set(layer_ids)]
    try:
        model(input_ids=torch.tensor([list(ids)]), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return [seen[layer] for layer in layer_ids]


@torch.no_grad()
def recurrent_states(model: PreTrainedModel, ids: Sequence[int]) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Per linear-attention layer: last conv inputs [C, 3] and state [v_heads, k, v].

    Both follow one prefill of all ids. Conv inputs are in time order, before the convolution,
    with zero columns on the left for prompts shorter than three tokens.
    """
    cache = DynamicCache(config=model.config)
    model(input_ids=torch.tensor([list(ids)]), **with_cache(model, cache))
    states: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for layer, kind in enumerate(model.config.layer_types):
        if kind == "linear_attention":
            held = cache.layers[layer]
            conv = held.conv_states[0][0, :, -CONV_LEFT:]
            states[layer] = (conv.clone(), held.recurrent_states[0][0].clone())
    return states
