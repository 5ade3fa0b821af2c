"""The primal-dual loop in plain Python floats, as the reference for the torch implementation.

Nothing here imports torch or the package under test. Every parameter, multiplier and slack is one Python
float (IEEE double) with an optimizer object of its own, moved in a loop over layers; NumPy only carries the
arrays in and out. Shapes: n is the number of model parameters, L the number of relaxed layers.

Every update of step t reads the state at t: gamma, u and lambda before the step, never a value that the
same step has already moved.

The second half holds two convex problems whose saddle points are known in closed form.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Grad = Callable[[Array, Array], tuple[Array, Array]]
"""grad(theta [n], gamma [L]) -> (dJ0/dtheta [n], dJ0/dgamma [L])."""
Rate = float | Callable[[int], float]
"""A constant, or a function of the step index, which counts from 0."""
Mode = Literal["strict", "bounded", "resilient"]


@dataclass
class Result:
    """The whole trajectory: row 0 is the start, row t the state after t steps."""

    gamma: Array
    """[steps + 1, L]"""
    theta: Array
    """[steps + 1, n]"""
    lambda_: Array
    """[steps + 1, L]"""
    u: Array
    """[steps + 1, L]: the learned slack in resilient mode, epsilon in bounded mode, 0 in strict mode."""


class _Scalar(Protocol):
    """The optimizer of one scalar: from a direction and a learning rate, the amount to move by."""

    def step(self, g: float, lr: float) -> float: ...


class _Sgd:
    """SGD, PyTorch's convention: buf = momentum * buf + g, and the first buf is g."""

    def __init__(self, momentum: float) -> None:
        self.momentum = momentum
        self.buf: float | None = None

    def step(self, g: float, lr: float) -> float:
        self.buf = g if self.buf is None else self.momentum * self.buf + g
        return lr * self.buf


class _Adam:
    """Adam with bias correction, eps added outside the square root."""

    def __init__(self, betas: tuple[float, float], eps: float) -> None:
        self.b1, self.b2 = betas
        self.eps = eps
        self.m = 0.0
        self.v = 0.0
        self.t = 0

    def step(self, g: float, lr: float) -> float:
        self.t += 1
        self.m = self.b1 * self.m + (1.0 - self.b1) * g
        self.v = self.b2 * self.v + (1.0 - self.b2) * g * g
        denominator = math.sqrt(self.v) / math.sqrt(1.0 - self.b2**self.t) + self.eps
        return lr * (self.m / (1.0 - self.b1**self.t)) / denominator


def _at(rate: Rate, step: int) -> float:
    return float(rate(step)) if callable(rate) else float(rate)


def _sign(x: float) -> float:
    if x > 0.0:
        return 1.0
    if x < 0.0:
        return -1.0
    return 0.0


def simulate(
    grad: Grad,
    theta0: Array,
    gamma0: Array,
    *,
    steps: int,
    mode: Mode,
    primal: Literal["sgd", "adam"] = "sgd",
    primal_lr: Rate,
    dual: Literal["sgd", "adam"] = "sgd",
    dual_lr: Rate,
    rho: float = 1.0,
    epsilon: float = 0.1,
    augmented: float = 0.0,
    gamma_lr: float = 1.0,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> Result:
    """Run ``steps`` steps of the loop from theta0 [n] and gamma0 [L], with lambda = 0.

    ``momentum`` is that of the primal SGD; the dual SGD has none. ``betas`` and ``eps`` serve both the primal
    and the dual Adam. ``weight_decay`` is coupled L2 on theta alone. ``gamma_lr`` multiplies the primal
    learning rate for gamma alone: neither theta nor u sees it. ``sign(0)`` is 0.
    """
    if mode not in ("strict", "bounded", "resilient"):
        raise ValueError(f"unknown mode {mode!r}")

    def primal_optimizer() -> _Scalar:
        if primal == "sgd":
            return _Sgd(momentum)
        if primal == "adam":
            return _Adam(betas, eps)
        raise ValueError(f"unknown primal optimizer {primal!r}")

    def dual_optimizer() -> _Scalar:
        if dual == "sgd":
            return _Sgd(0.0)
        if dual == "adam":
            return _Adam(betas, eps)
        raise ValueError(f"unknown dual optimizer {dual!r}")

    theta = [float(x) for x in np.asarray(theta0, dtype=np.float64)]
    gamma = [float(x) for x in np.asarray(gamma0, dtype=np.float64)]
    n, layers = len(theta), len(gamma)
    lam = [0.0] * layers
    u = [epsilon if mode == "bounded" else 0.0] * layers

    theta_optimizers = [primal_optimizer() for _ in range(n)]
    gamma_optimizers = [primal_optimizer() for _ in range(layers)]
    dual_optimizers = [dual_optimizer() for _ in range(layers)]

    thetas, gammas, lambdas, us = [list(theta)], [list(gamma)], [list(lam)], [list(u)]
    for t in range(steps):
        eta_p = _at(primal_lr, t)
        eta_d = _at(dual_lr, t)
        d_theta, d_gamma = grad(np.array(theta, dtype=np.float64), np.array(gamma, dtype=np.float64))

        for j in range(n):
            g = float(d_theta[j]) + weight_decay * theta[j]
            theta[j] = theta[j] - theta_optimizers[j].step(g, eta_p)

        for i in range(layers):
            gamma_t, lam_t, u_t = gamma[i], lam[i], u[i]
            g = float(d_gamma[i])
            if mode == "strict":
                slack = gamma_t
                g = g + lam_t + 2.0 * augmented * gamma_t
            else:
                slack = abs(gamma_t) - u_t
                violated = max(slack, 0.0)
                g = g + lam_t * _sign(gamma_t) + 2.0 * augmented * violated * _sign(gamma_t)
                if mode == "resilient":
                    u[i] = max(0.0, u_t - eta_p * (rho * u_t - lam_t - 2.0 * augmented * violated))
            gamma[i] = gamma_t - gamma_optimizers[i].step(g, eta_p * gamma_lr)
            lam[i] = lam_t + dual_optimizers[i].step(slack, eta_d)
            if mode != "strict":
                lam[i] = max(0.0, lam[i])

        thetas.append(list(theta))
        gammas.append(list(gamma))
        lambdas.append(list(lam))
        us.append(list(u))

    return Result(
        gamma=np.array(gammas, dtype=np.float64).reshape(steps + 1, layers),
        theta=np.array(thetas, dtype=np.float64).reshape(steps + 1, n),
        lambda_=np.array(lambdas, dtype=np.float64).reshape(steps + 1, layers),
        u=np.array(us, dtype=np.float64).reshape(steps + 1, layers),
    )


# Problems whose saddle points are known. The augmented term is zero, with its gradient, wherever the
# constraint holds, so none of these saddles depends on ``augmented``. Nor do they depend on ``gamma_lr``, on
# either optimizer, or on either learning rate. They do assume ``weight_decay = 0``.


@dataclass
class Saddle:
    """A stationary point of the loop."""

    theta: Array
    """[n]"""
    gamma: Array
    """[L]"""
    lambda_: Array
    """[L]"""
    u: Array
    """[L]"""


@dataclass
class Quadratic:
    """J0(z) = z.A z / 2 + b.z with z = (theta, gamma), so that every layer is coupled to every parameter."""

    A: Array
    """[n + L, n + L], symmetric positive definite"""
    b: Array
    """[n + L]"""
    n: int
    """how many of the coordinates are theta; the rest are gamma"""

    def loss(self, theta: Array, gamma: Array) -> float:
        """J0 at theta [n], gamma [L]."""
        z = np.concatenate([theta, gamma])
        return float(0.5 * z @ self.A @ z + self.b @ z)

    def grad(self, theta: Array, gamma: Array) -> tuple[Array, Array]:
        """(dJ0/dtheta [n], dJ0/dgamma [L])."""
        g = self.A @ np.concatenate([theta, gamma]) + self.b
        return g[: self.n], g[self.n :]

    def strict_saddle(self) -> Saddle:
        """gamma = 0, theta minimises J0(., 0), and lambda = -dJ0/dgamma there."""
        gamma = np.zeros(len(self.b) - self.n)
        theta = np.linalg.solve(self.A[: self.n, : self.n], -self.b[: self.n]).astype(np.float64)
        return Saddle(theta, gamma, -self.grad(theta, gamma)[1], np.zeros_like(gamma))

    def resilient_saddle(self, rho: float = 1.0) -> Saddle:
        """lambda = rho u and u = |gamma|, so lambda sign(gamma) = rho gamma and stationarity is linear.

        (A + rho diag(0, I)) z = -b: the minimiser of J0 + (rho / 2) |gamma|^2.
        """
        layers = len(self.b) - self.n
        ridge = np.diag(np.concatenate([np.zeros(self.n), np.full(layers, rho)]))
        z = np.linalg.solve(self.A + ridge, -self.b).astype(np.float64)
        u = np.abs(z[self.n :])
        return Saddle(z[: self.n], z[self.n :], rho * u, u)


def quadratic(A: npt.ArrayLike, b: npt.ArrayLike, n: int) -> Quadratic:
    """The coupled problem for A [n + L, n + L] (checked: symmetric positive definite) and b [n + L]."""
    matrix = np.array(A, dtype=np.float64)
    vector = np.array(b, dtype=np.float64)
    if matrix.shape != (len(vector), len(vector)) or not 0 < n < len(vector):
        raise ValueError(f"A {matrix.shape}, b {vector.shape} and n = {n} do not fit together")
    if not np.array_equal(matrix, matrix.T) or np.linalg.eigvalsh(matrix)[0] <= 0:
        raise ValueError("A must be symmetric positive definite")
    return Quadratic(matrix, vector, n)


def random_quadratic(n: int, layers: int, seed: int = 0) -> Quadratic:
    """A coupled problem whose Hessian has eigenvalues between 0.5 and 2 inclusive."""
    rng = np.random.default_rng(seed)
    q, _ = np.linalg.qr(rng.standard_normal((n + layers, n + layers)))
    A = (q * np.linspace(0.5, 2.0, n + layers)) @ q.T
    return quadratic((A + A.T) / 2, rng.standard_normal(n + layers), n)


@dataclass
class Diagonal:
    """J0 = sum_j a_j (theta_j - centre_j)^2 / 2 + sum_i h_i (gamma_i - target_i)^2 / 2: scalar formulas."""

    a: Array
    """[n], positive"""
    centre: Array
    """[n]"""
    h: Array
    """[L], positive"""
    target: Array
    """[L]: where the data wants gamma; 0 is a layer whose symmetry fits"""

    def loss(self, theta: Array, gamma: Array) -> float:
        """J0 at theta [n], gamma [L]."""
        return float(
            0.5 * np.sum(self.a * (theta - self.centre) ** 2) + 0.5 * np.sum(self.h * (gamma - self.target) ** 2)
        )

    def grad(self, theta: Array, gamma: Array) -> tuple[Array, Array]:
        """(dJ0/dtheta [n], dJ0/dgamma [L])."""
        return self.a * (theta - self.centre), self.h * (gamma - self.target)

    def strict_saddle(self) -> Saddle:
        """gamma = 0 and lambda = h target, of either sign."""
        zero = np.zeros_like(self.h)
        return Saddle(self.centre.copy(), zero, self.h * self.target, zero.copy())

    def resilient_saddle(self, rho: float = 1.0) -> Saddle:
        """gamma = h target / (h + rho), u = |gamma|, lambda = rho u."""
        gamma = self.h * self.target / (self.h + rho)
        return Saddle(self.centre.copy(), gamma, rho * np.abs(gamma), np.abs(gamma))

    def bounded_saddle(self, epsilon: float = 0.1) -> Saddle:
        """gamma = target clipped to [-epsilon, epsilon], and lambda = h max(|target| - epsilon, 0)."""
        gamma = np.clip(self.target, -epsilon, epsilon)
        excess = np.maximum(np.abs(self.target) - epsilon, 0.0)
        return Saddle(self.centre.copy(), gamma, self.h * excess, np.full_like(self.h, epsilon))


def diagonal(a: npt.ArrayLike, centre: npt.ArrayLike, h: npt.ArrayLike, target: npt.ArrayLike) -> Diagonal:
    """The uncoupled problem for a [n], centre [n], h [L] and target [L]."""
    return Diagonal(
        np.array(a, dtype=np.float64),
        np.array(centre, dtype=np.float64),
        np.array(h, dtype=np.float64),
        np.array(target, dtype=np.float64),
    )
