"""Predict the motion of a protein: python main_mdanalysis_no.py --config_by_file"""

import argparse
import json
import os
import random

import numpy as np
import torch
from mdanalysis.dataset import MDAnalysisDynamicsDataset
from model.egno import EGNO
from torch import nn, optim
from torch.utils.data import DataLoader
from utils import EarlyStopping

parser = argparse.ArgumentParser(description="EGNO on a protein (AdK)")
parser.add_argument("--exp_name", type=str, default="mdanalysis_exp")
parser.add_argument("--batch_size", type=int, default=8)
parser.add_argument("--epochs", type=int, default=500)
parser.add_argument("--no-cuda", action="store_true", default=False)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--test_interval", type=int, default=5, help="epochs between two evaluations")
parser.add_argument("--outf", type=str, default="exp_results", help="folder for results")
parser.add_argument("--lr", type=float, default=1e-4)
parser.add_argument("--nf", type=int, default=128, help="width of the features")
parser.add_argument("--n_layers", type=int, default=4)
parser.add_argument("--max_training_samples", type=int, default=500)
parser.add_argument("--weight_decay", type=float, default=1e-15)
parser.add_argument("--delta_frame", type=int, default=16, help="how far ahead to predict")
parser.add_argument("--data_dir", type=str, default="mdanalysis/dataset")
parser.add_argument("--config_by_file", nargs="?", const="", default=None, help="file of settings, which come first")
parser.add_argument("--num_timesteps", type=int, default=4)
parser.add_argument("--time_emb_dim", type=int, default=32)
parser.add_argument("--num_modes", type=int, default=2)

args = parser.parse_args()
if args.config_by_file is not None:
    with open(args.config_by_file or "./configs/config_mdanalysis_no.json") as file:
        vars(args).update(json.load(file))
device = torch.device("cuda" if torch.cuda.is_available() and not args.no_cuda else "cpu")
criterion = nn.MSELoss()
folder = os.path.join(args.outf, args.exp_name)
os.makedirs(folder, exist_ok=True)
print(args)


def main():
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)

    loaders = {}
    for partition, max_samples in (("train", args.max_training_samples), ("val", 2000), ("test", 2000)):
        dataset = MDAnalysisDynamicsDataset(
            partition, max_samples, args.delta_frame, args.data_dir, num_timesteps=args.num_timesteps
        )
        training = partition == "train"
        loaders[partition] = DataLoader(dataset, args.batch_size, shuffle=training, drop_last=training, num_workers=0)

    model = EGNO(
        n_layers=args.n_layers,
        in_node_nf=2,
        in_edge_nf=2,
        hidden_nf=args.nf,
        device=device,
        with_v=True,
        activation=nn.SiLU(),
        use_time_conv=True,
        num_modes=args.num_modes,
        num_timesteps=args.num_timesteps,
        time_emb_dim=args.time_emb_dim,
    )
    print(model)
    optimizer = optim.Adam(model.parameters(), lr=args.lr, weight_decay=args.weight_decay)
    early_stopping = EarlyStopping(patience=50, verbose=True, path=os.path.join(folder, "saved_model.pth"))

    for epoch in range(args.epochs):
        train(model, optimizer, epoch, loaders["train"])
        if epoch % args.test_interval == 0:
            val_loss = train(model, optimizer, epoch, loaders["val"], backprop=False)
            train(model, optimizer, epoch, loaders["test"], backprop=False)
            early_stopping(val_loss, model)
            if early_stopping.early_stop:
                break


def train(model, optimizer, epoch, loader, backprop=True):
    model.train(backprop)
    total, counter = 0.0, 0
    for data in loader:
        loc, vel, edges, edge_attr, charges, loc_end = (d.to(device) for d in data)
        batch_size, n_nodes, _ = loc.shape
        offsets = n_nodes * torch.arange(batch_size, device=device).view(-1, 1, 1)
        edges = (edges + offsets).transpose(0, 1).flatten(1)
        loc_mean = loc.mean(dim=1, keepdim=True).expand_as(loc).flatten(0, 1)
        loc, vel, edge_attr, charges, loc_end = (d.flatten(0, 1) for d in (loc, vel, edge_attr, charges, loc_end))

        optimizer.zero_grad()
        nodes = torch.cat((vel.norm(dim=1, keepdim=True), charges), dim=1)
        loc_dist = (loc[edges[0]] - loc[edges[1]]).square().sum(dim=1, keepdim=True)
        with torch.set_grad_enabled(backprop):
            loc_pred, _, _ = model(loc, nodes, edges, torch.cat((edge_attr, loc_dist), 1), v=vel, loc_mean=loc_mean)
            loss = criterion(loc_pred.view(args.num_timesteps, -1, 3), loc_end.transpose(0, 1))
        if backprop:
            loss.backward()
            optimizer.step()
        total += loss.item() * batch_size
        counter += batch_size

    average = total / counter
    print(f"{'' if backprop else '==> '}{loader.dataset.partition} epoch {epoch} avg loss: {average:.9f}")
    return average


if __name__ == "__main__":
    main()
