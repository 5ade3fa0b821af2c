"""Layout of a checkout of EGNO: the names and signatures that the adapter relies on."""

from __future__ import annotations

from ace_plugins.adapter import Checkout

CHECKOUT = Checkout(
    repository="MinkaiXu/EGNO",
    scripts=("main_mocap_no.py", "main_simulation_simple_no.py", "main_md17_no.py", "main_mdanalysis_no.py"),
    shape={
        "model/egno.py": """
            class EGNO(EGNN):
                def __init__(self, n_layers, in_node_nf, in_edge_nf, hidden_nf, activation=..., device=..., with_v=...,
                             flat=..., norm=..., use_time_conv=..., num_modes=..., num_timesteps=..., time_emb_dim=...):
                    ...
                def forward(self, x, h, edge_index, edge_fea, v=..., loc_mean=...): ...
            """,
        "model/basic.py": """
            class EGNN_Layer(Module):
                def __init__(self, in_edge_nf, hidden_nf, activation=..., with_v=..., flat=..., norm=...,
                             h_update=...): ...
                def forward(self, x, h, edge_index, edge_fea, v=...): ...
            class EGNN(Module):
                def __init__(self, n_layers, in_node_nf, in_edge_nf, hidden_nf, activation=..., device=..., with_v=...,
                             flat=..., norm=...): ...
                def forward(self, x, h, edge_index, edge_fea, v=...): ...
            """,
    },
    commits=("9ee4bf580ffb24b65eccd364a342b42df10df67b",),
)
