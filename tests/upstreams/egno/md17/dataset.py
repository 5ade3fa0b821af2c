import os

import numpy as np
import torch

BOND = 1.8
"""Distance in the first frame, in Angstrom, below which atoms are bonded."""


class MD17DynamicsDataset:
    """A vibrating molecule: positions and velocities in one frame, positions in num_timesteps later ones."""

    def __init__(self, partition, max_samples, delta_frame, data_dir, molecule_type, num_timesteps=8, seed=100):
        self.partition = partition
        self.molecule_type = molecule_type
        with np.load(os.path.join(data_dir, f"md17_{molecule_type}.npz")) as file:
            x = torch.tensor(file["R"], dtype=torch.float32)
            z = torch.tensor(file["z"], dtype=torch.float32)

        order = np.random.RandomState(seed).permutation(len(x) - delta_frame - 1)
        parts = np.split(order, [len(order) // 2, len(order) * 3 // 4])
        starts = torch.tensor(parts[("train", "val", "test").index(partition)][:max_samples])
        self.x_0, self.v_0 = x[starts], x[starts + 1] - x[starts]
        later = [delta_frame * (k + 1) // num_timesteps for k in range(num_timesteps)]
        self.x_t = torch.stack([x[starts + k] for k in later], dim=2)  # [S, N, T, 3]
        self.z = (z / z.max()).unsqueeze(-1)

        near = ((torch.cdist(x[0], x[0]) < BOND) & ~torch.eye(len(z), dtype=torch.bool)).float()
        second = ((near @ near > 0) & (near == 0)).float().fill_diagonal_(0)
        self.edges = (near + second).nonzero().t().contiguous()
        row, col = self.edges
        bonds = torch.stack((near[row, col], second[row, col]), dim=1)
        self.edge_attr = torch.cat((self.z[row], self.z[col], bonds), dim=1)  # [E, 4]
        print(f"Got {len(self)} samples!")

    def __getitem__(self, i):
        return self.x_0[i], self.v_0[i], self.edges, self.edge_attr, self.z, self.x_t[i]

    def __len__(self):
        return len(self.x_0)
