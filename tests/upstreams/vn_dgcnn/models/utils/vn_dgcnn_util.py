"""Graphs of nearest neighbours and their edge features."""

import torch


def knn(x, k):
    """Return the indices [B, N, k] of the k columns of x [B, D, N] nearest to each column, including itself."""
    square = x.square().sum(dim=1, keepdim=True)
    distance = square + square.transpose(2, 1) - 2 * torch.matmul(x.transpose(2, 1), x)
    return distance.topk(k, dim=-1, largest=False)[1]


def centre_and_neighbours(x, k, idx, x_coord):
    """Return neighbours and centres [B, C, 3, N, k] of x [B, C, 3, N], by idx, by distances in x_coord, or in x."""
    batch_size, num_points = x.size(0), x.size(3)
    x = x.reshape(batch_size, -1, num_points)
    if idx is None:
        idx = knn(x if x_coord is None else x_coord.reshape(batch_size, -1, num_points), k)
    device = torch.device("cuda")
    idx_base = torch.arange(0, batch_size, device=device).view(-1, 1, 1) * num_points
    idx = (idx + idx_base).view(-1)

    rows = x.transpose(2, 1).reshape(batch_size * num_points, -1, 3)
    neighbours = rows[idx].view(batch_size, num_points, k, -1, 3)
    centre = rows.view(batch_size, num_points, 1, -1, 3).expand_as(neighbours)
    return centre.permute(0, 3, 4, 1, 2), neighbours.permute(0, 3, 4, 1, 2)


def get_graph_feature(x, k=20, idx=None, x_coord=None):
    """Map x [B, C, 3, N] to [B, 2C, 3, N, k]: neighbour - centre, centre."""
    centre, neighbours = centre_and_neighbours(x, k, idx, x_coord)
    return torch.cat((neighbours - centre, centre), dim=1).contiguous()


def get_graph_feature_cross(x, k=20, idx=None):
    """Map x [B, C, 3, N] to [B, 3C, 3, N, k]: neighbour - centre, centre, neighbour x centre."""
    centre, neighbours = centre_and_neighbours(x, k, idx, None)
    cross = torch.cross(neighbours, centre, dim=2)
    return torch.cat((neighbours - centre, centre, cross), dim=1).contiguous()
