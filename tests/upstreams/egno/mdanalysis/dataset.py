import os

import numpy as np
import torch


class MDAnalysisDynamicsDataset:
    """Backbone of a protein, from adk.npz: R [frames, atoms, 3] and charges [atoms], in chain order."""

    def __init__(self, partition, max_samples, delta_frame, data_dir, num_timesteps=4, cut_off=6.0):
        self.partition = partition
        with np.load(os.path.join(data_dir, "adk.npz")) as file:
            x = torch.tensor(file["R"], dtype=torch.float32)
            self.charges = torch.tensor(file["charges"], dtype=torch.float32).unsqueeze(-1)

        starts = torch.arange(len(x) - delta_frame - 1)
        parts = torch.tensor_split(starts, [len(starts) * 3 // 5, len(starts) * 4 // 5])
        starts = parts[("train", "val", "test").index(partition)][:max_samples]
        self.x_0, self.v_0 = x[starts], x[starts + 1] - x[starts]
        later = [delta_frame * (k + 1) // num_timesteps for k in range(num_timesteps)]
        self.x_t = torch.stack([x[starts + k] for k in later], dim=2)  # [S, N, T, 3]

        n_nodes = x.shape[1]
        self.edges = ((torch.cdist(x[0], x[0]) < cut_off) & ~torch.eye(n_nodes, dtype=torch.bool)).nonzero().t()
        in_chain = (self.edges[0] - self.edges[1]).abs() == 1
        self.edge_attr = in_chain.float().unsqueeze(-1)  # [E, 1]
        print(f"Got {len(self)} samples!")

    def __getitem__(self, i):
        return self.x_0[i], self.v_0[i], self.edges, self.edge_attr, self.charges, self.x_t[i]

    def __len__(self):
        return len(self.x_0)
