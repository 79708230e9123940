"""Composite encoding: several encodings, each of its own range of input dimensions, side by side or combined.

With y_i the features of child i, padding included,

    Concatenation   y = (y_0, y_1, ...)
    Sum             y = Σ_i y_i
    Product         y = Π_i y_i

and u = dL/dy, child i sees the output gradient

    u_i = its columns of u,   u_i = u,   u_i = u · r_i  with  r_i = Π_{k≠i} y_k  the product of the other children.

Input gradients of children that share dimensions add up; dimensions that no child reads get 0. The y_i are combined in
the compute format: in half precision, y is rounded and they are not.

Second order: S = Σ_i S_i(x_i, u_i, θ_i) is a sum over the children, whose own second orders give ẏ_i = dS_i/du_i (the
derivative of y_i along v = dL_ddx), dS_i/dθ_i and dS_i/dx_i. Then

    dS/du   the ẏ_i side by side,  Σ_i ẏ_i,  or  Σ_i ẏ_i r_i

and in a product u_i depends on the other children: with ṙ_i, the derivative of r_i along v, y_i has the gradient
dS/dy_i = u · ṙ_i, which goes back through child i's first order. Products are formed again for each child, without
a division: a factor may be 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from numba_tcnn.layout import n_encoding_params
from numba_tcnn.specs import CompositeSpec, NestedEncoding

from .encoding_contract import WHOLE_BATCH, Encoding, Samples, write_features


class Child:
    """A nested encoding and its place: which input dimensions, output columns and parameters of the composite."""

    def __init__(self, nested: NestedEncoding, encoding: Encoding, first_param: int):
        first_dim, n_dims = nested.first_input_dim, nested.encoding.n_input_dims
        self.encoding = encoding
        self.n_own = nested.encoding.n_output_dims
        self.width = nested.n_padded_output_dims
        self.dims = slice(first_dim, first_dim + n_dims)
        self.columns = slice(nested.first_output_dim, nested.first_output_dim + self.width)
        self.params = slice(first_param, first_param + n_encoding_params(nested.encoding))


class Composite:
    padding_value = 1.0  # of columns past the children's; configs give none, they pad the children

    def __init__(self, spec: CompositeSpec, encodings: list[Encoding]):
        """`encodings` are those of `spec.nested`, in order."""
        self.spec = spec
        self.children: list[Child] = []
        first_param = 0
        for nested, encoding in zip(spec.nested, encodings, strict=True):
            self.children.append(Child(nested, encoding, first_param))
            first_param = self.children[-1].params.stop

    def forward(
        self, x: np.ndarray, params: np.ndarray, out: np.ndarray, samples: Samples = WHOLE_BATCH
    ) -> tuple[list[np.ndarray], list[Any]]:
        features, contexts = self.features(x, params, out, samples)
        if self.spec.reduction == "Sum":
            out[:] = np.add.reduce(features)
        elif self.spec.reduction == "Product":
            out[:] = np.multiply.reduce(features)
        return features, contexts

    def features(
        self, x: np.ndarray, params: np.ndarray, out: np.ndarray, samples: Samples
    ) -> tuple[list[np.ndarray], list[Any]]:
        """y_i and context of every child; side by side, the y_i are columns of `out`."""
        features, contexts = [], []
        for child in self.children:
            side_by_side = self.spec.reduction == "Concatenation"
            y = out[:, child.columns] if side_by_side else np.empty_like(out)
            contexts.append(write_features(child.encoding, x[:, child.dims], params[child.params], y, samples))
            features.append(y)
        return features, contexts

    def backward(
        self,
        context: tuple[list[np.ndarray], list[Any]],
        params: np.ndarray,
        dL_dout: np.ndarray,
        dL_dparams: np.ndarray | None,
        dL_dx: np.ndarray | None,
    ) -> None:
        features, contexts = context
        gradients = self.output_gradients(dL_dout, features)
        for child, child_context, u in zip(self.children, contexts, gradients, strict=True):
            self.backward_child(child, child_context, params, u, dL_dparams, dL_dx)

    def backward_child(
        self,
        child: Child,
        context: Any,
        params: np.ndarray,
        u: np.ndarray,
        dL_dparams: np.ndarray | None,
        dL_dx: np.ndarray | None,
    ) -> None:
        child.encoding.backward(
            context,
            params[child.params],
            u[:, : child.n_own],
            None if dL_dparams is None else dL_dparams[child.params],
            None if dL_dx is None else dL_dx[:, child.dims],
        )

    def output_gradients(self, u: np.ndarray, features: list[np.ndarray]) -> list[np.ndarray]:
        """u_i [batch, width] of every child."""
        if self.spec.reduction == "Concatenation":
            return [u[:, child.columns] for child in self.children]
        if self.spec.reduction == "Sum":
            return [u] * len(self.children)
        return [u * product_of_others(i, features) for i in range(len(features))]

    def backward_backward_input(
        self,
        x: np.ndarray,
        dL_dy: np.ndarray,
        dL_ddx: np.ndarray,
        params: np.ndarray,
        samples: Samples = WHOLE_BATCH,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        dL_ddLdy, dL_dparams, dL_dx = np.zeros_like(dL_dy), np.zeros_like(params), np.zeros_like(x)
        features, contexts = self.features(x, params, np.empty_like(dL_dy), samples)
        gradients = self.output_gradients(dL_dy, features)
        tangents = []
        for child, y, u in zip(self.children, features, gradients, strict=True):
            y_dot = np.zeros_like(y)  # padding does not move
            y_dot[:, : child.n_own], child_params, child_x = child.encoding.backward_backward_input(
                x[:, child.dims], u[:, : child.n_own], dL_ddx[:, child.dims], params[child.params], samples
            )
            dL_dparams[child.params] += child_params
            dL_dx[:, child.dims] += child_x
            tangents.append(y_dot)
        if self.spec.reduction == "Concatenation":
            for child, y_dot in zip(self.children, tangents, strict=True):
                dL_ddLdy[:, child.columns] = y_dot
        elif self.spec.reduction == "Sum":
            dL_ddLdy += np.add.reduce(tangents)
        else:
            for i, (child, context) in enumerate(zip(self.children, contexts, strict=True)):
                dL_ddLdy += tangents[i] * product_of_others(i, features)
                u = dL_dy * tangent_of_others(i, features, tangents)
                self.backward_child(child, context, params, u, dL_dparams, dL_dx)
        return dL_ddLdy, dL_dparams, dL_dx


def product_of_others(i: int, features: list[np.ndarray]) -> np.ndarray:
    """r_i = Π_{k≠i} y_k."""
    others = features[:i] + features[i + 1 :]
    return np.multiply.reduce(others) if others else np.ones_like(features[i])


def tangent_of_others(i: int, features: list[np.ndarray], tangents: list[np.ndarray]) -> np.ndarray:
    """ṙ_i = Σ_{j≠i} ẏ_j Π_{k≠i,j} y_k: the product grows factor by factor, its derivative by the product rule."""
    product, tangent = np.ones_like(features[i]), np.zeros_like(features[i])
    for k, (y, y_dot) in enumerate(zip(features, tangents, strict=True)):
        if k != i:
            tangent = tangent * y + product * y_dot
            product = product * y
    return tangent
