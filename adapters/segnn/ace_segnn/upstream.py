"""Layout of a checkout of Steerable-E3-GNN: the names and signatures that the adapter relies on."""

from __future__ import annotations

from ace_plugins.adapter import Checkout, Metric

MODEL = """
class {name}(Module):
    def __init__(self, input_irreps, hidden_irreps, output_irreps, edge_attr_irreps, node_attr_irreps,
                 num_layers, norm=..., pool=..., task=..., additional_message_irreps=...{more}): ...
    def forward(self, graph): ...
class {name}Layer(MessagePassing):
    def __init__(self, input_irreps, hidden_irreps, output_irreps, edge_attr_irreps, node_attr_irreps,
                 norm=..., additional_message_irreps=...{more}): ...
    def forward(self, x, edge_index, edge_attr, node_attr, batch, additional_message_features=...): ...
    def message(self, x_i, x_j, edge_attr, additional_message_features): ...
    def update(self, message, x, node_attr): ...
"""

MODELS = ("models.segnn.segnn:SEGNN", "models.segnn.seconv:SEConv")

CHECKOUT = Checkout(
    repository="RobDHess/Steerable-E3-GNN",
    scripts=("main.py",),
    shape={
        "models/segnn/segnn.py": MODEL.format(name="SEGNN", more=""),
        "models/segnn/seconv.py": MODEL.format(name="SEConv", more=", conv_type=..."),
        "models/segnn/o3_building_blocks.py": """
            class O3TensorProduct(Module):
                def __init__(self, irreps_in1, irreps_out, irreps_in2=..., tp_rescale=...): ...
                def forward(self, data_in1, data_in2=...): ...
            class O3TensorProductSwishGate(O3TensorProduct):
                def __init__(self, irreps_in1, irreps_out, irreps_in2=...): ...
                def forward(self, data_in1, data_in2=...): ...
            class O3SwishGate(Module):
                def __init__(self, irreps_g_scalars, irreps_g_gate, irreps_g_gated): ...
                def forward(self, data_in): ...
            """,
        "nbody/train_nbody.py": "def train(gpu, model, args): ...",
        "qm9/train.py": "def train(gpu, model, args): ...",
    },
    commits=("1b95898f6f18204b510ae127d7f38cd29f610f4d",),
)

METRICS = (
    # The N-body script prints every evaluation and the best so far; the QM9 script every validation, and a final test.
    Metric(
        "test",
        r"(?:Best Test Loss: |TEST: epoch:.*-MAE:){number}",
        r"(?:==> test epoch \d+ avg loss: |TEST: epoch:.*-MAE:){number}",
    ),
    Metric(
        "validation",
        r"(?:Best Val Loss: |VALIDATION: epoch:.*-MAE:){number}",
        r"(?:==> val epoch \d+ avg loss: |VALIDATION: epoch:.*-MAE:){number}",
    ),
)
