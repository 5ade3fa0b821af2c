import torch
from torch import nn

from model.basic import EGNN
from model.layer_no import TimeConv, TimeConv_x, get_timestep_embedding


class EGNO(EGNN):
    """Equivariant graph neural operator: maps a state of a graph to its states at num_timesteps later times."""

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
        use_time_conv=True,
        num_modes=2,
        num_timesteps=8,
        time_emb_dim=32,
    ):
        self.time_emb_dim = time_emb_dim
        super().__init__(
            n_layers, in_node_nf + time_emb_dim, in_edge_nf, hidden_nf, activation, device, with_v, flat, norm
        )
        self.use_time_conv = use_time_conv
        self.num_timesteps = num_timesteps
        self.device = device
        self.hidden_nf = hidden_nf
        if use_time_conv:
            self.time_conv_modules = nn.ModuleList(
                TimeConv(hidden_nf, hidden_nf, num_modes, activation, with_nin=False) for _ in range(n_layers)
            )
            self.time_conv_x_modules = nn.ModuleList(
                TimeConv_x(2, 2, num_modes, activation, with_nin=False) for _ in range(n_layers)
            )
        self.to(device)

    def forward(self, x, h, edge_index, edge_fea, v=None, loc_mean=None):
        """Return outputs [T * N, ...], ordered by time step."""
        times, n_nodes = self.num_timesteps, len(h)

        time_emb = get_timestep_embedding(torch.arange(times, device=x.device), self.time_emb_dim).to(h)
        h = torch.cat((h.repeat(times, 1), time_emb.repeat_interleave(n_nodes, dim=0)), dim=-1)
        h = self.embedding(h)

        x, edge_fea = x.repeat(times, 1), edge_fea.repeat(times, 1)
        v = None if v is None else v.repeat(times, 1)
        loc_mean = None if loc_mean is None else loc_mean.repeat(times, 1)
        offsets = n_nodes * torch.arange(times, device=x.device).unsqueeze(1)
        edge_index = [(offsets + ends).reshape(-1) for ends in (edge_index[0], edge_index[1])]

        for i in range(self.n_layers):
            if self.use_time_conv:
                h = self.time_conv_modules[i](h.view(times, n_nodes, -1)).view(times * n_nodes, -1)
                state = torch.stack((x - loc_mean, v), dim=-1).view(times, n_nodes, 3, 2)
                x, v = self.time_conv_x_modules[i](state).view(times * n_nodes, 3, 2).unbind(dim=-1)
                x = x + loc_mean
            x, v, h = self.layers[i](x, h, edge_index, edge_fea, v=v)
        return x, v, h
