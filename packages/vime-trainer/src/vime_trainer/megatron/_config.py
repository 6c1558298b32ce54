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

    def check_layers(self, layers: int) -> None:
        """Checks that the stages divide the layers.

        Raises:
            ValueError: they do not.
        """
        chunks = self.pipeline * self.virtual
        if layers % chunks:
            name = "virtual" if layers % self.pipeline == 0 else "pipeline"
            raise ValueError(
                f"parallel.{name}: {self.pipeline} stages of {self.virtual} model chunks do not divide {layers} layers"
            )
