"""PointNet on vectors."""
# ruff: noqa: F403, F405

import torch
from torch import nn

from models.utils.vn_dgcnn_util import get_graph_feature_cross
from models.vn_layers import *


class STNkd(nn.Module):
    """Global features of a cloud: [B, d, 3, N] -> [B, d, 3]."""

    def __init__(self, args, d=64):
        super().__init__()
        self.args = args
        self.conv1 = VNLinearLeakyReLU(d, 64 // 3, dim=4, negative_slope=0.0)
        self.conv2 = VNLinearLeakyReLU(64 // 3, 128 // 3, dim=4, negative_slope=0.0)
        self.conv3 = VNLinearLeakyReLU(128 // 3, 1024 // 3, dim=4, negative_slope=0.0)
        self.fc1 = VNLinearLeakyReLU(1024 // 3, 512 // 3, dim=3, negative_slope=0.0)
        self.fc2 = VNLinearLeakyReLU(512 // 3, 256 // 3, dim=3, negative_slope=0.0)
        if args.pooling == "max":
            self.pool = VNMaxPool(1024 // 3)
        elif args.pooling == "mean":
            self.pool = mean_pool
        self.fc3 = VNLinear(256 // 3, d)
        self.d = d

    def forward(self, x):
        x = self.pool(self.conv3(self.conv2(self.conv1(x))))
        return self.fc3(self.fc2(self.fc1(x)))


class PointNetEncoder(nn.Module):
    """Invariant features of a cloud, or of its points and the cloud."""

    def __init__(self, args, global_feat=True, feature_transform=False, channel=3):
        super().__init__()
        self.args = args
        self.n_knn = args.n_knn
        self.conv_pos = VNLinearLeakyReLU(3, 64 // 3, dim=5, negative_slope=0.0)
        self.conv1 = VNLinearLeakyReLU(64 // 3, 64 // 3, dim=4, negative_slope=0.0)
        self.conv2 = VNLinearLeakyReLU(64 // 3 * 2, 128 // 3, dim=4, negative_slope=0.0)
        self.conv3 = VNLinear(128 // 3, 1024 // 3)
        self.bn3 = VNBatchNorm(1024 // 3, dim=4)
        self.std_feature = VNStdFeature(1024 // 3 * 2, dim=4, normalize_frame=False, negative_slope=0.0)
        if args.pooling == "max":
            self.pool = VNMaxPool(64 // 3)
        elif args.pooling == "mean":
            self.pool = mean_pool
        self.global_feat = global_feat
        self.feature_transform = feature_transform
        if feature_transform:
            self.fstn = STNkd(args, d=64 // 3)

    def forward(self, x):
        batch_size, _, num_points = x.shape
        x = self.conv_pos(get_graph_feature_cross(x.unsqueeze(1), k=self.n_knn))
        x = self.conv1(self.pool(x))
        if self.feature_transform:
            x = torch.cat((x, self.fstn(x).unsqueeze(-1).expand_as(x)), dim=1)
        points = self.conv2(x)

        x = self.bn3(self.conv3(points))
        x = torch.cat((x, x.mean(dim=-1, keepdim=True).expand_as(x)), dim=1)
        x, trans = self.std_feature(x)
        x = x.reshape(batch_size, -1, num_points).amax(dim=-1)
        if self.global_feat:
            return x, trans, None
        points = torch.einsum("bijm,bjkm->bikm", points, trans).reshape(batch_size, -1, num_points)
        return torch.cat((x.unsqueeze(-1).expand(-1, -1, num_points), points), dim=1), trans, None
