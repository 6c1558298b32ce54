"""The recipes that come along."""

from __future__ import annotations

from pathlib import Path

from vime_launch.recipe import RecipeError


def find_recipe(name: str) -> Path:
    """The file of a recipe that comes along: beside the installed package, or in the source tree.

    Raises:
        RecipeError: there is none of this name.
    """
    here = Path(__file__).parent
    for folder in (here / "_recipes", here.parent.parent / "recipes"):
        if (folder / name).is_file():
            return folder / name
    raise RecipeError(f"no recipe {name!r} comes along")
