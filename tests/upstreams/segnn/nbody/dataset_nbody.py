import os

import numpy as np
import torch

FILES = {"nbody_small": "_charged5_initvel1small"}
FRAMES = {"nbody_small": (30, 40)}


class NBodyDataset:
    """Charged particles: positions and velocities in one frame, positions in a later one."""

    def __init__(self, partition="train", max_samples=1e8, dataset_name="nbody_small"):
        if dataset_name not in FILES:
            raise ValueError(f"unknown data set: {dataset_name}")
        self.partition = partition
        self.dataset_name = dataset_name
        self.suffix = ("valid" if partition == "val" else partition) + FILES[dataset_name]
        self.frame_0, self.frame_T = FRAMES[dataset_name]
        self.dataset_path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "dataset")
        self.set_max_samples(max_samples)

    def set_max_samples(self, max_samples):
        self.max_samples = int(max_samples)
        self.data, self.edges = self.load()

    def load(self):
        loc, vel, edges, charges = (self.read(name) for name in ("loc", "vel", "edges", "charges"))
        loc, vel = loc.transpose(2, 3), vel.transpose(2, 3)  # [samples, frames, particles, 3]

        n_nodes = loc.shape[2]
        rows, cols = zip(*[(i, j) for i in range(n_nodes) for j in range(n_nodes) if i != j], strict=True)
        rows, cols = torch.tensor(rows), torch.tensor(cols)
        edge_attr = edges[:, rows, cols].unsqueeze(-1)  # the products of the charges, [samples, pairs, 1]
        return (loc, vel, edge_attr, charges), [rows, cols]

    def read(self, name):
        array = np.load(os.path.join(self.dataset_path, f"{name}_{self.suffix}.npy"))
        return torch.tensor(array[: self.max_samples], dtype=torch.float32)

    def __getitem__(self, i):
        loc, vel, edge_attr, charges = (field[i] for field in self.data)
        return loc[self.frame_0], vel[self.frame_0], edge_attr, charges, loc[self.frame_T]

    def __len__(self):
        return len(self.data[0])

    def get_n_nodes(self):
        return self.data[0].shape[2]

    def get_edges(self, batch_size, n_nodes):
        """Return rows and columns of batch_size fully connected graphs with consecutive node numbers."""
        offsets = n_nodes * torch.arange(batch_size).unsqueeze(1)
        return [(offsets + ends).reshape(-1) for ends in self.edges]
