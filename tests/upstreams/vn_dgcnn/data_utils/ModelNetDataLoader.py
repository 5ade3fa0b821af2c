"""ModelNet40 from text files, one per shape, with a point and its normal on each line."""

import os

import numpy as np
from torch.utils.data import Dataset


def pc_normalize(pc):
    """Centre the points and scale them to the unit sphere."""
    pc = pc - pc.mean(axis=0)
    return pc / np.sqrt((pc**2).sum(axis=1)).max()


def farthest_point_sample(point, npoint):
    """Select npoint of the points [N, D] by farthest point sampling."""
    xyz = point[:, :3]
    distance = np.full(len(point), np.inf)
    chosen = [np.random.randint(len(point))]
    while len(chosen) < npoint:
        distance = np.minimum(distance, ((xyz - xyz[chosen[-1]]) ** 2).sum(axis=1))
        chosen.append(int(distance.argmax()))
    return point[chosen]


class ModelNetDataLoader(Dataset):
    def __init__(self, root, npoint=1024, split="train", uniform=False, normal_channel=True, cache_size=15000):
        self.root = root
        self.npoints = npoint
        self.uniform = uniform
        self.normal_channel = normal_channel
        with open(os.path.join(root, "modelnet40_shape_names.txt")) as file:
            self.classes = {name.strip(): number for number, name in enumerate(file)}
        with open(os.path.join(root, f"modelnet40_{split}.txt")) as file:
            shape_ids = [line.strip() for line in file]
        names = [shape_id.rpartition("_")[0] for shape_id in shape_ids]
        self.datapath = [
            (name, os.path.join(root, name, f"{shape_id}.txt")) for name, shape_id in zip(names, shape_ids, strict=True)
        ]
        print("The size of %s data is %d" % (split, len(self.datapath)))
        self.cache_size = cache_size
        self.cache = {}

    def __len__(self):
        return len(self.datapath)

    def __getitem__(self, index):
        if index not in self.cache:
            item = self.read(*self.datapath[index])
            if len(self.cache) >= self.cache_size:
                return item
            self.cache[index] = item
        return self.cache[index]

    def read(self, name, path):
        points = np.loadtxt(path, delimiter=",").astype(np.float32)
        points = farthest_point_sample(points, self.npoints) if self.uniform else points[: self.npoints]
        points[:, :3] = pc_normalize(points[:, :3])
        if not self.normal_channel:
            points = points[:, :3]
        return points, np.array([self.classes[name]]).astype(np.int32)
