"""What a checkout of vnn looks like: names, signatures and blob ids, as facts."""

from __future__ import annotations

from ace_plugins import Checkout

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
    commits={
        "f3197e210022b5f0015e0da6456adf66bd0cd73e": {
            "train_cls.py": "9a62a1b937b3f29ba63667e5741300d840526386",
            "test_cls.py": "356f33c78a6d36781b91577f972c5cf63ce78a52",
            "train_partseg.py": "2c985beeeadbf17ba08cc0ec76d6deeb78ed7dfc",
            "test_partseg.py": "bdec3ce4fa2fd9cb779027e63e428a9a594a8650",
            "models/vn_layers.py": "a8406333d6ab6b720b8293aca378b3edf07eefcd",
            "models/vn_dgcnn_cls.py": "837cb863d6d0fc8a1398e98747156240691f563e",
            "models/vn_dgcnn_partseg.py": "4ed29893fcf314e643e58a780167b122c30ceb92",
            "models/vn_pointnet_cls.py": "97918275c9d77d098ecacf39e3d8169a08d18ad2",
            "models/vn_pointnet_partseg.py": "11a90f505ce5a6fb370f65caff2e6d3fb57f8ccb",
            "models/utils/vn_dgcnn_util.py": "d0dd8d870606803c55e09e625950690aeb50ae91",
        }
    },
)
