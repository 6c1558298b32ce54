"""The `[parallel]` table: how one model and its batches are cut over the trainer's processes."""

from __future__ import annotations

from pydantic import Field, model_validator

from vime_proto.settings import Section

__all__ = ["ParallelConfig"]


class ParallelConfig(Section):
    """Sizes of the parallel dimensions; what they leave of the world is data parallel."""

    tensor: int = Field(1, ge=1, description="ranks that share each weight matrix")
    sequence: bool = Field(True, description="tensor-parallel ranks also share what lies between matrices, by tokens")
    pipeline: int = Field(1, ge=1, description="stages of consecutive layers")
    virtual: int = Field(1, ge=1, description="model chunks a stage; more than 1 shortens the idle time of stages")
    context: int = Field(1, ge=1, description="ranks that share the tokens of each batch")
    expert: int = Field(1, ge=1, description="ranks that share the routed experts of a layer")
    expert_tensor: int = Field(1, ge=1, description="ranks that share the matrices of each routed expert")

    @model_validator(mode="after")
    def _check(self) -> ParallelConfig:
        if self.virtual > 1 and self.pipeline == 1:
            raise ValueError(f"parallel.virtual: {self.virtual} needs pipeline stages; valid: 1 with pipeline = 1")
        return self

    @property
    def shares_tokens(self) -> bool:
        """Whether sequence parallelism acts."""
        return self.sequence and self.tensor > 1

    def check_world(self, world: int) -> None:
        """Checks that the sizes divide the number of processes.

        Raises:
            ValueError: names the first that does not.
        """
        for names in (("pipeline", "tensor", "context"), ("pipeline", "expert_tensor", "expert")):
            left = world
            for name in names:
                size = getattr(self, name)
                if left % size:
                    before = (
                        f", of which {world // left} go to {', '.join(names[: names.index(name)])}"
                        if left < world
                        else ""
                    )
                    raise ValueError(f"parallel.{name}: {size} does not divide the {world} trainer processes{before}")
                left //= size

    def split_layers(self, layers: int) -> list[int]:
        """Layers of each model chunk, from the first to the last of the model.

        What is left over goes to chunks in the middle: the first has the embedding too, the last the output head.

        Raises:
            ValueError: more chunks than layers.
        """
        chunks = self.pipeline * self.virtual
        if layers < chunks:
            name = "virtual" if layers >= self.pipeline else "pipeline"
            raise ValueError(
                f"parallel.{name}: {self.pipeline} stages of {self.virtual} model chunks are too many for {layers} layers"
            )
        each, more = divmod(layers, chunks)
        # Those farthest from both ends first; of two equally far ones the earlier.
        middle = sorted(range(chunks), key=lambda chunk: -min(chunk, chunks - 1 - chunk))
        return [each + (chunk in middle[:more]) for chunk in range(chunks)]
