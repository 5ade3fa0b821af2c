"""Test a classifier of shapes: python test_cls.py --model vn_dgcnn_cls --rot so3 --log_dir vn_dgcnn/z"""

import argparse
import importlib
import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from data_utils.ModelNetDataLoader import ModelNetDataLoader
from pytorch3d.transforms import Rotate, RotateAxisAngle, random_rotations
from torch.utils.data import DataLoader

BASE_DIR = os.path.dirname(os.path.abspath(__file__))
ROOT_DIR = BASE_DIR
sys.path.append(os.path.join(ROOT_DIR, "models"))


def parse_args():
    models = ["pointnet_cls", "vn_pointnet_cls", "dgcnn_cls", "vn_dgcnn_cls"]
    parser = argparse.ArgumentParser("PointNet and DGCNN on ModelNet40")
    parser.add_argument("--model", default="vn_dgcnn_cls", choices=models)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--gpu", default="0", help="which GPU")
    parser.add_argument("--num_point", type=int, default=1024)
    parser.add_argument("--log_dir", default="vn_dgcnn/aligned", help="folder in log/cls")
    parser.add_argument("--normal", action="store_true", default=False, help="normals as well")
    parser.add_argument("--num_votes", type=int, default=1, help="forward passes for each shape")
    parser.add_argument("--rot", default="so3", choices=["z", "so3"], help="how shapes are turned")
    parser.add_argument("--pooling", default="mean", choices=["mean", "max"])
    parser.add_argument("--n_knn", type=int, default=20, help="neighbours of a point")
    parser.add_argument("--seed", type=int, default=None)
    return parser.parse_args()


def test(model, loader, args, num_class, vote_num):
    """Return the loss, the instance accuracy and the mean class accuracy."""
    loss = 0.0
    right, seen = np.zeros(num_class), np.zeros(num_class)
    classifier = model.eval()
    for points, target in loader:
        target = target[:, 0]
        if args.rot == "z":
            trot = RotateAxisAngle(angle=torch.rand(points.shape[0]) * 360, axis="Z", degrees=True)
        else:
            trot = Rotate(R=random_rotations(points.shape[0]))
        points = trot.transform_points(points)
        points, target = points.transpose(2, 1).cuda(), target.long().cuda()
        vote_pool = torch.zeros(target.size(0), num_class).cuda()
        for _ in range(vote_num):
            pred, _ = classifier(points)
            vote_pool += pred
        pred = vote_pool / vote_num
        loss += F.cross_entropy(pred, target, reduction="sum").item()
        correct = pred.argmax(dim=1).eq(target).cpu().numpy()
        for cat, hit in zip(target.cpu().numpy(), correct, strict=True):
            right[cat] += hit
            seen[cat] += 1
    known = seen > 0
    return loss / seen.sum(), float(right.sum() / seen.sum()), float((right[known] / seen[known]).mean())


def main(args):
    os.environ["CUDA_VISIBLE_DEVICES"] = args.gpu
    if args.seed is not None:
        torch.manual_seed(args.seed)
    experiment_dir = Path("./log/cls") / args.log_dir
    print(args)

    data_path = "data/modelnet40_normal_resampled/"
    test_dataset = ModelNetDataLoader(data_path, args.num_point, split="test", normal_channel=args.normal)
    testDataLoader = DataLoader(test_dataset, batch_size=args.batch_size, shuffle=False, num_workers=0)

    num_class = 40
    MODEL = importlib.import_module(args.model)
    classifier = MODEL.get_model(args, num_class, normal_channel=args.normal).cuda()
    checkpoint = torch.load(str(experiment_dir / "checkpoints" / "best_model.pth"))
    classifier.load_state_dict(checkpoint["model_state_dict"])

    with torch.no_grad():
        loss, instance_acc, class_acc = test(classifier.eval(), testDataLoader, args, num_class, args.num_votes)
    print(f"Test Loss: {loss:.9f}")
    print(f"Test Instance Accuracy: {instance_acc:.9f}, Class Accuracy: {class_acc:.9f}")


if __name__ == "__main__":
    args = parse_args()
    main(args)
