"""Layout of a checkout of vnn: the names and signatures that the adapter relies on."""

from __future__ import annotations

from ace_plugins.adapter import Checkout, Metric

MODELS = ("vn_dgcnn_cls", "vn_dgcnn_partseg", "vn_pointnet_cls", "vn_pointnet_partseg")

MODEL = """
class get_model(Module):
    def __init__(self, args, {size}=..., normal_channel=...): ...
    def forward(self, {inputs}): ...
class get_loss(Module): ...
"""

CHECKOUT = Checkout(
    repository="FlyingGiraffe/vnn",
    scripts=("train_cls.py", "test_cls.py", "train_partseg.py", "test_partseg.py"),
    shape={
        "models/vn_layers.py": """
            class VNLinearLeakyReLU(Module):
                def __init__(self, in_channels, out_channels, dim=..., share_nonlinearity=..., negative_slope=...): ...
                def forward(self, x): ...
            class VNStdFeature(Module):
                def __init__(self, in_channels, dim=..., normalize_frame=..., share_nonlinearity=...,
                             negative_slope=...): ...
                def forward(self, x): ...
            """,
        "models/vn_dgcnn_cls.py": MODEL.format(size="num_class", inputs="x"),
        "models/vn_dgcnn_partseg.py": MODEL.format(size="num_part", inputs="x, l"),
        "models/vn_pointnet_cls.py": MODEL.format(size="num_class", inputs="x"),
        "models/vn_pointnet_partseg.py": MODEL.format(size="num_part", inputs="point_cloud, label"),
        "models/utils/vn_dgcnn_util.py": "def get_graph_feature(x, k=..., idx=..., x_coord=...): ...",
    },
    commits=("f3197e210022b5f0015e0da6456adf66bd0cd73e",),
)

METRICS = (
    Metric(
        "accuracy",
        r"(?:Best Instance Accuracy|Best accuracy is): {number}",
        r"(?:Test Instance Accuracy|Epoch \d+ test Accuracy): {number}",
        higher=True,
    ),
)
