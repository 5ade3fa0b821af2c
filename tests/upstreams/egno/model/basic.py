import torch
from torch import nn


def aggregate(message, row_index, n_node, aggr="sum", mask=None):
    """Sum or average messages [E, C] at the nodes given by row: [n_node, C]."""
    weight = message.new_ones(len(message), 1) if mask is None else mask.to(message).reshape(-1, 1)
    total = message.new_zeros(n_node, message.shape[1]).index_add(0, row_index, message * weight)
    if aggr == "sum":
        return total
    if aggr == "mean":
        count = message.new_zeros(n_node, 1).index_add(0, row_index, weight)
        return total / count.clamp(min=1)
    raise ValueError(f"unknown aggregation: {aggr}")


class BaseMLP(nn.Module):
    """Two linear layers with an activation between them."""

    def __init__(self, input_dim, hidden_dim, output_dim, activation, residual=False, last_act=False, flat=False):
        super().__init__()
        if residual and input_dim != output_dim:
            raise ValueError("a residual needs an output as wide as the input")
        if flat:
            activation, hidden_dim = nn.Tanh(), 4 * hidden_dim
        self.residual = residual
        modules = [nn.Linear(input_dim, hidden_dim), activation, nn.Linear(hidden_dim, output_dim)]
        if last_act:
            modules.append(activation)
        self.mlp = nn.Sequential(*modules)

    def forward(self, x):
        out = self.mlp(x)
        return x + out if self.residual else out


class InvariantScalarNet(nn.Module):
    """An MLP of the inner products of some vectors, and of scalars."""

    def __init__(
        self,
        n_vector_input,
        hidden_dim,
        output_dim,
        activation,
        n_scalar_input=0,
        norm=True,
        last_act=False,
        flat=False,
    ):
        super().__init__()
        self.norm = norm
        self.scalar_net = BaseMLP(
            n_vector_input**2 + n_scalar_input, hidden_dim, output_dim, activation, last_act=last_act, flat=flat
        )

    def forward(self, vectors, scalars=None):
        stacked = torch.stack(vectors, dim=1)  # [N, vectors, 3]
        gram = (stacked @ stacked.transpose(1, 2)).flatten(1)
        if self.norm:
            gram = nn.functional.normalize(gram, dim=-1)
        return self.scalar_net(gram if scalars is None else torch.cat((gram, scalars), dim=-1))


class EGNN_Layer(nn.Module):
    """Message passing layer that moves nodes and updates features."""

    def __init__(
        self,
        in_edge_nf,
        hidden_nf,
        activation=nn.SiLU(),  # noqa: B008
        with_v=False,
        flat=False,
        norm=False,
        h_update=True,
    ):
        super().__init__()
        self.with_v = with_v
        self.h_update = h_update
        self.edge_message_net = InvariantScalarNet(
            n_vector_input=1,
            hidden_dim=hidden_nf,
            output_dim=hidden_nf,
            activation=activation,
            n_scalar_input=2 * hidden_nf + in_edge_nf,
            norm=norm,
            last_act=True,
            flat=flat,
        )
        self.coord_net = BaseMLP(hidden_nf, hidden_nf, 1, activation, flat=flat)
        self.node_v_net = BaseMLP(hidden_nf, hidden_nf, 1, activation, flat=flat) if with_v else None
        self.node_net = BaseMLP(2 * hidden_nf, hidden_nf, hidden_nf, activation, flat=flat)

    def forward(self, x, h, edge_index, edge_fea, v=None):
        row, col = edge_index[0], edge_index[1]
        between = x[row] - x[col]
        message = self.edge_message_net([between], torch.cat((h[row], h[col], edge_fea), dim=-1))

        force = aggregate(between * self.coord_net(message), row, len(x), aggr="mean")
        x = x + force.clamp(-100, 100)
        if v is not None:
            x = x + self.node_v_net(h) * v

        if self.h_update:
            h = self.node_net(torch.cat((h, aggregate(message, row, len(h))), dim=-1))
        return x, v, h


class EGNN(nn.Module):
    """E(n) equivariant graph network: positions x [N, 3], features h, velocities v (or none)."""

    def __init__(
        self,
        n_layers,
        in_node_nf,
        in_edge_nf,
        hidden_nf,
        activation=nn.SiLU(),  # noqa: B008
        device="cpu",
        with_v=False,
        flat=False,
        norm=False,
    ):
        super().__init__()
        self.n_layers = n_layers
        self.layers = nn.ModuleList(
            EGNN_Layer(in_edge_nf, hidden_nf, activation=activation, with_v=with_v, flat=flat, norm=norm)
            for _ in range(n_layers)
        )
        self.embedding = nn.Linear(in_node_nf, hidden_nf)
        self.to(device)

    def forward(self, x, h, edge_index, edge_fea, v=None):
        h = self.embedding(h)
        for layer in self.layers:
            x, v, h = layer(x, h, edge_index, edge_fea, v=v)
        return x, v, h
