"""What computes y [batch, n_output_dims] from x [batch, n_input_dims]: an encoding, a network, or both in a row.

All three are one `Module`: parameters, inference, and a forward and backward pass for training loops of one's own.
"""

from __future__ import annotations

import copy
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from .arrays import HALF_AND_SINGLE, HALF_TO_DOUBLE, ArrayView, batch, view
from .config import parse_model
from .config_keys import did_you_mean
from .engine_selection import EngineOptions, SelectedEngine
from .engines import Explanation
from .initial_values import initial_params
from .layout import n_encoding_params, n_params, parameter_blocks
from .repeated_calls import RepeatedCalls, never_move
from .specs import ModelSpec
from .streams import stream_handle


class NotPickled:
    """Deep copies are models of their own; pickling is refused, a runtime holds device memory and loaded kernels."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        return twin

    def __reduce_ex__(self, protocol: int) -> Any:
        raise TypeError(
            f"a {type(self).__name__} can't be pickled: Model.save(path) stores a model and its training, and "
            f"numba_tcnn.load(path) brings them back (Model(network, trainer) makes one of parts); what a module "
            f"alone has learned is its `.params`, a NumPy array"
        )


@dataclass(frozen=True)
class Context:
    """What a backward pass needs of its forward pass: the inputs, and which version of the parameters it saw.

    The inputs are kept, not copied: leave their memory alone until the backward pass.
    """

    module: Module
    x: ArrayView
    parameters_version: int


@dataclass(frozen=True)
class Gradients:
    """dL/dparams, flat like `Module.params`, and dL/dx [batch, n_input_dims]; None where not asked for."""

    params: Any
    input: Any


@dataclass(frozen=True)
class SecondOrderGradients:
    """Gradients of S = sum(v * dL/dx) with respect to dL/dy [batch, n_output_dims], the parameters, and x."""

    dL_doutput: Any
    params: Any
    input: Any


class Module(NotPickled):
    """A differentiable function of x with parameters. Made through one of its subclasses."""

    def __init__(self, spec: ModelSpec, options: EngineOptions, *, seeding: str = "bindings"):
        self.spec = spec
        self.options = options
        self.engine = SelectedEngine(spec, initial_params(spec, options.seed, seeding=seeding), options)
        self._parameter_gradient: ArrayView | None = None
        self._repeated = RepeatedCalls()
        self._exact_dtypes = HALF_TO_DOUBLE if options.dtype == "float64" else HALF_AND_SINGLE

    @classmethod
    def _of(cls, spec: ModelSpec, options: EngineOptions, *, seeding: str) -> Module:
        """An instance without the public constructor, whose only work is to make the spec and the options."""
        module = object.__new__(cls)
        Module.__init__(module, spec, options, seeding=seeding)
        return module

    def __deepcopy__(self, memo: dict[int, Any]) -> Module:
        """The copy accumulates gradients of its own, and from nothing."""
        memo[id(self._parameter_gradient)] = None
        return super().__deepcopy__(memo)

    # -- what it is

    @property
    def n_input_dims(self) -> int:
        return self.spec.n_input_dims

    @property
    def n_output_dims(self) -> int:
        return self.spec.n_output_dims

    @property
    def n_params(self) -> int:
        """Length of the flat parameter vector, padded rows and columns included."""
        return n_params(self.spec)

    @property
    def layer_sizes(self) -> tuple[tuple[int, int], ...]:
        """(fan_out, fan_in) of each weight matrix as stored, padding included."""
        return self.spec.layer_shapes

    @property
    def seed(self) -> int:
        return self.options.seed

    @property
    def dtype(self) -> str:
        """The dtype that layers and encodings compute in."""
        return self.options.dtype

    def __repr__(self) -> str:
        shape = f"{self.n_input_dims} -> {self.n_output_dims}"
        return f"{type(self).__name__}({shape}, {self.n_params:,} parameters, {self.engine.runtime.name})"

    # -- engine

    @property
    def jit_fusion(self) -> bool:
        """Whether the fused engine runs; assign True or False to move there or to the reference, state included."""
        return self.engine.jit_fusion

    @jit_fusion.setter
    def jit_fusion(self, wanted: bool) -> None:
        self.engine.jit_fusion = wanted

    def explain(self) -> Explanation:
        """Which engine runs and why, and what its loaded kernels need; print it."""
        return self.engine.explain()

    # -- inside a kernel of one's own

    def device_function(self, block_size: int = 256) -> Callable:
        """The model as a Numba device function f(x, params) -> y, to be called inside your own `@cuda.jit` kernel.

        x           a tuple of n_input_dims float32, this lane's sample
        params      `device_params`, passed to the kernel as an argument
        y           a tuple of n_output_dims float32: what `inference` gives
        block_size  the most threads a block of the kernel will have, a multiple of 32

            f = model.device_function(block_size=256)

            @cuda.jit(launch_bounds=256)
            def kernel(points, params, out):
                i = cuda.grid(1)
                j = min(i, len(points) - 1)  # lanes past the end come along
                y = f((points[j, 0], points[j, 1]), params)
                if i < len(points):
                    out[i] = y[0]

            kernel[-(-n // 256), 256](points, model.device_params, out)

        All 32 lanes of a warp must call it together, as often as the one that needs it most often: no lane may have
        returned or sit in another branch (`cuda.any_sync(0xffffffff, ...)` decides loops for the whole warp). A lane
        without a sample passes anything and ignores the result. Warps need not wait for each other.

        It takes block_size rows of static shared memory (`2 * encoding width + 16` bytes each, at least 80), of which
        a kernel has 48 KiB, and none of its dynamic shared memory. A kernel may call several models' functions. Models
        of one configuration can share one: which parameters it uses is said by `params`. `launch_bounds` lets the
        compiler give a thread as many registers as such a block can have. Leave Numba's `cache=True` away: it does not
        notice another block_size.

        Raises `EngineUnavailable` where the reference computes the model, or no device function exists for it.
        """
        return self.engine.device_function(block_size)

    @property
    def device_params(self) -> Any:
        """The parameters as an argument of kernels that call `device_function`: pass it again at every launch.

        Nothing is copied. A kernel sees the parameters of inference as they are at its launch, after all training steps
        that were called before it, on whatever stream; a training step waits for kernels launched before it.
        """
        return self.engine.device_params()

    # -- levels of detail

    @property
    def max_level(self) -> float | np.ndarray:
        """The fraction of its levels that every grid of the encoding uses; 1, the default, is all of them.

        A grid of L levels uses those with a number (from 0) below max_level · L + 0.001; the features of the others
        are 0 and their parameters get no gradient. Assign a number, or an array [batch] of one number for each row of
        the batches that follow. Contexts from before do not survive.
        """
        return 1.0 if self.engine.max_level is None else self.engine.max_level

    @max_level.setter
    def max_level(self, value: Any) -> None:
        if n_encoding_params(self.spec.encoding) == 0:
            raise ValueError("max_level: the encoding has no grid, and so no levels")
        levels = np.array(value if isinstance(value, numbers.Real) else view(value, "max_level").numpy(), np.float32)
        if levels.ndim > 1 or np.isnan(levels).any():
            raise ValueError(f"max_level must be a number or an array [batch], without NaN, not {value!r}")
        levels.flags.writeable = False
        if levels.ndim == 1:
            self.engine.set_max_level(levels)
        else:
            self.engine.set_max_level(None if levels >= 1 else float(levels))

    # -- parameters

    @property
    def params(self) -> np.ndarray:
        """The flat parameter vector, as a read-only float32 copy. Assign a vector of the same length to set it."""
        params = np.array(self.engine.get_params(), np.float32)
        params.flags.writeable = False
        return params

    @params.setter
    def params(self, values: Any) -> None:
        host = view(values, "params").numpy()
        if host.dtype.kind != "f":
            raise TypeError(f"params must be of a float dtype, not {host.dtype}")
        if host.shape != (self.n_params,):
            raise ValueError(f"params must have shape ({self.n_params},), not {host.shape}")
        self.engine.set_params(np.ascontiguousarray(host, np.float32))

    def blocks(self) -> dict[str, np.ndarray]:
        """Copies of the named parts of the parameters, without padding.

        layer0.weight, layer1.weight, ...  [fan_out, fan_in]; the last one has n_output_dims rows
        layer0.bias, layer1.bias, ...      [fan_out], where the network was made with "bias": true
        grid.level0, grid.level1, ...      [entries, features]; nested0.grid.level0 ... inside a composite
        """
        params = self.engine.get_params()
        return {block.name: np.array(block.logical(params), np.float32) for block in parameter_blocks(self.spec)}

    def set_block(self, name: str, values: Any) -> None:
        """Set one block; padded rows and columns and all other blocks stay as they are."""
        by_name = {block.name: block for block in parameter_blocks(self.spec)}
        if name not in by_name:
            hint = did_you_mean(name, by_name) or f"; there are {', '.join(by_name) or 'none'}"
            raise KeyError(f"no parameter block {name!r}{hint}")
        block = by_name[name]
        host = view(values, name).numpy()
        if host.dtype.kind not in "fiu" or host.shape != block.logical_shape:
            raise ValueError(f"{name} must be real of shape {block.logical_shape}, not {host.dtype} of {host.shape}")
        params = np.array(self.engine.get_params(), np.float32)
        block.logical(params)[...] = host
        self.engine.set_params(params)

    # -- computing

    @property
    def _exact_dtype_names(self) -> str:
        return " or ".join(sorted(dtype.name for dtype in self._exact_dtypes))

    @property
    def _gradient_dtype(self) -> str:
        return "float64" if self.dtype == "float64" else "float32"

    def _batch(self, x: Any, name: str, n_columns: int) -> ArrayView:
        return batch(x, name, n_columns, exact=self._exact_dtypes)

    def _inputs(self, x: Any) -> ArrayView:
        return self._batch(x, "x", self.n_input_dims)

    def inference(self, x: Any, *, out: Any = None, dtype: DTypeLike = "float32", stream: Any = None) -> Any:
        """y [batch, n_output_dims] for x [batch, n_input_dims], in an array of the kind of x.

        out     write there instead and return it: C-contiguous, float32 or float16
        dtype   of the result without `out`: float32 or float16 (float64 from a model that computes in it)
        stream  CUDA stream to launch on, a handle or a library's object; by default the one on which x becomes ready
        """
        if stream is None:
            call = self._repeated.find(x, out)
            if call is not None and self.engine.repeat_inference(call):
                return out
        inputs = self._inputs(x)
        shape = (inputs.shape[0], self.n_output_dims)
        if out is None:
            try:
                known = np.dtype(dtype) in self._exact_dtypes
            except TypeError:  # no dtype at all
                known = False
            if not known:
                raise ValueError(f"dtype: {dtype} is not {self._exact_dtype_names}")
            output = self.engine.empty_like(inputs, shape, dtype)
        else:
            output = self._output(out, shape)
        can_repeat = stream is None and never_move(x, out) and inputs.shape[0] > 0 and inputs.array is x
        if can_repeat and self._repeated.should_record(x, out, self.engine.configuration):
            self._repeated.keep(x, out, self.engine.record_inference(inputs, output))
            return out
        stream = stream_handle(stream, inputs.stream)
        if inputs.shape[0] > 0:
            self.engine.inference(inputs, output, stream=stream)
        return output.result(stream)

    def _output(self, out: Any, shape: tuple[int, int]) -> ArrayView:
        output = view(out, "out")
        if output.kind == "jax":
            raise TypeError("out: JAX arrays can't be written; leave out= away and take the result")
        if output.array is not out:
            raise TypeError(f"out must be an array that can be written, not {type(out).__name__}")
        if output.shape != shape or output.dtype not in self._exact_dtypes or output.strides is not None:
            contiguous = "" if output.strides is None else "strided "
            raise ValueError(
                f"out must be C-contiguous {list(shape)} of {self._exact_dtype_names}, "
                f"not {contiguous}{list(output.shape)} of {output.dtype}"
            )
        return output

    def prepare(self, x: Any, out: Any) -> Prepared:
        """Inference from `x` into `out` for repeated use: `prepared()` reads what x holds then, at little host cost."""
        inputs = self._inputs(x)
        if inputs.array is not x:
            raise ValueError(
                f"x must be usable as it is, a C-contiguous array of {self._exact_dtype_names}: a copy would go stale"
            )
        return Prepared(self, inputs, self._output(out, (inputs.shape[0], self.n_output_dims)))

    def forward(self, x: Any, *, stream: Any = None) -> tuple[Any, Context]:
        """(y, context): the outputs, and what `backward` needs. Any number of contexts may wait, in any order.

        y is that of the parameters that are trained, also where the optimizer keeps others for inference.
        """
        inputs = self._inputs(x)
        output = self.engine.empty_like(inputs, (inputs.shape[0], self.n_output_dims), self._gradient_dtype)
        stream = stream_handle(stream, inputs.stream)
        if inputs.shape[0] > 0:
            self.engine.inference(inputs, output, training_params=True, stream=stream)
        return output.result(stream), Context(self, inputs, self.engine.parameters_version)

    def backward(
        self,
        context: Context,
        dL_dy: Any,
        *,
        parameters: str = "overwrite",
        input: bool = True,
        stream: Any = None,
    ) -> Gradients:
        """Gradients of a loss L, given dL/dy [batch, n_output_dims] at the outputs of the context's forward pass.

        parameters  "overwrite": a new gradient; "accumulate": add to the array that the last call returned, and
                    return that; "ignore": none
        input       whether dL/dx is wanted

        No loss scale goes in or comes out. Raises RuntimeError if the parameters have changed since the forward pass.
        """
        if parameters not in ("overwrite", "accumulate", "ignore"):
            raise ValueError(f"parameters: {parameters!r} is none of overwrite, accumulate, ignore")
        x = self._inputs_of(context)
        upstream = self._rows_of_context(dL_dy, "dL_dy", self.n_output_dims, x)

        gradient = self._gradient_buffer(x, parameters)
        accumulate = parameters == "accumulate" and gradient is self._parameter_gradient
        input_gradient = self.engine.empty_like(x, x.shape, self._gradient_dtype) if input else None
        stream = stream_handle(stream, x.stream)
        if x.shape[0] > 0 and (gradient is not None or input_gradient is not None):
            self.engine.backward(
                x, upstream, params=gradient, accumulate=accumulate, input=input_gradient, stream=stream
            )
        elif gradient is not None and not accumulate:
            gradient.write(np.zeros(gradient.shape, gradient.dtype))
        if gradient is not None:
            self._parameter_gradient = gradient
        return Gradients(*(v and v.result(stream) for v in (gradient, input_gradient)))

    def _inputs_of(self, context: Context) -> ArrayView:
        """The inputs that a context stands for, if the parameters still are those of its forward pass."""
        if not isinstance(context, Context):
            raise TypeError(f"context must be what forward() returned second, not {type(context).__name__}")
        if context.module is not self:
            raise ValueError("the context comes from another module's forward()")
        if context.parameters_version != self.engine.parameters_version:
            raise RuntimeError(
                "the parameters have changed, or max_level has, since this context's forward(); run forward() again"
            )
        return context.x

    def _rows_of_context(self, array: Any, name: str, n_columns: int, x: ArrayView) -> ArrayView:
        v = self._batch(array, name, n_columns)
        if v.shape[0] != x.shape[0]:
            raise ValueError(f"{name} has {v.shape[0]} rows, the context's x has {x.shape[0]}")
        return v

    def backward_backward_input(
        self, context: Context, dL_ddLdinput: Any, dL_doutput: Any, *, stream: Any = None
    ) -> SecondOrderGradients:
        """How dL/dx depends on everything: the backward pass of the backward pass with respect to x.

        For losses that contain a gradient, such as the eikonal loss (|df/dx| - 1)^2: `backward` with
        `dL_doutput` [batch, n_output_dims] gives dL/dx; `dL_ddLdinput` [batch, n_input_dims] is the derivative of
        the loss with respect to that. The result holds the derivatives of S = sum(dL_ddLdinput * dL/dx):

        dL_doutput  [batch, n_output_dims], with respect to the given dL_doutput
        params      [n_params]
        input       [batch, n_input_dims], with respect to x

        Where the fused engine has no second derivatives the reference computes them, from the same parameters.
        """
        x = self._inputs_of(context)
        v = self._rows_of_context(dL_ddLdinput, "dL_ddLdinput", self.n_input_dims, x)
        upstream = self._rows_of_context(dL_doutput, "dL_doutput", self.n_output_dims, x)
        shapes = {"dL_doutput": upstream.shape, "params": (self.n_params,), "input": x.shape}
        results = {name: self.engine.empty_like(x, shape, self._gradient_dtype) for name, shape in shapes.items()}
        stream = stream_handle(stream, x.stream)
        if x.shape[0] > 0:
            self.engine.backward_backward_input(x, v, upstream, **results, stream=stream)
        else:
            results["params"].write(np.zeros(self.n_params, self._gradient_dtype))
        return SecondOrderGradients(**{name: result.result(stream) for name, result in results.items()})

    def _gradient_buffer(self, x: ArrayView, parameters: str) -> ArrayView | None:
        """Where dL/dparams goes: the last call's array to accumulate there, else a new one of the kind of x."""
        if parameters == "ignore":
            return None
        last = self._parameter_gradient
        if parameters == "accumulate" and last is not None:
            return last
        return self.engine.empty_like(x, (self.n_params,), self._gradient_dtype)


class Prepared:
    """Inference between two fixed arrays; see `Module.prepare`."""

    def __init__(self, module: Module, x: ArrayView, out: ArrayView):
        self._module, self._x, self._out = module, x, out

    def __call__(self, *, stream: Any = None) -> Any:
        if self._x.shape[0] > 0:
            self._module.engine.inference(self._x, self._out, stream=stream_handle(stream, self._x.stream))
        return self._out.array


class NetworkWithInputEncoding(Module):
    """A trainable or fixed encoding of x, and a multi-layer perceptron behind it; see `Network` for its config."""

    def __init__(
        self,
        n_input_dims: int,
        n_output_dims: int,
        encoding_config: Mapping[str, Any],
        network_config: Mapping[str, Any],
        seed: int = 1337,
        *,
        engine: str = "auto",
        dtype: str = "float16",
        device: int = 0,
        deterministic: bool = False,
        strict: bool = False,
    ):
        spec = parse_model(n_input_dims, n_output_dims, encoding_config, network_config)
        super().__init__(spec, EngineOptions(engine, dtype, device, seed, deterministic, strict))


class Network(Module):
    """A multi-layer perceptron alone. Ones pad its input to a multiple of 16, as in tiny-cuda-nn's bindings.

    Its config is tiny-cuda-nn's ("otype", "n_neurons", "n_hidden_layers", "activation", "output_activation"), and two
    options that tiny-cuda-nn does not have:

    "hidden": [64, 32, 16]  the width of each hidden layer, instead of "n_neurons" and "n_hidden_layers"
    "bias": true            each layer adds a bias, which begins at 0
    """

    def __init__(
        self,
        n_input_dims: int,
        n_output_dims: int,
        network_config: Mapping[str, Any],
        seed: int = 1337,
        *,
        engine: str = "auto",
        dtype: str = "float16",
        device: int = 0,
        deterministic: bool = False,
        strict: bool = False,
    ):
        spec = parse_model(n_input_dims, n_output_dims, {"otype": "Identity"}, network_config)
        super().__init__(spec, EngineOptions(engine, dtype, device, seed, deterministic, strict))


class Encoding(Module):
    """An encoding alone. Its output has its natural width, or is padded to a multiple of `alignment`."""

    def __init__(
        self,
        n_input_dims: int,
        encoding_config: Mapping[str, Any],
        seed: int = 1337,
        *,
        alignment: int = 0,
        engine: str = "auto",
        dtype: str = "float16",
        device: int = 0,
        deterministic: bool = False,
        strict: bool = False,
    ):
        spec = parse_model(n_input_dims, None, encoding_config, None, alignment=alignment)
        super().__init__(spec, EngineOptions(engine, dtype, device, seed, deterministic, strict))
