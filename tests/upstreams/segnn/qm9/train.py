import copy

import torch
import torch.distributed as dist
import wandb
from e3nn.o3 import Irreps, spherical_harmonics
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.data import Batch, Data
from torch_scatter import scatter

torch.manual_seed(42)

N_TRAIN, N_VALID, N_TEST = 64, 16, 16


def make_graphs(n, radius, lmax_attr, seed):
    """Random small "molecules" of five elements, with a target computed from elements and distances."""
    generator = torch.Generator().manual_seed(seed)
    attr_irreps = Irreps.spherical_harmonics(lmax_attr)
    graphs = []
    for _ in range(n):
        n_nodes = int(torch.randint(4, 9, (1,), generator=generator))
        pos = torch.randn(n_nodes, 3, generator=generator)
        kind = torch.randint(5, (n_nodes,), generator=generator)

        distances = torch.cdist(pos, pos)
        edge_index = ((distances < radius) & ~torch.eye(n_nodes, dtype=torch.bool)).nonzero().t().contiguous()
        rel_pos = pos[edge_index[0]] - pos[edge_index[1]]
        edge_attr = spherical_harmonics(attr_irreps, rel_pos, normalize=True, normalization="integral")
        node_attr = scatter(edge_attr, edge_index[1], dim=0, dim_size=n_nodes, reduce="mean")

        charge = kind.float() / 2 - 1
        energy = (charge[:, None] * charge[None, :] * torch.exp(-distances)).mean()
        graphs.append(
            Data(
                x=nn.functional.one_hot(kind, 5).float(),
                pos=pos,
                edge_index=edge_index,
                edge_attr=edge_attr,
                node_attr=node_attr,
                additional_message_features=rel_pos.norm(dim=-1, keepdim=True),
                y=energy.reshape(1, 1),
            )
        )
    return graphs


def batches(graphs, epoch, rank, args):
    """Batches of one epoch for one of args.gpus processes. Together they see the same data as a single process.

    So they also learn the same (with --norm none; an instance norm takes the gradient of the biases before it away,
    and Adam makes steps of the rounding errors that are left; a batch norm sees only the batch of its process).
    """
    world_size = max(args.gpus, 1)
    assert args.batch_size % world_size == 0, "the batch is shared equally"
    order = torch.randperm(len(graphs), generator=torch.Generator().manual_seed(epoch)).tolist()
    order = order[: len(order) // args.batch_size * args.batch_size]  # drop the last
    order = order[rank::world_size]
    size = args.batch_size // world_size
    for start in range(0, len(order), size):
        yield Batch.from_data_list([graphs[i] for i in order[start : start + size]])


def train(gpu, model, args):
    use_cuda = args.gpus > 0 and torch.cuda.is_available()
    device = torch.device(f"cuda:{gpu}" if use_cuda else "cpu")
    if args.gpus > 1:
        backend = "nccl" if use_cuda else "gloo"
        dist.init_process_group(backend, init_method="env://", rank=gpu, world_size=args.gpus)
        if not use_cuda:
            model = copy.deepcopy(model)  # spawned processes share the memory of the parameters they are handed
        model = DistributedDataParallel(model.to(device), device_ids=[gpu] if use_cuda else None)
    else:
        model = model.to(device)
    log = args.log and gpu == 0
    if log:
        wandb.init(project="SEGNN", name=f"qm9_{args.target}_{args.model}", config=vars(args), dir=args.save_dir)

    train_graphs = make_graphs(N_TRAIN, args.radius, args.lmax_attr, seed=1)[: int(args.max_samples)]
    valid_graphs = make_graphs(N_VALID, args.radius, args.lmax_attr, seed=3)
    test_graphs = make_graphs(N_TEST, args.radius, args.lmax_attr, seed=2)
    optimizer = optim.Adam(model.parameters(), lr=args.lr, weight_decay=args.weight_decay)
    criterion = nn.MSELoss()

    if gpu == 0:
        print("Training:", args.ID)
    for epoch in range(args.epochs):
        model.train()
        losses, errors = [], []
        for step, graph in enumerate(batches(train_graphs, epoch, gpu, args)):
            graph = graph.to(device)
            optimizer.zero_grad()
            out = model(graph)
            loss = criterion(out, graph.y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            errors.append((out.detach() - graph.y).abs().mean().item())
            if (step + 1) % args.print == 0:
                means = (sum(losses) / len(losses), sum(errors) / len(errors))
                print("epoch:%2d  step:%4d  loss: %0.4f  train MAE:%0.4f" % (epoch, step, *means))

        valid_mae = evaluate(model.module if args.gpus > 1 else model, valid_graphs, device, args)
        if gpu == 0:
            print("VALIDATION: epoch:%2d  step:%4d  %s-MAE:%0.4f" % (epoch, step, args.target, valid_mae))
        if log:
            wandb.log({"val_mae": valid_mae}, step=epoch)

    test_mae = evaluate(model.module if args.gpus > 1 else model, test_graphs, device, args)
    if gpu == 0:
        print("TEST: epoch:%2d  step:%4d  %s-MAE:%0.4f" % (epoch, step, args.target, test_mae))
    if log:
        wandb.finish()
    if args.save:
        if gpu == 0:
            torch.save((model.module if args.gpus > 1 else model).state_dict(), args.save)
        if args.gpus > 1:
            torch.save(model.module.state_dict(), f"{args.save}.rank{gpu}")
    if args.gpus > 1:
        dist.destroy_process_group()


@torch.no_grad()
def evaluate(model, graphs, device, args):
    model.eval()
    total = 0.0
    for start in range(0, len(graphs), args.batch_size):
        graph = Batch.from_data_list(graphs[start : start + args.batch_size]).to(device)
        total += (model(graph) - graph.y).abs().sum().item()
    return total / len(graphs)
