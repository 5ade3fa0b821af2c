import numpy as np
import torch
from motion.dataset import MotionDataset  # noqa: F401


class EarlyStopping:
    """Saves the best model, and stops after patience evaluations without improvement."""

    def __init__(self, patience=7, verbose=False, delta=0, path="checkpoint.pt", trace_func=print):
        self.patience = patience
        self.verbose = verbose
        self.delta = delta
        self.path = path
        self.trace_func = trace_func
        self.counter = 0
        self.best_score = None
        self.early_stop = False
        self.val_loss_min = np.Inf

    def __call__(self, val_loss, model, master_worker=True):
        score = -val_loss
        if self.best_score is None or score >= self.best_score + self.delta:
            self.best_score = score
            self.counter = 0
            if master_worker:
                self.save_checkpoint(val_loss, model)
        else:
            self.counter += 1
            self.early_stop = self.counter >= self.patience
            if self.verbose and master_worker:
                self.trace_func(f"EarlyStopping counter: {self.counter} out of {self.patience}")

    def save_checkpoint(self, val_loss, model):
        if self.verbose:
            self.trace_func(f"Validation loss decreased ({self.val_loss_min:.9f} --> {val_loss:.9f}). Saving model ...")
        torch.save(model.state_dict(), self.path)
        self.val_loss_min = val_loss
