from e3nn.o3 import FullyConnectedTensorProduct, Irreps


def one_of_each(lmax, sh):
    """Return every type up to lmax once, with the parity of spherical harmonics or with both."""
    if sh:
        return Irreps.spherical_harmonics(lmax)
    return Irreps([(1, (degree, parity)) for degree in range(lmax + 1) for parity in (1, -1)])


def BalancedIrreps(lmax, vec_dim, sh_type=True):
    """Divide vec_dim channels equally among the types. The remainder becomes scalars."""
    types = one_of_each(lmax, sh_type)
    counts = [int(vec_dim / len(types) / mul_ir.ir.dim) for mul_ir in types]
    counts[0] += vec_dim - sum(n * mul_ir.ir.dim for n, mul_ir in zip(counts, types, strict=True))
    irreps = Irreps([(n, mul_ir.ir) for n, mul_ir in zip(counts, types, strict=True)]).remove_zero_multiplicities()
    print("Determined irrep type:", irreps)
    return irreps


def WeightBalancedIrreps(irreps_in1_scalar, irreps_in2, sh=True, lmax=None):
    """Return the smallest balanced irreps with at least as many weights as the scalar linear map."""
    irreps_in2 = Irreps(irreps_in2)
    types = one_of_each(irreps_in2.lmax if lmax is None else lmax, sh)
    wanted = count_weights(irreps_in1_scalar, "1x0e", irreps_in1_scalar)
    n = 1
    while True:
        irreps = Irreps([(n, mul_ir.ir) for mul_ir in types])
        found = count_weights(irreps, irreps_in2, irreps)
        if found >= wanted:
            print(f"Determined irrep type: {irreps} ({found} weights, {wanted} in the scalar map)")
            return irreps
        n += 1


def count_weights(irreps_in1, irreps_in2, irreps_out):
    tp = FullyConnectedTensorProduct(irreps_in1, irreps_in2, irreps_out, compile_left_right=False, compile_right=False)
    return tp.weight_numel
