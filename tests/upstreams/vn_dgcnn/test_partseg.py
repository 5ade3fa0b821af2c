"""Test a segmentation into parts: python test_partseg.py --model vn_dgcnn_partseg --rot so3 --log_dir vn_dgcnn/z"""

import argparse
import importlib
import os
import sys
from pathlib import Path

import torch
from pytorch3d.transforms import Rotate, RotateAxisAngle, random_rotations

BASE_DIR = os.path.dirname(os.path.abspath(__file__))
ROOT_DIR = BASE_DIR
sys.path.append(os.path.join(ROOT_DIR, "models"))


def parse_args():
    parser = argparse.ArgumentParser("PointNet and DGCNN on ShapeNet parts")
    parser.add_argument("--model", default="vn_dgcnn_partseg", choices=["vn_dgcnn_partseg", "vn_pointnet_partseg"])
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--gpu", default="0", help="which GPU")
    parser.add_argument("--num_point", type=int, default=64)
    parser.add_argument("--log_dir", default="vn_dgcnn/aligned", help="folder in log/partseg")
    parser.add_argument("--normal", action="store_true", default=False)
    parser.add_argument("--num_votes", type=int, default=1, help="forward passes for each shape")
    parser.add_argument("--rot", default="so3", choices=["z", "so3"], help="how shapes are turned")
    parser.add_argument("--pooling", default="mean", choices=["mean", "max"])
    parser.add_argument("--n_knn", type=int, default=5, help="neighbours of a point")
    parser.add_argument("--seed", type=int, default=None)
    return parser.parse_args()


def main(args):
    os.environ["CUDA_VISIBLE_DEVICES"] = args.gpu
    if args.seed is not None:
        torch.manual_seed(args.seed)
    experiment_dir = Path("./log/partseg") / args.log_dir
    print(args)

    num_part = 50
    MODEL = importlib.import_module(args.model)
    classifier = MODEL.get_model(args, num_part, normal_channel=args.normal).cuda()
    checkpoint = torch.load(str(experiment_dir / "checkpoints" / "best_model.pth"))
    classifier.load_state_dict(checkpoint["model_state_dict"])

    points = torch.randn(args.batch_size, args.num_point, 3)
    label = torch.eye(16)[torch.randint(16, (args.batch_size, 1))].cuda()
    target = ((points > 0) * torch.tensor([1, 2, 4])).sum(dim=-1).cuda()
    if args.rot == "z":
        trot = RotateAxisAngle(angle=torch.rand(points.shape[0]) * 360, axis="Z", degrees=True)
    else:
        trot = Rotate(R=random_rotations(points.shape[0]))
    points = trot.transform_points(points).transpose(2, 1).cuda()

    with torch.no_grad():
        classifier = classifier.eval()
        vote_pool = torch.zeros(args.batch_size, args.num_point, num_part).cuda()
        for _ in range(args.num_votes):
            seg_pred, _ = classifier(points, label)
            vote_pool += seg_pred
    accuracy = (vote_pool / args.num_votes).argmax(dim=-1).eq(target).float().mean().item()
    print(f"Accuracy is: {accuracy:.9f}")


if __name__ == "__main__":
    args = parse_args()
    main(args)
