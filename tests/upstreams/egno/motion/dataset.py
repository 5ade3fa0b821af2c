import os
import pickle

import numpy as np
import torch

PARTITIONS = ("train", "val", "test")


class MotionDataset:
    """Joints of a moving person: positions and velocities, and the same delta_frame frames later."""

    def __init__(self, partition, max_samples, delta_frame, data_dir, case="walk"):
        self.partition = partition
        self.max_samples = max_samples
        self.delta_frame = delta_frame
        self.data_dir = data_dir
        self.case = case

        bones, trials = self.read("motion")
        split = self.read("split")[PARTITIONS.index(partition)]
        print("Got Split!")

        per_trial = max_samples // len(split)
        before, after = [], []
        for trial, starts in split.items():
            x = np.asarray(trials[trial])
            frames = np.stack((x[:-1], np.diff(x, axis=0)))  # positions and velocities, [2, frames, N, 3]
            starts = np.asarray(starts)[:per_trial]
            before.append(frames[:, starts])
            after.append(np.stack([frames[:, starts + later] for later in self.later_frames()], axis=3))
        self.x_0, self.v_0 = torch.tensor(np.concatenate(before, axis=1), dtype=torch.float32)
        self.x_t, self.v_t = torch.tensor(np.concatenate(after, axis=1), dtype=torch.float32)  # [S, N, T, 3]
        self.node_fea = self.x_0[:, :, 1:2] / 10  # the height

        self.make_edges(bones, self.x_0.shape[1])
        print(f"Got {len(self)} samples!")

    def read(self, name):
        with open(os.path.join(self.data_dir, f"{name}_{self.case}.pkl"), "rb") as file:
            return pickle.load(file)

    def later_frames(self):
        """Return the target frames relative to the start."""
        return [self.delta_frame]

    def make_edges(self, bones, n_nodes):
        """Connect joints with a bone between them (attribute 1) and with one joint between them (2)."""
        near = torch.zeros(n_nodes, n_nodes)
        for i, j in bones:
            near[i, j] = near[j, i] = 1
        kind = torch.where(near > 0, near, 2.0 * (near @ near > 0)).fill_diagonal_(0)
        self.edges = kind.nonzero().t().contiguous()
        self.edge_attr = kind[self.edges[0], self.edges[1]].unsqueeze(-1)
        local = self.edge_attr[:, 0] == 1
        self.local_edges, self.local_edge_attr = self.edges[:, local], self.edge_attr[local]

    def __getitem__(self, i):
        return (
            self.x_0[i],
            self.v_0[i],
            self.edges,
            self.edge_attr,
            self.local_edges,
            self.local_edge_attr,
            self.node_fea[i],
            self.x_t[i],
            self.v_t[i],
        )

    def __len__(self):
        return len(self.x_0)


class MotionDynamicsDataset(MotionDataset):
    """The same data with num_timesteps target frames."""

    def __init__(self, partition, max_samples, delta_frame, data_dir, case="walk", num_timesteps=6):
        self.num_timesteps = num_timesteps
        super().__init__(partition, max_samples, delta_frame, data_dir, case=case)

    def later_frames(self):
        return range(self.delta_frame - self.num_timesteps + 1, self.delta_frame + 1)
