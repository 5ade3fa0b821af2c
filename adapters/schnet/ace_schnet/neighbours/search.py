"""Exact, batched neighbour search within a cutoff.

Two atoms are neighbours if ``((pos_i - pos_j) ** 2).sum() <= cutoff ** 2`` in the dtype of ``pos``. Differences from
``torch_cluster.radius_graph``: pairs exactly at the cutoff are included (SchNet gives them zero weight), and of more
than ``max_num_neighbors`` neighbours the nearest are kept instead of an arbitrary subset.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Up to this many pairs per atom (molecules of about 64 atoms) or in total (one of 256 atoms), all pairs of each graph
# are tested. That is linear in the number of atoms too, and takes fewer operations than cells.
DENSE_PER_ATOM = 64
DENSE_TOTAL = 1 << 16


@torch.no_grad()
def radius_graph(
    pos: Tensor,
    cutoff: float,
    batch: Tensor | None = None,
    *,
    max_num_neighbors: int | None = None,
    loop: bool = False,
) -> Tensor:
    """Find all pairs of atoms of the same graph that are at most ``cutoff`` apart.

    Memory is linear in the number of atoms and of pairs within the cutoff.

    Args:
        pos: Positions, [N, 3].
        cutoff: Largest distance of neighbours, in the unit of ``pos``.
        batch: Graph of each atom, [N], in any order. None means one graph.
        max_num_neighbors: Keep at most this many neighbours of each atom, the nearest ones; ties go to the lower index.
        loop: Make each atom a neighbour of itself, counted like any other.

    Returns:
        Edges [2, E], sorted by (target, source). Row 0 has the sources (neighbours), row 1 the targets (centres). Each
        pair is listed in both directions.

    Raises:
        ValueError: The arguments are invalid or do not fit together.
    """
    _check_limits(cutoff, max_num_neighbors)
    _check_tensors(pos, cutoff, batch)
    n = pos.shape[0]
    if n == 0:
        return torch.empty((2, 0), dtype=torch.long, device=pos.device)
    if batch is None:
        batch = torch.zeros(n, dtype=torch.long, device=pos.device)
    # Renumber the graphs, so that keys made of them stay small.
    _, graph, sizes = torch.unique(batch, return_inverse=True, return_counts=True)
    if int(sizes.square().sum()) <= max(DENSE_PER_ATOM * n, DENSE_TOTAL):
        source, target = _dense(pos, cutoff, graph, sizes)
    else:
        source, target = _cells(pos, cutoff, graph)
    key = target * n + source
    if loop:
        key = torch.cat([key, torch.arange(n, device=pos.device) * (n + 1)])
    if not bool((key[1:] > key[:-1]).all()):  # a dense search of a sorted batch is sorted already
        key = key.sort().values
    edges = torch.stack([key % n, key // n])
    return edges if max_num_neighbors is None else _nearest(pos, edges, max_num_neighbors)


class RadiusGraph(torch.nn.Module):
    """Neighbour search for ``SchNet(interaction_graph=RadiusGraph(cutoff))``.

    Returns edges [2, E] and their lengths [E], differentiable in ``pos``. The length between coincident atoms has zero
    gradients of every order, where a plain square root would give nan.
    """

    def __init__(self, cutoff: float = 10.0, max_num_neighbors: int | None = None) -> None:
        super().__init__()
        _check_limits(cutoff, max_num_neighbors)
        self.cutoff = cutoff
        self.max_num_neighbors = max_num_neighbors

    def forward(self, pos: Tensor, batch: Tensor | None = None) -> tuple[Tensor, Tensor]:
        edges = radius_graph(pos, self.cutoff, batch, max_num_neighbors=self.max_num_neighbors)
        squared = _square_distances(pos, edges[0], edges[1])
        zero = squared == 0
        return edges, squared.masked_fill(zero, 1.0).sqrt().masked_fill(zero, 0.0)

    def extra_repr(self) -> str:
        return f"cutoff={self.cutoff}, max_num_neighbors={self.max_num_neighbors}"


def _square_distances(pos: Tensor, source: Tensor, target: Tensor) -> Tensor:
    return (pos.index_select(0, source) - pos.index_select(0, target)).square().sum(-1)


def _within(pos: Tensor, cutoff: float, centre: Tensor, first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Return sources and targets of the pairs of centre[k] with first[k], ..., last[k] - 1 within the cutoff."""
    count = last - first
    target = centre.repeat_interleave(count)
    shift = (last - count.cumsum(0)).repeat_interleave(count)
    source = shift + torch.arange(target.shape[0], device=pos.device)
    limit = torch.full((), cutoff**2, dtype=pos.dtype, device=pos.device)
    near = (_square_distances(pos, source, target) <= limit) & (source != target)
    return source[near], target[near]


def _dense(pos: Tensor, cutoff: float, graph: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Test all pairs within each graph."""
    order = graph.argsort(stable=True)
    end = sizes.cumsum(0)
    first, last = (end - sizes).repeat_interleave(sizes), end.repeat_interleave(sizes)
    centre = torch.arange(order.shape[0], device=pos.device)
    source, target = _within(pos[order], cutoff, centre, first, last)
    return order[source], order[target]


def _cells(pos: Tensor, cutoff: float, graph: Tensor) -> tuple[Tensor, Tensor]:
    """Test each atom against the atoms of the 3 x 3 columns (in x and y) around it that are near in z.

    Linear time: cut the columns into cells as high as they are wide. One iteration tests an atom against at most three
    cells, and n_a n_b <= (n_a^2 + n_b^2) / 2, so it tests at most three times the sum of n^2 over the cells. Of the n
    atoms of a cell, those in the same one of its 8 subcells of half the side are within the cutoff (the diagonal is
    0.87 of a side); by the pigeonhole principle these are at least n^2 / 8 ordered pairs, each an edge or an atom with
    itself. So one iteration tests at most 24 (edges + atoms) pairs, and keeps only edges.

    Exact: a pair that passes the rounded test is less than `reach` apart on every axis. Rounding is monotone, and so
    is x -> floor(x / side), so x_i - reach <= x_j implies cell(x_i - reach) <= cell(x_j) as computed, however large x
    is; likewise above, and in z. Therefore columns are looked up from x -+ reach: adding -1, 0 and 1 to the cell of x
    would lose pairs where x / side is rounded by as much as a cell.
    """
    n = pos.shape[0]
    reach = cutoff * (1 + 8 * torch.finfo(pos.dtype).eps)  # the error of the rounded test is below 2.5 eps
    side = 1.01 * reach  # wider than reach, or atoms near a border would often reach four columns instead of three
    # Half precision is exact in float32, with finer cells. Cells stay floats, since integers could overflow.
    x, y, z = (pos.float() if pos.dtype.itemsize < 4 else pos).t().contiguous()

    def cells(at: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
        """Return the rank of each atom's cell among the occupied ones, the ranks in reach and the number of ranks."""
        occupied, rank = torch.unique((at / side).floor(), return_inverse=True)
        low = torch.searchsorted(occupied, ((at - reach) / side).floor())
        high = torch.searchsorted(occupied, ((at + reach) / side).floor(), right=True)
        return rank, low, high, occupied.shape[0]

    x_rank, x_low, x_high, x_size = cells(x)
    y_rank, y_low, y_high, y_size = cells(y)
    z_sorted, z_order = z.sort()
    z_rank = z_order.argsort()
    z_low = torch.searchsorted(z_sorted, z - reach)
    z_high = torch.searchsorted(z_sorted, z + reach, right=True)

    # Keys combine two numbers at a time and are renumbered in between, so that none exceeds about n^2.
    slabs, slab = torch.unique(graph * x_size + x_rank, return_inverse=True)
    columns, column = torch.unique(slab * y_size + y_rank, return_inverse=True)
    keys, order = (column * n + z_rank).sort()

    # From here on atoms are in the order of their keys, and each is tested against later ones only.
    pos, graph, z_low, z_high = pos[order], graph[order], z_low[order], z_high[order]
    x_low, x_high, y_low, y_high = x_low[order], x_high[order], y_low[order], y_high[order]
    later = torch.arange(1, n + 1, device=pos.device)
    found: list[tuple[Tensor, Tensor]] = []
    for dx in range(int((x_high - x_low).max())):
        slab, in_slab = _lookup(slabs, graph * x_size + x_low + dx, x_low + dx < x_high)
        for dy in range(int((y_high - y_low).max())):
            column, there = _lookup(columns, slab * y_size + y_low + dy, in_slab & (y_low + dy < y_high))
            first = torch.searchsorted(keys, column * n + z_low).maximum(later)
            last = torch.searchsorted(keys, column * n + z_high)
            centre = (there & (last > first)).nonzero().squeeze(1)
            found.append(_within(pos, cutoff, centre, first[centre], last[centre]))
    one, other = (order[torch.cat(ends)] for ends in zip(*found, strict=True))
    return torch.cat([one, other]), torch.cat([other, one])


def _lookup(table: Tensor, key: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Return the place of each key in a sorted table, and whether the key is valid and present."""
    at = torch.searchsorted(table, key).clamp_(max=table.shape[0] - 1)
    return at, valid & (table[at] == key)


def _nearest(pos: Tensor, edges: Tensor, most: int) -> Tensor:
    """Keep the ``most`` nearest sources of each target. The edges are sorted by (target, source)."""
    source, target = edges.unbind(0)
    start = torch.searchsorted(target.contiguous(), torch.arange(pos.shape[0], device=pos.device))
    by_distance = _square_distances(pos, source, target).argsort(stable=True)  # stable: ties stay ordered by source
    order = by_distance[target[by_distance].argsort(stable=True)]  # by target again, nearest first
    place = torch.arange(order.shape[0], device=pos.device) - start[target]
    return edges[:, order[place < most].sort().values]


def _check_limits(cutoff: float, max_num_neighbors: int | None) -> None:
    if not (math.isfinite(cutoff) and cutoff > 0):
        raise ValueError(f"cutoff: expected a positive finite number, found {cutoff}")
    if max_num_neighbors is not None and max_num_neighbors < 1:
        raise ValueError(f"max_num_neighbors: expected None or at least 1, found {max_num_neighbors}")


def _check_tensors(pos: Tensor, cutoff: float, batch: Tensor | None) -> None:
    if pos.dim() != 2 or pos.shape[1] != 3:
        raise ValueError(f"pos: expected shape [N, 3], found {list(pos.shape)}")
    if not pos.dtype.is_floating_point:
        raise ValueError(f"pos: expected a floating-point dtype, found {pos.dtype}")
    range_ = torch.finfo(pos.dtype)
    if not range_.tiny <= cutoff * cutoff <= range_.max:
        raise ValueError(f"cutoff: expected a square within the range of {pos.dtype}, found cutoff {cutoff}")
    if not bool(pos.isfinite().all()):
        atom = int((~pos.isfinite()).any(1).nonzero()[0])
        raise ValueError(f"pos: expected finite coordinates, found {pos[atom].tolist()} at atom {atom}")
    if batch is None:
        return
    if batch.dtype == torch.bool or batch.dtype.is_floating_point or batch.dtype.is_complex:
        raise ValueError(f"batch: expected an integer dtype, found {batch.dtype}")
    if batch.shape != pos.shape[:1]:
        raise ValueError(f"batch: expected shape [{pos.shape[0]}], as pos, found {list(batch.shape)}")
    if batch.device != pos.device:
        raise ValueError(f"batch: expected a tensor on {pos.device}, the device of pos, found {batch.device}")
    if batch.numel() and batch.min() < 0:
        raise ValueError(f"batch: expected graph ids of at least 0, found {int(batch.min())}")
