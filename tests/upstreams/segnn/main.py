"""Train a steerable E(3) equivariant network: python main.py --dataset nbody --model segnn"""

from __future__ import annotations

import argparse
import os

import torch.multiprocessing as mp
from e3nn.o3 import Irreps
from models.balanced_irreps import BalancedIrreps, WeightBalancedIrreps
from utils import count_parameters, find_free_port

if __name__ == "__main__":
    parser = argparse.ArgumentParser()

    # Run parameters
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--batch_size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--weight_decay", type=float, default=1e-8)
    parser.add_argument("--print", type=int, default=100, help="batches between two prints")
    parser.add_argument("--log", type=bool, default=False, help="log to wandb")
    parser.add_argument("--num_workers", type=int, default=0)
    parser.add_argument("--save_dir", type=str, default="saved models")
    parser.add_argument("--save", type=str, default=None, help="file for the final state dict")

    # Data parameters
    parser.add_argument("--dataset", type=str, default="nbody", help="nbody or qm9")
    parser.add_argument("--root", type=str, default="datasets")
    parser.add_argument("--target", type=str, default="alpha", help="property (qm9)")
    parser.add_argument("--radius", type=float, default=2.0, help="of the neighbourhoods (qm9)")
    parser.add_argument("--feature_type", type=str, default="one_hot", help="of the atoms (qm9)")
    parser.add_argument("--nbody_name", type=str, default="nbody_small")
    parser.add_argument("--max_samples", type=int, default=3000, help="training samples")
    parser.add_argument("--test_interval", type=int, default=5, help="epochs between two evaluations")
    parser.add_argument("--time_exp", type=bool, default=False, help="time the forward passes (nbody)")

    # Model parameters
    parser.add_argument("--model", type=str, default="segnn", help="segnn or seconv")
    parser.add_argument("--hidden_features", type=int, default=64, help="scalar features, before balancing")
    parser.add_argument("--lmax_h", type=int, default=1, help="highest degree of the hidden features")
    parser.add_argument("--lmax_attr", type=int, default=1, help="highest degree of the attributes")
    parser.add_argument("--subspace_type", type=str, default="weightbalanced", help="weightbalanced or balanced")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--norm", type=str, default="instance", help="instance, batch or none")
    parser.add_argument("--pool", type=str, default="avg", help="avg or sum")
    parser.add_argument("--conv_type", type=str, default="linear", help="linear or nonlinear (seconv)")

    # Parallel computing
    parser.add_argument("-g", "--gpus", type=int, default=0, help="number of gpus, 0 is the cpu")

    args = parser.parse_args()

    # Select dataset
    if args.dataset == "nbody":
        from nbody.train_nbody import train

        task = "node"
        input_irreps = Irreps("2x1o + 1x0e")
        output_irreps = Irreps("1x1o")
        additional_message_irreps = Irreps("2x0e")
    elif args.dataset == "qm9":
        from qm9.train import train

        if args.feature_type != "one_hot":
            raise ValueError(f"unknown feature type: {args.feature_type}")
        task = "graph"
        input_irreps = Irreps("5x0e")
        output_irreps = Irreps("1x0e")
        additional_message_irreps = Irreps("1x0e")
    else:
        raise ValueError(f"unknown data set: {args.dataset}")

    # Create hidden irreps
    edge_attr_irreps = Irreps.spherical_harmonics(args.lmax_attr)
    node_attr_irreps = Irreps.spherical_harmonics(args.lmax_attr)
    if args.subspace_type == "weightbalanced":
        hidden_irreps = WeightBalancedIrreps(
            Irreps(f"{args.hidden_features}x0e"), node_attr_irreps, sh=True, lmax=args.lmax_h
        )
    elif args.subspace_type == "balanced":
        hidden_irreps = BalancedIrreps(args.lmax_h, args.hidden_features, True)
    else:
        raise ValueError(f"unknown subspace type: {args.subspace_type}")

    # Select model
    if args.model == "segnn":
        from models.segnn.segnn import SEGNN

        model = SEGNN(
            input_irreps,
            hidden_irreps,
            output_irreps,
            edge_attr_irreps,
            node_attr_irreps,
            num_layers=args.layers,
            norm=args.norm,
            pool=args.pool,
            task=task,
            additional_message_irreps=additional_message_irreps,
        )
    elif args.model == "seconv":
        from models.segnn.seconv import SEConv

        model = SEConv(
            input_irreps,
            hidden_irreps,
            output_irreps,
            edge_attr_irreps,
            node_attr_irreps,
            num_layers=args.layers,
            norm=args.norm,
            pool=args.pool,
            task=task,
            additional_message_irreps=additional_message_irreps,
            conv_type=args.conv_type,
        )
    else:
        raise ValueError(f"unknown model: {args.model}")

    print(model)
    print(f"The model has {count_parameters(model):,} parameters.")

    # Train
    args.ID = f"{args.model}_{args.dataset}"
    if args.gpus > 1:
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        os.environ["MASTER_PORT"] = find_free_port()
        mp.spawn(train, nprocs=args.gpus, args=(model, args))
    else:
        train(0, model, args)
