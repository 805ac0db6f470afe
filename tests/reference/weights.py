"""Seeded random weights for tiny models, scaled so that greedy output is worth comparing.

Values depend only on the seed and the plain tensor name, so nested, sharded and flat forms
of one seed are the same model. The gains make every sublayer matter and peak the attention:
greedy output wanders for hundreds of tokens and the two best logits stay apart in float32.
"""

import math
import zlib
from collections.abc import Sequence

import torch

EMBED_STD = 0.5
TIED_EMBED_STD = 0.05
# A tied head sees its own input embedding in the residual stream. Kept this small beside the
# block outputs, that embedding cannot make the model repeat its last token.
GAINS = {
    "o_proj": 1.5,
    "out_proj": 1.5,
    "down_proj": 2.0,
    "gate": 3.0,  # routers of experts that choose clearly
    "proj": 3.0,  # and Gemma's
    "router": 3.0,
    "kernel_projection": 0.3,
    # What chooses a draft's tokens often overrules the most probable one.
    "candidate_selector": 3.0,
    "markov_w1": 3.0,
    "markov_w2": 6.0,
    "in_proj_a": 0.5,
    "in_proj_qkv": 2.0,  # keeps the gated norm away from its epsilon, hence rounding small
    "in_proj_qkvz": 2.0,
}


def generator(seed: int, name: str) -> torch.Generator:
    """A stream of its own for every tensor, independent of which others exist."""
    return torch.Generator().manual_seed(seed * 1_000_003 + zlib.crc32(name.encode()))


def draw(
    name: str,
    shape: Sequence[int],
    seed: int,
    centre: float,
    embed_std: float = 1.0,
    head_std: float = 1.0,
) -> torch.Tensor:
    """Random values for one parameter; `centre` is what an RMSNorm of the family stores as 1."""
    gen = generator(seed, name)
    normal = torch.randn(*shape, generator=gen)
    if "embed_tokens" in name:
        return normal * embed_std
    if name.startswith("lm_head"):
        return normal * head_std
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return centre + 0.8 + 0.2 * normal  # peaked attention keeps long contexts relevant
    if name.endswith("norm.weight"):
        # The gated norm of linear attention multiplies by its plain weight in every family.
        return (1.0 if "linear_attn" in name else centre) + 0.2 * normal
    if name.endswith(("layer_scalar", "router.scale", "per_expert_scale")):
        return 1.0 + 0.2 * normal
    if name.endswith("conv1d.weight"):
        return normal * 0.6
    if name.startswith("embed_proj.2"):
        return normal * 3.0
    if name.endswith("base_kernel"):
        identity = torch.zeros(shape)
        identity[:, 0] = 1.0
        return identity + 0.4 * normal
    if name.endswith((".bias", "_bias")):
        return normal * 0.3
    if name.endswith("sinks"):
        return 1.0 + normal
    if name.endswith(("experts.gate_up_proj", "experts.down_proj")) and centre == 1.0:
        # gpt-oss stores these transposed.
        return normal * (2.0 if "down_proj" in name else 1.0) / math.sqrt(shape[-2])
    part = name.split(".")[-2]
    return normal * GAINS.get(part, 1.0) / math.sqrt(shape[-1])


def decay_parameters(heads: int, gen: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """A_log and dt_bias whose decay, for a zero input, lies between 0.35 and 0.985."""
    decay = 0.35 + (0.985 - 0.35) * torch.rand(heads, generator=gen)
    dt_bias = 2 * torch.rand(heads, generator=gen) - 1
    return torch.log(-torch.log(decay) / torch.nn.functional.softplus(dt_bias)), dt_bias


def draw_model(
    shapes: dict[str, tuple[int, ...]],
    *,
    seed: int,
    tied: bool,
    centre: float,
    hidden: int,
    logit_scale: float,
) -> dict[str, torch.Tensor]:
    """All tensors of a target, named as the text-only model names them."""
    embed_std = TIED_EMBED_STD if tied else EMBED_STD
    head_std = logit_scale / math.sqrt(hidden)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        if tied and name == "lm_head.weight":
            continue
        tensors[name] = draw(name, shape, seed, centre, embed_std, head_std)
    if tied:
        # The tied embedding is tiny, so the final norm carries the scale of the logits.
        norm = tensors["model.norm.weight"]
        scale = head_std / embed_std
        tensors["model.norm.weight"] = (norm - centre + 1) * scale - 1 + centre
    for name in [name for name in tensors if name.endswith("A_log")]:
        bias_name = name.removesuffix("A_log") + "dt_bias"
        pair = decay_parameters(shapes[name][0], generator(seed, name))
        tensors[name], tensors[bias_name] = pair
    return tensors
