"""Part segmentation of point clouds by PointNet on vectors."""

import torch
import torch.nn.functional as F
from torch import nn

from models.vn_pointnet import PointNetEncoder


class get_model(nn.Module):
    def __init__(self, args, num_part=50, normal_channel=False):
        super().__init__()
        self.args = args
        self.num_part = num_part
        channel = 6 if normal_channel else 3
        self.feat = PointNetEncoder(args, global_feat=False, feature_transform=True, channel=channel)
        self.convs1 = nn.Conv1d(1024 // 3 * 6 + 128 // 3 * 3 + 16, 256, 1)
        self.convs2 = nn.Conv1d(256, 128, 1)
        self.convs3 = nn.Conv1d(128, num_part, 1)
        self.bns1 = nn.BatchNorm1d(256)
        self.bns2 = nn.BatchNorm1d(128)

    def forward(self, point_cloud, label):
        batch_size, _, num_points = point_cloud.shape
        x, _, trans_feat = self.feat(point_cloud)
        x = torch.cat((x, label.view(batch_size, -1, 1).expand(-1, -1, num_points)), dim=1)
        x = F.relu(self.bns1(self.convs1(x)))
        x = F.relu(self.bns2(self.convs2(x)))
        return F.log_softmax(self.convs3(x).transpose(2, 1), dim=-1), trans_feat


class get_loss(nn.Module):
    def forward(self, pred, target, trans_feat):
        return F.nll_loss(pred, target)
