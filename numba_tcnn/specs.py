"""Specs: the user's JSON as frozen dataclasses.

`config.py` makes them once, checks every number, and fills in defaults; everything downstream (parameter
layout, initial values, both engines, kernel plans, cache keys) is a pure function of them. A spec therefore
holds only hashable values, and equal specs mean equal models. Names and defaults are tiny-cuda-nn's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

ACTIVATIONS = (
    "None",
    "ReLU",
    "LeakyReLU",
    "SiLU",
    "Exponential",
    "Sine",
    "Sigmoid",
    "Squareplus",
    "Softplus",
    "Tanh",
)
LOSSES = (
    "L1",
    "L2",
    "RelativeL1",
    "RelativeL2",
    "RelativeL2Luminance",
    "Mape",
    "Smape",
    "CrossEntropy",
    "Variance",
)

N_COLOURS = 3
"""Outputs that a luminance is made of: red, green, blue."""

TENSOR_CORE_WIDTH = 16
"""Widths of matrices are padded to this many rows and columns."""


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


# --------------------------------------------------------------------------------------------- encodings


@dataclass(frozen=True)
class GridSpec:
    """Multiresolution grid (Müller et al. 2022, "Instant Neural Graphics Primitives")."""

    n_input_dims: int
    type: str = "Hash"  # Hash | Dense | Tiled
    n_levels: int = 16
    n_features_per_level: int = 2  # 1, 2, 4 or 8
    log2_hashmap_size: int = 19
    base_resolution: int = 16
    per_level_scale: float = 2.0
    interpolation: str = "Linear"  # Nearest | Linear | Smoothstep
    hash: str = "CoherentPrime"  # Prime | CoherentPrime | ReversedPrime | Rng | BaseConvert
    stochastic_interpolation: bool = False
    fixed_point_pos: bool = False

    @property
    def n_output_dims(self) -> int:
        return self.n_levels * self.n_features_per_level


@dataclass(frozen=True)
class IdentitySpec:
    n_input_dims: int
    scale: float = 1.0
    offset: float = 0.0

    @property
    def n_output_dims(self) -> int:
        return self.n_input_dims


@dataclass(frozen=True)
class FrequencySpec:
    n_input_dims: int
    n_frequencies: int = 12

    @property
    def n_output_dims(self) -> int:
        return 2 * self.n_frequencies * self.n_input_dims


@dataclass(frozen=True)
class TriangleWaveSpec:
    n_input_dims: int
    n_frequencies: int = 12

    @property
    def n_output_dims(self) -> int:
        return self.n_frequencies * self.n_input_dims


@dataclass(frozen=True)
class OneBlobSpec:
    n_input_dims: int
    n_bins: int = 16

    @property
    def n_output_dims(self) -> int:
        return self.n_bins * self.n_input_dims


@dataclass(frozen=True)
class SphericalHarmonicsSpec:
    n_input_dims: int = 3
    degree: int = 4

    @property
    def n_output_dims(self) -> int:
        return self.degree * self.degree


@dataclass(frozen=True)
class EmptySpec:
    n_input_dims: int

    @property
    def n_output_dims(self) -> int:
        return 0


@dataclass(frozen=True)
class NestedEncoding:
    """A child of a composite: which input dims it reads and which output columns it writes (padding included)."""

    encoding: EncodingSpec
    first_input_dim: int
    first_output_dim: int
    n_padded_output_dims: int


@dataclass(frozen=True)
class CompositeSpec:
    n_input_dims: int
    nested: tuple[NestedEncoding, ...]
    reduction: str = "Concatenation"  # Concatenation | Sum | Product

    @property
    def n_output_dims(self) -> int:
        if self.reduction == "Concatenation":
            return sum(child.n_padded_output_dims for child in self.nested)
        return self.nested[0].n_padded_output_dims


EncodingSpec = (
    GridSpec
    | IdentitySpec
    | FrequencySpec
    | TriangleWaveSpec
    | OneBlobSpec
    | SphericalHarmonicsSpec
    | EmptySpec
    | CompositeSpec
)


# ---------------------------------------------------------------------------------------------- networks


@dataclass(frozen=True)
class NetworkSpec:
    """A multi-layer perceptron: one weight matrix [fan_out, fan_in] more than it has hidden layers.

    `hidden` and `bias` are ours; tiny-cuda-nn has neither.

    hidden  the width of each hidden layer, in place of `n_neurons` and `n_hidden_layers`
    bias    whether each layer adds a bias [fan_out] to its product
    """

    otype: str = "CutlassMLP"  # FullyFusedMLP | CutlassMLP
    n_neurons: int = 128
    n_hidden_layers: int = 5
    activation: str = "ReLU"
    output_activation: str = "None"
    hidden: tuple[int, ...] | None = None
    bias: bool = False

    @property
    def hidden_widths(self) -> tuple[int, ...]:
        """Neurons of each hidden layer, without padding."""
        return (self.n_neurons,) * self.n_hidden_layers if self.hidden is None else self.hidden


def _shapes_between(widths: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple((fan_out, fan_in) for fan_in, fan_out in zip(widths[:-1], widths[1:], strict=True))


@dataclass(frozen=True)
class ModelSpec:
    """What is computed from x [batch, n_input_dims]: an encoding, and a network behind it unless `network` is None."""

    n_input_dims: int
    n_output_dims: int
    encoding: EncodingSpec
    network: NetworkSpec | None
    encoding_width: int  # output columns of the encoding, padding included

    @property
    def padded_output_width(self) -> int:
        """Rows of the last weight matrix; the encoding's padded width where there is no network."""
        return self.encoding_width if self.network is None else round_up(self.n_output_dims, TENSOR_CORE_WIDTH)

    @property
    def layer_shapes(self) -> tuple[tuple[int, int], ...]:
        """(fan_out, fan_in) of each weight matrix as stored, padding included, in parameter order."""
        if self.network is None:
            return ()
        hidden = (round_up(width, TENSOR_CORE_WIDTH) for width in self.network.hidden_widths)
        return _shapes_between((self.encoding_width, *hidden, self.padded_output_width))

    @property
    def logical_layer_shapes(self) -> tuple[tuple[int, int], ...]:
        """(fan_out, fan_in) of each weight matrix without padding: nothing depends on what is stored beyond.

        The columns of an encoding's padding belong to the first matrix: the encoding writes numbers there.
        """
        if self.network is None:
            return ()
        return _shapes_between((self.encoding_width, *self.network.hidden_widths, self.n_output_dims))


# ------------------------------------------------------------------------------------ losses, optimizers


@dataclass(frozen=True)
class LossSpec:
    """`gradient` is that of ConstantGradient, one number an output; other losses have none."""

    otype: str = "RelativeL2"  # one of LOSSES | ConstantGradient
    gradient: tuple[float, ...] = ()


@dataclass(frozen=True)
class AdamSpec:
    learning_rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    l2_reg: float = 1e-8  # matrix parameters only
    non_matrix_l2_reg: float = 0.0
    non_matrix_learning_rate_factor: float = 1.0
    relative_decay: float = 0.0
    absolute_decay: float = 0.0
    clipping_magnitude: float = 0.0  # of weights; 0 is off
    gradient_clipping_magnitude: float = 0.0  # element-wise; 0 is off
    adabound: bool = False
    optimize_matrix_params: bool = True
    optimize_non_matrix_params: bool = True
    skip_zero_grad_non_matrix_params: bool = True


@dataclass(frozen=True)
class SgdSpec:
    learning_rate: float = 1e-3
    l2_reg: float = 1e-8


@dataclass(frozen=True)
class NovogradSpec:
    learning_rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    relative_decay: float = 0.0
    absolute_decay: float = 0.0


@dataclass(frozen=True)
class ShampooSpec:
    learning_rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.99
    beta3: float = 0.9
    beta_shampoo: float = 0.9
    epsilon: float = 1e-8
    identity: float = 0.01
    cg_on_momentum: bool = True
    l2_reg: float = 1e-5
    relative_decay: float = 0.0
    absolute_decay: float = 0.0
    frobenius_normalization: bool = True


@dataclass(frozen=True)
class AverageSpec:
    nested: OptimizerSpec = field(default_factory=AdamSpec)
    n_samples: int = 128


@dataclass(frozen=True)
class BatchedSpec:
    nested: OptimizerSpec = field(default_factory=AdamSpec)
    batch_size_multiplier: int = 16


@dataclass(frozen=True)
class EmaSpec:
    nested: OptimizerSpec = field(default_factory=AdamSpec)
    decay: float = 0.99
    full_precision: bool = False


@dataclass(frozen=True)
class ExponentialDecaySpec:
    nested: OptimizerSpec = field(default_factory=AdamSpec)
    decay_base: float = 0.1
    decay_start: int = 10_000
    decay_end: int = 10_000_000
    decay_interval: int = 10_000


@dataclass(frozen=True)
class LookaheadSpec:
    nested: OptimizerSpec = field(default_factory=AdamSpec)
    alpha: float = 0.5
    n_steps: int = 16


@dataclass(frozen=True)
class CompositeOptimizerSpec:
    nested: tuple[OptimizerSpec, ...]
    n_params_to_optimize: tuple[int, ...]


OptimizerSpec = (
    AdamSpec
    | SgdSpec
    | NovogradSpec
    | ShampooSpec
    | AverageSpec
    | BatchedSpec
    | EmaSpec
    | ExponentialDecaySpec
    | LookaheadSpec
    | CompositeOptimizerSpec
)
