"""Attention by torch's FlexAttention (arXiv:2412.05496), which skips blocks of 128 x 128 pairs that are not visible.

No S x T tensor is made. FlexAttention has no backward on a CPU.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from models.visible import Visible

BLOCK = 128
LEAST_WIDTH = 16
"""Smallest head width of torch's GPU kernel. Narrower heads are padded with zeros, which change no result."""
Range = tuple[Tensor, Tensor]
"""(lowest, highest) position or document of each block: (..., R, 1) for query blocks, (..., 1, C) for key blocks."""


def blocks(visible: Visible) -> Any:
    """torch's BlockMask: the key blocks that each query block sees in part, and those that it sees in full."""
    from torch.nn.attention.flex_attention import BlockMask  # 1 s to import

    before, documents_BT, window = visible.before, visible.documents_BT, visible.window
    query_documents_BS = visible.query_documents_BS

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        position = query + before
        seen = position >= key
        if window is not None:
            seen = seen & (position - key < window)
        if documents_BT is not None and query_documents_BS is not None:
            seen = seen & (query_documents_BS[row, query] == documents_BT[row, key])
        return seen

    rows, columns = (_starts(count, visible.device) for count in (visible.queries, visible.keys))
    first_query = rows[:, None] + before
    last_query = (rows[:, None] + BLOCK).clamp(max=visible.queries) - 1 + before
    first_key, last_key = columns[None], (columns[None] + BLOCK).clamp(max=visible.keys) - 1
    any_pair, every_pair = last_query >= first_key, first_query >= last_key
    if window is not None:
        any_pair = any_pair & (first_query - last_key < window)
        every_pair = every_pair & (last_query - first_key < window)
    any_pair, every_pair = any_pair[None], every_pair[None]
    if documents_BT is not None and query_documents_BS is not None:
        query_low, query_high = _documents(query_documents_BS, rows, -1)
        key_low, key_high = _documents(documents_BT, columns, -2)
        any_pair = any_pair & (query_low <= key_high) & (key_low <= query_high)
        every_pair = every_pair & (query_low == query_high) & (key_low == key_high) & (query_low == key_low)
    # A block that reaches past the last query or key is never full.
    complete = (rows + BLOCK <= visible.queries)[:, None] & (columns + BLOCK <= visible.keys)
    full = every_pair & complete
    parts = _listed(any_pair & ~full) + _listed(any_pair & full)
    return BlockMask.from_kv_blocks(*parts, BLOCK, sees, (visible.queries, visible.keys))


def blocks_unless_causal(visible: Visible) -> Any:
    """The BlockMask, or None for the plain causal mask, for which torch has faster kernels."""
    return None if visible.is_causal else blocks(visible)


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Visible) -> Tensor:
    """The `attend` of a Kernel (models/attention.py)."""
    return _run(q, k, v, visible.made)[..., : v.shape[3]]


def attend_with_logsumexp(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> tuple[Tensor, Tensor]:
    """The result (B, H, S, K), and each query's log-sum-exp of logits (B, H, S): -inf for a query that sees no key."""
    from torch.nn.attention.flex_attention import AuxRequest

    width = v.shape[3]
    out, aux = _run(q, k, v, mask, return_aux=AuxRequest(lse=True))
    return out[..., :width], aux.lse


def _run(q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
    """The kernel's result; its heads are as wide as those of v, but at least LEAST_WIDTH."""
    from torch.nn.attention.flex_attention import flex_attention

    uncompiled = q.device.type != "cpu" and not torch.compiler.is_compiling()
    run: Any = _compiled() if uncompiled else flex_attention
    options |= {"block_mask": mask, "scale": q.shape[3] ** -0.5, "enable_gqa": q.shape[1] != k.shape[1]}
    return run(*(F.pad(x, (0, max(0, LEAST_WIDTH - x.shape[3]))) for x in (q, k, v)), **options)


@cache
def _compiled() -> Any:
    """The compiled flex_attention; on a GPU the kernel exists only compiled.

    One kernel is compiled per combination of shape, window and first query's position. A ring of 4 ranks with a window
    needs 12. torch compiles 8 by default, and after that silently materializes all scores in float32.
    """
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.config.recompile_limit = max(256, torch._dynamo.config.recompile_limit)
    return torch.compile(flex_attention, dynamic=False)


def _starts(count: int, device: torch.device) -> Tensor:
    return torch.arange(0, count, BLOCK, device=device)


def _documents(documents_BT: Tensor, starts: Tensor, dim: int) -> Range:
    """The smallest and the largest document of each block: (B, R, 1) for dim -1, (B, 1, C) for dim -2."""
    positions = (starts[:, None] + torch.arange(BLOCK, device=starts.device)).clamp(max=documents_BT.shape[1] - 1)
    low, high = torch.aminmax(documents_BT[:, positions], dim=-1)
    return low.unsqueeze(dim), high.unsqueeze(dim)


def _listed(blocks_BRC: Tensor) -> tuple[Tensor, Tensor]:
    """Per block row: number of set blocks (B, 1, R), and column indices (B, 1, R, C), set ones first."""
    flags = blocks_BRC[:, None].to(torch.int32)
    columns = flags.argsort(dim=-1, descending=True, stable=True)
    return flags.sum(dim=-1, dtype=torch.int32), columns.to(torch.int32)
