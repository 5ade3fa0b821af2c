"""What a checkout of EGNO looks like: names, signatures and blob ids, as facts."""

from __future__ import annotations

from ace_plugins import Checkout

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
    commits={
        "9ee4bf580ffb24b65eccd364a342b42df10df67b": {
            "main_mocap_no.py": "06b23c724ffaa431a6d74b67a9431ae40ec0a428",
            "main_simulation_simple_no.py": "228b633ef875eb7a8a7fb26a1724f5c75026cda7",
            "main_md17_no.py": "1fe62c9938880e6dfa902fe0515ee43bb1795870",
            "main_mdanalysis_no.py": "bf383a4ac80b60d0d548b183d766879f8c511935",
            "model/egno.py": "d2b5c87d31509d1d4605623b2e9559d605765c63",
            "model/basic.py": "e547336ff34903a683ec426b67c00d9c4edbdc06",
        }
    },
)
