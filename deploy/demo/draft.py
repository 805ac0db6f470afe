"""The draft: a few Qwen3-style layers that fill a block of masked tokens at once.

Queries are the block's rows only; keys and values come from the target's captured features
(projected once to ``context``) and from the block itself. Many blocks of one text are computed
side by side in training; a block sees the context before its anchor and itself, nothing else.
Sliding layers are not causal: their window only limits the distance.

A DFlash2 draft has two things more: convolutions over the rows of a block, before and behind
every sublayer, and a selector that chooses among the most probable tokens of each row the one
that fits the token chosen before it.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layers import Mlp, rms_norm, rotary, rotate
from shapes import DraftShape

Memory = tuple[Tensor, Tensor]


class Norm(nn.Module):
    """RMSNorm with a plain weight, unlike the target's."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class DraftAttention(nn.Module):
    def __init__(self, shape: DraftShape, window: int | None) -> None:
        super().__init__()
        self.heads, self.groups = shape.num_attention_heads, shape.num_key_value_heads
        self.dim, self.theta, self.window = shape.head_dim, shape.rope_theta, window
        self.q_proj = nn.Linear(shape.hidden_size, self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, self.groups * self.dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, self.groups * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, shape.hidden_size, bias=False)
        self.q_norm = Norm(self.dim, shape.rms_norm_eps)
        self.k_norm = Norm(self.dim, shape.rms_norm_eps)

    def keys(self, x: Tensor, positions: Tensor) -> Tensor:
        cos, sin = rotary(positions, self.dim, self.theta)
        k = self.k_norm(self.k_proj(x).unflatten(-1, (self.groups, self.dim)))
        return rotate(k, cos[..., None, :], sin[..., None, :])

    def remember(self, context: Tensor) -> Memory:
        """Keys and values [R, groups, T, dim] of the context: what a server would cache."""
        seen = torch.arange(context.shape[1], device=context.device)
        values = self.v_proj(context).unflatten(-1, (self.groups, self.dim))
        return self.keys(context, seen).transpose(1, 2), values.transpose(1, 2)

    def forward(self, x: Tensor, memory: Memory, anchors: Tensor) -> Tensor:
        """x [R, A, B, H]: A blocks of B rows, block a starting at position anchors[r, a]."""
        rows, blocks, size, _ = x.shape
        positions = anchors[..., None] + torch.arange(size, device=x.device)
        cos, sin = rotary(positions, self.dim, self.theta)
        q = self.q_norm(self.q_proj(x).unflatten(-1, (self.heads, self.dim)))
        q = rotate(q, cos[..., None, :], sin[..., None, :]) * self.dim**-0.5
        # [R, groups, heads per group, A, B, dim]: the queries that share one key head.
        q = q.unflatten(3, (self.groups, -1)).permute(0, 3, 4, 1, 2, 5)
        own_k = self.keys(x, positions).permute(0, 3, 1, 2, 4)[:, :, None]
        own_v = self.v_proj(x).unflatten(-1, (self.groups, self.dim)).permute(0, 3, 1, 2, 4)
        ctx_k, ctx_v = memory
        seen = torch.arange(ctx_k.shape[2], device=x.device)
        far = (q.flatten(2, 4) @ ctx_k.to(q.dtype).mT).unflatten(2, (-1, blocks, size))
        visible = seen < anchors[..., None, None]
        if self.window is not None:
            visible = visible & (positions[..., None] - seen < self.window)
        far = far.float().masked_fill(~visible[:, None, None], float("-inf"))
        near = (q @ own_k.to(q.dtype).mT).float()
        weights = torch.cat((far, near), -1).softmax(-1).to(ctx_v.dtype)
        far_weights, near_weights = weights.split((len(seen), size), -1)
        out = (far_weights.flatten(2, 4) @ ctx_v).unflatten(2, (-1, blocks, size))
        out = out + near_weights @ own_v[:, :, None]
        return self.o_proj(out.permute(0, 3, 4, 1, 2, 5).flatten(3))


class BlockConvolution(nn.Module):
    """Mixes each row of a block with those before it, on both sides of a sublayer.

    Part of the kernels is learned as it is, part is made of the sublayer's input: one number for a
    group of neighbouring elements. It begins as the identity.
    """

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.taps, self.groups = shape.conv_kernel_size, shape.hidden_size // shape.conv_group_size
        base = torch.zeros(2, self.taps, shape.hidden_size)
        base[:, 0] = 1
        self.base_kernel = nn.Parameter(base)
        self.kernel_projection = nn.Linear(shape.hidden_size, 2 * self.taps * self.groups, bias=False)
        nn.init.zeros_(self.kernel_projection.weight)

    def forward(self, sublayer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """What the sublayer makes of the normed rows x [R, A, B, H], convolved before and behind it."""
        added = self.kernel_projection(x).float().unflatten(-1, (2, self.taps, self.groups, 1))
        kernels = self.base_kernel.unflatten(-1, (self.groups, -1)) + added
        before, behind = kernels.unbind(-4)
        return self.mix(sublayer(self.mix(x, before)), behind)

    def mix(self, x: Tensor, kernels: Tensor) -> Tensor:
        """Rows x [R, A, B, H] by kernels [R, A, B, taps, groups, H / groups]; nothing comes before a block's first."""
        rows = x.float().unflatten(-1, (self.groups, -1))
        total = rows * kernels[..., 0, :, :]
        for tap in range(1, self.taps):
            total = total + F.pad(rows[:, :, :-tap], (0, 0, 0, 0, tap, 0)) * kernels[..., tap, :, :]
        return total.flatten(-2).to(x.dtype)


class CandidateSelector(nn.Module):
    """How well a token fits the one before it: their vectors' product, weighed by the row's state.

    The token that follows has vectors of zero at first, so that training begins with the draft's
    own logits.
    """

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.hidden_projection = nn.Linear(shape.hidden_size, shape.selector_rank, bias=False)
        self.predecessor_codebook = nn.Parameter(torch.randn(shape.vocab_size, shape.selector_rank))
        self.successor_codebook = nn.Parameter(torch.zeros(shape.vocab_size, shape.selector_rank))

    def forward(self, hidden: Tensor, before: Tensor) -> Tensor:
        """[.., rank]: what to multiply the following token's vector by, for tokens ``before`` [..]."""
        return self.hidden_projection(hidden) * F.embedding(before, self.predecessor_codebook)


class DraftLayer(nn.Module):
    def __init__(self, shape: DraftShape, window: int | None) -> None:
        super().__init__()
        self.attention_conv = BlockConvolution(shape) if shape.conv_kernel_size else None
        self.mlp_conv = BlockConvolution(shape) if shape.conv_kernel_size else None
        self.self_attn = DraftAttention(shape, window)
        self.mlp = Mlp(shape.hidden_size, shape.intermediate_size)
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x: Tensor, context: Tensor | Memory, anchors: Tensor) -> Tensor:
        memory = self.self_attn.remember(context) if isinstance(context, Tensor) else context

        def attend(rows: Tensor) -> Tensor:
            return self.self_attn(rows, memory, anchors)

        x = x + _around(attend, self.attention_conv, self.input_layernorm(x))
        return x + _around(self.mlp, self.mlp_conv, self.post_attention_layernorm(x))


def _around(sublayer: Callable[[Tensor], Tensor], convolution: BlockConvolution | None, x: Tensor) -> Tensor:
    return sublayer(x) if convolution is None else convolution(sublayer, x)


class Draft(nn.Module):
    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.shape = shape
        captured = len(shape.target_layer_ids) * shape.hidden_size
        self.fc = nn.Linear(captured, shape.hidden_size, bias=False)
        self.hidden_norm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList(
            DraftLayer(shape, shape.sliding_window if kind == "sliding_attention" else None)
            for kind in shape.layer_types
        )
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.candidate_selector = CandidateSelector(shape) if shape.selector_rank else None
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2 and not name.endswith(("codebook", "kernel_projection.weight")):
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                scale = (2 * shape.num_hidden_layers) ** -0.5 if residual else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)

    def remember(self, features: Tensor) -> list[Memory]:
        context = self.hidden_norm(self.fc(features))
        return [layer.self_attn.remember(context) for layer in self.layers if isinstance(layer, DraftLayer)]

    def forward(self, features: Tensor | list[Memory], known: Tensor, mask: Tensor, anchors: Tensor) -> Tensor:
        """Normed states [R, A, B-1, H] of the masked rows.

        ``features`` [R, T, N*H] are the captures, or what ``remember`` made of them; ``known``
        [R, A, H] are the embeddings of the tokens at the anchors, ``mask`` [H] that of the mask.
        """
        if isinstance(features, Tensor):
            contexts: list[Tensor | Memory] = [self.hidden_norm(self.fc(features))] * len(self.layers)
        else:
            contexts = [*features]
        masks = mask.expand(*known.shape[:2], self.shape.block_size - 1, -1)
        x = torch.cat((known[:, :, None], masks), 2)
        for layer, context in zip(self.layers, contexts, strict=True):
            x = layer(x, context, anchors)
        return self.norm(x[:, :, 1:])

    def choose(self, hidden: Tensor, head: Tensor, before: Tensor) -> Tensor:
        """The tokens [..] that it proposes for rows of states [.., H], each behind the token ``before`` [..].

        Only a selector asks for the token before.
        """
        logits = hidden @ head.T
        if self.candidate_selector is None:
            return logits.argmax(-1)
        logits, candidates = logits.float().topk(self.shape.selector_top_k, -1)
        followers = self.candidate_selector.successor_codebook[candidates].float()
        fits = (followers @ self.candidate_selector(hidden, before).float()[..., None])[..., 0]
        return candidates.gather(-1, (logits + fits).argmax(-1, keepdim=True))[..., 0]

    @torch.no_grad()
    def start_from(self, other: "Draft", embedding: Tensor) -> None:
        """Take over all that a trained draft of the same layers has; a narrower MLP its heaviest elements.

        Where it has no selector, the vectors of the token before become the main directions of the
        target's embedding [V, H], so that tokens of a kind are of a kind for a selector too.
        """
        trained = other.state_dict()
        for index in range(self.shape.num_hidden_layers):
            gate, up, down = (f"layers.{index}.mlp.{part}_proj.weight" for part in ("gate", "up", "down"))
            weight = trained[gate].norm(dim=1) * trained[up].norm(dim=1) * trained[down].norm(dim=0)
            kept = weight.topk(self.shape.intermediate_size).indices.sort().values
            trained |= {gate: trained[gate][kept], up: trained[up][kept], down: trained[down][:, kept]}
        own = self.state_dict()
        self.load_state_dict({name: trained.get(name, tensor) for name, tensor in own.items()})
        if self.candidate_selector is not None and other.candidate_selector is None:
            vectors = embedding.float().cpu()
            directions = torch.linalg.svd(vectors - vectors.mean(0), full_matrices=False).U
            known = directions[:, : self.shape.selector_rank] * len(vectors) ** 0.5
            self.candidate_selector.predecessor_codebook.copy_(known)
