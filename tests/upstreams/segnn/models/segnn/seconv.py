import torch
from e3nn.nn import BatchNorm
from e3nn.o3 import Irreps
from models.segnn.instance_norm import InstanceNorm
from models.segnn.o3_building_blocks import O3SwishGate, O3TensorProduct, O3TensorProductSwishGate, split_for_gate
from torch import nn
from torch_geometric.nn import MessagePassing, global_add_pool, global_mean_pool


class SEConv(nn.Module):
    """Steerable E(3) equivariant network of (linear or nonlinear) convolutions."""

    def __init__(
        self,
        input_irreps,
        hidden_irreps,
        output_irreps,
        edge_attr_irreps,
        node_attr_irreps,
        num_layers,
        norm=None,
        pool="avg",
        task="graph",
        additional_message_irreps=None,
        conv_type="linear",
    ):
        super().__init__()
        if task not in ("graph", "node"):
            raise ValueError(f"unknown task: {task}")
        hidden_irreps, output_irreps = Irreps(hidden_irreps), Irreps(output_irreps)
        self.task = task

        self.embedding_layer = O3TensorProduct(input_irreps, hidden_irreps, node_attr_irreps)
        self.layers = nn.ModuleList(
            SEConvLayer(
                hidden_irreps,
                hidden_irreps,
                hidden_irreps,
                edge_attr_irreps,
                node_attr_irreps,
                norm=norm,
                additional_message_irreps=additional_message_irreps,
                conv_type=conv_type,
            )
            for _ in range(num_layers)
        )

        self.pre_pool1 = O3TensorProductSwishGate(hidden_irreps, hidden_irreps, node_attr_irreps)
        if task == "node":
            self.pre_pool2 = O3TensorProduct(hidden_irreps, output_irreps, node_attr_irreps)
        else:
            pooled_irreps = (output_irreps * hidden_irreps.num_irreps).simplify().sort().irreps
            self.pre_pool2 = O3TensorProduct(hidden_irreps, pooled_irreps, node_attr_irreps)
            self.post_pool1 = O3TensorProductSwishGate(pooled_irreps, pooled_irreps)
            self.post_pool2 = O3TensorProduct(pooled_irreps, output_irreps)
            self.init_pooler(pool)

    def init_pooler(self, pool):
        if pool == "avg":
            self.pooler = global_mean_pool
        elif pool == "sum":
            self.pooler = global_add_pool
        else:
            raise ValueError(f"unknown pool: {pool}")

    def catch_isolated_nodes(self, graph):
        """Add rows of node_attr that nodes without neighbours lack, and set the trivial attribute to one."""
        missing = graph.num_nodes - graph.node_attr.shape[0]
        if graph.contains_isolated_nodes() and missing > 0:
            graph.node_attr = nn.functional.pad(graph.node_attr, (0, 0, 0, missing))
        graph.node_attr[:, 0] = 1.0

    def forward(self, graph):
        self.catch_isolated_nodes(graph)
        node_attr, batch = graph.node_attr, graph.batch
        additional_message_features = getattr(graph, "additional_message_features", None)

        x = self.embedding_layer(graph.x, node_attr)
        for layer in self.layers:
            x = layer(x, graph.edge_index, graph.edge_attr, node_attr, batch, additional_message_features)

        x = self.pre_pool1(x, node_attr)
        x = self.pre_pool2(x, node_attr)
        if self.task == "graph":
            x = self.pooler(x, batch)
            x = self.post_pool1(x)
            x = self.post_pool2(x)
        return x


class SEConvLayer(MessagePassing):
    """Steerable convolution: messages are summed, then gated."""

    def __init__(
        self,
        input_irreps,
        hidden_irreps,
        output_irreps,
        edge_attr_irreps,
        node_attr_irreps,
        norm=None,
        additional_message_irreps=None,
        conv_type="linear",
    ):
        super().__init__(aggr="add", node_dim=-2)
        input_irreps = Irreps(input_irreps)
        self.hidden_irreps = Irreps(hidden_irreps)
        self.conv_type = conv_type

        self.setup_gate(self.hidden_irreps)
        message_irreps = (2 * input_irreps + Irreps(additional_message_irreps or [])).simplify()
        if conv_type == "linear":
            self.message_layer = O3TensorProduct(message_irreps, self.irreps_g, edge_attr_irreps)
        elif conv_type == "nonlinear":
            self.message_layer_1 = O3TensorProductSwishGate(message_irreps, self.hidden_irreps, edge_attr_irreps)
            self.message_layer_2 = O3TensorProduct(self.hidden_irreps, self.irreps_g, edge_attr_irreps)
        else:
            raise ValueError(f"unknown conv_type: {conv_type}")
        self.setup_normalisation(norm)

    def setup_gate(self, hidden_irreps):
        scalars, gates, gated = split_for_gate(hidden_irreps)
        self.irreps_g = (scalars + gates + gated).sort().irreps.simplify()
        self.gate = O3SwishGate(scalars, gates, gated)

    def setup_normalisation(self, norm):
        self.norm = norm
        self.feature_norm = None
        self.message_norm = None
        if norm == "batch":
            self.feature_norm = BatchNorm(self.hidden_irreps)
            self.message_norm = BatchNorm(self.irreps_g)
        elif norm == "instance":
            self.feature_norm = InstanceNorm(self.hidden_irreps)

    def forward(self, x, edge_index, edge_attr, node_attr, batch, additional_message_features=None):
        x = self.propagate(
            edge_index,
            x=x,
            edge_attr=edge_attr,
            node_attr=node_attr,
            additional_message_features=additional_message_features,
        )
        if self.norm == "batch":
            x = self.feature_norm(x)
        elif self.norm == "instance":
            x = self.feature_norm(x, batch)
        return x

    def message(self, x_i, x_j, edge_attr, additional_message_features):
        inputs = [x_i, x_j]
        if additional_message_features is not None:
            inputs.append(additional_message_features)
        message = torch.cat(inputs, dim=-1)
        if self.conv_type == "linear":
            message = self.message_layer(message, edge_attr)
        else:
            message = self.message_layer_2(self.message_layer_1(message, edge_attr), edge_attr)
        if self.message_norm is not None:
            message = self.message_norm(message)
        return message

    def update(self, message, x, node_attr):
        x += self.gate(message)
        return x
