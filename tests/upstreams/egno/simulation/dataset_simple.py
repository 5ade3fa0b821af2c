import os

import numpy as np
import torch


class NBodyDataset:
    """Charged particles: positions and velocities in one frame, positions in a later one."""

    frame_0, frame_T = 30, 40

    def __init__(self, partition="train", data_dir=".", max_samples=1e8):
        self.partition = partition
        self.data_dir = data_dir
        self.max_samples = int(max_samples)

        loc, vel, products, self.charges = (self.read(name) for name in ("loc", "vel", "edges", "charges"))
        self.loc, self.vel = loc.transpose(2, 3), vel.transpose(2, 3)  # [samples, frames, particles, 3]
        n_nodes = self.loc.shape[2]
        self.edges = (~torch.eye(n_nodes, dtype=torch.bool)).nonzero().unbind(dim=1)
        self.edge_attr = products[:, self.edges[0], self.edges[1]].unsqueeze(-1)

    def read(self, name):
        path = os.path.join(self.data_dir, "simple", f"{name}_{self.partition}_charged5_initvel1small.npy")
        return torch.tensor(np.load(path)[: self.max_samples], dtype=torch.float32)

    def target_frames(self):
        return [self.frame_T]

    def __getitem__(self, i):
        loc_end = self.loc[i, self.target_frames()].transpose(0, 1)  # [particles, T, 3]
        return self.loc[i, self.frame_0], self.vel[i, self.frame_0], self.edge_attr[i], self.charges[i], loc_end

    def __len__(self):
        return len(self.loc)

    def get_n_nodes(self):
        return self.loc.shape[2]

    def get_edges(self, batch_size, n_nodes):
        """Return rows and columns of batch_size fully connected graphs with consecutive node numbers."""
        offsets = n_nodes * torch.arange(batch_size).unsqueeze(1)
        return [(offsets + ends).reshape(-1) for ends in self.edges]


class NBodyDynamicsDataset(NBodyDataset):
    """The same data with num_timesteps targets, evenly spaced up to the last frame."""

    def __init__(self, partition="train", data_dir=".", max_samples=1e8, num_timesteps=10):
        self.num_timesteps = num_timesteps
        super().__init__(partition, data_dir, max_samples)

    def target_frames(self):
        length = self.frame_T - self.frame_0
        return [self.frame_0 + length * (k + 1) // self.num_timesteps for k in range(self.num_timesteps)]
