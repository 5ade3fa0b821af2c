"""Train a segmentation into parts: python train_partseg.py --model vn_dgcnn_partseg --rot z --log_dir vn_dgcnn/z"""

import argparse
import importlib
import os
import random
import sys
from pathlib import Path

import numpy as np
import torch
from pytorch3d.transforms import Rotate, RotateAxisAngle, random_rotations

BASE_DIR = os.path.dirname(os.path.abspath(__file__))
ROOT_DIR = BASE_DIR
sys.path.append(os.path.join(ROOT_DIR, "models"))

STEPS = 2
"""Batches per epoch."""


def parse_args():
    parser = argparse.ArgumentParser("PointNet and DGCNN on ShapeNet parts")
    parser.add_argument("--model", default="vn_dgcnn_partseg", choices=["vn_dgcnn_partseg", "vn_pointnet_partseg"])
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--epoch", type=int, default=2)
    parser.add_argument("--learning_rate", type=float, default=0.001, help="a hundred times that with SGD")
    parser.add_argument("--decay_rate", type=float, default=1e-4, help="weight decay of Adam")
    parser.add_argument("--optimizer", default="SGD", choices=["SGD", "Adam"])
    parser.add_argument("--gpu", default="0", help="which GPU")
    parser.add_argument("--npoint", type=int, default=64)
    parser.add_argument("--log_dir", default="vn_dgcnn/aligned", help="folder in log/partseg")
    parser.add_argument("--normal", action="store_true", default=False)
    parser.add_argument("--rot", default="aligned", choices=["aligned", "z", "so3"], help="how shapes are turned")
    parser.add_argument("--pooling", default="mean", choices=["mean", "max"])
    parser.add_argument("--n_knn", type=int, default=5, help="neighbours of a point")
    parser.add_argument("--seed", type=int, default=None)
    return parser.parse_args()


def batch(args):
    """Return random clouds [B, N, 3], one-hot categories [B, 1, 16], and parts [B, N]: the octant of each point."""
    points = torch.randn(args.batch_size, args.npoint, 3)
    label = torch.eye(16)[torch.randint(16, (args.batch_size, 1))]
    return points, label, ((points > 0) * torch.tensor([1, 2, 4])).sum(dim=-1)


def main(args):
    os.environ["CUDA_VISIBLE_DEVICES"] = args.gpu
    if args.seed is not None:
        random.seed(args.seed)
        np.random.seed(args.seed)
        torch.manual_seed(args.seed)
    checkpoints_dir = Path("./log/partseg") / args.log_dir / "checkpoints"
    checkpoints_dir.mkdir(parents=True, exist_ok=True)
    print(args)

    num_part = 50
    MODEL = importlib.import_module(args.model)
    classifier = MODEL.get_model(args, num_part, normal_channel=args.normal).cuda()
    criterion = MODEL.get_loss().cuda()
    if args.optimizer == "SGD":
        optimizer = torch.optim.SGD(classifier.parameters(), lr=args.learning_rate * 100, momentum=0.9)
    else:
        optimizer = torch.optim.Adam(classifier.parameters(), lr=args.learning_rate, weight_decay=args.decay_rate)

    for epoch in range(args.epoch):
        losses, correct = [], []
        for _ in range(STEPS):
            points, label, target = batch(args)
            if args.rot == "z":
                trot = RotateAxisAngle(angle=torch.rand(points.shape[0]) * 360, axis="Z", degrees=True)
                points = trot.transform_points(points)
            elif args.rot == "so3":
                points = Rotate(R=random_rotations(points.shape[0])).transform_points(points)
            points, label, target = points.transpose(2, 1).cuda(), label.cuda(), target.view(-1).cuda()
            optimizer.zero_grad()
            classifier = classifier.train()
            seg_pred, trans_feat = classifier(points, label)
            seg_pred = seg_pred.reshape(-1, num_part)
            loss = criterion(seg_pred, target, trans_feat)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            correct.append(seg_pred.data.argmax(dim=1).eq(target).float().mean().item())
        print(f"Epoch {epoch + 1}/{args.epoch}: Train loss: {np.mean(losses):.9f}, accuracy: {np.mean(correct):.9f}")

    state = {
        "epoch": args.epoch,
        "model_state_dict": classifier.state_dict(),
        "optimizer_state_dict": optimizer.state_dict(),
    }
    torch.save(state, str(checkpoints_dir / "best_model.pth"))


if __name__ == "__main__":
    args = parse_args()
    main(args)
