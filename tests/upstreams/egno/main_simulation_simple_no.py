"""Predict the motion of charged particles: python main_simulation_simple_no.py --config_by_file"""

import argparse
import json
import os
import random

import numpy as np
import torch
from model.egno import EGNO
from simulation.dataset_simple import NBodyDynamicsDataset as SimulationDataset
from torch import nn, optim
from torch.utils.data import DataLoader
from utils import EarlyStopping

parser = argparse.ArgumentParser(description="EGNO on charged particles")
parser.add_argument("--exp_name", type=str, default="simulation_simple_exp")
parser.add_argument("--batch_size", type=int, default=100)
parser.add_argument("--epochs", type=int, default=2000)
parser.add_argument("--no-cuda", action="store_true", default=False)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--test_interval", type=int, default=5, help="epochs between two evaluations")
parser.add_argument("--outf", type=str, default="exp_results", help="folder for results")
parser.add_argument("--lr", type=float, default=1e-4)
parser.add_argument("--nf", type=int, default=64, help="width of the features")
parser.add_argument("--model", type=str, default="egno")
parser.add_argument("--n_layers", type=int, default=4)
parser.add_argument("--max_training_samples", type=int, default=3000)
parser.add_argument("--weight_decay", type=float, default=1e-8)
parser.add_argument("--data_dir", type=str, default="simulation/dataset")
parser.add_argument("--config_by_file", nargs="?", const="", default=None, help="file of settings, which come first")
parser.add_argument("--flat", action="store_true", default=False, help="wide and shallow MLPs")
parser.add_argument("--norm", action="store_true", default=False, help="normalise the inner products")
parser.add_argument("--num_timesteps", type=int, default=5)
parser.add_argument("--time_emb_dim", type=int, default=32)
parser.add_argument("--num_modes", type=int, default=2)

args = parser.parse_args()
if args.config_by_file is not None:
    with open(args.config_by_file or "./configs/config_simulation_simple_no.json") as file:
        vars(args).update(json.load(file))
args.cuda = torch.cuda.is_available() and not args.no_cuda
device = torch.device("cuda" if args.cuda else "cpu")
criterion = nn.MSELoss()

print(args)
os.makedirs(os.path.join(args.outf, args.exp_name), exist_ok=True)


def main():
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)

    loaders = {}
    for partition in ("train", "valid", "test"):
        training = partition == "train"
        dataset = SimulationDataset(
            partition,
            data_dir=args.data_dir,
            max_samples=args.max_training_samples if training else 1e8,
            num_timesteps=args.num_timesteps,
        )
        loaders[partition] = DataLoader(
            dataset, batch_size=args.batch_size, shuffle=training, drop_last=training, num_workers=0
        )

    if args.model != "egno":
        raise ValueError(f"unknown model: {args.model}")
    model = EGNO(
        n_layers=args.n_layers,
        in_node_nf=1,
        in_edge_nf=2,
        hidden_nf=args.nf,
        device=device,
        with_v=True,
        flat=args.flat,
        activation=nn.SiLU(),
        norm=args.norm,
        use_time_conv=True,
        num_modes=args.num_modes,
        num_timesteps=args.num_timesteps,
        time_emb_dim=args.time_emb_dim,
    )
    print(model)

    optimizer = optim.Adam(model.parameters(), lr=args.lr, weight_decay=args.weight_decay)
    folder = os.path.join(args.outf, args.exp_name)
    early_stopping = EarlyStopping(patience=50, verbose=True, path=os.path.join(folder, "saved_model.pth"))

    results = {"eval epoch": [], "val loss": [], "test loss": [], "train loss": []}
    best_train = best_val = best_test = float("inf")
    best_epoch = 0
    for epoch in range(args.epochs):
        train_loss = train(model, optimizer, epoch, loaders["train"])
        results["train loss"].append(train_loss)
        if epoch % args.test_interval == 0:
            val_loss = train(model, optimizer, epoch, loaders["valid"], backprop=False)
            test_loss = train(model, optimizer, epoch, loaders["test"], backprop=False)
            results["eval epoch"].append(epoch)
            results["val loss"].append(val_loss)
            results["test loss"].append(test_loss)
            if val_loss < best_val:
                best_train, best_val, best_test, best_epoch = train_loss, val_loss, test_loss, epoch
            print(f"*** Best Val Loss: {best_val:.9f} \t Best Test Loss: {best_test:.9f} \t Best epoch {best_epoch}")
            early_stopping(val_loss, model)

        with open(os.path.join(folder, "loss.json"), "w") as file:
            json.dump(results, file, indent=4)
        if early_stopping.early_stop:
            print("Early Stopping.")
            break
    return best_train, best_val, best_test, best_epoch


def train(model, optimizer, epoch, loader, backprop=True):
    """Run one epoch on all time steps, and return the error of the last time step."""
    model.train(backprop)
    total, counter = 0.0, 0
    for data in loader:
        batch_size, n_nodes, _ = data[0].shape
        loc_mean = data[0].mean(dim=1, keepdim=True).expand_as(data[0]).flatten(0, 1).to(device)
        loc, vel, edge_attr, _, loc_end = (d.to(device).flatten(0, 1) for d in data)
        loc_end = loc_end.transpose(0, 1)  # [T, B * N, 3]
        edges = [ends.to(device) for ends in loader.dataset.get_edges(batch_size, n_nodes)]

        optimizer.zero_grad()
        nodes = vel.norm(dim=1, keepdim=True)
        loc_dist = (loc[edges[0]] - loc[edges[1]]).square().sum(dim=1, keepdim=True)
        edge_attr = torch.cat((edge_attr, loc_dist), dim=1)
        with torch.set_grad_enabled(backprop):
            loc_pred, _, _ = model(loc, nodes, edges, edge_attr, v=vel, loc_mean=loc_mean)
            loc_pred = loc_pred.view(args.num_timesteps, batch_size * n_nodes, 3)
            loss = criterion(loc_pred, loc_end)
        if backprop:
            loss.backward()
            optimizer.step()
        total += criterion(loc_pred[-1], loc_end[-1]).item() * batch_size
        counter += batch_size

    average = total / counter
    print(f"{'' if backprop else '==> '}{loader.dataset.partition} epoch {epoch} avg loss: {average:.9f}")
    return average


if __name__ == "__main__":
    best_train, best_val, best_test, best_epoch = main()
    print(f"best_train = {best_train:.9f}")
    print(f"best_val = {best_val:.9f}")
    print(f"best_test = {best_test:.9f}")
    print(f"best_epoch = {best_epoch}")
