"""Augmentation of batches of point clouds [B, N, C], numpy arrays, in place."""

import numpy as np


def random_point_dropout(batch_pc, max_dropout_ratio=0.875):
    """Moves a random part of each cloud's points to its first point."""
    for cloud in batch_pc:
        ratio = np.random.random() * max_dropout_ratio
        cloud[np.random.random(len(cloud)) <= ratio] = cloud[0]
    return batch_pc


def random_scale_point_cloud(batch_data, scale_low=0.8, scale_high=1.25):
    """Scales each cloud."""
    batch_data *= np.random.uniform(scale_low, scale_high, (len(batch_data), 1, 1))
    return batch_data


def shift_point_cloud(batch_data, shift_range=0.1):
    """Shifts each cloud."""
    batch_data += np.random.uniform(-shift_range, shift_range, (len(batch_data), 1, 3))
    return batch_data
