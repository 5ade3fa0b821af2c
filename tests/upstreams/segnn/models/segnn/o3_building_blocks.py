import torch
from e3nn.nn import Gate
from e3nn.o3 import FullyConnectedTensorProduct, Irreps
from torch import nn


class O3TensorProduct(nn.Module):
    """Linear map of irreps_in1 conditioned on irreps_in2, with biases on the scalars and the scale of nn.Linear."""

    def __init__(self, irreps_in1, irreps_out, irreps_in2=None, tp_rescale=True):
        super().__init__()
        self.irreps_in1 = Irreps(irreps_in1)
        self.irreps_out = Irreps(irreps_out)
        self.irreps_in2_provided = irreps_in2 is not None
        self.irreps_in2 = Irreps(irreps_in2) if self.irreps_in2_provided else Irreps("1x0e")
        self.tp_rescale = tp_rescale
        self.tp = FullyConnectedTensorProduct(
            self.irreps_in1, self.irreps_in2, self.irreps_out, shared_weights=True, irrep_normalization="component"
        )
        self.tensor_product_init()
        self.vectorise()

    def tensor_product_init(self):
        """Draw weights and biases from U(-sqrt_k, sqrt_k), where 1/k is the fan in of the output slice."""
        fan_in = [0] * len(self.irreps_out)
        for instr in self.tp.instructions:
            fan_in[instr.i_out] += self.irreps_in1[instr.i_in1].mul * self.irreps_in2[instr.i_in2].mul
        self.slices_sqrt_k = [max(n, 1) ** -0.5 for n in fan_in]

        with torch.no_grad():
            if self.tp_rescale:
                for _, instr, weight in self.tp.weight_views(yield_instruction=True):
                    sqrt_k = self.slices_sqrt_k[instr.i_out]
                    weight.uniform_(-sqrt_k, sqrt_k)
            biases = [
                torch.empty(mul_ir.mul).uniform_(-sqrt_k, sqrt_k)
                for mul_ir, sqrt_k in zip(self.irreps_out, self.slices_sqrt_k, strict=True)
                if mul_ir.ir.is_scalar()
            ]
        self.register_parameter("biases", nn.Parameter(torch.cat(biases)) if biases else None)

    def vectorise(self):
        """Compute the corrections and the places of the biases for each output channel."""
        correction = torch.ones(self.irreps_out.dim)
        bias_idx = []
        for mul_ir, s, sqrt_k in zip(self.irreps_out, self.irreps_out.slices(), self.slices_sqrt_k, strict=True):
            if self.tp_rescale:
                correction[s] = sqrt_k
            if mul_ir.ir.is_scalar():
                bias_idx.extend(range(s.start, s.stop))
        self.register_buffer("bias_idx", torch.tensor(bias_idx, dtype=torch.long), persistent=False)
        self.register_buffer("sqrt_k_correction", correction, persistent=False)

    def forward_tp_rescale_bias(self, data_in1, data_in2=None):
        if data_in2 is None:
            data_in2 = torch.ones_like(data_in1[:, :1])
        data_out = self.tp(data_in1, data_in2) / self.sqrt_k_correction
        if self.biases is not None:
            data_out[:, self.bias_idx] += self.biases
        return data_out

    def forward(self, data_in1, data_in2=None):
        return self.forward_tp_rescale_bias(data_in1, data_in2)


class O3TensorProductSwishGate(O3TensorProduct):
    """O3TensorProduct with SiLU on the scalars and sigmoid gates on everything else."""

    def __init__(self, irreps_in1, irreps_out, irreps_in2=None):
        scalars, gates, gated = split_for_gate(irreps_out)
        super().__init__(irreps_in1, (scalars + gates + gated).sort().irreps.simplify(), irreps_in2)
        self.gate = make_gate(scalars, gates, gated)

    def forward(self, data_in1, data_in2=None):
        return self.gate(self.forward_tp_rescale_bias(data_in1, data_in2))


class O3SwishGate(torch.nn.Module):
    """The gate alone, for features that include the gate scalars."""

    def __init__(self, irreps_g_scalars, irreps_g_gate, irreps_g_gated):
        super().__init__()
        self.gate = make_gate(Irreps(irreps_g_scalars), Irreps(irreps_g_gate), Irreps(irreps_g_gated))

    def forward(self, data_in):
        return self.gate(data_in)


def split_for_gate(irreps):
    """Return the scalars (the first block), the gate scalars and the gated irreps."""
    irreps = Irreps(irreps)
    scalars, gated = irreps[:1], irreps[1:]
    gates = Irreps([(gated.num_irreps, "0e")]) if gated.dim else Irreps([])
    return Irreps(scalars), gates, Irreps(gated)


def make_gate(scalars, gates, gated):
    if gated.dim == 0:
        return nn.SiLU()
    return Gate(scalars, [nn.SiLU()], gates, [torch.sigmoid], gated)
