import torch
from e3nn.o3 import Irreps
from torch import nn
from torch_geometric.nn import global_max_pool, global_mean_pool


class InstanceNorm(nn.Module):
    """Normalises every channel over the nodes of its graph. Scalars are centred, others only scaled."""

    def __init__(self, irreps, eps=1e-5, affine=True, reduce="mean", normalization="component"):
        super().__init__()
        if reduce not in ("mean", "max"):
            raise ValueError(f"unknown reduce: {reduce}")
        if normalization not in ("component", "norm"):
            raise ValueError(f"unknown normalization: {normalization}")
        self.irreps = Irreps(irreps)
        self.eps = eps
        self.affine = affine
        self.reduce = reduce
        self.normalization = normalization
        if affine:
            self.weight = nn.Parameter(torch.ones(self.irreps.num_irreps))
            self.bias = nn.Parameter(torch.zeros(self.irreps.count("0e")))
        else:
            self.register_parameter("weight", None)
            self.register_parameter("bias", None)

    def __repr__(self):
        return f"{self.__class__.__name__} ({self.irreps}, eps={self.eps})"

    def forward(self, input, batch):
        pool = global_mean_pool if self.reduce == "mean" else global_max_pool
        outputs = []
        i_weight = i_bias = 0
        for (mul, ir), s in zip(self.irreps, self.irreps.slices(), strict=True):
            field = input[:, s]
            if ir.is_scalar():
                field = field - global_mean_pool(field, batch)[batch]
            field = field.reshape(-1, mul, ir.dim)

            squares = field.pow(2)
            norm = squares.mean(-1) if self.normalization == "component" else squares.sum(-1)
            scale = (pool(norm, batch) + self.eps).rsqrt()[batch]
            if self.affine:
                scale = scale * self.weight[i_weight : i_weight + mul]
                i_weight += mul
            field = (field * scale.unsqueeze(-1)).reshape(-1, mul * ir.dim)

            if self.affine and ir.is_scalar():
                field = field + self.bias[i_bias : i_bias + mul]
                i_bias += mul
            outputs.append(field)
        return torch.cat(outputs, dim=-1)
