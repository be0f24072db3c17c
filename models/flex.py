"""Attention by torch's FlexAttention (arXiv:2412.05496): of blocks of 128 queries and 128 keys only some are computed.

No tensor of all pairs of queries and keys is made. On a CPU it has no backward.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from models.visible import Visible

BLOCK = 128
LEAST_WIDTH = 16
"""Width of a head: torch's kernel on a GPU takes no less. Narrower heads are padded with zeros, which add nothing."""
Range = tuple[Tensor, Tensor]
"""First and last of a block, or smallest and largest; of blocks of queries (.., R, 1), of keys (.., 1, C)."""


def blocks(visible: Visible) -> Any:
    """torch's BlockMask: which blocks of keys a block of queries sees in part, and which as a whole."""
    from torch.nn.attention.flex_attention import BlockMask  # 1 s to import

    before, documents_BT, window = visible.before, visible.documents_BT, visible.window
    own_BS = visible.query_documents_BS

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        place = query + before
        seen = place >= key
        if window is not None:
            seen = seen & (place - key < window)
        if documents_BT is not None and own_BS is not None:
            seen = seen & (own_BS[row, query] == documents_BT[row, key])
        return seen

    rows, columns = (_starts(count, visible.device) for count in (visible.queries, visible.keys))
    row = rows[:, None] + before, (rows[:, None] + BLOCK).clamp(max=visible.queries) - 1 + before
    column = columns[None], (columns[None] + BLOCK).clamp(max=visible.keys) - 1
    some, all_ = row[1] >= column[0], row[0] >= column[1]
    if window is not None:
        some, all_ = some & (row[0] - column[1] < window), all_ & (row[1] - column[0] < window)
    some, all_ = some[None], all_[None]
    if documents_BT is not None and own_BS is not None:
        low, high = _documents(own_BS, rows, -1)
        other_low, other_high = _documents(documents_BT, columns, -2)
        some = some & (low <= other_high) & (other_low <= high)
        all_ = all_ & (low == high) & (other_low == other_high) & (low == other_low)
    # A block that is cut off at the end is never whole.
    whole = (rows + BLOCK <= visible.queries)[:, None] & (columns + BLOCK <= visible.keys)
    parts = _listed(some & ~(all_ & whole)) + _listed(some & all_ & whole)
    return BlockMask.from_kv_blocks(*parts, BLOCK, sees, (visible.queries, visible.keys))


def blocks_unless_causal(visible: Visible) -> Any:
    """None for the plain causal mask, for which torch has faster kernels."""
    return None if visible.is_causal else blocks(visible)


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Visible) -> Tensor:
    """A kernel of models/attention.py."""
    return _run(q, k, v, visible.made)[..., : v.shape[3]]


def attend_with_logsumexp(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> tuple[Tensor, Tensor]:
    """The result, and (B, H, S) the log-sum-exp of each query's logits: -inf for a query that sees no key."""
    from torch.nn.attention.flex_attention import AuxRequest

    width = v.shape[3]
    out, more = _run(q, k, v, mask, return_aux=AuxRequest(lse=True))
    return out[..., :width], more.lse


def _run(q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
    """The kernel's result, whose heads are as wide as those of v or LEAST_WIDTH."""
    from torch.nn.attention.flex_attention import flex_attention

    alone = q.device.type != "cpu" and not torch.compiler.is_compiling()
    run: Any = _compiled() if alone else flex_attention
    options |= {"block_mask": mask, "scale": q.shape[3] ** -0.5, "enable_gqa": q.shape[1] != k.shape[1]}
    return run(*(F.pad(x, (0, max(0, LEAST_WIDTH - x.shape[3]))) for x in (q, k, v)), **options)


@cache
def _compiled() -> Any:
    """On a GPU the kernel exists only compiled.

    Each shape, window and place of the first query has a kernel of its own: with a window a ring of 4 ranks takes 12.
    After 8 torch would compute whole scores in float32 without a word.
    """
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.config.recompile_limit = max(256, torch._dynamo.config.recompile_limit)
    return torch.compile(flex_attention, dynamic=False)


def _starts(count: int, device: torch.device) -> Tensor:
    return torch.arange(0, count, BLOCK, device=device)


def _documents(documents_BT: Tensor, starts: Tensor, dim: int) -> Range:
    """The smallest and the largest document of each block, (B, R, 1) for dim -1 or (B, 1, C) for dim -2."""
    places = (starts[:, None] + torch.arange(BLOCK, device=starts.device)).clamp(max=documents_BT.shape[1] - 1)
    low, high = torch.aminmax(documents_BT[:, places], dim=-1)
    return low.unsqueeze(dim), high.unsqueeze(dim)


def _listed(blocks_BRC: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row of blocks: how many there are, (B, 1, R), and their numbers before all others, (B, 1, R, C)."""
    flags = blocks_BRC[:, None].to(torch.int32)
    numbers = flags.argsort(dim=-1, descending=True, stable=True)
    return flags.sum(dim=-1, dtype=torch.int32), numbers.to(torch.int32)
