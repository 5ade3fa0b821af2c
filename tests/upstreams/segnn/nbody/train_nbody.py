import time

import torch
import wandb
from e3nn.o3 import Irreps, spherical_harmonics
from nbody.dataset_nbody import NBodyDataset
from torch import nn, optim
from torch.utils.data import DataLoader
from torch_geometric.data import Data
from torch_scatter import scatter

torch.manual_seed(42)


class O3Transform:
    """Adds the network's inputs to a graph with pos, vel and the products of the charges (in edge_attr)."""

    def __init__(self, lmax_attr):
        self.attr_irreps = Irreps.spherical_harmonics(lmax_attr)

    def __call__(self, graph):
        pos, vel, charge_products = graph.pos, graph.vel, graph.edge_attr
        rel_pos = pos[graph.edge_index[0]] - pos[graph.edge_index[1]]
        edge_dist = rel_pos.norm(dim=-1, keepdim=True)

        graph.edge_attr = self.harmonics(rel_pos)
        neighbourhood = scatter(graph.edge_attr, graph.edge_index[1], dim=0, reduce="mean")
        graph.node_attr = neighbourhood + self.harmonics(vel)

        mean_pos = pos.mean(1, keepdims=True)  # over x, y and z, not over the particles: not equivariant
        graph.x = torch.cat((pos - mean_pos, vel, vel.norm(dim=-1, keepdim=True)), dim=1)
        graph.additional_message_features = torch.cat((edge_dist, charge_products), dim=-1)
        return graph

    def harmonics(self, vectors):
        return spherical_harmonics(self.attr_irreps, vectors, normalize=True, normalization="integral")


def train(gpu, model, args):
    assert args.gpus <= 1, "nbody trains on one device"
    device = torch.device("cpu") if args.gpus == 0 else torch.device(f"cuda:{gpu}")
    model = model.to(device)

    loaders = {}
    for partition in ("train", "val", "test"):
        training = partition == "train"
        dataset = NBodyDataset(
            partition, max_samples=args.max_samples if training else 1e8, dataset_name=args.nbody_name
        )
        loaders[partition] = DataLoader(
            dataset, batch_size=args.batch_size, shuffle=training, drop_last=training, num_workers=args.num_workers
        )

    if args.log:
        wandb.init(project="SEGNN", name=f"nbody_{args.model}", config=vars(args), dir=args.save_dir)

    transform = O3Transform(args.lmax_attr)
    optimizer = optim.Adam(model.parameters(), lr=args.lr, weight_decay=args.weight_decay)
    criterion = nn.MSELoss()

    best_val_loss, best_test_loss, best_epoch = float("inf"), float("inf"), -1
    for epoch in range(args.epochs):
        train_loss = run_epoch(model, optimizer, criterion, epoch, loaders["train"], transform, device, args)
        if args.log:
            wandb.log({"train_loss": train_loss}, step=epoch)

        if epoch % args.test_interval == 0 or epoch == args.epochs - 1:
            val_loss, test_loss = (
                run_epoch(model, optimizer, criterion, epoch, loaders[part], transform, device, args, backprop=False)
                for part in ("val", "test")
            )
            if args.log:
                wandb.log({"val_loss": val_loss, "test_loss": test_loss}, step=epoch)
            if val_loss < best_val_loss:
                best_val_loss, best_test_loss, best_epoch = val_loss, test_loss, epoch
            best = (best_val_loss, best_test_loss, best_epoch)
            print("*** Best Val Loss: %.5f \t Best Test Loss: %.5f \t Best epoch %d" % best)

    if args.log:
        wandb.finish()
    if args.save:
        torch.save(model.state_dict(), args.save)
    return best_val_loss, best_test_loss, best_epoch


def run_epoch(model, optimizer, criterion, epoch, loader, transform, device, args, backprop=True):
    model.train(backprop)
    n_nodes = loader.dataset.get_n_nodes()
    total, counter, seconds = 0.0, 0, 0.0

    for data in loader:
        batch_size = len(data[0])
        loc, vel, edge_attr, _, loc_end = (d.to(device).flatten(0, 1) for d in data)
        edge_index = torch.stack(loader.dataset.get_edges(batch_size, n_nodes)).to(device)
        batch = torch.arange(batch_size, device=device).repeat_interleave(n_nodes)
        graph = transform(Data(pos=loc, vel=vel, edge_index=edge_index, edge_attr=edge_attr, batch=batch))

        optimizer.zero_grad()
        start = time.perf_counter()
        with torch.set_grad_enabled(backprop):
            loc_pred = graph.pos + model(graph)
            loss = criterion(loc_pred, loc_end)
        seconds += time.perf_counter() - start
        if backprop:
            loss.backward()
            optimizer.step()

        total += loss.item() * batch_size
        counter += batch_size

    average = total / counter
    name = loader.dataset.partition
    print("%s epoch %d avg loss: %.5f" % (name if backprop else "==> " + name, epoch, average))
    if args.time_exp:
        print("Forward average time: %.6f" % (seconds / len(loader)))
    return average
