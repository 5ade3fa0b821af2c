"""Classification of point clouds by a dynamic graph CNN on vectors."""
# ruff: noqa: F403, F405

import torch
import torch.nn.functional as F
from torch import nn

from models.utils.vn_dgcnn_util import get_graph_feature
from models.vn_layers import *


class get_model(nn.Module):
    def __init__(self, args, num_class=40, normal_channel=False):
        super().__init__()
        self.args = args
        self.n_knn = args.n_knn
        self.conv1 = VNLinearLeakyReLU(2, 64 // 3)
        self.conv2 = VNLinearLeakyReLU(64 // 3 * 2, 64 // 3)
        self.conv3 = VNLinearLeakyReLU(64 // 3 * 2, 128 // 3)
        self.conv4 = VNLinearLeakyReLU(128 // 3 * 2, 256 // 3)
        self.conv5 = VNLinearLeakyReLU(256 // 3 + 128 // 3 + 64 // 3 * 2, 1024 // 3, dim=4, share_nonlinearity=True)
        self.std_feature = VNStdFeature(1024 // 3 * 2, dim=4, normalize_frame=False)
        self.linear1 = nn.Linear(1024 // 3 * 12, 512)
        self.bn1 = nn.BatchNorm1d(512)
        self.dp1 = nn.Dropout(p=0.5)
        self.linear2 = nn.Linear(512, 256)
        self.bn2 = nn.BatchNorm1d(256)
        self.dp2 = nn.Dropout(p=0.5)
        self.linear3 = nn.Linear(256, num_class)
        if args.pooling == "max":
            self.pool1 = VNMaxPool(64 // 3)
            self.pool2 = VNMaxPool(64 // 3)
            self.pool3 = VNMaxPool(128 // 3)
            self.pool4 = VNMaxPool(256 // 3)
        elif args.pooling == "mean":
            self.pool1 = self.pool2 = self.pool3 = self.pool4 = mean_pool

    def forward(self, x):
        batch_size, _, num_points = x.shape
        x = x.unsqueeze(1)
        x1 = self.pool1(self.conv1(get_graph_feature(x, k=self.n_knn)))
        x2 = self.pool2(self.conv2(get_graph_feature(x1, k=self.n_knn)))
        x3 = self.pool3(self.conv3(get_graph_feature(x2, k=self.n_knn)))
        x4 = self.pool4(self.conv4(get_graph_feature(x3, k=self.n_knn)))

        x = self.conv5(torch.cat((x1, x2, x3, x4), dim=1))
        x = torch.cat((x, x.mean(dim=-1, keepdim=True).expand_as(x)), dim=1)
        x, _ = self.std_feature(x)
        x = x.reshape(batch_size, -1, num_points)
        x = torch.cat((x.amax(dim=-1), x.mean(dim=-1)), dim=1)

        x = self.dp1(F.leaky_relu(self.bn1(self.linear1(x)), negative_slope=0.2))
        x = self.dp2(F.leaky_relu(self.bn2(self.linear2(x)), negative_slope=0.2))
        return self.linear3(x), None


class get_loss(nn.Module):
    def forward(self, pred, target, trans_feat, smoothing=True):
        return F.cross_entropy(pred, target, label_smoothing=0.2 if smoothing else 0.0)
