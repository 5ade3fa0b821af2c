"""Train a classifier of shapes: python train_cls.py --model vn_dgcnn_cls --rot z --log_dir vn_dgcnn/z"""

import argparse
import importlib
import logging
import os
import random
import sys
from pathlib import Path

import numpy as np
import provider
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
    parser.add_argument("--epoch", type=int, default=250)
    parser.add_argument("--learning_rate", type=float, default=0.001, help="a hundred times that with SGD")
    parser.add_argument("--decay_rate", type=float, default=1e-4, help="weight decay of Adam")
    parser.add_argument("--optimizer", default="SGD", choices=["SGD", "Adam"])
    parser.add_argument("--gpu", default="0", help="which GPU")
    parser.add_argument("--num_point", type=int, default=1024)
    parser.add_argument("--log_dir", default="vn_dgcnn/aligned", help="folder in log/cls")
    parser.add_argument("--normal", action="store_true", default=False, help="normals as well")
    parser.add_argument("--num_votes", type=int, default=1)
    parser.add_argument("--rot", default="aligned", choices=["aligned", "z", "so3"], help="how shapes are turned")
    parser.add_argument("--pooling", default="mean", choices=["mean", "max"])
    parser.add_argument("--n_knn", type=int, default=20, help="neighbours of a point")
    parser.add_argument("--seed", type=int, default=None)
    return parser.parse_args()


def rotation(args, batch_size):
    trot = None
    if args.rot == "z":
        trot = RotateAxisAngle(angle=torch.rand(batch_size) * 360, axis="Z", degrees=True)
    elif args.rot == "so3":
        trot = Rotate(R=random_rotations(batch_size))
    return trot


def test(model, loader, args, num_class):
    """Return the loss, the instance accuracy and the mean class accuracy."""
    loss = 0.0
    right, seen = np.zeros(num_class), np.zeros(num_class)
    for points, target in loader:
        target = target[:, 0]
        trot = rotation(args, points.shape[0])
        if trot is not None:
            points = trot.transform_points(points)
        points, target = points.transpose(2, 1).cuda(), target.long().cuda()
        pred, _ = model.eval()(points)
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
        random.seed(args.seed)
        np.random.seed(args.seed)
        torch.manual_seed(args.seed)

    experiment_dir = Path("./log/cls") / args.log_dir
    checkpoints_dir, log_dir = experiment_dir / "checkpoints", experiment_dir / "logs"
    checkpoints_dir.mkdir(parents=True, exist_ok=True)
    log_dir.mkdir(parents=True, exist_ok=True)

    logger = logging.getLogger("Model")
    logger.setLevel(logging.INFO)
    file_handler = logging.FileHandler(log_dir / f"{args.model}.txt")
    file_handler.setFormatter(logging.Formatter("%(asctime)s - %(name)s - %(levelname)s - %(message)s"))
    logger.addHandler(file_handler)

    def log_string(message):
        logger.info(message)
        print(message)

    log_string(args)
    data_path = "data/modelnet40_normal_resampled/"
    train_dataset = ModelNetDataLoader(data_path, args.num_point, split="train", normal_channel=args.normal)
    test_dataset = ModelNetDataLoader(data_path, args.num_point, split="test", normal_channel=args.normal)
    trainDataLoader = DataLoader(train_dataset, batch_size=args.batch_size, shuffle=True, num_workers=0)
    testDataLoader = DataLoader(test_dataset, batch_size=args.batch_size, shuffle=False, num_workers=0)

    num_class = 40
    MODEL = importlib.import_module(args.model)
    classifier = MODEL.get_model(args, num_class, normal_channel=args.normal).cuda()
    criterion = MODEL.get_loss().cuda()

    try:
        checkpoint = torch.load(str(checkpoints_dir / "best_model.pth"))
        start_epoch = checkpoint["epoch"]
        classifier.load_state_dict(checkpoint["model_state_dict"])
        log_string("Use pretrain model")
    except:  # noqa: E722
        log_string("No existing model, starting training from scratch...")
        start_epoch = 0

    if args.optimizer == "SGD":
        optimizer = torch.optim.SGD(classifier.parameters(), lr=args.learning_rate * 100, momentum=0.9)
    else:
        optimizer = torch.optim.Adam(classifier.parameters(), lr=args.learning_rate, weight_decay=args.decay_rate)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.7)

    best_instance_acc, best_class_acc = 0.0, 0.0
    for epoch in range(start_epoch, args.epoch):
        log_string(f"Epoch {epoch + 1}/{args.epoch}:")
        scheduler.step()
        losses, correct = [], []
        for points, target in trainDataLoader:
            trot = rotation(args, points.shape[0])
            if trot is not None:
                points = trot.transform_points(points)

            points = points.data.numpy()
            points = provider.random_point_dropout(points)
            points[:, :, 0:3] = provider.random_scale_point_cloud(points[:, :, 0:3])
            points[:, :, 0:3] = provider.shift_point_cloud(points[:, :, 0:3])
            points = torch.Tensor(points)
            target = target[:, 0]

            points = points.transpose(2, 1)
            points, target = points.cuda(), target.long().cuda()
            optimizer.zero_grad()

            classifier = classifier.train()
            pred, trans_feat = classifier(points)
            loss = criterion(pred, target, trans_feat)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            correct.append(pred.data.argmax(dim=1).eq(target).sum().item() / len(points))

        log_string("Train Loss: %.9f" % np.mean(losses))
        log_string("Train Instance Accuracy: %.9f" % np.mean(correct))

        with torch.no_grad():
            test_loss, instance_acc, class_acc = test(classifier.eval(), testDataLoader, args, num_class)
        best_class_acc = max(best_class_acc, class_acc)
        is_best = instance_acc >= best_instance_acc
        best_instance_acc = max(best_instance_acc, instance_acc)
        log_string(f"Test Loss: {test_loss:.9f}")
        log_string(f"Test Instance Accuracy: {instance_acc:.9f}, Class Accuracy: {class_acc:.9f}")
        log_string(f"Best Instance Accuracy: {best_instance_acc:.9f}, Class Accuracy: {best_class_acc:.9f}")

        if is_best:
            savepath = str(checkpoints_dir / "best_model.pth")
            log_string(f"Saving at {savepath}")
            state = {
                "epoch": epoch + 1,
                "instance_acc": np.float64(instance_acc),
                "class_acc": np.float64(class_acc),
                "model_state_dict": classifier.state_dict(),
                "optimizer_state_dict": optimizer.state_dict(),
            }
            torch.save(state, savepath)

    log_string("End of training...")


if __name__ == "__main__":
    args = parse_args()
    main(args)
