"""Programs that go layer by layer (`layer_plan.py`): kernels launched for one layer of a chunk after the other."""

from __future__ import annotations

from ..specs import ModelSpec, round_up
from .gradient_programs import BATCH_FIELDS, Batch, GradientProgram, batch_fields
from .layer_plan import ChunkLayout, LayeredPlan, ProductPlan
from .plan import bias_offsets, layer_offsets
from .programs import PartialSums, Program, Workspace
from .tiles import HALF

CHUNK_BYTES = 256 * 2**20
"""Memory for the matrices of a chunk."""

PARTIAL_BYTES = 128 * 2**20
"""Memory for partial sums, of which there is at least one row."""


class Chunk:
    """The matrices of a chunk of `n_rows` samples, which are whole tiles: addresses by `layout`'s numbers."""

    def __init__(self, address: int, n_rows: int):
        self.address, self.n_rows = address, n_rows

    def place(self, bytes_before: int) -> int:
        return self.address + bytes_before * self.n_rows


class LayerKernels:
    """The kernels of a layered plan by name, and each layer's sizes and parameters."""

    def __init__(self, spec: ModelSpec, plan: LayeredPlan, programs: list[Program], parameters: int):
        self.spec, self.plan = spec, plan
        self.programs = {program.kernel.name: program for program in programs}
        self.own_widths = [fan_out for fan_out, _ in spec.logical_layer_shapes]
        self.use(parameters)

    def use(self, parameters: int) -> None:
        """The parameters at this address from now on."""
        biases = bias_offsets(self.spec)
        self.parameters = parameters
        self.weights = [parameters + HALF * offset for offset in layer_offsets(self.spec)]
        self.biases = [parameters + HALF * offset for offset in biases] if biases else [0] * len(self.weights)

    def __contains__(self, name: str) -> bool:
        return name in self.programs

    def chunk_rows(self, bytes_a_row: int, batch: int) -> int:
        """Samples a chunk, whole tiles: as many as `CHUNK_BYTES` holds, at least one tile."""
        tile = self.plan.tile_rows
        return min(max(1, CHUNK_BYTES // (bytes_a_row * tile)) * tile, round_up(batch, tile))

    def encode(self, name: str, features: int, n_rows: int, stream: int) -> None:
        program = self.programs[name]
        program.kernel.set(features=features)
        program.kernel.launch(n_rows // self.plan.encode.tile_rows, stream)

    def multiply(self, name: str, layer: int, operand: int, n_rows: int, stream: int, **more: int) -> None:
        """Forward, h W^T, or backward, d W, as the plan of this kernel says."""
        program = self.programs[name]
        plan: ProductPlan = program.source.plan
        fan_out, fan_in = self.spec.layer_shapes[layer]
        depth, width = (fan_out, fan_in) if plan.transposed else (fan_in, fan_out)
        program.kernel.set(
            operand=operand, weights=self.weights[layer], biases=self.biases[layer], n_rows=n_rows, depth=depth,
            width=width, **more,
        )  # fmt: skip
        program.kernel.launch(n_rows // plan.tile_rows, stream, -(-width // plan.columns))

    def forward(self, chunk: Chunk, layout: ChunkLayout, n_rows: int, stream: int) -> int:
        """Encoding and hidden layers; returns where the last one's output is."""
        self.encode("encode", chunk.place(layout.inputs[0]), n_rows, stream)
        for layer in range(len(self.weights) - 1):
            self.multiply(
                "layer", layer, chunk.place(layout.inputs[layer]), n_rows, stream,
                own_width=self.own_widths[layer], result=chunk.place(layout.inputs[layer + 1]),
                gates=chunk.place(layout.gates[layer]) if layout.gates else 0,
            )  # fmt: skip
        return chunk.place(layout.inputs[-1])


class LayeredInferenceProgram:
    """Outputs of a batch, chunk after chunk."""

    def __init__(
        self,
        spec: ModelSpec,
        plan: LayeredPlan,
        programs: list[Program],
        workspace: Workspace,
        constants: dict[str, int],
    ):
        self.programs, self.workspace = programs, workspace
        for program in programs:
            program.kernel.set(**constants)
        self._kernels = LayerKernels(spec, plan, programs, constants["parameters"])
        self._layout, self._tile_rows = ChunkLayout.of_inference(spec), plan.tile_rows
        self._last_layer = len(spec.layer_shapes) - 1

    def use(self, parameters: int, table: int) -> None:
        """Compute with the parameters at these addresses from now on."""
        if parameters != self._kernels.parameters:
            self._kernels.use(parameters)
            for program in self.programs:
                program.kernel.set(parameters=parameters, table=table)

    def run(
        self,
        x: int,
        x_stride: int,
        out: int,
        out_stride: int,
        batch: int,
        stream: int,
        max_levels: tuple[int, int] = (0, 0),
    ) -> None:
        """max_levels   as in `InferenceProgram`"""
        levels, level_stride = max_levels
        kernels, layout = self._kernels, self._layout
        chunk_rows = kernels.chunk_rows(layout.total, batch)
        chunk = Chunk(self.workspace.get("layers", layout.total * chunk_rows), chunk_rows)
        for start in range(0, batch, chunk_rows):
            rows = min(chunk_rows, batch - start)
            n_rows = round_up(rows, self._tile_rows)
            for program in self.programs:
                program.kernel.set(
                    batch=rows, x=x + start * x_stride, x_stride=x_stride, y=out + start * out_stride,
                    y_stride=out_stride, max_levels=levels + start * level_stride, max_level_stride=level_stride,
                )  # fmt: skip
            last = kernels.forward(chunk, layout, n_rows, stream)
            kernels.multiply("output", self._last_layer, last, n_rows, stream)


class LayeredGradientProgram(GradientProgram):
    """Forward through all layers of a chunk, then back: of each layer dW, db and the layer before's d."""

    def _prepare(self) -> None:
        self._kernels = LayerKernels(self.spec, self.plan, self.programs, self.parameters)
        self._layout = ChunkLayout.of_training(self.spec)
        self._gradient = next(p for p in self.programs if p.kernel.name == "layer_gradient")
        self._side = self.plan.weight_gradient.side

    def _tiles(self, layer: int) -> tuple[int, int]:
        """Tiles of dW, and how many of them a row has."""
        fan_out, fan_in = self.spec.layer_shapes[layer]
        per_row = -(-fan_in // self._side)
        return -(-fan_out // self._side) * per_row, per_row

    def _n_parts(self, n_rows: int) -> int:
        """Rows of partial sums: among so many blocks the samples are divided for each tile of dW."""
        most_tiles = max(self._tiles(layer)[0] for layer in range(len(self.spec.layer_shapes)))
        pieces = -(-n_rows // self.plan.weight_gradient.samples)
        return max(1, min(pieces, self._gradient.max_blocks // most_tiles, PARTIAL_BYTES // self.row_bytes))

    def _run(self, batch: Batch, mark: int, stream: int) -> PartialSums:
        plan, layout, workspace = self.plan, self._layout, self.workspace
        chunk_rows = self._kernels.chunk_rows(layout.total, batch.size)
        n_chunks = -(-batch.size // chunk_rows)
        chunk = Chunk(workspace.get("layers", layout.total * chunk_rows), chunk_rows)
        n_losses = chunk_rows // plan.tile_rows * -(-self.spec.padded_output_width // plan.output.columns)
        losses = workspace.get("losses", 4 * n_losses * n_chunks)
        n_parts = self._n_parts(chunk_rows)
        partial = workspace.get("partial sums", n_parts * self.row_bytes)
        if n_chunks > 1 and batch.size % chunk_rows:  # the last chunk has fewer blocks, each with a loss
            workspace.buffer("losses").fill_zero(stream)
        for program in self.programs:
            program.kernel.set(mark=mark)
        for i, start in enumerate(range(0, batch.size, chunk_rows)):
            part = batch.rows(start, min(chunk_rows, batch.size - start))
            fields = dict(zip(BATCH_FIELDS, batch_fields(part), strict=True))
            for program in self.programs:
                program.kernel.set(losses=losses + 4 * n_losses * i, accumulate=int(i > 0), **fields)
            self._run_chunk(chunk, round_up(part.size, plan.tile_rows), partial, n_parts, stream)
        return PartialSums(partial, n_parts, self.row_bytes, losses, n_losses * n_chunks)

    def _run_chunk(self, chunk: Chunk, n_rows: int, partial: int, n_parts: int, stream: int) -> None:
        kernels, layout = self._kernels, self._layout
        here, there = (chunk.place(place) for place in layout.gradients)
        last_output = kernels.forward(chunk, layout, n_rows, stream)
        last = len(self.spec.layer_shapes) - 1
        kernels.multiply("output_gradient", last, last_output, n_rows, stream, result=here)
        for layer in range(last, -1, -1):
            self._sum_weight_gradient(layer, here, chunk.place(layout.inputs[layer]), n_rows, partial, n_parts, stream)
            if layer > 0:
                kernels.multiply(
                    "layer_backward", layer, here, n_rows, stream, own_width=kernels.own_widths[layer - 1],
                    state=chunk.place(layout.gates[layer - 1]), result=there,
                )  # fmt: skip
                here, there = there, here
        if "features_gradient" in kernels:
            features = chunk.place(layout.features)
            kernels.multiply("features_gradient", 0, here, n_rows, stream, result=features)
            kernels.encode("encode_backward", features, n_rows, stream)

    def _sum_weight_gradient(
        self, layer: int, d: int, h: int, n_rows: int, partial: int, n_parts: int, stream: int
    ) -> None:
        fan_out, fan_in = self.spec.layer_shapes[layer]
        n_tiles, n_column_tiles = self._tiles(layer)
        biases = bias_offsets(self.spec)
        self._gradient.kernel.set(
            d=d, h=h, n_rows=n_rows, fan_out=fan_out, fan_in=fan_in, n_column_tiles=n_column_tiles,
            weight_sums=partial + 4 * layer_offsets(self.spec)[layer],
            bias_sums=partial + 4 * biases[layer] if biases else 0,
        )  # fmt: skip
        self._gradient.kernel.launch(n_parts, stream, n_tiles)
