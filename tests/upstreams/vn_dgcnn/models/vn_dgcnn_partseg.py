"""Part segmentation of point clouds by a dynamic graph CNN on vectors."""
# ruff: noqa: F403, F405

import torch
import torch.nn.functional as F
from torch import nn

from models.utils.vn_dgcnn_util import get_graph_feature
from models.vn_layers import *


def pointwise(in_channels, out_channels, norm):
    return nn.Sequential(nn.Conv1d(in_channels, out_channels, 1, bias=False), norm, nn.LeakyReLU(0.2))


class get_model(nn.Module):
    def __init__(self, args, num_part=50, normal_channel=False):
        super().__init__()
        self.args = args
        self.n_knn = args.n_knn
        self.bn7 = nn.BatchNorm1d(64)
        self.bn8 = nn.BatchNorm1d(256)
        self.bn9 = nn.BatchNorm1d(256)
        self.bn10 = nn.BatchNorm1d(128)
        self.conv1 = VNLinearLeakyReLU(2, 64 // 3)
        self.conv2 = VNLinearLeakyReLU(64 // 3, 64 // 3)
        self.conv3 = VNLinearLeakyReLU(64 // 3 * 2, 64 // 3)
        self.conv4 = VNLinearLeakyReLU(64 // 3, 64 // 3)
        self.conv5 = VNLinearLeakyReLU(64 // 3 * 2, 64 // 3)
        if args.pooling == "max":
            self.pool1 = VNMaxPool(64 // 3)
            self.pool2 = VNMaxPool(64 // 3)
            self.pool3 = VNMaxPool(64 // 3)
        elif args.pooling == "mean":
            self.pool1 = self.pool2 = self.pool3 = mean_pool
        self.conv6 = VNLinearLeakyReLU(64 // 3 * 3, 1024 // 3, dim=4, share_nonlinearity=True)
        self.std_feature = VNStdFeature(1024 // 3 * 2, dim=4, normalize_frame=False)
        self.conv8 = pointwise(2299, 256, self.bn8)
        self.conv7 = pointwise(16, 64, self.bn7)
        self.dp1 = nn.Dropout(p=0.5)
        self.conv9 = pointwise(256, 256, self.bn9)
        self.dp2 = nn.Dropout(p=0.5)
        self.conv10 = pointwise(256, 128, self.bn10)
        self.conv11 = nn.Conv1d(128, num_part, 1, bias=False)

    def forward(self, x, l):  # noqa: E741
        batch_size, _, num_points = x.shape
        x = x.unsqueeze(1)
        x1 = self.pool1(self.conv2(self.conv1(get_graph_feature(x, k=self.n_knn))))
        x2 = self.pool2(self.conv4(self.conv3(get_graph_feature(x1, k=self.n_knn))))
        x3 = self.pool3(self.conv5(get_graph_feature(x2, k=self.n_knn)))
        x123 = torch.cat((x1, x2, x3), dim=1)

        x = self.conv6(x123)
        x = torch.cat((x, x.mean(dim=-1, keepdim=True).expand_as(x)), dim=1)
        x, z0 = self.std_feature(x)
        local = torch.einsum("bijm,bjkm->bikm", x123, z0).reshape(batch_size, -1, num_points)
        whole = x.reshape(batch_size, -1, num_points).amax(dim=-1, keepdim=True)
        whole = torch.cat((whole, self.conv7(l.view(batch_size, -1, 1))), dim=1)

        x = torch.cat((whole.expand(-1, -1, num_points), local), dim=1)
        x = self.dp1(self.conv8(x))
        x = self.dp2(self.conv9(x))
        x = self.conv11(self.conv10(x))
        return x.transpose(2, 1), None


class get_loss(nn.Module):
    def forward(self, pred, target, trans_feat, smoothing=True):
        return F.cross_entropy(pred, target, label_smoothing=0.2 if smoothing else 0.0)
